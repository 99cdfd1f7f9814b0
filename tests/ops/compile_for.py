"""Compiles the kernels, as they are launched, for a GPU that need not be here: `python -m tests.ops.compile_for 90`.

Prints a line of JSON for each variant: the kernel, the shared memory of a program, and what asked for it. Registers
that do not suffice, instructions that an architecture lacks and types that do not fit are the compiler's errors.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import (
    cache_append_kernels,
    cache_attention_kernels,
    cache_read_kernels,
    device_features,
    product_kernels,
    quantize_kernels,
    weight_only_kernels,
)
from rotaquant.ops.cache import Turn
from rotaquant.ops.cache_layout import PageFormat
from rotaquant.ops.factors import mix_factors, rotation_factors
from rotaquant.ops.rotation_kernels import rotate, rotate_quantize, supports
from rotaquant.rotation.plan import plan_head_mix
from tests.ops.test_product_kernels import LARGE

MULTIPROCESSORS = 132
BF16, F16 = torch.bfloat16, torch.float16


class _NoDevice:
    """What Triton asks a driver when it compiles and does not launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that between them launch every kernel by every plan of its table; operands hold nothing."""
    yield from _products()
    yield from _quantizers()
    yield from _rotations()
    yield from _caches()
    for m, (n, k) in itertools.product((1, 2, 32, 64), ((1024, 4096), (8192, 2048), (20000, 8192))):
        for groups, dtype in ((1, BF16), (1, F16), (k // 128, BF16), (k // 16, BF16)):
            w, scale = torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, groups, dtype=dtype)
            operands = torch.empty(m, k, dtype=dtype), w, scale, None
            yield f"w4a16 {m} {n} {k} {groups} {dtype}", partial(weight_only_kernels.product, *operands)
    w, scale = torch.empty(8, 512, dtype=torch.int32), torch.empty(8, 1, dtype=BF16)
    yield "widen", partial(weight_only_kernels.widen, w, scale, 4096, BF16)


def _products() -> Iterator[tuple[str, Callable[[], object]]]:
    def product(m: int, n: int, k: int, bits: int, groups: int) -> Tensor:
        planes = 2 if bits == 4 else 1
        codes = torch.empty(m, planes, k // planes, dtype=torch.int8)
        w, scale = torch.empty(n, k * bits // 32, dtype=torch.int32), torch.empty(n, groups, dtype=BF16)
        return product_kernels.product(codes, torch.empty(m, groups), w, scale, torch.empty(n, dtype=BF16), BF16)

    # What a copy engine cannot copy, and every number of tokens with groups.
    odd = [(m, 4095, 4096, groups) for m in (1, 16, 30, 60, 300) for groups in (1, 32, 512)]
    for (m, n, k, groups), bits in itertools.product([*((*shape, 1) for shape in LARGE), *odd], (4, 8)):
        yield f"w{bits} {m} {n} {k} {groups}", partial(product, m, n, k, bits, groups)

    def quantizing(n: int, k: int, bits: int, dtype: torch.dtype) -> Tensor | None:
        w, scale = torch.empty(n, k * bits // 32, dtype=torch.int32), torch.empty(n, 1, dtype=dtype)
        return product_kernels.quantizing_product(torch.empty(1, k, dtype=dtype), w, scale, None, 4, 0.9, bits)

    for n, k, bits, dtype in itertools.product((4096, 30000), (576, 4096, 8192), (4, 8), (BF16, F16)):
        yield f"quantizing {n} {k} {bits} {dtype}", partial(quantizing, n, k, bits, dtype)


def _quantizers() -> Iterator[tuple[str, Callable[[], object]]]:
    types = (BF16, True), (F16, False), (torch.float32, True)
    for (dtype, planar), k, group in itertools.product(types, (4096, 28672, 65536), (None, 64)):
        x, grid = torch.empty(3, k, dtype=dtype), (4 if planar else 8, 0.9, group, planar)
        yield f"rows {k} {grid} {dtype}", partial(quantize_kernels.quantize_rows, x, *grid)
        yield f"norm {k} {grid} {dtype}", partial(quantize_kernels.rmsnorm_quantize, x, x, 1e-5, *grid)


def _rotations() -> Iterator[tuple[str, Callable[[], object]]]:
    widths = 576, 1536, 4096, 4864, 8960, 11008, 13696, 14336, 17920, 18944, 25600, 27648, 28672
    found = {str(width): (width, rotation_factors(factor_or_fallback(width))) for width in widths}
    for heads, size in ((9, 64), (32, 128), (40, 128), (64, 128)):
        mix = plan_head_mix(heads, factor_or_fallback(size))
        assert mix is not None
        found[f"{heads} heads"] = heads * size, mix_factors(mix.matrix(), mix.shards, heads * size)
    for name, (width, factors) in found.items():
        assert factors is not None, name
        # The dtype changes little; one width stands for all.
        for dtype in (BF16, F16) if width == 4096 else (BF16,):
            to = factors.to(torch.device("cpu"), dtype)
            rotation, x = (to.left, to.order, to.right, to.norm), torch.empty(5, width, dtype=dtype)
            if not supports(width, dtype, to.order, to.right, x.device):
                yield f"{name} has no kernel", partial(_say, {"missing": name})
                continue
            yield f"gate {name} {dtype}", partial(rotate_quantize, x, x, "silu", *rotation, 4, 0.9, True)
            if width in {4096, 14336}:
                yield f"rotate {name} {dtype}", partial(rotate, x, *rotation, dtype)
                yield f"bytes {name} {dtype}", partial(rotate_quantize, x, None, None, *rotation, 8, 0.9, False)


def _caches() -> Iterator[tuple[str, Callable[[], object]]]:
    def attend(
        batch: int, tokens: int, head_dim: int, bits: tuple[int, int], queries: int, dtype: torch.dtype
    ) -> Tensor:
        form = PageFormat(8, head_dim, *bits)
        query = torch.empty(batch, queries, 32, head_dim, dtype=dtype)
        pages, table = torch.empty(4, form.page_bytes, dtype=torch.uint8), torch.empty(batch, 9, dtype=torch.int64)
        lengths, arrivals = torch.empty(batch, dtype=torch.int32), torch.empty(4096, dtype=torch.int32)
        return cache_attention_kernels.attend(
            query, pages, table, lengths, arrivals, None, None, form, longest=tokens, scaling=0.1
        )

    def append(head_dim: int, bits: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        form = PageFormat(8, head_dim, *bits)
        query, states = torch.empty(2, 3, 32, head_dim, dtype=dtype), torch.empty(2, 3, 8, head_dim, dtype=dtype)
        pages, table = torch.empty(4, form.page_bytes, dtype=torch.uint8), torch.empty(2, 9, dtype=torch.int64)
        angles, matrix = torch.empty(2, 3, head_dim, dtype=dtype), torch.empty(head_dim, head_dim, dtype=dtype)
        turn = Turn(style="half", cos=angles, sin=angles, rotation=matrix, norm=0.1)
        first = torch.empty(2, dtype=torch.int32)
        return cache_append_kernels.append(pages, table, first, query, states, states, None, form, (1.0, 1.0), turn)

    def read(head_dim: int, bits: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        form = PageFormat(8, head_dim, *bits)
        pages, table = torch.empty(4, form.page_bytes, dtype=torch.uint8), torch.empty(2, 9, dtype=torch.int64)
        return cache_read_kernels.read(pages, table, 5, 300, (2, 6), form, dtype)

    # The batches and lengths between them take every plan.
    for (batch, tokens), queries in itertools.product(
        ((1, 2048), (16, 8192), (64, 512), (64, 8192), (256, 512)), (1, 16)
    ):
        yield f"cache {batch} {tokens} {queries}", partial(attend, batch, tokens, 128, (4, 4), queries, BF16)
    for head_dim, bits in itertools.product((64, 80, 256), ((4, 4), (2, 3), (8, 8))):
        yield f"cache {head_dim} {bits}", partial(attend, 1, 8192, head_dim, bits, 1, F16)
    for head_dim, bits in itertools.product((80, 256), ((4, 4), (2, 3), (8, 8))):
        yield f"append {head_dim} {bits}", partial(append, head_dim, bits, BF16)
    for head_dim, bits in itertools.product((64, 72, 80, 128), ((4, 4), (2, 3), (8, 8))):
        yield f"read {head_dim} {bits}", partial(read, head_dim, bits, BF16 if head_dim > 64 else F16)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Also where a module has taken it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, by)


def main(capability: int) -> None:
    """Compile all cases for that compute capability."""
    launch, name = JITFunction.run, ""
    _replace_everywhere(device_features.capability, lambda device: divmod(capability, 10))
    _replace_everywhere(device_features.multiprocessors, lambda device: MULTIPROCESSORS)
    driver.set_active(_NoDevice(capability))
    seen: set[int] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            _say({"kernel": self.fn.__name__, "shared": kernel.metadata.shared, "case": name})

    JITFunction.run = compile_only
    for name, call in cases():  # noqa: B007 - `compile_only` tells it
        call()


if __name__ == "__main__":
    main(int(sys.argv[1]))
