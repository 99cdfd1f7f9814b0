"""Find the fastest plan of a product on a device: check each candidate, time it, keep the best.

No plan is timed before its output, on random codes, equals that of a plain plan to the bit; outputs are filled with NaN
first. A plan that does not compile or run is dropped and counted; a wrong one is dropped, logged and reported.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.ops.dispatch import OUT_BYTES
from rotaquant.ops.plan_candidates import candidates
from rotaquant.ops.product_plans import Plan, Problem, choose
from rotaquant.ops.tuned_plans import REGIMES, DeviceKind, TunedPlan, regime

logger = logging.getLogger(__name__)

# Up to so many tokens a product waits for its weights, which in a model come from memory every time.
COLD_TOKENS = 64

# A candidate has to beat the standard plan by more than times scatter.
_GAIN = 0.98
_OUT_DTYPE = torch.bfloat16

_ROUNDS = 9
_ROUND_SECONDS = 5e-3
_COLD_CALLS = 48
_WARM_CALLS = 4
# What a cache must have been overwritten by, as a multiple of its size, to hold nothing of before.
_CACHE_FILLS = 3


class Workload:
    """Random codes, weights and scales of a problem on a device, to be multiplied by any plan."""

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0) -> None:
        self.problem = problem
        self.device = device
        generator = torch.Generator(device).manual_seed(seed)
        planes, half = (2, 8) if problem.packed else (1, 128)
        tokens, outputs, groups = problem.tokens, problem.outputs, problem.groups

        def integers(shape: tuple[int, ...], half: int, dtype: torch.dtype) -> Tensor:
            return torch.randint(-half, half, shape, generator=generator, device=device, dtype=dtype)

        def scales(rows: int) -> Tensor:
            return torch.rand(rows, groups, generator=generator, device=device) + 0.5

        self._codes = integers((tokens, planes, problem.plane), half, torch.int8)
        self._weights = [integers((outputs, problem.plane // 4), 1 << 31, torch.int32)]
        self._token_scale, self._weight_scale = scales(tokens), scales(outputs).to(_OUT_DTYPE)

    def run(self, plan: Plan, tokens: int | None = None, copy: int = 0) -> Tensor:
        """The product of the first `tokens` rows of codes, all by default, with a copy of the weights."""
        from rotaquant.ops.product_kernels import product

        codes, token_scale = self._codes[:tokens], self._token_scale[:tokens]
        return product(codes, token_scale, self._weights[copy], self._weight_scale, None, _OUT_DTYPE, plan)

    def run_poisoned(self, plan: Plan, tokens: int) -> Tensor:
        """As `run`, into memory that holds NaN: what a plan leaves unwritten is not taken for its result."""
        poison = torch.full((tokens, self.problem.outputs), math.nan, dtype=_OUT_DTYPE, device=self.device)
        # The allocator hands the block that was freed last to the next tensor of its size.
        del poison
        out = self.run(plan, tokens)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return out

    def copies(self, total_bytes: int) -> int:
        """Hold copies of the weights that together take `total_bytes` or more, and say how many."""
        first = self._weights[0]
        while len(self._weights) * first.nbytes < total_bytes:
            self._weights.append(first.clone())
        return len(self._weights)


Timer = Callable[[Workload, Plan], float]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where plans are timed, what they are kept under, and by which clocks; `timer` gives seconds a product."""

    device: torch.device
    kind: DeviceKind
    timer: Timer
    workload: Callable[[Problem, torch.device], Workload] = Workload
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What tuning a problem found; times in seconds.

    `plan` is the fastest, `None` where none gave the right result, `standard` that of the table; `failed` counts
    candidates that did not compile or run, `wrong` lists those that ran and gave something else.
    """

    problem: Problem
    standard: Plan
    standard_seconds: float | None
    plan: Plan | None
    seconds: float | None
    timed: int
    failed: int
    wrong: tuple[Plan, ...]

    def tuned(self) -> TunedPlan | None:
        """The plan to be kept."""
        if self.plan is None or self.seconds is None:
            return None
        problem = self.problem
        return TunedPlan(
            outputs=problem.outputs,
            plane=problem.plane,
            packed=problem.packed,
            groups=problem.groups,
            tokens=problem.tokens,
            plan=self.plan,
            seconds=self.seconds,
            standard_seconds=self.standard_seconds,
        )


def tune_problem(problem: Problem, bench: Bench, deadline: float = math.inf) -> Outcome | None:
    """Check and time the candidates of a problem; `None` where `bench.now()` passes `deadline` before the last one.

    Raises `RotaquantError` where the plain plan does not run, and where a candidate leaves the device unusable.
    """
    workload = _workload(problem, bench)
    standard = choose(problem, bench.device, OUT_BYTES)
    expected = _expected(workload)
    times: dict[Plan, float] = {}
    failed, wrong = 0, []
    for plan in dict.fromkeys((standard, *candidates(problem, bench.kind.capability))):
        if bench.now() > deadline:
            return None
        try:
            if not _agrees(workload, plan, expected):
                logger.warning("%s gives a wrong result for %s and is not used", plan, problem)
                wrong.append(plan)
                continue
            times[plan] = bench.timer(workload, plan)
        except Exception as error:  # compiler, driver and launcher each raise their own
            logger.debug("%s does not run for %s: %s", plan, problem, error)
            _require_alive(bench.device, plan)
            failed += 1
    fastest = _fastest(times, standard)
    return Outcome(
        problem=problem,
        standard=standard,
        standard_seconds=times.get(standard),
        plan=fastest,
        seconds=None if fastest is None else times[fastest],
        timed=len(times),
        failed=failed,
        wrong=tuple(wrong),
    )


def _fastest(times: dict[Plan, float], standard: Plan) -> Plan | None:
    if not times:
        return None
    best = min(times, key=lambda plan: times[plan])
    close = standard in times and times[best] > _GAIN * times[standard]
    return standard if close else best


def _workload(problem: Problem, bench: Bench) -> Workload:
    try:
        return bench.workload(problem, bench.device)
    except torch.OutOfMemoryError as error:
        raise RotaquantError(
            f"{bench.kind.name} has too little free memory for {problem.tokens} tokens and {problem.outputs} outputs: "
            "give smaller --rows, or end what else runs there"
        ) from error


# --- the check -------------------------------------------------------------------------------------------------


def plain_plan(problem: Problem) -> Plan:
    """The plan whose output all others must give: the kernel that takes every shape, in a small tile."""
    return Plan(kernel="tile", outputs=64, tokens=16 if problem.tokens <= 64 else 64, bytes=32, warps=4, stages=2)


def checked_tokens(tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that a plan is checked at: its own, and an odd smaller one of its regime if there is one."""
    least = (0, *REGIMES)[regime(tokens)] + 1
    odd = max(least, tokens - tokens // 4) | 1
    return (tokens,) if odd >= tokens else (tokens, odd)


def _expected(workload: Workload) -> dict[int, Tensor]:
    problem = workload.problem
    plan = plain_plan(problem)
    try:
        return {tokens: workload.run_poisoned(plan, tokens) for tokens in checked_tokens(problem.tokens)}
    except RotaquantError:
        raise
    except Exception as error:  # as for a candidate
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RotaquantError(f"kernels do not run here, see `rotaquant doctor`: {text}") from error


def _agrees(workload: Workload, plan: Plan, expected: dict[int, Tensor]) -> bool:
    return all(torch.equal(workload.run_poisoned(plan, tokens), out) for tokens, out in expected.items())


def _require_alive(device: torch.device, plan: Plan) -> None:
    """Raise where the last failure was of the kind after which a process can use its device no more."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise RotaquantError(
            f"{plan} left the device unusable for this process; plans of the problems before it are kept: run the "
            "same command again, and please report the plan"
        ) from error


# --- the time --------------------------------------------------------------------------------------------------


def time_on_device(workload: Workload, plan: Plan) -> float:
    """Seconds of a product on a CUDA device: the median of several rounds of a CUDA graph of calls.

    For few tokens each call reads another copy of the weights, so many that none is left in the L2 cache.
    """
    device = workload.device
    cold = workload.problem.tokens <= COLD_TOKENS
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = workload.copies(_CACHE_FILLS * cache) if cold else 1
    calls = copies * math.ceil(_COLD_CALLS / copies) if cold else _WARM_CALLS
    with torch.cuda.device(device):
        workload.run(plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                workload.run(plan, copy=call % copies)
        _replay(graph, 1)
        once = _replay(graph, 1)
        times = math.ceil(_ROUND_SECONDS / max(once, 1e-6))
        return statistics.median(_replay(graph, times) for _ in range(_ROUNDS)) / (times * calls)


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Seconds of so many replays of a graph."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
