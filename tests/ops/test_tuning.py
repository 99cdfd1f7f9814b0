"""Tuned plans: what a kernel admits, what is tried, what is kept, on disk and in a product. No GPU is needed."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rotaquant.errors import RotaquantError
from rotaquant.ops import device_features, tuned_plans
from rotaquant.ops.dispatch import CAPABILITIES, has_copy_engine, has_kernel, launches_early, paths, refusal
from rotaquant.ops.plan_candidates import MOST_CANDIDATES, candidates
from rotaquant.ops.product_plans import Plan, Problem, choose
from rotaquant.ops.tuned_plans import DeviceKind, TunedPlan, lookup
from rotaquant.ops.tuning import Bench, Workload, checked_tokens, plain_plan, tune_problem
from tests.fake_gpu import fake_gpu

KIND = DeviceKind("NVIDIA Test 9", (9, 0), tuned_plans.triton_version() or "3.6.0")
TILE = Plan(kernel="tile", outputs=64, tokens=16, bytes=64, warps=4, stages=4)
TMA = Plan(kernel="tma", outputs=128, tokens=128, bytes=64, warps=4, stages=4)
DOT = Plan(kernel="dot", outputs=16, tokens=1, bytes=512, warps=4, stages=3)
SLICED = Plan(kernel="sliced", outputs=32, tokens=16, bytes=64, warps=4, stages=3, slices=4)


def problem(tokens: int, outputs: int = 4096, plane: int = 2048, groups: int = 1) -> Problem:
    return Problem(tokens=tokens, outputs=outputs, plane=plane, packed=True, groups=groups)


def tuned(tokens: int, plan: Plan, outputs: int = 4096, groups: int = 1) -> TunedPlan:
    return TunedPlan(
        outputs=outputs, plane=2048, packed=True, groups=groups, tokens=tokens, plan=plan, seconds=1e-5,
        standard_seconds=2e-5,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- what a device and a kernel admit ---------------------------------------------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_paths_of_a_capability_are_those_that_products_take_there(capability: tuple[int, int]) -> None:
    with fake_gpu(capability) as device:
        assert has_copy_engine(capability) == device_features.tensor_copy_engine(device)
        assert launches_early(capability) == device_features.programmatic_launch(device)
        shapes = itertools.product((1, 2, 3, 16, 17, 64, 65, 256, 4096), (72, 4096, 11008), (1, 16))
        chosen = [(problem(*shape[:2], groups=shape[2]), device) for shape in shapes]
        plans = [(each, choose(each, where, 2)) for each, where in chosen]
    assert [refusal(plan, each, capability) for each, plan in plans] == [None] * len(plans)
    assert {plan.kernel for _, plan in plans} <= set(paths(capability).kernels)
    assert any(plan.kernel == "tma" for _, plan in plans) == ("tma" in paths(capability).kernels)


def test_what_each_capability_has() -> None:
    found = {capability: paths(capability) for capability in CAPABILITIES}
    assert [path.copy_engine for path in found.values()] == [False, False, False, True, True, True]
    assert [path.early_launch for path in found.values()] == [False, False, False, True, True, True]
    assert [path.measured for path in found.values()] == [False, False, False, True, False, False]
    assert [path.matrix_instruction for path in found.values()] == ["mma.sync"] * 3 + ["wgmma"] + ["mma.sync"] * 2
    assert found[8, 6].kernels == ("tile", "sliced", "dot")


@pytest.mark.parametrize(
    ("plan", "each", "capability", "words"),
    [
        (TMA, problem(4096), (8, 0), "no tensor copy engine"),
        (TMA, problem(4096), None, "no tensor copy engine"),
        (TMA, problem(4096, plane=2052), (9, 0), "whole 16 bytes"),
        (TMA, problem(4096, outputs=4100), (9, 0), "whole 16 bytes"),
        (replace(TMA, tokens=512), problem(4096), (9, 0), "no more than 256"),
        (TMA, problem(4096, groups=16), (9, 0), "no scales per group"),
        (DOT, problem(4, groups=16), (9, 0), "no scales per group"),
        (DOT, problem(17), (9, 0), "16 tokens or fewer"),
        (SLICED, problem(65), (9, 0), "64 tokens or fewer"),
        (replace(TILE, outputs=48), problem(16), (9, 0), "outputs 48 is no power of two"),
        (replace(TILE, bytes=16), problem(16), (9, 0), "smaller than a matrix instruction's"),
        (replace(TILE, warps=64), problem(16), (9, 0), "out of range"),
        (replace(TILE, stages=0), problem(16), (9, 0), "out of range"),
    ],
)
def test_plans_that_cannot_run_are_refused(
    plan: Plan, each: Problem, capability: tuple[int, int] | None, words: str
) -> None:
    assert words in str(refusal(plan, each, capability))


def test_registered_kernels_are_known() -> None:
    assert has_kernel("int4_matmul") and has_kernel("quantize_rows")
    assert not has_kernel("no_such_operation")


# --- what is tried ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 64, 65, 256, 257, 16384])
def test_candidates_are_distinct_and_admitted(tokens: int, groups: int, capability: tuple[int, int]) -> None:
    each = problem(tokens, groups=groups)
    found = candidates(each, capability)
    assert 12 <= len(found) == len(set(found)) <= MOST_CANDIDATES
    assert all(refusal(plan, each, capability) is None for plan in found)
    kernels = {plan.kernel for plan in found}
    if groups > 1:
        assert kernels == {"tile"}
    elif tokens <= 2:
        assert kernels == {"dot", "sliced"}
    elif tokens <= 16:
        assert kernels == {"sliced", "tile"}
    else:
        assert "tile" in kernels and ("tma" in kernels) == (capability >= (9, 0))


@pytest.mark.parametrize(("tokens", "tile"), [(3, 8), (8, 8), (9, 16), (16, 16)])
@pytest.mark.parametrize("outputs", [512, 20000])
def test_few_tokens_fill_the_smallest_tile_that_holds_them(tokens: int, tile: int, outputs: int) -> None:
    each = problem(tokens, outputs=outputs)
    plans = (choose(each, torch.device("cpu"), 2), *candidates(each, (9, 0)))
    assert {plan.tokens for plan in plans} == {tile}


def test_candidates_are_no_larger_than_the_problem() -> None:
    found = candidates(problem(16, outputs=32, plane=64), (9, 0))
    assert found and all(plan.outputs <= 32 and plan.bytes * plan.slices <= 128 for plan in found)


# --- what is kept ----------------------------------------------------------------------------------------------


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    kind = DeviceKind("NVIDIA RTX A6000 (48GB)", (8, 6), "3.6.0")
    assert kind.file == cache / "plans-nvidia-rtx-a6000-48gb-sm86-triton3.6.0.json"
    monkeypatch.delenv("ROTAQUANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tuned_plans.cache_folder() == Path("/somewhere/rotaquant")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/ada")
    assert tuned_plans.cache_folder() == Path("/home/ada/.cache/rotaquant")


def test_stored_plans_are_merged_and_come_back(cache: Path) -> None:
    first, second, better = tuned(16, TILE), tuned(2048, TMA), tuned(16, SLICED)
    assert tuned_plans.store(KIND, [first, second]) == KIND.file
    assert tuned_plans.store(KIND, [better]) == KIND.file
    assert tuned_plans.read(KIND) == (better, second)
    assert tuned_plans.state(KIND).state == "in use" and tuned_plans.state(KIND).plans == 2
    assert [path.name for path in cache.iterdir()] == [KIND.file.name]
    other = replace(KIND, triton="9.9.9")
    assert tuned_plans.read(other) == () and tuned_plans.state(other).state == "absent"


def test_a_failed_write_keeps_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_plans.store(KIND, [tuned(16, TILE)])

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="full"):
        tuned_plans.store(KIND, [tuned(16, SLICED)])
    assert tuned_plans.read(KIND) == (tuned(16, TILE),)
    assert len(list(cache.iterdir())) == 1


# --- in a product ----------------------------------------------------------------------------------------------


def test_a_product_takes_the_nearest_plan_of_its_regime() -> None:
    eight, sixteen, large = replace(TILE, stages=2), replace(TILE, stages=3), replace(TMA, stages=2)
    grouped = replace(TILE, bytes=32)
    entries = [tuned(1, DOT), tuned(8, eight), tuned(16, sixteen), tuned(64, SLICED), tuned(2048, large)]
    tuned_plans.store(KIND, [*entries, tuned(16, grouped, groups=16)])
    with fake_gpu((9, 0)) as device:
        found = {tokens: lookup(problem(tokens), device) for tokens in (1, 2, 3, 8, 9, 16, 17, 64, 65, 256, 257, 2048)}
        assert lookup(problem(2049), device) is None
        assert lookup(problem(16), torch.device("cuda")) == sixteen
        assert lookup(problem(16, groups=16), device) == grouped
        for other in (problem(16, outputs=4100), problem(16, plane=2052), replace(problem(16), packed=False)):
            assert lookup(other, device) is None
        # float32 outputs take more of the memory that a plan was found to fit in.
        assert lookup(problem(16), device, 4) is None
        assert lookup(problem(16), torch.device("cpu")) is None
    assert found == {
        1: DOT, 2: None, 3: eight, 8: eight, 9: sixteen, 16: sixteen, 17: SLICED, 64: SLICED, 65: None, 256: None,
        257: large, 2048: large,
    }  # fmt: skip


def test_the_file_is_read_once_and_anew_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[DeviceKind] = []
    read = tuned_plans.read
    monkeypatch.setattr(tuned_plans, "read", lambda kind: reads.append(kind) or read(kind))
    with fake_gpu((9, 0)) as device:
        assert [lookup(problem(16), device) for _ in range(3)] == [None] * 3
        assert reads == [KIND]
        tuned_plans.store(KIND, [tuned(16, TILE)])
        assert [lookup(problem(16), device) for _ in range(3)] == [TILE] * 3
    assert len(reads) == 3  # one by `store`, to merge


def _field(name: str, value: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), name: value})


def _plan_field(name: str, value: object) -> Callable[[str], str]:
    def change(text: str) -> str:
        fields = json.loads(text)
        fields["plans"][0]["plan"][name] = value
        return json.dumps(fields)

    return change


UNFIT: dict[str, tuple[Callable[[str], str], str]] = {
    "cut short": (lambda text: text[:-20], "is damaged"),
    "empty": (lambda text: "", "is damaged"),
    "a list": (lambda text: "[]", "is damaged"),
    "no version": (lambda text: "{}", "is damaged"),
    "an older version": (_field("format_version", 0), "is of format version 0, not 1"),
    "a newer version": (_field("format_version", 2), "is of format version 2, not 1"),
    "an unknown field": (_field("future", 1), "is damaged"),
    "another device": (_field("device", "NVIDIA Other"), "was made for NVIDIA Other"),
    "other kernels": (_field("kernels", "0" * 16), "the kernels of another version"),
    "an unknown kernel": (_plan_field("kernel", "magic"), "is damaged"),
    "a number as text": (_plan_field("warps", "4"), "is damaged"),
    "a crooked tile": (_plan_field("outputs", 48), "cannot run (outputs 48 is no power of two)"),
    "a kernel for fewer tokens": (_plan_field("kernel", "dot"), "the dot kernel is for 16 tokens or fewer"),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_an_unfit_file_is_told_once_and_ignored(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    change, words = UNFIT[fault]
    tuned_plans.store(KIND, [tuned(2048, TMA)])
    KIND.file.write_text(change(KIND.file.read_text()))
    with fake_gpu((9, 0)) as device, caplog.at_level(logging.WARNING):
        assert [lookup(problem(2048), device) for _ in range(3)] == [None] * 3
    [message] = [record.getMessage() for record in caplog.records]
    assert words in message and str(KIND.file) in message
    assert "`rotaquant tune`, or delete it" in message
    assert (tuned_plans.state(KIND).state, tuned_plans.state(KIND).plans) == ("ignored", 0)
    tuned_plans.store(KIND, [tuned(16, TILE)])
    assert tuned_plans.read(KIND) == (tuned(16, TILE),)


def test_a_file_that_cannot_be_read_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    KIND.file.mkdir(parents=True)
    with fake_gpu((9, 0)) as device:
        assert lookup(problem(16), device) is None
    assert "cannot be read" in caplog.text


# --- tuning a problem ------------------------------------------------------------------------------------------


class FakeWorkload(Workload):
    """Every plan gives ones, except those that are said to be wrong or broken."""

    wrong: frozenset[Plan] = frozenset()
    broken: frozenset[Plan] = frozenset()

    def __init__(self, each: Problem, device: torch.device) -> None:
        self.problem, self.device, self.ran = each, device, []

    def run(self, plan: Plan, tokens: int | None = None, copy: int = 0) -> torch.Tensor:
        self.ran.append((plan, tokens))
        if plan in self.broken:
            raise ValueError("out of resource: shared memory")
        out = torch.ones(tokens or self.problem.tokens, 4)
        if plan in self.wrong:
            out[-1, -1] = float("nan")
        return out


def bench(
    seconds: Callable[[Plan], float], *, wrong: set[Plan] | None = None, broken: set[Plan] | None = None, **more: Any
) -> Bench:
    kind = type("Chosen", (FakeWorkload,), {"wrong": frozenset(wrong or ()), "broken": frozenset(broken or ())})
    return Bench(
        device=torch.device("cpu"), kind=KIND, timer=lambda _, plan: seconds(plan), **{"workload": kind, **more}
    )


def test_the_fastest_right_plan_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    each = problem(2048)
    tried = candidates(each, (9, 0))
    fast, faster, fastest = tried[3], tried[5], tried[7]
    times = {fast: 3e-5, faster: 2e-5, fastest: 1e-5}
    found = tune_problem(each, bench(lambda plan: times.get(plan, 9e-5), wrong={fastest}, broken={faster}))
    assert found is not None
    assert (found.plan, found.seconds, found.standard_seconds) == (fast, 3e-5, 9e-5)
    assert (found.failed, found.wrong) == (1, (fastest,))
    assert found.timed == len({*tried, found.standard}) - 2
    assert "gives a wrong result" in caplog.text and str(fastest) in caplog.text
    assert found.tuned() == TunedPlan(
        outputs=4096, plane=2048, packed=True, groups=1, tokens=2048, plan=fast, seconds=3e-5, standard_seconds=9e-5
    )


def test_a_gain_within_scatter_is_none() -> None:
    each = problem(16)
    other = candidates(each, (9, 0))[-1]
    standard = choose(each, torch.device("cpu"), 2)
    assert other != standard
    for time, kept in ((0.99e-5, standard), (0.97e-5, other)):
        found = tune_problem(each, bench(lambda plan, time=time: time if plan == other else 1e-5))
        assert found is not None and found.plan == kept


def test_without_a_right_plan_nothing_is_kept() -> None:
    each = problem(16)
    every = {choose(each, torch.device("cpu"), 2), *candidates(each, (9, 0))}
    found = tune_problem(each, bench(lambda plan: 1e-5, wrong=every - {plain_plan(each)}))
    assert found is not None and found.tuned() is None and found.timed == 0 and set(found.wrong) == every


def test_where_the_plain_plan_fails_so_does_tuning() -> None:
    each = problem(16)
    with pytest.raises(RotaquantError, match=r"rotaquant doctor.*out of resource: shared memory"):
        tune_problem(each, bench(lambda plan: 1e-5, broken={plain_plan(each)}))


def test_tuning_ends_at_its_deadline() -> None:
    ticks = itertools.count()
    timed: list[Plan] = []
    clocked = bench(lambda plan: timed.append(plan) or 1e-5, now=lambda: next(ticks))
    assert tune_problem(problem(16), clocked, deadline=4) is None
    assert len(timed) == 5


def test_too_little_memory_is_told() -> None:
    def starved(*_: Any) -> Workload:
        raise torch.OutOfMemoryError

    with pytest.raises(RotaquantError, match="smaller --rows"):
        tune_problem(problem(16384), bench(lambda plan: 1e-5, workload=starved))


def test_plans_are_checked_at_two_numbers_of_tokens() -> None:
    assert {tokens: checked_tokens(tokens) for tokens in (1, 2, 8, 16, 17, 64, 256, 300, 2048)} == {
        1: (1,), 2: (2,), 8: (8, 7), 16: (16, 13), 17: (17,), 64: (64, 49), 256: (256, 193), 300: (300, 257),
        2048: (2048, 1537),
    }  # fmt: skip


def test_real_kernels_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    from rotaquant.ops import product_kernels, tuning

    each = Problem(tokens=3, outputs=24, plane=32, packed=True)
    plans = (
        replace(TILE, bytes=32),
        replace(SLICED, bytes=32, slices=2),
        replace(DOT, bytes=128),
        replace(TILE, band=2),
    )
    monkeypatch.setattr(tuning, "candidates", lambda *_: plans)
    real = product_kernels.product

    def faulty(*operands: Any) -> torch.Tensor:
        out = real(*operands)
        if operands[-1].kernel == "sliced":
            out[0, 23] += 1
        return out

    monkeypatch.setattr(product_kernels, "product", faulty)
    timed: dict[Plan, float] = {plan: 1e-5 / (1 + at) for at, plan in enumerate(plans)}
    found = tune_problem(each, bench(lambda plan: timed.get(plan, 9e-5), workload=Workload))
    assert found is not None
    assert found.failed == 0 and {plan.kernel for plan in found.wrong} == {"sliced"}
    assert found.plan == plans[3] and plans[1] in found.wrong


def test_random_weights_fill_a_cache() -> None:
    workload = Workload(problem(1, outputs=8, plane=64), torch.device("cpu"))
    assert workload.copies(0) == 1 and workload.copies(4 * 512 - 1) == 4 and workload.copies(100) == 4
    assert all(torch.equal(weight, workload._weights[0]) for weight in workload._weights)
