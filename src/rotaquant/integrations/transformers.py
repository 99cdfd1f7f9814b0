"""transformers' loader for our checkpoints, at work in `from_pretrained(folder)` after importing rotaquant."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from rotaquant.errors import RotaquantError
from rotaquant.integrations.headers import require_matching_tensors
from rotaquant.runtime import ModelLayout, install
from rotaquant.runtime.attention import register_attention
from rotaquant.runtime.kv_codec import LayerCodec
from rotaquant.runtime.linear import QuantizedLinear

QUANT_METHOD = "rotaquant"
FORMAT_VERSION = 2


class RotaquantConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a checkpoint: format version, and the fields of `ModelLayout`."""

    def __init__(self, quant_method: str = QUANT_METHOD, format_version: Any = None, **fields: Any) -> None:
        if not isinstance(format_version, int) or format_version < 1:
            raise RotaquantError(
                f"quantization_config is damaged: format_version {format_version!r} is no version; get a good copy"
            )
        if format_version > FORMAT_VERSION:
            raise RotaquantError(
                f"the checkpoint has format version {format_version}, this rotaquant reads up to {FORMAT_VERSION}: "
                "upgrade rotaquant (pip install -U rotaquant)"
            )
        if format_version < FORMAT_VERSION:
            raise RotaquantError(
                f"the checkpoint has format version {format_version}, which only rotaquant before its first release "
                "wrote: quantize the model again"
            )
        self.quant_method = QUANT_METHOD
        self.format_version = format_version
        layout = _parse_layout(fields)
        self.__dict__.update(layout.model_dump(mode="json"))

    @property
    def layout(self) -> ModelLayout:
        """The description that the runtime is built from."""
        return _parse_layout({name: self.__dict__[name] for name in ModelLayout.model_fields})


def _parse_layout(fields: dict[str, Any]) -> ModelLayout:
    try:
        return ModelLayout.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise RotaquantError(f"quantization_config is damaged at {where}: {fault['msg']}") from error


class RotaquantQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds the quantized modules before transformers loads the tensors into them."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        layout = self.quantization_config.layout
        architecture = install(model, layout)
        files = kwargs.get("checkpoint_files")
        if files:
            tied = {f"{architecture.head}.weight"} if layout.keeps_tied else set()
            require_matching_tensors(model, files, not_stored=tied)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        # Matrices and layouts are made now, not in the first forward pass: that one may be traced or captured.
        for module in model.modules():
            codec = getattr(module, "kv_codec", None)
            if isinstance(codec, LayerCodec) and codec.query_key is not None:
                device = next(iter(module.state_dict().values())).device
                codec.prepare(device)
                if codec.is_paged:
                    codec.turn(device, model.dtype)
            if isinstance(module, QuantizedLinear):
                module.prepare(module.weight.device)
                module.lay_out()
                if module.layout.weights and module.weight_shape.tolist() != [module.out_features, module.in_features]:
                    raise RotaquantError(
                        f"weight_shape {module.weight_shape.tolist()} contradicts the model; get a good copy"
                    )
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """`save_pretrained` of a loaded model writes the same checkpoint again."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integer codes have no gradients."""
        return False


def register() -> None:
    """Make the format and the attention known to transformers; a second call changes nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(RotaquantConfig)
        register_quantizer(QUANT_METHOD)(RotaquantQuantizer)
    register_attention()
