"""Single rotation sites, and the gate that stands before quantization."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rotaquant.architectures import Block, describe
from rotaquant.checkpoint.sources import open_source
from rotaquant.errors import RotaquantError
from rotaquant.invariance_gate import require_invariance
from rotaquant.recipe import PRESETS, Recipe, Rotations
from rotaquant.rotation.fuse import fold_block, rotate_block
from rotaquant.rotation.invariance import relative_error
from rotaquant.rotation.plan import plan_rotations
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.structure import rotate_in_place
from tests.test_contract import transformed
from tests.tiny_models import tiny_model

SITES = ("residual", "value_head", "head_mix", "query_key", "down_input")


@pytest.mark.parametrize("site", SITES)
def test_every_site_alone_changes_nothing(site: str) -> None:
    rotations = Rotations(**{name: name == site or (site == "head_mix" and name == "value_head") for name in SITES})
    before, after = transformed("llama-9-heads", Recipe(rotations=rotations))
    assert relative_error(after, before) < 1e-9


def test_every_site_does_rotate() -> None:
    """The weights of a rotated model differ from the original's: the contract does not hold by doing nothing."""
    model = tiny_model("llama", torch.float64)
    architecture = describe(model)
    plan = plan_rotations(architecture, Recipe(), seed=0)
    block = architecture.blocks[0]
    module = model.get_submodule(block.path)
    before = {path: module.get_submodule(path).weight.clone() for path in block.linears}
    rotate_block(module, block, plan, centred=False)
    for path, weight in before.items():
        assert relative_error(module.get_submodule(path).weight, weight) > 0.1, path


def test_rotations_are_refused_in_less_than_float64() -> None:
    model = tiny_model("llama", torch.float32)
    architecture = describe(model)
    with pytest.raises(TypeError, match="float64"):
        fold_block(model.get_submodule("model.layers.0"), architecture.blocks[0], value_bias_apart=False)


def _gate(model: nn.Module, recipe: Recipe = PRESETS["w4a4kv4"]) -> None:
    source = open_source(model)
    _, architecture = source.skeleton()
    layout = ModelLayout(recipe=recipe, rotation=plan_rotations(architecture, recipe, seed=0), scale_dtype="float64")
    require_invariance(source, layout, torch.device("cpu"), lambda index: None)


def test_the_gate_names_the_first_block_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain that a block forgets to fold (its norm rotated with it) is caught in that block."""
    import rotaquant.invariance_gate as gate

    def forgetful(module: nn.Module, block: Block, *arguments: object) -> None:
        rotate_in_place(module, block, *arguments)
        if block.path.endswith(".1"):
            module.post_attention_layernorm.weight.data[3] = 1.01

    monkeypatch.setattr(gate, "rotate_in_place", forgetful)
    with pytest.raises(RotaquantError, match=r"block 1 \(model\.layers\.1\).*nothing was quantized"):
        _gate(tiny_model("llama", torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_gate_names_a_tensor_that_is_not_finite(bad: float) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = bad
    with pytest.raises(RotaquantError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*NaN or infinity"):
        _gate(model)
