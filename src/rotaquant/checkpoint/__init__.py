"""Open float models lazily; write, verify and load our self-describing folder."""

from rotaquant.checkpoint.folder import (
    FolderSummary,
    TensorGroup,
    inspect_folder,
    is_quantized_folder,
    load,
    open_float_model,
    open_tokenizer,
    require_quantized_folder,
)
from rotaquant.checkpoint.sources import Source, open_source

__all__ = [
    "FolderSummary",
    "Source",
    "TensorGroup",
    "inspect_folder",
    "is_quantized_folder",
    "load",
    "open_float_model",
    "open_source",
    "open_tokenizer",
    "require_quantized_folder",
]
