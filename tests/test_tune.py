"""Tuning a model's products: which shapes it has, in which order they are tuned, what is reported and kept."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from rotaquant import tune
from rotaquant.architectures import Block, describe
from rotaquant.checkpoint.folder import quantized_config
from rotaquant.cli import app
from rotaquant.errors import RotaquantError
from rotaquant.integrations.transformers import FORMAT_VERSION, RotaquantConfig
from rotaquant.ops import library, tuned_plans
from rotaquant.ops.product_plans import Plan, Problem
from rotaquant.ops.tuned_plans import DeviceKind
from rotaquant.ops.tuning import Bench, Workload
from rotaquant.recipe import PRESETS, Recipe
from rotaquant.rotation.plan import plan_rotations
from rotaquant.runtime import ModelLayout
from rotaquant.runtime.install import install
from rotaquant.runtime.layout import LinearLayout
from rotaquant.runtime.linear import QuantizedLinear
from rotaquant.tune import LinearShape, ShapeOutcome, model_shapes, parse_rows
from tests.checkpoint.test_text_only import vision_language_model
from tests.fake_gpu import fake_gpu
from tests.tiny_models import save_tiny

KIND = DeviceKind("NVIDIA Test 9", (9, 0), "3.6.0")


class Ones(Workload):
    """Every plan is right, and nothing is multiplied."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device

    def run(self, plan: Plan, tokens: int | None = None, copy: int = 0) -> torch.Tensor:
        return torch.ones(1)


