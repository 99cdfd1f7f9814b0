"""Gates on kernels: found by trial, the same numbers as the stock modules, which run wherever anything is unusual."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

import rotaquant
from rotaquant.architectures import Mlp, describe
from rotaquant.runtime.experts import SeparateExperts, unstack_experts
from rotaquant.runtime.gated_mlp import GatedMlp, activation_of, gate_on_kernels
from rotaquant.runtime.linear import QuantizedLinear
from tests.runtime.on_kernels import laid_out, on_kernels
from tests.tiny_models import CONFIGS, tiny_model, tokens

SILU = {"llama", "mistral", "granite", "olmo2", "olmo3", "cohere", "smollm3", "phi3", "glm4"}
SILU |= {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}
GELU_TANH = {"gemma", "gemma2", "gemma3_text"}
# Widths that have a rotation on kernels.
WIDTHS = {"intermediate_size": 192, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
FAMILIES = ["llama-biased", "gemma2", "phi3", "glm4", "mixtral", "qwen2-moe-shared", "gpt-oss", "starcoder2"]
PLAIN = {"gpt-oss", "starcoder2"}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class TestTrial:
    """Which activation a gate has; anything that is not exactly act(gate) * up has none."""

    @pytest.mark.parametrize(
        ("activation", "expected"),
        [
            (nn.SiLU(), "silu"),
            (nn.GELU(), "gelu"),
            (nn.GELU(approximate="tanh"), "gelu_tanh"),
            (ACT2FN["silu"], "silu"),
            (ACT2FN["gelu"], "gelu"),
            (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
            (ACT2FN["gelu_new"], None),  # rounds after every step
            (ACT2FN["quick_gelu"], None),
            (ACT2FN["relu"], None),
            (ACT2FN["relu2"], None),
            (ACT2FN["linear"], None),
        ],
    )
    def test_activations(self, activation: nn.Module, expected: str | None) -> None:
        def gate(both: Tensor) -> Tensor:
            gate, up = both.chunk(2, dim=-1)
            return activation(gate) * up

        assert activation_of(gate) == expected

    @pytest.mark.parametrize(
        "gate",
        [
            lambda g, u: functional.silu(u) * g,
            lambda g, u: functional.silu(g.clamp(max=50)) * u,
            lambda g, u: functional.silu(g) * u.clamp(-70, 70),
            lambda g, u: functional.silu(g.clamp(max=3e4)) * u,
            lambda g, u: functional.silu(g) * u.clamp(-5e4, 5e4),
            lambda g, u: (functional.silu(g) * u).clamp(-6e4, 6e4),
            lambda g, u: (functional.silu(g) * u).nan_to_num(),
            lambda g, u: functional.silu(g) * u.nan_to_num(posinf=torch.inf, neginf=-torch.inf),
            lambda g, u: [][0],
            lambda g, u: {}["gate"],
            lambda g, u: functional.silu(g) * (u + 1),
            lambda g, u: 0.5 * functional.silu(g) * u,
            lambda g, u: functional.silu(1.001 * g) * u,
            lambda g, u: (functional.silu(g.float()) * u.float()).to(g.dtype),
            lambda g, u: (functional.silu(g) * u).float(),
            lambda g, u: functional.silu(g),
            lambda g, u: None,
            lambda g, u: g.weight,
        ],
    )
    def test_what_is_no_plain_gate(self, gate: Callable[[Tensor, Tensor], Any]) -> None:
        assert activation_of(lambda both: gate(*both.chunk(2, dim=-1))) is None

    def test_interleaved_halves_are_no_plain_gate(self) -> None:
        assert activation_of(lambda both: functional.silu(both[..., ::2]) * both[..., 1::2]) is None

    @pytest.mark.parametrize("name", CONFIGS)
    def test_every_family(self, name: str) -> None:
        model = tiny_model(name)
        architecture = describe(model)
        unstack_experts(model, architecture)
        for block in architecture.blocks:
            gate_on_kernels(model.get_submodule(block.path), block)
        family = model.config.model_type
        expected = "silu" if family in SILU else "gelu_tanh" if family in GELU_TANH else None
        gated = [module.gating.activation for module in model.modules() if isinstance(module, GatedMlp)]
        experts = [module.activation for module in model.modules() if isinstance(module, SeparateExperts)]
        assert set(gated) == ({expected} if expected else set())
        assert set(experts) <= ({None} if family == "gpt_oss" else {"silu"})
        parts = sum(len(block.mlps) for block in architecture.blocks)
        counts = [block.experts.count for block in architecture.blocks if block.experts]
        assert len(gated) == (parts - sum(counts) if expected else 0) and len(experts) == len(counts)


FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderOf]:
    """A tiny bfloat16 model quantized by `w4a4kv4-rtn`, made when first asked for."""
    made: dict[str, Path] = {}
    with pytest.MonkeyPatch.context() as patch:

        def folder(name: str) -> Path:
            if name not in made:
                made[name] = tmp_path_factory.mktemp("gated") / name
                widths = {key: width for key, width in WIDTHS.items() if key == "intermediate_size" or "moe" in name}
                patch.setitem(CONFIGS, name, {**CONFIGS[name], **widths})
                rotaquant.quantize(tiny_model(name, torch.bfloat16), "w4a4kv4-rtn", output=made[name])
            return made[name]

        yield folder


@pytest.fixture
def mlp(folder_of: FolderOf) -> Any:
    """The feed-forward part of a block of Llama."""
    return rotaquant.load(folder_of("llama-biased")).model.layers[0].mlp


def hidden(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def as_stock(model: Any) -> Any:
    """A copy whose modules gate by themselves."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, GatedMlp):
            module.__class__ = type(module).__mro__[2]
        if isinstance(module, SeparateExperts):
            module.activation = None
    return copied


