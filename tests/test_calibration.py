"""Blocks quantized stage by stage: what each linear sees, against inputs collected by hand; experts that see little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rotaquant.calibration as calibration_module
from rotaquant.architectures import Architecture, Block, describe
from rotaquant.calibration import BlockRecord, passes, quantize_block, record_block_inputs
from rotaquant.hadamard import transform_matrix
from rotaquant.observation import observe
from rotaquant.preflight import expected_output_bytes, expected_peak_bytes
from rotaquant.quantization.activation_clip import search_activation_clip
from rotaquant.quantization.weights import QuantizedWeight, round_to_nearest, weight_scale
from rotaquant.recipe import PRESETS, Recipe
from rotaquant.rotation.plan import plan_rotations
from rotaquant.runtime.experts import unstack_experts
from rotaquant.runtime.layout import ModelLayout, float_layout
from rotaquant.runtime.linear import QuantizedLinear
from tests.tiny_models import tiny_model, tokens

SEQUENCES, LENGTH = 3, 40
TOTAL = SEQUENCES * LENGTH
FEWEST = 16  # a quarter of the hidden size of 64
SPARSE = ["mixtral", "qwen3-moe-dense-first", "qwen2-moe-shared", "gpt-oss"]


@dataclass
class Prepared:
    """A block of a tiny model, its linears float `QuantizedLinear`s, and what to calibrate it on."""

    module: Any
    block: Block
    layout: ModelLayout
    data: tuple[Tensor, dict[str, Any]]

    def quantize(self, on_linear: Callable[[str, float | None], None] | None = None) -> BlockRecord:
        data = self.data if self.layout.recipe.needs_calibration else None
        return quantize_block(self.module, self.block, self.layout, data, on_linear or (lambda *_: None))[0]

    def linear(self, path: str) -> QuantizedLinear:
        linear = self.module.get_submodule(path)
        assert isinstance(linear, QuantizedLinear)
        return linear


class FixedRouter(nn.Module):
    """Sends every token to experts 0 and 1, but the first four of a sequence to 0 and 2; to expert 3 it sends none."""

    def forward(self, hidden: Tensor) -> tuple[None, Tensor, Tensor]:
        chosen = torch.tensor([[0, 1]]).repeat(hidden.shape[0], 1)
        chosen[:4, 1] = 2
        return None, torch.full(chosen.shape, 0.5, dtype=hidden.dtype), chosen


def layout_of(architecture: Architecture, recipe: Recipe) -> ModelLayout:
    rotation = plan_rotations(architecture, recipe, seed=0)
    return ModelLayout(recipe=recipe, rotation=rotation, scale_dtype="float32")


def prepare(name: str, recipe: str | Recipe = "w4a4kv4", *, starved: bool = False) -> Prepared:
    """The last block of a model; its weights are not rotated, but online rotations are in place."""
    chosen = PRESETS[recipe] if isinstance(recipe, str) else recipe
    model = tiny_model(name)
    architecture = describe(model)
    layout = layout_of(architecture, chosen)
    unstack_experts(model, architecture)
    block = architecture.blocks[-1]
    module: Any = model.get_submodule(block.path)
    hidden, arguments = record_block_inputs(model, architecture, tokens(SEQUENCES, LENGTH))
    for path in block.linears:
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        module.set_submodule(path, QuantizedLinear.from_float(linear, float_layout(layout.linear(block, path))))
    if starved:
        module.mlp.gate = FixedRouter()
    return Prepared(module, block, layout, (hidden, arguments[-1]))


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[tuple[Tensor, ...]]]:
    """The arguments of every call of a module."""
    seen: list[tuple[Tensor, ...]] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args))
    yield seen
    handle.remove()


@torch.no_grad()
def by_hand(prepared: Prepared, experts: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs of all experts' linears, float64, from one run of the block; and all that enters the experts.

    Written for a gate of SiLU: the stock modules' gating is not called. Activations are left in float.
    """
    for path in prepared.block.linears:
        linear = prepared.linear(path)
        linear.layout = replace(linear.layout, activations=None)
    with inputs_of(experts) as calls:
        for row in prepared.data[0]:
            prepared.module(row[None], **prepared.data[1])
    hidden, chosen = (torch.cat([call[part] for call in calls]) for part in range(2))
    hidden = hidden.double()
    found = {}
    for index in range(experts.count):
        path = f"mlp.experts.gate_up.{index}"
        x = hidden[(chosen == index).any(dim=1)]
        gate, up = (x @ prepared.linear(path).float_weight(torch.float64).T).chunk(2, dim=-1)
        down = f"mlp.experts.down.{index}"
        transform = prepared.linear(down).layout.transform
        found[path] = x
        found[down] = (gate * torch.sigmoid(gate) * up) @ transform_matrix(transform)
    return found, hidden


