"""Products of 16-bit activations with packed 4-bit weights on a GPU: what is stored is read, and widened on the way.

For few tokens that is limited by the bytes of the weights; a single one goes without the matrix unit. For many, the
weight is widened once to 16 bits and cuBLAS multiplies: there arithmetic is what takes the time, and it is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotaquant.ops import weight_only_few_kernels as few_kernels
from rotaquant.ops.device_features import inline_assembly, multiprocessors, programmatic_launch, shared_memory
from rotaquant.ops.quantize_units import by_words
from rotaquant.ops.weight_only_single_kernels import product_single

FEW_TOKENS = 64
_STEPS = 256, 128, 64, 32  # bytes of weights that lie within a group
_STEP_OF_GROUPS = 64  # ... where groups are finer
_LARGE_TILE = 145 * 1024  # bytes of shared memory that tiles of 64 tokens take


@dataclass(frozen=True, kw_only=True)
class FewPlan:
    """How few tokens are multiplied: the tile of outputs, bytes of their weights a step, and slices of K at once."""

    outputs: int
    bytes: int
    slices: int = 1
    warps: int = 4
    stages: int = 4


FEW = FewPlan(outputs=32, bytes=128, warps=2)
WIDE = FewPlan(outputs=64, bytes=128, stages=3)
SLICED = FewPlan(outputs=32, bytes=64, slices=4, stages=3)
SLICED_NARROW = FewPlan(outputs=16, bytes=64, slices=4, stages=3)


@triton.jit
def _widen(w, out, scale, columns, words, groups, size, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = column < columns
    packed = tl.load(w + row * words + column // 2, mask=inside, other=0)
    code = ((packed >> (4 * (column % 2))) & 0xF).to(tl.float32) - 8.0
    c = tl.load(scale + row * groups + column // size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (code * c).to(out.dtype.element_ty), mask=inside)


def widen(weight_packed: Tensor, weight_scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Packed weights int32 `[n, words]` as `[n, columns]` in `dtype`: codes times the scale of their group."""
    outputs, groups = weight_scale.shape
    out = torch.empty(outputs, columns, dtype=dtype, device=weight_packed.device)
    block = min(triton.next_power_of_2(columns), 2048)
    w = weight_packed.view(torch.uint8)
    if out.numel():
        _widen[(outputs, triton.cdiv(columns, block))](
            w, out, weight_scale, columns, w.shape[1], groups, columns // groups, block, num_warps=4
        )
    return out


def product(
    x: Tensor, weight_packed: Tensor, weight_scale: Tensor, bias: Tensor | None, plan: FewPlan | None = None
) -> Tensor:
    """Product of `[m, k]` in 16 bits and packed weights int32 `[n, words]` -> `[m, n]` in the dtype of x.

    `weight_scale` is `[n, 1 or groups]`. Sums are float32; where groups are of fewer than 64 columns, several tokens
    meet weights that were rounded to the dtype of x, as in the definition.
    """
    # Kernels know no strides but those of rows that follow one another.
    weight_packed, weight_scale = weight_packed.contiguous(), weight_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    tokens, columns = x.shape
    outputs, groups = weight_scale.shape
    size = columns // groups
    if size % 2 or (plan is None and tokens > FEW_TOKENS):
        wide = widen(weight_packed, weight_scale, columns, x.dtype)
        return torch.nn.functional.linear(x, wide, None if bias is None else bias.to(x.dtype))
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0 or outputs == 0:
        return out
    operands = weight_packed, weight_scale, out if bias is None else bias
    if tokens == 1 and plan is None and (groups == 1 or size % 8 == 0):
        _launch_single(x, operands, out, size, bias is not None)
        return out
    plan = plan or choose(tokens, outputs, weight_packed.shape[1] * 4, x.device)
    _launch_few(x, operands, out, size, bias is not None, plan)
    return out


_Weight = tuple[Tensor, Tensor, Tensor]


def _launch_single(x: Tensor, weight: _Weight, out: Tensor, size: int, biased: bool) -> None:
    w, scale, bias = weight
    (outputs, groups), words, block = scale.shape, w.shape[1], 128
    if x.stride(1) != 1 or x.data_ptr() % 4 or x.shape[1] != 8 * words:
        # Whole words of weights and pairs of columns; what is added meets zeros.
        x = torch.nn.functional.pad(x, (0, 8 * words - x.shape[1])).contiguous()
    pdl = programmatic_launch(x.device)
    product_single[(triton.cdiv(outputs, 16), 1)](
        w, x, out, scale, bias, outputs, words, groups, size // 8, x.stride(0), 16, block, 4,
        words % block == 0, groups > 1, biased, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def choose(tokens: int, outputs: int, half: int, device: torch.device) -> FewPlan:
    """The plan for rows of weights of `half` bytes, by how many programs of its outputs a device runs at once."""
    units = multiprocessors(device)
    if tokens <= 16:
        return SLICED_NARROW if outputs <= 80 * units else FEW
    if tokens <= 32:
        return SLICED if outputs <= 80 * units and half >= 4096 else WIDE
    return SLICED if outputs <= 32 * units else FEW if outputs <= 64 * units else WIDE


def _launch_few(x: Tensor, weight: _Weight, out: Tensor, size: int, biased: bool, plan: FewPlan) -> None:
    w, scale, bias = weight
    tokens, (outputs, groups), half = len(x), scale.shape, w.shape[1] * 4
    pdl = programmatic_launch(x.device)
    # Two tiles of 32 tokens where the shared memory is too small for one of 64.
    most = 64 if shared_memory(x.device) >= _LARGE_TILE else 32
    tile = min(max(triton.next_power_of_2(tokens), 16), most)
    planes = x.new_empty(-(-tokens // tile) * tile, 2, half)
    few_kernels.to_planes[(len(planes), triton.cdiv(half, 1024))](
        x, planes, tokens, x.shape[1], half, x.stride(0), x.stride(1), x.stride(1) == 1 and by_words(x), 1024, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    grid = triton.cdiv(outputs, plan.outputs), triton.cdiv(tokens, tile)
    operands = w.view(torch.uint8), planes, out, scale, bias, outputs, tokens, half, groups, size // 2
    # A step lies within one group; where groups are finer than any, it takes several.
    steps = (plan.bytes,) if groups == 1 else (step for step in _STEPS if step <= plan.bytes and size // 2 % step == 0)
    step, asm = next(iter(steps), None), inline_assembly(x.device)
    if plan.slices > 1 and step is not None:
        few_kernels.product_sliced[grid](
            *operands, plan.outputs, tile, step, plan.slices, plan.stages, half % (step * plan.slices) == 0,
            groups > 1, biased, asm, pdl, num_warps=plan.warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        fine, step = step is None, step or _STEP_OF_GROUPS
        few_kernels.product_tile[grid](
            *operands, plan.outputs, tile, step, plan.stages, half % step == 0,
            groups > 1, fine, biased, asm, pdl, num_warps=plan.warps, launch_pdl=pdl,
        )  # fmt: skip