class TestModels:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_logits_are_those_of_the_stock_gates(self, name: str, folder_of: FolderOf) -> None:
        model, ids = rotaquant.load(folder_of(name)), tokens(2, 20)
        by_definition = model(input_ids=ids).logits
        with on_kernels() as calls:
            logits = model(input_ids=ids).logits
            gated, products = calls["gated_hadamard_quantize"], calls["int4_matmul"]
            calls.clear()
            assert torch.equal(as_stock(model)(input_ids=ids).logits, logits)
            assert calls["int4_matmul"] == products and not calls["gated_hadamard_quantize"]
        if name in PLAIN:
            assert gated == 0
        elif "mo" in name or name == "mixtral":  # each expert that a token chose, and the shared one
            assert gated >= 2 * len(model.model.layers)
        else:
            assert gated == len(model.model.layers)
        # The factored rotation adds in another order, which may move a code by one.
        assert relative(logits, by_definition) < 0.05

    def test_generation(self, folder_of: FolderOf) -> None:
        model, ids = rotaquant.load(folder_of("phi3")), tokens(2, 7)
        with on_kernels():
            generated = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
            assert torch.equal(generated, as_stock(model).generate(input_ids=ids, max_new_tokens=8, do_sample=False))

    def test_the_names_are_those_of_the_stock_model(self, folder_of: FolderOf) -> None:
        model: PreTrainedModel = rotaquant.load(folder_of("llama-biased"))
        stock = as_stock(model)
        assert model.state_dict().keys() == stock.state_dict().keys()
        assert str(model) == str(stock)
        assert isinstance(model.model.layers[0].mlp, type(stock.model.layers[0].mlp))


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


