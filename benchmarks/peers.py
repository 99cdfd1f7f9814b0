"""What the products are compared with: cuBLAS in bfloat16, float8 by rows, and the package humming-kernels (W4A8).

Each takes the same float weight, quantizes the weight beforehand and its input within the call. The layer of
humming-kernels is run by the tuning that the package itself picks for the number of tokens; that one kernel is built
instead of those for all numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from timing import relative_error, sample

Run = Callable[[Tensor], Tensor]
Copies = Callable[[int], int]

FLOAT8_LARGEST = 448.0  # of float8_e4m3fn

# A quantized product that errs by more than this is broken, not coarse: 4-bit weights of a whole row err by 0.17.
_LOOSE = {"bf16": 0.01, "float8": 0.08, "humming-w4a8": 0.3}


@dataclass(frozen=True)
class Product:
    """One way to multiply by a weight: its copies side by side, each a function of the input `[m, in]`.

    `check` takes an input and what came out of it; it gives figures, and raises where the result is wrong.
    """

    runs: Sequence[Run]
    weight_bytes: int
    check: Callable[[Tensor, Tensor], dict[str, Any]]
    notes: dict[str, Any] = field(default_factory=dict)


def _loosely(name: str, weight: Tensor) -> Callable[[Tensor, Tensor], dict[str, Any]]:
    """A check against the float product, on a sample of outputs."""

    def check(x: Tensor, out: Tensor) -> dict[str, Any]:
        rows, outputs = (sample(size, 64).to(x.device) for size in out.shape)
        error = relative_error(out[rows][:, outputs], x[rows].double() @ weight[outputs].double().T)
        if not error < _LOOSE[name]:
            raise ValueError(f"wrong result: relative error {error:.3g} against the float product")
        return {"relative_error": round(error, 5)}

    return check


def bf16(weight: Tensor, m: int, copies: Copies) -> Product:
    """The float product, `[m, in] @ [out, in].T`."""
    weights = [weight] + [weight.clone() for _ in range(copies(weight.nbytes) - 1)]
    return Product([partial(_by_cublas, weight=w) for w in weights], weight.nbytes, _loosely("bf16", weight))


def _by_cublas(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.T)


# --- float8 ----------------------------------------------------------------------------------------------------


def quantize_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to float8_e4m3fn `[m, n]` and their float32 scales `[m, 1]`."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FLOAT8_LARGEST).clamp(min=1e-12)
    return (wide / scale).clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn), scale


def float8(weight: Tensor, m: int, copies: Copies) -> Product:
    """`torch._scaled_mm` by rows, its input quantized by one compiled kernel (or by single ones, if that fails)."""
    quantize, how = quantize_float8, "eager"
    if weight.is_cuda:
        quantize, how = _compiled_float8(m, weight.shape[1], weight.dtype)
    codes, scale = quantize_float8(weight)
    size = codes.nbytes + scale.nbytes
    stored = [(codes, scale.T)] + [(codes.clone(), scale.T.clone()) for _ in range(copies(size) - 1)]
    runs = [partial(_by_scaled_mm, quantize=quantize, codes=c, scale=s) for c, s in stored]
    return Product(runs, size, _loosely("float8", weight), {"input_quantization": how})


def _by_scaled_mm(x: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]], codes: Tensor, scale: Tensor) -> Any:
    rows, row_scale = quantize(x)
    return torch._scaled_mm(
        rows, codes.T, scale_a=row_scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


@lru_cache(maxsize=1)
def _float8_compiler() -> Any:
    import torch._dynamo

    # One kernel for every shape, none of them dynamic: more than dynamo would build by itself.
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, name, 4096)
    return torch.compile(quantize_float8, dynamic=False)


def _compiled_float8(m: int, inputs: int, dtype: torch.dtype) -> tuple[Any, str]:
    try:
        compiled = _float8_compiler()
        x = torch.randn(m, inputs, dtype=dtype, device="cuda")
        same = torch.allclose(compiled(x)[1], quantize_float8(x)[1], rtol=1e-5)
    except Exception as error:
        return quantize_float8, f"eager, since torch.compile failed: {type(error).__name__}"
    return (compiled, "torch.compile") if same else (quantize_float8, "eager, since torch.compile gave other scales")


# --- humming-kernels -------------------------------------------------------------------------------------------

_TENSORS = ("weight", "weight_scale", "weight_scale_2", "zero_point")


def humming_w4a8(weight: Tensor, m: int, copies: Copies) -> Product:
    """4-bit weights with a scale a row, 8-bit activations with a scale a token."""
    from humming import __version__
    from humming.layer import HummingLayer

    outputs, inputs = weight.shape
    layer = HummingLayer(
        shape_n=outputs,
        shape_k=inputs,
        weight_config={"dtype": "int4"},
        input_config={"dtype": "int8"},
        torch_dtype=weight.dtype,
    ).to(weight.device)
    layer.load_from_unquantized(weight)
    layer.transform()
    tensors = {name: value.data for name in _TENSORS if (value := getattr(layer, name, None)) is not None}
    size = sum(tensor.nbytes for tensor in tensors.values())
    stored = [tensors]
    stored += [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(copies(size) - 1)]
    tuning = _humming_tuning(layer.humming_config, m)
    runs = [
        partial(_by_humming, config=layer.humming_config, tuning=tuning, locks=torch.zeros_like(layer.locks), tensors=t)
        for t in stored
    ]
    return Product(runs, size, _loosely("humming-w4a8", weight), {"version": __version__, "tuning": tuning})


def _by_humming(x: Tensor, config: Any, tuning: str | None, locks: Tensor, tensors: dict[str, Tensor]) -> Any:
    from humming.forward import humming_forward

    return humming_forward(config, inputs=x, locks=locks, tuning_config=tuning, **tensors)


def _humming_tuning(config: Any, m: int) -> str | None:
    """The tuning that the package would pick out of its table for `m` tokens."""
    from humming.tune import get_heuristics_config

    for low, high, tuning in get_heuristics_config(config):
        if low < m <= high:
            return json.dumps(tuning)
    return None


def build_humming(shapes: Iterable[tuple[int, int]], m: int) -> None:
    """Compile what `humming_w4a8` will run for `m` tokens, side by side; whatever fails will say so in its own cell."""
    from humming.forward import may_process_input
    from humming.kernel.humming import HummingKernel
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    def build(shape: tuple[int, int]) -> None:
        config = prepare_layer_config(
            shape_n=shape[0],
            shape_k=shape[1],
            weight_schema=HummingWeightSchema(b_dtype="int4"),
            input_schema=HummingInputSchema(a_dtype="int8"),
            torch_dtype=torch.bfloat16,
        )
        HummingKernel.prepare_kernels(config.to_str(), None, _humming_tuning(config, m))
        may_process_input(config, torch.randn(m, shape[1], dtype=torch.bfloat16, device="cuda"))

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(build, shape) for shape in dict.fromkeys(shapes)]:
            if (error := future.exception()) is not None:
                print(f"humming-kernels, building for {m} tokens: {error}"[:400], flush=True)
    torch.cuda.synchronize()
