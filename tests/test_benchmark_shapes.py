"""The benchmarks of speed: the right shapes, honest figures, wrong results refused. The clock is a stub here."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from rotaquant import ops
from rotaquant.hadamard import transform_matrix

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MODELS = ("Llama-2-7B", "Llama-3-8B", "Llama-2-70B", "Qwen2.5-32B")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def shapes(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("shapes")


@pytest.fixture
def timing(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The clock: calls are made once each, on the CPU, and take two microseconds."""
    module = load("timing")

    def measure(calls: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
        results = [call() for call in calls]
        return module.Timing.of([2.0 * len(calls)] * 30, len(calls)), results

    run = {"device": "stub", "torch": "2", "triton": "3", "commit": "abc"}
    monkeypatch.setattr(module, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(module, "l2_bytes", lambda: 1000)
    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "environment", lambda: dict(run))
    monkeypatch.setattr(module, "require_green", lambda: None)
    return module


@pytest.fixture
def small(shapes: ModuleType, timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a small one, and each call is made a few times only."""
    monkeypatch.setattr(timing, "_FEWEST_CALLS", ((16384, 2),))
    monkeypatch.setattr(timing, "l2_bytes", lambda: 100_000)
    block = shapes.Block(model="Llama-2-7B", hidden=256, intermediate=448, heads=4, kv_heads=2, head_dim=64)
    monkeypatch.setattr(shapes, "block", lambda model: dataclasses.replace(block, model=model))


def run_script(module: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, *more: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", [module.__name__, "--output", str(output), "--models", "Llama-2-7B", *more])
    module.main()
    return json.loads(output.read_text())["rows"]


# --- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_outputs_and_inputs_are_those_of_the_model(model: str, shapes: ModuleType) -> None:
    config = shapes.CONFIGS[model]
    config.num_hidden_layers = 1
    with torch.device("meta"):
        layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[0]
    stock = {
        "qkv": (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        "o": (layer.self_attn.o_proj,),
        "gate_up": (layer.mlp.gate_proj, layer.mlp.up_proj),
        "down": (layer.mlp.down_proj,),
    }
    linears = shapes.block(model).linears
    assert [linear.name for linear in linears] == list(stock)
    for linear in linears:
        parts = stock[linear.name]
        assert linear.outputs == sum(part.weight.shape[0] for part in parts)
        assert {part.weight.shape[1] for part in parts} == {linear.inputs}


def test_the_widths_are_the_published_ones(shapes: ModuleType) -> None:
    linears = {(x.model, x.name): (x.outputs, x.inputs) for model in MODELS for x in shapes.block(model).linears}
    assert linears["Llama-2-7B", "qkv"] == (12288, 4096)
    assert linears["Llama-3-8B", "qkv"] == (6144, 4096)
    assert linears["Llama-2-70B", "gate_up"] == (57344, 8192)
    assert linears["Llama-2-70B", "down"] == (8192, 28672)
    assert linears["Qwen2.5-32B", "down"] == (5120, 27648)


@pytest.mark.parametrize("model", MODELS)
def test_the_transforms_are_exact_at_these_widths(model: str, shapes: ModuleType) -> None:
    block = shapes.block(model)
    assert block.down_transform.size == block.intermediate
    assert block.down_transform.exact_hadamard
    assert block.head_mix.heads == block.heads
    assert block.head_mix.matrix().shape[0] == block.heads * block.head_mix.split


# --- the clock and the file ------------------------------------------------------------------------------------


def test_a_timing_is_the_median_of_replays_a_call(load: Callable[[str], ModuleType]) -> None:
    found = load("timing").Timing.of([40.0, 44.0, 48.0, 52.0, 400.0], 4)
    assert (found.us, found.us_min, found.us_max, found.us_iqr) == (12.0, 10.0, 100.0, 2.0)
    assert (found.replays, found.calls) == (5, 4)


@pytest.mark.parametrize("us", [5.0, 900.0, 40_000.0])
def test_replays_are_warm_and_at_least_thirty(
    us: float, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    timing, asked = load("timing"), []

    def replay(graph: object, times: int) -> list[float]:
        asked.append(times)
        return [us] * times

    monkeypatch.setattr(timing, "_capture", lambda calls: (None, [call() for call in calls]))
    monkeypatch.setattr(timing, "_replay", replay)
    found, results = timing.measure([lambda: "a", lambda: "b"])
    assert results == ["a", "b"]
    assert (found.us, found.calls, found.replays) == (us / 2, 2, asked[-1])
    assert 30 <= asked[-1] <= 100
    assert asked[1] >= 2 and asked[1] * us >= 0.9 * 60_000 or asked[1] == 1000


def test_weights_come_round_only_when_the_cache_has_lost_them(timing: ModuleType) -> None:
    for size in (1, 10, 999, 4000, 10**9):
        copies = timing.copies_beyond_cache(size)
        assert copies >= 2 and copies * size >= 4 * timing.l2_bytes()
    for copies in (2, 3, 29, 100):
        for m in (1, 256, 2048, 16384):
            assert timing.turns(copies, m) % copies == 0 and timing.turns(copies, m) >= copies
    assert timing.turns(2, 1) >= 48


def test_samples_hold_both_ends(timing: ModuleType) -> None:
    assert timing.sample(3, 64).tolist() == [0, 1, 2]
    spread = timing.sample(16384, 64)
    assert len(spread.unique()) == 64 and (spread[0], spread[-1]) == (0, 16383)


def test_the_file_keeps_other_cells_and_forgets_unused_runs(timing: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"

    def write(merge: bool, commit: str, *cells: str) -> Any:
        results = timing.Results(path, "x", ("cell",), merge=merge)
        results.begin({"commit": commit})
        for cell in cells:
            results.put({"cell": cell, "by": commit})
        return results

    write(False, "first", "a", "b")
    write(True, "second", "b", "c")
    held = json.loads(path.read_text())
    assert {(row["cell"], held["runs"][row["run"]]["commit"]) for row in held["rows"]} == {
        ("a", "first"),
        ("b", "second"),
        ("c", "second"),
    }
    results = write(True, "third", "a", "b", "c")
    held = json.loads(path.read_text())
    assert held["runs"] == [{"commit": "third"}] and len(held["rows"]) == 3
    assert results.holds({"cell": "c"}) and not results.holds({"cell": "d"})
    write(False, "fourth", "d")
    assert [row["cell"] for row in json.loads(path.read_text())["rows"]] == ["d"]


def test_nothing_is_timed_on_a_red_test(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    timing = load("timing")

    def finished(command: list[str], **_: Any) -> Any:
        assert command[1:] == ["-m", "pytest", "-q", "-m", "gpu", "tests/ops"]
        return type("Finished", (), {"returncode": 5})

    monkeypatch.setattr(timing.subprocess, "run", finished)
    with pytest.raises(SystemExit, match="red test"):
        timing.require_green()


def test_an_error_that_spoils_the_device_ends_in_a_new_process(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class ReplacedError(Exception):
        pass

    def execv(program: str, command: list[str]) -> None:
        assert command[:4] == [program, "linear.py", "--output", "x"]
        assert command[4:8] == ["--merge", "--missing", "--tested", "--limit-s"] and 0 < float(command[8]) <= 50
        raise ReplacedError

    def spoilt() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    results = timing.Results(tmp_path / "x.json", "x", ("cell",), merge=False)
    results.begin({})
    session = timing.Session(results, 50, missing=False)
    monkeypatch.setattr(sys, "argv", ["linear.py", "--output", "x"])
    assert session.cell({"cell": "a"}, spoilt)["error"] == "RuntimeError: an illegal memory access was encountered"
    monkeypatch.setattr(timing, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", spoilt)
    monkeypatch.setattr(timing.os, "execv", execv)
    with pytest.raises(ReplacedError):
        session.cell({"cell": "b"}, spoilt)
    assert results.holds({"cell": "b"})


# --- linear layers ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_linear_writes_every_cell_and_an_error_is_a_result(
    load: Callable[[str], ModuleType], timing: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    linear, path = load("linear"), tmp_path / "linear-stub.json"
    monkeypatch.setitem(sys.modules, "humming", None)
    names = ["bf16", "rotaquant-w4a4", "rotaquant-w8a8", "humming-w4a8"]
    rows = run_script(linear, monkeypatch, path, "--rows", "16", "1", "--implementations", *names)
    assert len(rows) == 2 * 4 * len(names)
    assert [row["m"] for row in rows] == [1] * 16 + [16] * 16
    for row in rows:
        if row["implementation"] == "humming-w4a8":
            assert "us" not in row and row["error"].startswith("ModuleNotFoundError")
            continue
        assert (row["us"], row["ratio"], row["cold"]) == (2.0, 1.0, True)
        weights = {"bf16": 2.0, "rotaquant-w4a4": 0.5, "rotaquant-w8a8": 1.0}[row["implementation"]]
        scales = 0 if row["implementation"] == "bf16" else 2 * row["outputs"]
        assert row["weight_bytes"] == weights * row["outputs"] * row["inputs"] + scales
        assert row["bytes"] == row["weight_bytes"] + 2 * row["m"] * (row["outputs"] + row["inputs"])
    page = load("speed_tables").render(tmp_path)
    assert "| Llama-2-7B gate_up | 896 × 256 | 2.0 | 2.0 (1.00×) | 2.0 (1.00×) |" in page
    assert "humming W4A8, Llama-2-7B qkv, 1 tokens and 7 more" in page
    assert "| 1 to 16 | all | W4A4 | 1.00× (least 1.00×) |" in page


@pytest.mark.usefixtures("small")
def test_linear_goes_on_where_it_ended(
    load: Callable[[str], ModuleType], timing: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    linear, path = load("linear"), tmp_path / "linear-stub.json"
    options = ("--rows", "1", "8", "--implementations", "rotaquant-w4a4")
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "monotonic", lambda: float(next(clock)))
    first = run_script(linear, monkeypatch, path, *options, "--limit-s", "12")
    assert 0 < len(first) < 16
    rows = run_script(linear, monkeypatch, path, *options, "--merge", "--missing")
    assert len(rows) == 16 and all("ratio" in row for row in rows)
    assert rows[: len(first) - 1] == first[:-1]


@pytest.mark.usefixtures("small", "timing")
def test_a_product_that_differs_from_the_reference_gets_no_time(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    linear, path = load("linear"), tmp_path / "linear-stub.json"
    right = ops.quantize_matmul

    def wrong(*operands: Any) -> torch.Tensor:
        out = right(*operands)
        out[-1, -1] *= 1.01
        return out

    monkeypatch.setattr(ops, "quantize_matmul", wrong)
    rows = run_script(linear, monkeypatch, path, "--rows", "16", "--implementations", "rotaquant-w4a4")
    ours = [row for row in rows if row["implementation"] == "rotaquant-w4a4"]
    assert len(ours) == 4
    assert all("us" not in row and "not the reference's integers: 1 of" in row["error"] for row in ours)


@pytest.mark.usefixtures("small", "timing")
def test_timed_calls_that_give_other_results_get_no_time(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    linear, path = load("linear"), tmp_path / "linear-stub.json"
    right, calls = ops.quantize_matmul, []

    def racing(*operands: Any) -> torch.Tensor:
        calls.append(1)
        return right(*operands) * (1 if len(calls) == 1 else 2)

    monkeypatch.setattr(ops, "quantize_matmul", racing)
    rows = run_script(linear, monkeypatch, path, "--rows", "1", "--implementations", "rotaquant-w4a4")
    assert "the timed calls gave other results" in rows[1]["error"]


def test_float8_rows_use_the_whole_range(load: Callable[[str], ModuleType]) -> None:
    x = torch.randn(5, 96) * torch.tensor([1e-6, 1, 100, 1e4, 0])[:, None]
    codes, scale = load("peers").quantize_float8(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().abs().amax(-1).tolist() == [448.0] * 4 + [0.0]
    torch.testing.assert_close(codes.float() * scale, x, rtol=2**-4, atol=1e-9)


# --- transforms ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("timing")
@pytest.mark.parametrize("width", [448, 1024, 172 * 8, 2048, 77 * 32])
def test_the_unfused_rotation_is_the_same_rotation(
    width: int, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    transforms = load("transforms")
    transform = load("shapes").factor_or_fallback(width)
    monkeypatch.setattr(transforms, "DTYPE", torch.float64)
    x = torch.randn(3, width, dtype=torch.float64)
    got = transforms.rotate_unfused(x, transforms._matrices(transform), width)
    torch.testing.assert_close(got, x @ transform_matrix(transform))


@pytest.mark.usefixtures("small")
def test_transforms_writes_every_cell_and_a_block(
    load: Callable[[str], ModuleType], timing: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transforms, path = load("transforms"), tmp_path / "transforms-stub.json"
    monkeypatch.setattr(transforms, "ROWS", (16, 2))
    monkeypatch.setattr(transforms, "BLOCK_ROWS", 16)
    rows = run_script(transforms, monkeypatch, path, "--rows", "16", "2")
    assert not [row for row in rows if "error" in row]
    names = [row["operation"] for row in rows if row["m"] == 16]
    rotations = ["hadamard", "hadamard_quantize", "silu_mul_hadamard_quantize", "head_mix_quantize"]
    norm = ["rmsnorm_quantize"] if hasattr(ops, "rmsnorm_quantize") else []
    assert names == ["quantize_rows", "quantize_rows", *rotations, *norm, "block"]
    gated = next(row for row in rows if row["operation"] == "silu_mul_hadamard_quantize" and row["m"] == 16)
    assert gated["bytes"] == 16 * (5 * 448 + 4)
    assert gated["over_floor"] == pytest.approx(gated["us"] / gated["floor_us"], rel=0.01)
    block = next(row for row in rows if row["operation"] == "block")
    assert (block["us"], block["plain_us"], block["online_fraction"]) == (2.0, 2.0, 0.0)
    page = load("speed_tables").render(tmp_path)
    assert "### silu_mul_hadamard_quantize" in page and "| Llama-2-7B | 16 | 2.0 | 2.0 | 0.0% |" in page


@pytest.mark.usefixtures("timing")
def test_a_transform_that_is_wrong_is_refused(load: Callable[[str], ModuleType]) -> None:
    transforms, block = load("transforms"), load("shapes").Block("tiny", 256, 448, 4, 2, 64)
    x = torch.randn(8, 448, dtype=torch.bfloat16)
    operation = transforms._of_down(block)[1]()
    codes, scale = transforms.quantize(operation.unfused(x)[0].flatten(1)[:, :448].to(torch.bfloat16))
    with pytest.raises(ValueError, match="relative error"):
        transforms.verify(operation, x, (codes, scale))
    assert transforms.verify(operation, x, operation.unfused(x))["relative_error"] < 0.2


def test_no_results_make_no_page(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    assert load("speed_tables").render(tmp_path) is None