def bench(**more: Any) -> Bench:
    """The larger the tile, the faster."""
    return Bench(
        device=torch.device("cpu"),
        kind=KIND,
        timer=lambda _, plan: 1e-5 / plan.outputs + plan.stages * 1e-9,
        workload=Ones,
        **more,
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def quantized(folder: Path, output: Path, recipe: Recipe) -> Path:
    """What tuning reads of a quantized folder: its config."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        architecture = describe(AutoModelForCausalLM.from_config(config))
    layout = ModelLayout(recipe=recipe, rotation=plan_rotations(architecture, recipe, seed=0), scale_dtype="float32")
    config.quantization_config = RotaquantConfig(format_version=FORMAT_VERSION, **layout.model_dump(mode="json"))
    config.save_pretrained(output)
    return output


# --- the shapes of a model -------------------------------------------------------------------------------------


def test_shapes_of_a_float_model(folder: Path) -> None:
    # Four heads of 16 channels, two of keys and values; q and o have one shape, k and v too, and so have gate and up.
    assert model_shapes(folder) == (
        LinearShape(("q_proj",), 64, 64, True, 1),
        LinearShape(("k_proj",), 32, 64, True, 1),
        LinearShape(("q_proj", "k_proj", "v_proj"), 128, 64, True, 1),
        LinearShape(("gate_proj",), 96, 64, True, 1),
        LinearShape(("gate_proj", "up_proj"), 192, 64, True, 1),
        LinearShape(("down_proj",), 64, 96, True, 1),
    )


def test_fused_projections_and_experts_have_their_own_shapes(tmp_path: Path) -> None:
    fused = {shape.linears: shape.outputs for shape in model_shapes(save_tiny(tmp_path / "phi3", "phi3"))}
    assert fused == {("qkv_proj",): 128, ("o_proj",): 64, ("gate_up_proj",): 192, ("down_proj",): 64}
    experts = {shape.linears: shape.inputs for shape in model_shapes(save_tiny(tmp_path / "mixtral", "mixtral"))}
    assert experts[("gate_up",)] == 64 and experts[("down",)] == 96


def test_shapes_of_a_quantized_model_follow_its_recipe(folder: Path, tmp_path: Path) -> None:
    eight = quantized(folder, tmp_path / "eight", PRESETS["w8a8kv8-rtn"])
    assert {(shape.packed, shape.groups) for shape in model_shapes(eight)} == {(False, 1)}
    weights = PRESETS["w4a4kv4-rtn"].weights
    assert weights is not None
    grouped = weights.model_copy(update={"group_size": 32})
    recipe = PRESETS["w4a4kv4-rtn"].model_copy(update={"weights": grouped, "skip": ("*.q_proj", "*.down_proj")})
    shapes = model_shapes(quantized(folder, tmp_path / "grouped", recipe))
    assert [shape.linears for shape in shapes] == [
        ("k_proj",), ("k_proj", "v_proj"), ("gate_proj",), ("gate_proj", "up_proj"),
    ]  # fmt: skip
    assert {shape.groups for shape in shapes} == {2}


def products_of_the_runtime(folder: Path, layout: ModelLayout) -> set[tuple[str, ...]]:
    """Which linears are alone and which are one product in the model that is loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    install(model, layout)
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    products = {(module,) if module.shared_input is None else module.shared_input.members for module in linears}
    return {tuple(names[member] for member in members) for members in products}


@pytest.mark.parametrize("what", ["q is wider", "q is skipped", "q has another clip ratio", "all are alike"])
def test_linears_are_stacked_as_the_runtime_stacks_them(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = PRESETS["w4a4kv4-rtn"].model_copy(update={"skip": ("*.q_proj",) if what == "q is skipped" else ()})
    made = ModelLayout.linear

    def linear(layout: ModelLayout, block: Block, path: str) -> LinearLayout:
        found = made(layout, block, path)
        if found.weights is None or found.activations is None or not path.endswith(".q_proj"):
            return found
        if what == "q is wider":
            return replace(found, weights=found.weights.model_copy(update={"bits": 8}))
        ratio = 0.7 if what == "q has another clip ratio" else found.activations.clip_ratio
        return replace(found, activations=found.activations.model_copy(update={"clip_ratio": ratio}))

    monkeypatch.setattr(ModelLayout, "linear", linear)
    path = quantized(folder, tmp_path / "out", recipe)
    runtime = products_of_the_runtime(folder, quantized_config(path).layout)
    several = {names for names in runtime if len(names) > 1}
    stacked = ("q_proj", "k_proj", "v_proj") if what == "all are alike" else ("k_proj", "v_proj")
    assert several == {stacked, ("gate_proj", "up_proj")}
    shapes = {(shape.inputs, shape.outputs, shape.packed): shape.linears for shape in model_shapes(path)}
    assert ((64, 128, True) in shapes) == (what == "all are alike")
    # A shape is named after the first product that has it: k and v together have that of q.
    alone = what in {"q has another clip ratio", "all are alike"}
    assert shapes[64, 64, True] == (("q_proj",) if alone else ("k_proj", "v_proj"))
    assert shapes.get((64, 64, False)) == (("q_proj",) if what == "q is wider" else None)
    assert shapes[64, 192, True] == ("gate_proj", "up_proj")


def test_the_text_part_of_a_model_that_has_others(tmp_path: Path) -> None:
    vision_language_model("llava").save_pretrained(tmp_path)
    with pytest.raises(RotaquantError, match=r"ask for it with --text-only \(text_only=True\)"):
        model_shapes(tmp_path)
    assert ("q_proj", "k_proj", "v_proj") in {shape.linears for shape in model_shapes(tmp_path, text_only=True)}
    report = tune.tune(tmp_path, rows=(16,), text_only=True, bench=bench())
    assert report.results and report.unfinished == 0


def test_the_command_has_the_option_that_its_error_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision_language_model("llava").save_pretrained(tmp_path)
    monkeypatch.setattr(tune, "open_bench", lambda device: bench())
    refused = CliRunner().invoke(app, ["tune", str(tmp_path), "--rows", "16"])
    assert refused.exit_code == 1 and "ask for it with --text-only" in refused.stderr
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--rows", "16", "--text-only", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["results"], done.output


def test_a_model_without_integer_products_has_nothing_to_tune(folder: Path, tmp_path: Path) -> None:
    recipe = PRESETS["w4a4kv4-rtn"].model_copy(update={"activations": None})
    with pytest.raises(RotaquantError, match=r"nothing to tune; give a model quantized.*such as w4a4kv4"):
        tune.tune(quantized(folder, tmp_path / "out", recipe), bench=bench())


def test_a_problem_counts_bytes_of_a_plane() -> None:
    assert LinearShape(("o_proj",), 7, 99, True, 1).problem(5) == Problem(tokens=5, outputs=7, plane=52, packed=True)
    assert LinearShape(("o_proj",), 7, 96, False, 3).problem(5) == Problem(
        tokens=5, outputs=7, plane=96, packed=False, groups=3
    )


# --- a run -----------------------------------------------------------------------------------------------------


def test_tuned_plans_are_kept_and_used(folder: Path) -> None:
    told: list[tuple[ShapeOutcome, int]] = []
    report = tune.tune(folder, rows=(16, 64), bench=bench(), on_result=lambda found, left: told.append((found, left)))
    assert (report.device, report.file, report.unfinished) == (KIND.name, KIND.file, 0)
    assert [found for found, _ in told] == list(report.results)
    assert [left for _, left in told] == list(range(11, -1, -1))
    for found in report.results:
        outcome = found.outcome
        assert outcome.timed > 3 and outcome.standard_seconds is not None
        assert outcome.seconds is not None and outcome.seconds <= outcome.standard_seconds
        assert outcome.plan is not None
        assert outcome.plan.outputs == 128 or found.shape.outputs < 128
    assert len(tuned_plans.read(KIND)) == 12
    shape = LinearShape(("gate_proj", "up_proj"), 192, 64, True, 1)
    [best] = [
        found.outcome.plan for found in report.results if found.shape == shape and found.outcome.problem.tokens == 16
    ]
    with fake_gpu((9, 0)) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_plans, "triton_version", lambda: KIND.triton)
        assert tuned_plans.lookup(shape.problem(5), device) == best
        assert tuned_plans.lookup(shape.problem(65), device) is None


def test_a_run_that_is_cut_short_goes_on_with_the_rest(folder: Path) -> None:
    ticks = itertools.count()
    report = tune.tune(folder, rows=(16,), limit=30, bench=bench(now=lambda: next(ticks)))
    done = [found.outcome.problem for found in report.results]
    assert 0 < len(done) < 6 and report.unfinished == 6 - len(done)
    assert {entry.problem for entry in tuned_plans.read(KIND)} == set(done)
    again = [found.outcome.problem for found in tune.tune(folder, rows=(16,), bench=bench()).results]
    assert set(again[: 6 - len(done)]).isdisjoint(done) and set(again[6 - len(done) :]) == set(done)


def test_an_unfit_file_of_plans_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    KIND.file.parent.mkdir(parents=True)
    KIND.file.write_text("{")
    tune.tune(folder, rows=(16,), bench=bench())
    assert len(tuned_plans.read(KIND)) == 6
    [message] = [record.getMessage() for record in caplog.records]
    assert str(KIND.file) in message and "is damaged" in message and message.endswith("; it is replaced")


# --- bad input -------------------------------------------------------------------------------------------------


def test_rows() -> None:
    assert parse_rows("16, 1,2048,16,") == (1, 16, 2048)
    for text, words in (
        ("1,a", "'a'"),
        ("-1", "'-1'"),
        ("0", "0 is not between 1 and 65536"),
        ("99999", "99999"),
        ("", "no"),
    ):
        with pytest.raises(RotaquantError, match=words) as caught:
            parse_rows(text)
        assert "--rows" in str(caught.value)


def test_a_limit_is_a_time(folder: Path) -> None:
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(RotaquantError, match="--limit"):
            tune.tune(folder, limit=limit, bench=bench())


def test_without_a_device_or_triton_the_way_out_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RotaquantError, match="'cpu' has no kernels to tune; use --device cuda"):
        tune.tune(folder, device="cpu")
    for device in ("cuda", "auto", torch.device("cuda", 0)):
        with pytest.raises(RotaquantError, match="sees no CUDA device.*run this where the model is to run"):
            tune.tune(folder, device=device)
    with fake_gpu((9, 0)):
        monkeypatch.setattr(tune, "triton_missing", lambda: "the package triton is not installed (pip install triton)")
        with pytest.raises(RotaquantError, match="pip install triton"):
            tune.tune(folder)
    assert library.triton_missing is not tune.triton_missing