def hessian(x: Tensor) -> Tensor:
    return (x.T @ x / x.shape[0]).float()


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The weights and Hessians that GPTQ was given, in its order."""
    calls: list[tuple[Tensor, Tensor]] = []
    original = calibration_module.gptq

    def watched(weight: Tensor, hessian: Tensor, *rest: Any) -> QuantizedWeight | None:
        calls.append((weight.clone(), hessian.clone()))
        return original(weight, hessian, *rest)

    monkeypatch.setattr(calibration_module, "gptq", watched)
    return calls


def nearest(weight: Tensor, prepared: Prepared) -> Tensor:
    fmt = prepared.layout.recipe.weights
    assert fmt is not None
    return round_to_nearest(weight, fmt, weight_scale(weight, fmt, torch.float32)).codes


# --- what sites see -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-dense-first", "qwen2-moe-shared"])
def test_a_stage_is_observed_as_every_expert_for_itself(name: str) -> None:
    prepared = prepare(name)
    experts = prepared.module.mlp.experts
    expected, _ = by_hand(prepared, experts)
    found = observe(prepared.module, expected, prepared.data, hessian=True, rows=True)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        assert found[path].tokens == x.shape[0] > 0
        torch.testing.assert_close(found[path].hessian, hessian(x), rtol=1e-4, atol=1e-5)
        rows = found[path].rows
        assert rows is not None
        in_order, expected_order = rows[:, 0].argsort(), x[:, 0].argsort()
        torch.testing.assert_close(rows[in_order], x[expected_order].float(), rtol=1e-4, atol=1e-5)
    assert sum(x.shape[0] for path, x in expected.items() if "gate_up" in path) == 2 * TOTAL


def test_downs_are_measured_behind_quantized_gates(walked: list[tuple[Tensor, Tensor]]) -> None:
    prepared = prepare("mixtral")
    experts = prepared.module.mlp.experts
    prepared.quantize()
    expected, _ = by_hand(prepared, experts)  # of the block as it is now
    hessians = [given for weight, given in walked if weight.shape == (64, 96)]
    assert len(hessians) == 4
    for index, given in enumerate(hessians):
        torch.testing.assert_close(given, hessian(expected[f"mlp.experts.down.{index}"]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SPARSE)
def test_the_bound_on_hessians_changes_no_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts at a time, then one: the same codes, from more runs of the block."""
    whole = prepare(name, "w4a4kv4-tuned")
    record = whole.quantize()
    runs = []
    for limit in (2 * 4 * 96**2, 1):
        monkeypatch.setattr(calibration_module, "HESSIAN_BYTES", limit)
        split = prepare(name, "w4a4kv4-tuned")
        with inputs_of(split.module) as calls:
            assert split.quantize() == record
        runs.append(len(calls))
        for path in split.block.linears:
            assert torch.equal(split.linear(path).codes(), whole.linear(path).codes()), path
    sites = len(split.block.sites)
    assert runs[0] < runs[1] == (sites + 1) * SEQUENCES