class TestModule:
    def test_the_definition_is_the_stock_module(self, mlp: Any) -> None:
        x = hidden()
        assert torch.equal(mlp(x), as_stock(mlp)(x))

    def test_one_operation_gates_rotates_and_quantizes(self, mlp: Any) -> None:
        with on_kernels() as calls:
            output = laid_out(mlp)(hidden())
            assert dict(calls) == {"quantize_rows": 1, "int4_matmul": 2, "gated_hadamard_quantize": 1}
            assert torch.equal(output, as_stock(mlp)(hidden()))

    def test_copies_and_pickles_gate_too(self, mlp: Any) -> None:
        file = io.BytesIO()
        torch.save(mlp, file)
        file.seek(0)
        x = hidden()
        with on_kernels() as calls:
            expected = mlp(x)
            for other in (copy.deepcopy(mlp), torch.load(file, weights_only=False)):
                assert isinstance(other, GatedMlp) and type(other) is type(mlp)
                calls.clear()
                assert torch.equal(other(x), expected)
                assert calls["gated_hadamard_quantize"] == 1
            other.down_proj.bias += 1
            assert torch.equal(mlp(x), expected)

    def test_hooks_of_gate_and_up_run(self, mlp: Any) -> None:
        x = hidden()
        mlp.up_proj.register_forward_hook(lambda module, args, output: 2 * output)
        with on_kernels() as calls:
            assert torch.equal(mlp(x), as_stock(mlp)(x))
            assert calls["gated_hadamard_quantize"] == 1

    def _falls_back(self, mlp: Any, x: Tensor, *, expected: Tensor | None = None) -> None:
        with on_kernels() as calls:
            assert torch.equal(mlp(x), as_stock(mlp)(x) if expected is None else expected)
            assert not calls["gated_hadamard_quantize"]

    def test_what_watches_or_changes_the_input_of_down_is_obeyed(self, mlp: Any) -> None:
        seen: list[Tensor] = []
        x = hidden()
        hook = mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        self._falls_back(mlp, x)
        assert torch.equal(seen[0], mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        hook.remove()
        hook = mlp.act_fn.register_forward_hook(lambda module, args, output: output + 1)
        self._falls_back(mlp, x)
        hook.remove()
        mlp.act_fn = nn.ReLU()
        self._falls_back(mlp, x)

    def test_another_formula_of_the_same_class_is_obeyed(self, mlp: Any) -> None:
        mlp.act_fn = nn.GELU()
        mlp.__class__ = type(mlp).__mro__[2]
        part = Mlp(inputs=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", width=192)
        gate_on_kernels(nn.ModuleDict({"mlp": mlp}), SimpleNamespace(mlps=(part,)))  # type: ignore[arg-type]
        mlp.act_fn = nn.GELU(approximate="tanh").train(mlp.training)
        self._falls_back(mlp, hidden())

    def test_hooks_on_every_module_are_obeyed(self, mlp: Any) -> None:
        changed = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output + 1 if isinstance(module, type(mlp.act_fn)) else None
        )
        try:
            self._falls_back(mlp, hidden())
        finally:
            changed.remove()

    def test_dropout_is_kept(self, mlp: Any) -> None:
        class Dropping(nn.Module):
            def __init__(self, part: Any) -> None:
                super().__init__()
                self.gate, self.up, self.down = part.gate_proj, part.up_proj, part.down_proj
                self.drop = nn.Dropout(0.5)

            def forward(self, x: Tensor) -> Tensor:
                return self.down(self.drop(functional.silu(self.gate(x)) * self.up(x)))

        owner = Dropping(mlp)
        modes = owner.training, owner.gate.training
        part = Mlp(inputs=("mlp.gate", "mlp.up"), down="mlp.down", width=192)
        gate_on_kernels(nn.ModuleDict({"mlp": owner}), SimpleNamespace(mlps=(part,)))  # type: ignore[arg-type]
        assert isinstance(owner, GatedMlp) and (owner.training, owner.gate.training) == modes
        for mode in (False, True):
            with on_kernels() as calls:
                torch.manual_seed(0)
                output = owner.train(mode)(hidden())
                assert calls["gated_hadamard_quantize"] == (0 if mode else 1)
                torch.manual_seed(0)
                assert torch.equal(output, as_stock(nn.ModuleList([owner]))[0](hidden()))
        owner.eval().drop.train()
        with on_kernels() as calls:
            owner(hidden())
            assert not calls["gated_hadamard_quantize"]

    @pytest.mark.parametrize(
        "kind",
        ["output", "data", "residual", "input", "between", "by dimensions", "by token", "over tokens", "counter"],
    )
    def test_what_else_a_module_does_is_kept(self, mlp: Any, kind: str) -> None:
        class Doing(nn.Module):
            def __init__(self, part: Any) -> None:
                super().__init__()
                self.gate, self.up, self.down = part.gate_proj, part.up_proj, part.down_proj
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                if kind == "counter":
                    self.calls += 1
                if kind == "input":
                    x.mul_(0.5)
                gate = self.gate(x)
                if kind == "between":
                    x.mul_(0.5)
                gated = functional.silu(gate) * self.up(x)
                if kind == "by dimensions" and x.dim() == 3:
                    gated = gated / 2
                if kind == "by token":
                    gated = gated * x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
                if kind == "over tokens":
                    gated = gated.cumsum(0)
                output = self.down(gated)
                if kind == "data":
                    output.data.mul_(0.5)
                if kind == "output":
                    output.mul_(0.5)
                if kind == "residual":
                    output += x
                return output

        owner = Doing(mlp)
        part = Mlp(inputs=("mlp.gate", "mlp.up"), down="mlp.down", width=192)
        with torch.inference_mode():
            gate_on_kernels(nn.ModuleDict({"mlp": owner}), SimpleNamespace(mlps=(part,)))  # type: ignore[arg-type]
        assert owner.calls == 0
        expected = owner(hidden())
        with on_kernels() as calls:
            output = owner(hidden())
            assert not calls["gated_hadamard_quantize"]
        assert relative(output, expected) < 0.05

    def test_hooks_within_other_modules_run(self, mlp: Any) -> None:
        inner = nn.SiLU()
        mlp.act_fn = nn.Sequential(inner).eval()
        mlp.__class__ = type(mlp).__mro__[2]
        part = Mlp(inputs=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", width=192)
        gate_on_kernels(nn.ModuleDict({"mlp": mlp}), SimpleNamespace(mlps=(part,)))  # type: ignore[arg-type]
        with on_kernels() as calls:
            mlp(hidden())
            assert calls["gated_hadamard_quantize"] == 1
        inner.register_forward_hook(lambda module, args, output: output + 1)
        self._falls_back(mlp, hidden())

    def test_another_module_in_place_of_a_linear_is_called(self, mlp: Any) -> None:
        class Wrapped(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x) + 1

        for name in ("gate_proj", "down_proj"):
            changed = copy.deepcopy(mlp)
            setattr(changed, name, Wrapped(getattr(changed, name)))
            self._falls_back(changed, hidden())

    def test_autocast_and_keywords_are_left_to_the_stock_module(self, mlp: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self._falls_back(mlp, hidden())
        with on_kernels() as calls:
            assert torch.equal(mlp(x=hidden()), mlp(hidden()))
            assert calls["gated_hadamard_quantize"] == 1

    def test_float64_runs_by_the_definition(self, mlp: Any) -> None:
        mlp.double()
        self._falls_back(mlp, hidden().double())

    def test_a_float_down_is_called(self, mlp: Any) -> None:
        layout = copy.copy(mlp.down_proj.layout)
        mlp.down_proj = QuantizedLinear.from_float(
            nn.Linear(192, 64, dtype=torch.bfloat16).requires_grad_(False),
            type(layout)(transform=layout.transform),
        )
        self._falls_back(mlp, hidden())

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_it_compiles(self, mlp: Any, backend: str) -> None:
        with on_kernels():
            x = hidden()
            expected = mlp(x)
            compiled = torch.compile(mlp, backend=backend, fullgraph=True)
            assert torch.equal(compiled(x), expected)


class TestExperts:
    def test_hooks_of_down_see_its_input(self, folder_of: FolderOf) -> None:
        """As calibration does, which watches the linears."""
        model, ids = rotaquant.load(folder_of("mixtral")), tokens(2, 9)
        experts = model.model.layers[0].mlp.experts
        seen: list[Tensor] = []
        for down in experts.down:
            down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with on_kernels() as calls:
            logits = model(input_ids=ids).logits
            assert 0 < len(seen) <= 4
            assert calls["gated_hadamard_quantize"] <= 4
            assert torch.equal(as_stock(model)(input_ids=ids).logits, logits)
