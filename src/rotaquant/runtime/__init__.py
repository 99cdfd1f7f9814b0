"""What runs: quantized linear, packed cache, attention, and their installation into a transformers model."""

from rotaquant.runtime.device import resolve_device
from rotaquant.runtime.install import install
from rotaquant.runtime.layout import LinearLayout, ModelLayout

__all__ = ["LinearLayout", "ModelLayout", "install", "resolve_device"]
