"""The contract of every family: folding and rotating leave the logits as they were, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rotaquant.architectures import Architecture, describe
from rotaquant.checkpoint.sources import open_source
from rotaquant.errors import RotaquantError
from rotaquant.invariance_gate import require_invariance
from rotaquant.recipe import NO_ROTATIONS, Recipe, Rotations
from rotaquant.rotation.fuse import fold_block_norms, fuse_ends, rotate_block
from rotaquant.rotation.invariance import exact_arithmetic, relative_error
from rotaquant.rotation.plan import plan_rotations
from rotaquant.runtime.attention import install_attention, register_attention
from rotaquant.runtime.layout import ModelLayout, float_layout
from rotaquant.runtime.linear import QuantizedLinear
from tests.tiny_models import CONFIGS, tiny_model, tokens

SITES = ("residual", "value_head", "head_mix", "query_key", "down_input")


def transformed(name: str, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the original and of the folded and rotated model, the online halves in place."""
    register_attention()
    model = tiny_model(name, torch.float64)
    ids = tokens(2, 24)
    with exact_arithmetic():
        before = model(input_ids=ids, use_cache=False).logits
        _untie(model)
        architecture = describe(model)
        layout = ModelLayout(
            recipe=Recipe(rotations=rotations),
            rotation=plan_rotations(architecture, rotations, seed=5),
            scale_dtype="float64",
        )
        _rotate(model, architecture, layout)
        after = model(input_ids=ids, use_cache=False).logits
    return before, after


def _untie(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _rotate(model: nn.Module, architecture: Architecture, layout: ModelLayout) -> None:
    fuse_ends(model, architecture, layout.rotation)
    for block in architecture.blocks:
        module = model.get_submodule(block.path)
        fold_block_norms(module, block)
        rotate_block(module, block, layout.rotation)
        for path in block.linears:
            linear = module.get_submodule(path)
            quantized = QuantizedLinear.from_float(linear, float_layout(layout.linear(block, path)))
            module.set_submodule(path, quantized)
    install_attention(model, architecture, layout)


@pytest.mark.parametrize("name", CONFIGS)
class TestContract:
    def test_fold_changes_nothing(self, name: str) -> None:
        before, after = transformed(name, NO_ROTATIONS)
        assert relative_error(after, before) < 1e-9

    def test_rotate_changes_nothing(self, name: str) -> None:
        before, after = transformed(name, Rotations())
        assert relative_error(after, before) < 1e-9

    def test_the_gate_lets_it_pass(self, name: str) -> None:
        source = open_source(tiny_model(name, torch.float64))
        architecture = describe(tiny_model(name))
        plan = plan_rotations(architecture, Rotations(), seed=0)
        layout = ModelLayout(recipe=Recipe(), rotation=plan, scale_dtype="float64")
        require_invariance(source, layout, torch.device("cpu"), lambda index: None)


@pytest.mark.parametrize("site", SITES)
def test_every_site_alone_changes_nothing(site: str) -> None:
    rotations = Rotations(**{name: name == site or (site == "head_mix" and name == "value_head") for name in SITES})
    before, after = transformed("llama-9-heads", rotations)
    assert relative_error(after, before) < 1e-9


def test_every_site_does_rotate() -> None:
    """The weights of a rotated model differ from the original's: the contract does not hold by doing nothing."""
    model = tiny_model("llama", torch.float64)
    architecture = describe(model)
    plan = plan_rotations(architecture, Rotations(), seed=0)
    block = architecture.blocks[0]
    module = model.get_submodule(block.path)
    before = {path: module.get_submodule(path).weight.clone() for path in block.linears}
    rotate_block(module, block, plan)
    for path, weight in before.items():
        assert relative_error(module.get_submodule(path).weight, weight) > 0.1, path


def test_rotations_are_refused_in_less_than_float64() -> None:
    model = tiny_model("llama", torch.float32)
    architecture = describe(model)
    with pytest.raises(TypeError, match="float64"):
        fold_block_norms(model.get_submodule("model.layers.0"), architecture.blocks[0])


def _gate(model: nn.Module) -> None:
    source = open_source(model)
    skeleton, architecture = source.skeleton()
    del skeleton
    plan = plan_rotations(architecture, Rotations(), seed=0)
    layout = ModelLayout(recipe=Recipe(), rotation=plan, scale_dtype="float64")
    require_invariance(source, layout, torch.device("cpu"), lambda index: None)


def test_the_gate_names_the_first_block_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain that a block forgets to fold (its norm rotated with it) is caught in that block."""
    import rotaquant.invariance_gate as gate

    def forgetful(module: nn.Module, block: object) -> None:
        if block.path.endswith(".1"):
            fold_block_norms(module, block)
            module.post_attention_layernorm.weight.data[3] = 1.01
        else:
            fold_block_norms(module, block)

    monkeypatch.setattr(gate, "fold_block_norms", forgetful)
    with pytest.raises(RotaquantError, match=r"block 1 \(model\.layers\.1\).*nothing was quantized"):
        _gate(tiny_model("llama", torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_gate_names_a_tensor_that_is_not_finite(bad: float) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = bad
    with pytest.raises(RotaquantError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*NaN or infinity"):
        _gate(model)
