"""Read GGUF files tensor by tensor, through transformers' name and layout tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rotaquant.errors import RotaquantError


def gguf_config(path: Path) -> Any:
    """The transformers config that a GGUF file's header describes."""
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, OSError, KeyError, IndexError, NotImplementedError) as error:
        raise RotaquantError(f"{path} cannot be read as a GGUF model: {error}") from error


def gguf_tensors(path: Path, skeleton: PreTrainedModel) -> tuple[set[str], Callable[[str], Tensor]]:
    """The names of a file's tensors, as transformers calls them, and a function that unpacks one to float32."""
    from gguf import GGUFReader, dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(path)
    config = skeleton.config.to_dict()
    architecture = str(bytes(reader.fields["general.architecture"].parts[-1]), "utf-8")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
    hf_names = get_gguf_hf_weights_map(skeleton, processor)
    stored = {hf_names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in hf_names}

    def load(name: str) -> Tensor:
        tensor = stored[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        processed = processor.process(
            weights=values, name=tensor.name, tensor_key_mapping=hf_names, parsed_parameters={}
        )
        return torch.from_numpy(processed.weights.copy())

    return set(stored), load
