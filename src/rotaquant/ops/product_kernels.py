"""Products of integer codes on a GPU: packed weights times int8 activations, scaled in the epilogue.

Legend: N outputs, M tokens, K inputs. Weights are read as they lie in a checkpoint. Four bits: a byte holds columns 2j
(low nibble) and 2j+1 (high nibble), offset by 8; the activations come as two planes, even and odd columns
(`packing.to_planes`), so that a tile of bytes meets a tile of each plane. Eight bits: a byte holds one column, offset
by 128; one plane. Padding of activations is zero, so padding of weights counts for nothing.

    out[m, n] = (sum over k of codes[m, k] * weight[n, k]) * token_scale[m] * weight_scale[n] + bias[n]

Weights are the first operand of the matrix instruction (out' = W X'), because that one may come from registers: a tile
of bytes is unpacked there and never written back. Nibbles are left in the upper half of their byte, which makes them
16 times as large; the exact integer sum is shifted back at the end. Sums are int32: 16 * 8 * 128 * K stays below 2**31
for K below 131072, far above any layer.

Four kernels, chosen by `product_plans`: "tma" for many tokens (tiles copied by descriptor), "tile" for any shape, with
scales per group too, "sliced" for few tokens (`product_few_kernels`) and "dot" for one (`product_single_kernels`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rotaquant.errors import RotaquantError
from rotaquant.ops import product_single_kernels as single
from rotaquant.ops import tuned_plans
from rotaquant.ops.device_features import inline_assembly, programmatic_launch
from rotaquant.ops.product_few_kernels import product_sliced
from rotaquant.ops.product_plans import Plan, Problem, choose, choose_quantizing
from rotaquant.ops.product_units import even_codes, odd_codes, scaled, whole_codes

# 16 * 2**3 * 2**7 * K, and 2**7 * 2**7 * K for 8-bit weights, must stay below 2**31.
WIDEST_INPUT = 131064


@triton.jit
def _tile_position(N, M, BN: tl.constexpr, BM: tl.constexpr, BAND: tl.constexpr):
    """The tile of a program: bands of BAND tiles of outputs, within which weights stay in the L2 cache."""
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    band = BAND * tl.cdiv(M, BM)
    first = (pid // band) * BAND
    width = min(across - first, BAND)
    return first + (pid % band) % width, (pid % band) // width


@triton.jit
def _product_tma(
    w,
    even,
    odd,
    out,
    token_scale,
    weight_scale,
    bias,
    N,
    M,
    H,
    PACKED: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pn, pm = _tile_position(N, M, BN, BM, BAND)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BN, BM), tl.int32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        packed = w.load([pn * BN, k])
        if PACKED:
            acc = tl.dot(even_codes(packed, ASM), even.load([pm * BM, k]).T, acc, out_dtype=tl.int32)
            acc = tl.dot(odd_codes(packed, ASM), odd.load([pm * BM, k]).T, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(whole_codes(packed, ASM), even.load([pm * BM, k]).T, acc, out_dtype=tl.int32)
    rn = pn * BN + tl.arange(0, BN)
    rm = pm * BM + tl.arange(0, BM)
    t = tl.load(token_scale + rm, mask=rm < M, other=0.0)
    c = tl.load(weight_scale + rn, mask=rn < N, other=0.0).to(tl.float32)
    result = scaled(acc, t[None, :], c[:, None], PACKED)
    if BIAS:
        result += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    out.store([pm * BM, pn * BN], result.to(out.dtype).T)


@triton.jit
def _product_tile(
    w,
    x,
    out,
    token_scale,
    weight_scale,
    bias,
    N,
    M,
    H,
    groups,
    t_row,
    t_group,
    c_row,
    c_group,
    PACKED: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPED: tl.constexpr,
    ONE_STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pn, pm = _tile_position(N, M, BN, BM, BAND)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rn = pn * BN + tl.arange(0, BN)
    rm = pm * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    planes: tl.constexpr = 2 if PACKED else 1
    # Rows beyond the end read others twice; they are not stored.
    wp = w + (rn % N).to(tl.int64)[:, None] * H + rk[None, :]
    xp = x + (rm % M).to(tl.int64)[None, :] * (planes * H) + rk[:, None]
    tp = token_scale + (rm % M).to(tl.int64) * t_row
    cp = weight_scale + (rn % N).to(tl.int64) * c_row
    if GROUPED:
        size = H // groups
        total = tl.zeros((BN, BM), tl.float32)
        for group in tl.range(0, groups, num_stages=STAGES):
            acc = tl.zeros((BN, BM), tl.int32)
            if ONE_STEP:
                acc = _step(wp, xp, acc, H, size, 0, rk, PACKED, EVEN, ASM)
            else:
                for k in range(0, size, BK):
                    acc = _step(wp + k, xp + k, acc, H, size, k, rk, PACKED, EVEN, ASM)
            t = tl.load(tp + group * t_group)
            c = tl.load(cp + group * c_group).to(tl.float32)
            total += scaled(acc, t[None, :], c[:, None], PACKED)
            wp += size
            xp += size
    else:
        acc = tl.zeros((BN, BM), tl.int32)
        for k in tl.range(0, H, BK, num_stages=STAGES):
            acc = _step(wp, xp, acc, H, H, k, rk, PACKED, EVEN, ASM)
            wp += BK
            xp += BK
        total = scaled(acc, tl.load(tp)[None, :], tl.load(cp).to(tl.float32)[:, None], PACKED)
    if BIAS:
        total += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    op = out + rm.to(tl.int64)[None, :] * N + rn[:, None]
    tl.store(op, total.to(out.dtype.element_ty), mask=(rm < M)[None, :] & (rn < N)[:, None])


@triton.jit
def _step(wp, xp, acc, H, size, k, rk, PACKED: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr):
    """One tile of bytes times its tiles of activations; `size` bytes from the group's start are its own."""
    if EVEN:
        packed = tl.load(wp)
        even = tl.load(xp)
    else:
        packed = tl.load(wp, mask=(k + rk < size)[None, :], other=0)
        even = tl.load(xp, mask=(k + rk < size)[:, None], other=0)
    if PACKED:
        if EVEN:
            odd = tl.load(xp + H)
        else:
            odd = tl.load(xp + H, mask=(k + rk < size)[:, None], other=0)
        acc = tl.dot(even_codes(packed, ASM), even, acc, out_dtype=tl.int32)
        return tl.dot(odd_codes(packed, ASM), odd, acc, out_dtype=tl.int32)
    else:
        return tl.dot(whole_codes(packed, ASM), even, acc, out_dtype=tl.int32)