def test_a_wrong_model_is_told_where_there_is_no_gpu_too(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RotaquantError, match=f"^{tmp_path / 'gone'} does not exist"):
        tune.tune(tmp_path / "gone")
    with pytest.raises(RotaquantError, match=f"^{tmp_path} is empty$"):
        tune.tune(tmp_path)
    awq = tmp_path / "awq"
    awq.mkdir()
    fields = json.loads((folder / "config.json").read_text())
    (awq / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(RotaquantError, match=rf"{awq} is already quantized \(awq\); give the float model"):
        tune.tune(awq)
    weights_alone = PRESETS["w4a4kv4-rtn"].model_copy(update={"activations": None})
    with pytest.raises(RotaquantError, match="nothing to tune"):
        tune.tune(quantized(folder, tmp_path / "w4a16", weights_alone))
    with pytest.raises(RotaquantError, match="sees no CUDA device"):
        tune.tune(quantized(folder, tmp_path / "fit", PRESETS["w4a4kv4-rtn"]))


def test_a_bench_on_a_device() -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    with fake_gpu((8, 6), "NVIDIA Test 8") as device:
        found = tune.open_bench("cuda:0")
        with pytest.raises(RotaquantError, match="no device cuda:1: torch sees 1"):
            tune.open_bench("cuda:1")
    assert (found.device, found.kind.name, found.kind.capability) == (device, "NVIDIA Test 8", (8, 6))
