"""How fast: each operation's definition in plain PyTorch (`reference`), its kernels, and how codes lie in memory."""

from rotaquant.ops.library import int4_matmul, int8_matmul, quantize_rows

__all__ = ["int4_matmul", "int8_matmul", "quantize_rows"]