def product(
    codes: Tensor,
    token_scale: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    plan: Plan | None = None,
) -> Tensor:
    """Scaled product of codes int8 `[m, planes, plane]` and packed weights int32 `[n, words]` -> `[m, n]`.

    Two planes mean 4-bit weights, one plane 8-bit ones. `token_scale` float32 `[m, 1 or groups]` and `weight_scale`
    `[n, 1 or groups]`; with groups, sums of the groups are scaled and added in float32 in their order. `plan` overrides
    the choice of kernel and tiles.
    """
    # Kernels know no strides but those of rows that follow one another.
    codes, token_scale, bias = codes.contiguous(), token_scale.contiguous(), None if bias is None else bias.contiguous()
    weight_packed, weight_scale = weight_packed.contiguous(), weight_scale.contiguous()
    tokens, planes, plane = codes.shape
    outputs = weight_packed.shape[0]
    if plane * planes > WIDEST_INPUT:
        raise RotaquantError(f"a layer with {plane * planes} inputs is too wide for exact int32 sums")
    out = torch.empty(tokens, outputs, dtype=out_dtype, device=codes.device)
    if tokens == 0 or outputs == 0:
        return out
    groups = max(token_scale.shape[1], weight_scale.shape[1])
    problem = Problem(tokens=tokens, outputs=outputs, plane=plane, packed=planes == 2, groups=groups)
    size = out.element_size()
    plan = plan or tuned_plans.lookup(problem, codes.device, size) or choose(problem, codes.device, size)
    operands = (
        weight_packed.view(torch.uint8),
        codes,
        out,
        token_scale,
        weight_scale,
        bias if bias is not None else out,
    )
    _LAUNCHERS[plan.kernel](problem, plan, operands, bias is not None)
    return out


