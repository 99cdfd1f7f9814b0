"""Models as they are installed: what reads one input is one product on kernels, and all else is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import rotaquant
from rotaquant.runtime.linear import QuantizedLinear
from tests.runtime.on_kernels import ENCODERS, laid_out, on_kernels
from tests.tiny_models import tiny_model, tokens

FAMILIES = [
    "llama",
    "qwen2",
    "gemma2",
    "phi3",
    "glm4",
    "olmo2",
    "opt",
    "cohere",
    "mixtral",
    "qwen2-moe-shared",
    "gpt-oss",
]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """A tiny bfloat16 model quantized by `w4a4kv4-rtn`, made when first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("shared") / name
            rotaquant.quantize(tiny_model(name, torch.bfloat16), "w4a4kv4-rtn", output=made[name])
        return made[name]

    return folder


def separated(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose linears share nothing."""
    copied = copy.deepcopy(model)
    for linear in copied.modules():
        if isinstance(linear, QuantizedLinear):
            linear.shared_input = None
    return copied


class TestSharedInputs:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_logits_are_those_of_separate_products(self, name: str, folder_of: FolderOf) -> None:
        model, ids = rotaquant.load(folder_of(name)), tokens(2, 20)
        with on_kernels() as calls:
            logits = laid_out(model)(input_ids=ids).logits
            together = sum(calls[op] for op in ENCODERS), calls["int4_matmul"]
            calls.clear()
            assert torch.equal(separated(model)(input_ids=ids).logits, logits)
            apart = sum(calls[op] for op in ENCODERS), calls["int4_matmul"]
        # In each of two blocks: q, k and v are three linears or one; gate and up two, or (in experts, or no gate) one.
        spared = 2 * (
            (0 if name == "phi3" else 2) + (0 if name in {"phi3", "glm4", "opt", "mixtral", "gpt-oss"} else 1)
        )
        assert (apart[0] - together[0], apart[1] - together[1]) == (spared, spared)

    def test_generation(self, folder_of: FolderOf) -> None:
        model, ids = rotaquant.load(folder_of("qwen2")), tokens(2, 7)
        with on_kernels():
            generated = laid_out(model).generate(input_ids=ids, max_new_tokens=8, do_sample=False)
            expected = separated(model).generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(generated, expected)

    def test_a_skipped_linear_stays_apart(self, tmp_path: Path) -> None:
        recipe = rotaquant.recipe.PRESETS["w4a4kv4-rtn"].model_copy(update={"skip": ("*.v_proj", "*.up_proj")})
        rotaquant.quantize(tiny_model("llama", torch.bfloat16), recipe, output=tmp_path / "out")
        model, ids = rotaquant.load(tmp_path / "out"), tokens(2, 20)
        attention = model.model.layers[0].self_attn
        assert attention.q_proj.shared_input is attention.k_proj.shared_input is not None
        assert attention.v_proj.shared_input is None
        with on_kernels():
            assert torch.equal(laid_out(model)(input_ids=ids).logits, separated(model)(input_ids=ids).logits)

    def test_saving_a_model_that_has_run_writes_the_same_checkpoint(self, folder_of: FolderOf, tmp_path: Path) -> None:
        rotaquant.load(folder_of("qwen2"))  # makes the format known to transformers
        model, ids = AutoModelForCausalLM.from_pretrained(folder_of("qwen2"), dtype="auto"), tokens(2, 11)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with on_kernels():
            logits = laid_out(model)(input_ids=ids).logits
            assert model.model.layers[0].self_attn.q_proj.weight_packed._base is not None
            model.save_pretrained(tmp_path)
            again = rotaquant.load(tmp_path)
            assert torch.equal(again(input_ids=ids).logits, logits)
        assert again.state_dict().keys() == before.keys()
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in before.items())

    @pytest.mark.slow
    def test_a_compiled_model_gives_the_same(self, folder_of: FolderOf) -> None:
        model, ids = rotaquant.load(folder_of("qwen2")), tokens(2, 11)
        with on_kernels():
            logits = laid_out(model)(input_ids=ids, use_cache=False).logits
            compiled = torch.compile(model, backend="eager")
            assert torch.equal(compiled(input_ids=ids, use_cache=False).logits, logits)