def test_passes_hold_as_many_hessians_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare("mixtral")
    downs = [(mlp.down,) for mlp in prepared.block.mlps]
    size = 4 * 96**2
    for fit, expected in ((size // 2, [1, 1, 1, 1]), (3 * size, [3, 1]), (4 * size, [4])):
        monkeypatch.setattr(calibration_module, "HESSIAN_BYTES", fit)
        parts = list(passes(prepared.module, downs))
        assert [len(part) for part in parts] == expected
        assert [site for part in parts for site in part] == downs


@pytest.mark.parametrize("name", ["llama-biased", "phi3"])
def test_a_dense_block_runs_no_further_than_the_site(name: str) -> None:
    """Four runs, each up to the linear it observes, and a whole one for the next block's inputs."""
    prepared = prepare(name)
    mlp = prepared.block.mlps[0]
    paths = (prepared.block.attention.inputs[0], prepared.block.attention.o, mlp.inputs[0], mlp.down)
    reached = [[] for _ in paths]  # type: list[list[int]]
    for path, calls in zip(paths, reached, strict=True):
        prepared.linear(path).register_forward_hook(lambda *_, calls=calls: calls.append(1))
    prepared.quantize()
    assert [len(calls) for calls in reached] == [SEQUENCES * runs for runs in (4, 3, 2, 1)]


# --- experts that see little --------------------------------------------------------------------------------------


def test_a_starved_expert_is_calibrated_on_all_tokens(walked: list[tuple[Tensor, Tensor]]) -> None:
    prepared = prepare("mixtral", "w4a4kv4-tuned", starved=True)
    experts = prepared.module.mlp.experts
    names = [f"mlp.experts.{part}.{index}" for part in ("gate_up", "down") for index in range(4)]
    weights = {name: prepared.linear(name).float_weight(torch.float32).clone() for name in names}
    gates = [prepared.linear(f"mlp.experts.gate_up.{index}").float_weight(torch.float32).clone() for index in range(4)]
    record = prepared.quantize()
    expected, entering = by_hand(prepared, experts)
    assert [expected[f"mlp.experts.gate_up.{index}"].shape[0] for index in range(4)] == [TOTAL, TOTAL - 12, 12, 0]

    given = {index: h for weight, h in walked for index, gate in enumerate(gates) if torch.equal(weight, gate)}
    for index, x in enumerate((entering, expected["mlp.experts.gate_up.1"], entering, entering)):
        torch.testing.assert_close(given[index], hessian(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(hessian(expected["mlp.experts.gate_up.1"]), hessian(entering), rtol=1e-3)
    assert sum(weight.shape == (64, 96) for weight, _ in walked) == 2  # the downs of experts 0 and 1
    for index in (2, 3):
        down = f"mlp.experts.down.{index}"
        assert torch.equal(prepared.linear(down).codes(), nearest(weights[down], prepared))
        assert f"{prepared.block.path}.{down}" not in record.errors
        gate_up = f"mlp.experts.gate_up.{index}"
        assert not torch.equal(prepared.linear(gate_up).codes(), nearest(weights[gate_up], prepared))
        assert record.errors[f"{prepared.block.path}.{gate_up}"] > 0


def test_a_starved_experts_clips_are_searched_where_there_are_rows() -> None:
    prepared = prepare("mixtral", "w4a4kv4-tuned", starved=True)
    experts = prepared.module.mlp.experts
    names = [f"mlp.experts.{part}.{index}" for part in ("gate_up", "down") for index in range(4)]
    before = {name: prepared.linear(name).float_weight(torch.float32).clone() for name in names}
    record = prepared.quantize()
    expected, entering = by_hand(prepared, experts)
    fmt = prepared.layout.recipe.activations
    assert fmt is not None

    def searched(name: str, x: Tensor) -> float:
        after = prepared.linear(name).float_weight(torch.float32)
        return search_activation_clip(x.float(), after, x.float() @ before[name].T, fmt)

    found = {name: record.clip_ratios[f"{prepared.block.path}.{name}"] for name in names}
    for name in ("mlp.experts.gate_up.2", "mlp.experts.gate_up.3"):
        assert found[name] == searched(name, entering)
    for name in ("mlp.experts.gate_up.0", "mlp.experts.down.0", "mlp.experts.down.1", "mlp.experts.down.2"):
        assert found[name] == searched(name, expected[name])
    assert found["mlp.experts.down.3"] == 0.9
    assert record.clip_ratios.keys() == {f"{prepared.block.path}.{path}" for path in prepared.block.linears}


@pytest.mark.parametrize(
    ("recipe", "then"),
    [
        ("w4a4kv4", "; their down rounded to nearest"),
        ("w4a4kv4-tuned", "; their down rounded to nearest; expert 3 saw none: clip ratio 0.9 before down"),
    ],
)
def test_a_block_has_one_note_about_starved_experts(recipe: str, then: str) -> None:
    record = prepare("mixtral", recipe, starved=True).quantize()
    assert record.notes == [
        f"model.layers.1: experts 2, 3 saw fewer than {FEWEST} of {TOTAL} tokens: "
        f"their gate/up calibrated on all tokens{then}"
    ]


@pytest.mark.parametrize(
    ("skip", "note"),
    [
        (["*.gate_up.*"], "experts 2, 3 saw fewer than {} of {} tokens: their down rounded to nearest"),
        (["*.down.*"], "experts 2, 3 saw fewer than {} of {} tokens: their gate/up calibrated on all tokens"),
        (
            ["*.gate_up.2", "*.down.3"],
            "experts 2, 3 saw fewer than {} of {} tokens: gate/up of expert 3 calibrated on all tokens; down of "
            "expert 2 rounded to nearest",
        ),
        (["*.experts.*"], None),
    ],
)
def test_the_note_says_what_was_done_where_parts_are_skipped(skip: list[str], note: str | None) -> None:
    recipe = PRESETS["w4a4kv4"].model_copy(update={"skip": skip})
    record = prepare("mixtral", recipe, starved=True).quantize()
    assert record.notes == ([f"model.layers.1: {note.format(FEWEST, TOTAL)}"] if note else [])


def test_experts_that_see_enough_have_no_note() -> None:
    assert not [note for note in prepare("qwen2-moe-shared").quantize().notes if "tokens" in note]


@torch.no_grad()
def test_a_block_with_an_expert_without_tokens_runs() -> None:
    prepared = prepare("mixtral", "w4a4kv4-tuned", starved=True)
    record = prepared.quantize()
    layout = prepared.layout.model_copy(update={"clip_ratios": record.clip_ratios})
    for path in prepared.block.linears:
        prepared.linear(path).layout = layout.linear(prepared.block, path)
    output = prepared.module(prepared.data[0][:1], **prepared.data[1])
    assert torch.isfinite(output[0] if isinstance(output, tuple) else output).all()
    assert prepared.linear("mlp.experts.down.3")(torch.empty(0, 96)).shape == (0, 64)


def test_rounding_experts_looks_at_no_data() -> None:
    prepared = prepare("gpt-oss", "w4a4kv4-rtn", starved=False)
    weights = {path: prepared.linear(path).float_weight(torch.float32).clone() for path in prepared.block.linears}
    told: list[tuple[str, float | None]] = []
    record = prepared.quantize(lambda path, error: told.append((path, error)))
    assert record == BlockRecord()
    assert told == [(path, None) for path in prepared.block.linears]
    for path, weight in weights.items():
        rows = prepared.linear(path).codes()
        assert torch.equal(rows, nearest(weight, prepared))


# --- linears that are skipped -------------------------------------------------------------------------------------


def skipping(*patterns: str) -> Recipe:
    return PRESETS["w4a4kv4-tuned"].model_copy(update={"skip": patterns})


def test_skipped_linears_stay_float_and_change_no_other(walked: list[tuple[Tensor, Tensor]]) -> None:
    """q shares its input with k and v, which are quantized as they would be beside a quantized q."""
    whole = prepare("mixtral", "w4a4kv4-tuned")
    whole.quantize()
    walked.clear()
    prepared = prepare("mixtral", skipping("*.q_proj", "*.experts.down.2", "*.experts.gate_up.0"))
    skipped = {"self_attn.q_proj", "mlp.experts.down.2", "mlp.experts.gate_up.0"}
    before = {path: prepared.linear(path).float_weight(torch.float32).clone() for path in skipped}
    told: list[str] = []
    record = prepared.quantize(lambda path, _: told.append(path))
    quantized = [path for path in prepared.block.linears if path not in skipped]
    assert told == quantized
    assert record.clip_ratios.keys() == record.errors.keys() == {f"{prepared.block.path}.{path}" for path in quantized}
    for path in skipped:
        assert prepared.linear(path).layout.weights is None and prepared.linear(path).layout.activations is None
        assert torch.equal(prepared.linear(path).rotated_weight, before[path])
    for path in ("self_attn.k_proj", "self_attn.v_proj"):
        assert torch.equal(prepared.linear(path).codes(), whole.linear(path).codes())
    assert [weight.shape[0] for weight, _ in walked] == [64, 64, 192, 192, 192, 64, 64, 64]


def test_a_block_that_is_skipped_whole_is_not_observed() -> None:
    prepared = prepare("qwen2-moe-shared", skipping("*"))
    with inputs_of(prepared.module) as calls:
        assert prepared.quantize() == BlockRecord()
    assert len(calls) == SEQUENCES  # the inputs of the next block


# --- what a run will need -----------------------------------------------------------------------------------------


def skeleton(name: str) -> tuple[Any, Architecture]:
    model = tiny_model(name)
    architecture = describe(model)
    unstack_experts(model, architecture)
    return model, architecture


def test_the_expected_output_counts_skipped_linears_as_float() -> None:
    model, architecture = skeleton("mixtral")
    sizes = [
        expected_output_bytes(model, architecture, layout_of(architecture, skipping(*patterns)))
        for patterns in ((), ("*.experts.down.*",), ("*",))
    ]
    downs = 2 * 4 * 64 * 96
    scales = 2 * 4 * 64 * 4
    assert sizes[1] - sizes[0] == downs * (32 - 4) // 8 - scales
    assert sizes[2] == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_the_expected_peak_is_that_of_the_largest_block() -> None:
    """Of a dense block and one with experts, the second."""
    model, architecture = skeleton("qwen3-moe-dense-first")
    sizes = [sum(p.numel() for p in model.get_submodule(block.path).parameters()) for block in architecture.blocks]
    assert sizes[0] < sizes[1]
    found = expected_peak_bytes(model, architecture, layout_of(architecture, PRESETS["w4a4kv4"]), None)
    assert found == 4 * 2 * 96 * 64 + 16 * sizes[1]


def test_the_expected_peak_holds_as_many_hessians_as_the_bound_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, architecture = skeleton("mixtral")
    data = tokens(SEQUENCES, LENGTH)

    def peak(recipe: str) -> int:
        return expected_peak_bytes(model, architecture, layout_of(architecture, PRESETS[recipe]), data)

    without = peak("w4a4kv4-rtn")
    size = 4 * 96**2
    assert peak("w4a4kv4") == without + (4 + 2) * size  # those of four downs, and one in float64
    monkeypatch.setattr(calibration_module, "HESSIAN_BYTES", 3 * size)
    assert peak("w4a4kv4") == without + (3 + 2) * size
    monkeypatch.setattr(calibration_module, "HESSIAN_BYTES", 1)
    assert peak("w4a4kv4") == without + (1 + 2) * size
