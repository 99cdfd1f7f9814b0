"""rotaquant: 4-bit weights, activations and KV cache for language models, by Hadamard rotation."""

from rotaquant.checkpoint import load
from rotaquant.data import Calibration
from rotaquant.errors import RotaquantError
from rotaquant.integrations.transformers import register
from rotaquant.pipeline import QuantizationReport, quantize
from rotaquant.recipe import PRESETS, Recipe

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Calibration",
    "QuantizationReport",
    "Recipe",
    "RotaquantError",
    "__version__",
    "load",
    "quantize",
]

# After `import rotaquant`, transformers' from_pretrained loads our folders.
register()