def quantizing_product(
    x: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    clip_ratio: float,
    weight_bits: int,
    plan: Plan | None = None,
) -> Tensor | None:
    """`product` of the codes of `[m, k]`, quantized where they are multiplied -> `[m, n]` in the dtype of x.

    `None` where no kernel does both, or two are the faster.
    """
    tokens = len(x)
    outputs, words = weight_packed.shape
    problem = Problem(
        tokens=tokens, outputs=outputs, plane=4 * words, packed=weight_bits == 4, groups=weight_scale.shape[1]
    )
    plan = plan or choose_quantizing(problem, x.device)
    if plan is None or not single.takes(x):
        return None
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        single.launch_quantizing(
            x, weight_packed.contiguous(), weight_scale.contiguous(), None if bias is None else bias.contiguous(),
            out, plan, bits, clip_ratio, problem.packed,
        )  # fmt: skip
    return out


_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _launch_tma(problem: Problem, plan: Plan, operands: _Operands, biased: bool) -> None:
    w, x, out, *scales = operands
    pdl = programmatic_launch(x.device)
    shape, strides = [problem.tokens, problem.plane], [x.stride(0), 1]
    even, odd = (
        TensorDescriptor(x[:, i], shape, strides, [plan.tokens, plan.bytes]) for i in (0, 1 if problem.packed else 0)
    )
    _product_tma[(plan.tiles(problem),)](
        TensorDescriptor.from_tensor(w, [plan.outputs, plan.bytes]), even, odd,
        TensorDescriptor.from_tensor(out, [plan.tokens, plan.outputs]), *scales,
        problem.outputs, problem.tokens, problem.plane, problem.packed, plan.outputs, plan.tokens, plan.bytes,
        plan.band, plan.stages, biased, inline_assembly(x.device), pdl,
        num_warps=plan.warps, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip


def _launch_tile(problem: Problem, plan: Plan, operands: _Operands, biased: bool) -> None:
    w, x, out, token_scale, weight_scale, bias = operands
    pdl = programmatic_launch(x.device)
    size = problem.plane // problem.groups
    _product_tile[(plan.tiles(problem),)](
        w, x, out, token_scale, weight_scale, bias,
        problem.outputs, problem.tokens, problem.plane, problem.groups,
        token_scale.shape[1], int(token_scale.shape[1] > 1), weight_scale.shape[1], int(weight_scale.shape[1] > 1),
        problem.packed, plan.outputs, plan.tokens, plan.bytes, plan.band, plan.stages,
        problem.groups > 1, size <= plan.bytes, size % plan.bytes == 0, biased, inline_assembly(x.device), pdl,
        num_warps=plan.warps, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip


def _launch_sliced(problem: Problem, plan: Plan, operands: _Operands, biased: bool) -> None:
    x = operands[1]
    pdl = programmatic_launch(x.device)
    step = plan.bytes * plan.slices
    grid = (triton.cdiv(problem.outputs, plan.outputs), triton.cdiv(problem.tokens, plan.tokens))
    product_sliced[grid](
        *operands, problem.outputs, problem.tokens, problem.plane, problem.packed,
        plan.outputs, plan.tokens, plan.bytes, plan.slices, plan.stages, problem.plane % step == 0, biased,
        inline_assembly(x.device), pdl, plan.lines if pdl else 0,
        num_warps=plan.warps, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip


def _launch_dot(problem: Problem, plan: Plan, operands: _Operands, biased: bool) -> None:
    w, codes, out, token_scale, weight_scale, bias = operands
    weight = w.view(torch.int32)
    single.launch_codes(codes, token_scale, weight, weight_scale, bias if biased else None, out, plan)


_LAUNCHERS = {"tma": _launch_tma, "tile": _launch_tile, "sliced": _launch_sliced, "dot": _launch_dot}
