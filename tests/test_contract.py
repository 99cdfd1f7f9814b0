"""The contract of every family and shape, from folding to generation. One table of tiny models, one class.

A family is supported when its entries in `tests/tiny_models.py` pass here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

import rotaquant
from rotaquant.architectures import Architecture, describe
from rotaquant.architectures.families import FAMILIES
from rotaquant.checkpoint.sources import open_source
from rotaquant.invariance_gate import require_invariance
from rotaquant.recipe import NO_ROTATIONS, PRESETS, Recipe
from rotaquant.rotation.fuse import fuse_ends
from rotaquant.rotation.invariance import exact_arithmetic, relative_error
from rotaquant.rotation.plan import plan_rotations
from rotaquant.runtime.attention import install_attention, register_attention
from rotaquant.runtime.cache import QuantizedCache, QuantizedStaticCache
from rotaquant.runtime.experts import unstack_experts
from rotaquant.runtime.layout import ModelLayout
from rotaquant.runtime.structure import reshape_ends, rotate_in_place
from tests.stored_bytes import same_bytes, stored_bytes
from tests.tiny_models import CONFIGS, cache_name, tiny_model, tokens

# Keys have a bias, their own or from a LayerNorm's shift, that depends on the position once RoPE has turned it.
POSITIONS_STORED = {
    *("llama-biased", "qwen2", "qwen2-tied-sliding", "qwen2-yarn", "qwen2-moe-shared", "smollm3", "granite", "cohere"),
    *("gpt-oss", "gpt-neox", "gpt-neox-sequential", "starcoder2", "starcoder2-unbiased", "glm4"),
}
FolderOf = Callable[[str, str], Path]
ModelOf = Callable[[str], PreTrainedModel]
KEEP_TIED = PRESETS["w4a4kv4"].model_copy(update={"tied_embeddings": "keep"})


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of a float64 model quantized by a recipe, made when first asked for."""
    made: dict[tuple[str, str], Path] = {}

    def folder(name: str, recipe: str) -> Path:
        if (name, recipe) not in made:
            made[name, recipe] = tmp_path_factory.mktemp("quantized") / name
            rotaquant.quantize(tiny_model(name, torch.float64), recipe, output=made[name, recipe])
        return made[name, recipe]

    return folder


@pytest.fixture(scope="module")
def quantized(folder_of: FolderOf) -> ModelOf:
    """A float64 model of the table by `w4a4kv4-rtn`, loaded from disk."""
    loaded: dict[str, PreTrainedModel] = {}

    def model(name: str) -> PreTrainedModel:
        if name not in loaded:
            loaded[name] = rotaquant.load(folder_of(name, "w4a4kv4-rtn"))
        return loaded[name]

    return model


def transformed(name: str, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the original and of the folded and rotated model, the online halves in place."""
    register_attention()
    model = tiny_model(name, torch.float64)
    ids = tokens(2, 24)
    with exact_arithmetic():
        before = model(input_ids=ids, use_cache=False).logits
        architecture = describe(model)
        if recipe.tied_embeddings == "untie":
            head = model.get_submodule(architecture.head)
            head.weight = nn.Parameter(head.weight.detach().clone())
        unstack_experts(model, architecture)
        plan = plan_rotations(architecture, recipe, seed=5)
        _rotate(model, architecture, ModelLayout(recipe=recipe, rotation=plan, scale_dtype="float64"))
        after = model(input_ids=ids, use_cache=False).logits
    return before, after


def _rotate(model: nn.Module, architecture: Architecture, layout: ModelLayout) -> None:
    fuse_ends(model, architecture, layout.rotation, keep_tied=layout.keeps_tied)
    reshape_ends(model, architecture, layout)
    for block in architecture.blocks:
        rotate_in_place(model.get_submodule(block.path), block, architecture, layout)
    install_attention(model, architecture, layout)


def gate(name: str, recipe: Recipe) -> None:
    source = open_source(tiny_model(name, torch.float64))
    _, architecture = source.skeleton()
    layout = ModelLayout(recipe=recipe, rotation=plan_rotations(architecture, recipe, seed=0), scale_dtype="float64")
    require_invariance(source, layout, torch.device("cpu"), lambda index: None)


def test_every_family_is_in_the_table() -> None:
    assert {fields["model_type"] for fields in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
class TestContract:
    def test_fold_changes_nothing(self, name: str) -> None:
        before, after = transformed(name, Recipe(rotations=NO_ROTATIONS))
        assert relative_error(after, before) < 1e-9

    def test_rotate_changes_nothing(self, name: str) -> None:
        before, after = transformed(name, Recipe())
        assert relative_error(after, before) < 1e-9

    def test_the_gate_lets_it_pass(self, name: str) -> None:
        """The gate runs what the recipe quantizes, biases kept out of the cache included, before it is quantized."""
        gate(name, PRESETS["w4a4kv4"])
        gate(name, PRESETS["naive-w4a4kv4"])

    def test_a_float_folder_is_the_model(self, name: str, folder_of: FolderOf) -> None:
        """Rotate, save, load: the logits are the original's; what the loader builds is what the pipeline wrote."""
        original, ids = tiny_model(name, torch.float64), tokens(2, 20)
        model = rotaquant.load(folder_of(name, "float-rotated"))
        with exact_arithmetic():
            for use_cache in (False, True):
                after = model(input_ids=ids, use_cache=use_cache).logits
                assert relative_error(after, original(input_ids=ids, use_cache=False).logits) < 1e-9

    def test_eight_bits_are_close(self, name: str, folder_of: FolderOf) -> None:
        original, ids = tiny_model(name, torch.float64), tokens(2, 20)
        expected = original(input_ids=ids).logits
        actual = rotaquant.load(folder_of(name, "w8a8kv8-rtn"))(input_ids=ids).logits
        assert 1e-4 < (actual - expected).norm() / expected.norm() < 0.06

    def test_loading_and_saving_again_change_nothing(
        self, name: str, quantized: ModelOf, folder_of: FolderOf, tmp_path: Path
    ) -> None:
        model, ids = quantized(name), tokens(2, 11)
        theirs = AutoModelForCausalLM.from_pretrained(folder_of(name, "w4a4kv4-rtn"), dtype="auto")
        theirs.save_pretrained(tmp_path)
        for loaded in (theirs, rotaquant.load(tmp_path)):
            tensors = loaded.state_dict()
            assert tensors.keys() == model.state_dict().keys()
            assert all(torch.equal(tensors[key], tensor) for key, tensor in model.state_dict().items())
            # Products of float64 matrices may differ in the last bit where tensors lie elsewhere in memory.
            torch.testing.assert_close(
                loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-11, atol=1e-11
            )

    def test_prefill_stores_the_bytes_of_decoding(self, quantized: ModelOf, name: str) -> None:
        model, ids = quantized(name), tokens(2, 7)
        prefill = model(input_ids=ids, use_cache=True)
        cache = DynamicCache(config=model.config)
        logits = []
        for position in range(ids.shape[1]):
            out = model(input_ids=ids[:, position : position + 1], **{cache_name(model): cache})
            logits.append(out.logits)
        together = getattr(prefill, cache_name(model))
        for one, many in zip(cache.layers, together.layers, strict=True):
            assert same_bytes(one, many)
        torch.testing.assert_close(torch.cat(logits, 1), prefill.logits, rtol=1e-9, atol=1e-9)

    def test_the_uncached_path_gives_the_same_numbers(self, quantized: ModelOf, name: str) -> None:
        model, ids = quantized(name), tokens(3, 20)
        cached = model(input_ids=ids, use_cache=True).logits
        uncached = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(cached, uncached, rtol=1e-9, atol=1e-9)

    def test_left_padding_changes_nothing(self, quantized: ModelOf, name: str) -> None:
        """Rows of different lengths in one batch give what each gives alone, in prefill and in decoding."""
        model = quantized(name)
        rows = [tokens(1, length, seed=length)[0] for length in (3, 12, 17)]
        length = max(map(len, rows))
        ids = torch.stack([torch.cat((torch.zeros(length - len(r), dtype=torch.long), r)) for r in rows])
        mask = torch.stack([torch.cat((torch.zeros(length - len(r)), torch.ones(len(r)))) for r in rows]).long()
        steps = dict(max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True)
        batch = model.generate(input_ids=ids, attention_mask=mask, eos_token_id=None, **steps)
        for index, row in enumerate(rows):
            alone = model.generate(
                input_ids=row[None], attention_mask=torch.ones(1, len(row)).long(), eos_token_id=None, **steps
            )
            for step, (one, many) in enumerate(zip(alone.logits, batch.logits, strict=True)):
                torch.testing.assert_close(many[index], one[0], rtol=1e-8, atol=1e-8, msg=f"row {index} step {step}")

    def test_generate_stores_packed_rows(self, quantized: ModelOf, name: str) -> None:
        model = quantized(name)
        out = model.generate(input_ids=tokens(2, 5), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        cache = getattr(out, cache_name(model))
        assert isinstance(cache, QuantizedCache)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layer, positions = cache.layers[0], 4 if name in POSITIONS_STORED else 0
        if head_dim % 8:
            row = -(-head_dim // 2) + 4
            padded = row + -row % 4
            assert layer.values.shape[-1] == padded
            assert layer.keys.shape[-1] == padded + positions
            assert layer.keys.dtype == layer.values.dtype == torch.uint8
            return
        heads = describe(tiny_model(name)).blocks[0].attention.kv_heads
        pages = layer.group.sequences.total
        assert pages == 2  # one for each sequence
        assert layer.nbytes == pages * 64 * (heads * 2 * (head_dim // 2 + 4) + positions)

    def test_a_static_cache_is_packed_and_gives_the_same_tokens(self, quantized: ModelOf, name: str) -> None:
        model, ids = quantized(name), tokens(1, 6)
        ours = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        cache = StaticCache(config=model.config, max_cache_len=32)
        arguments = {cache_name(model): cache, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        assert torch.equal(ours, model.generate(input_ids=ids, **arguments))
        assert isinstance(cache, QuantizedStaticCache)
        assert all(part.dtype in (torch.uint8, torch.int32) for part in stored_bytes(cache.layers[0]))

    def test_a_static_cache_gives_the_same_logits(self, quantized: ModelOf, name: str) -> None:
        """Longer than the text from the start: no query may see the slots that nothing was written to."""
        model, ids = quantized(name), tokens(2, 20)
        expected = model(input_ids=ids, use_cache=False).logits
        cache = {cache_name(model): StaticCache(config=model.config, max_cache_len=40)}
        parts = [model(input_ids=part, **cache).logits for part in ids.split((7, 12, 1), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, fields in CONFIGS.items() if fields.get("tie_word_embeddings")])
class TestTiedEmbeddings:
    """Tied embeddings that stay tied, by the recipe's choice."""

    def test_rotate_changes_nothing(self, name: str) -> None:
        before, after = transformed(name, Recipe(tied_embeddings="keep"))
        assert relative_error(after, before) < 1e-9
        gate(name, KEEP_TIED)

    def test_the_folder_has_one_weight_and_gives_the_logits(self, name: str, tmp_path: Path) -> None:
        original, ids = tiny_model(name, torch.float64), tokens(2, 20)
        rotaquant.quantize(original, Recipe(tied_embeddings="keep"), output=tmp_path / "kept")
        rotaquant.quantize(original, Recipe(), output=tmp_path / "untied")
        model = rotaquant.load(tmp_path / "kept")
        assert model.config.tie_word_embeddings
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        with exact_arithmetic():
            assert relative_error(model(input_ids=ids).logits, original(input_ids=ids).logits) < 1e-9
        sizes = {kind: rotaquant.checkpoint.inspect_folder(tmp_path / kind).total_bytes for kind in ("kept", "untied")}
        # Not all of it: a norm that is not folded keeps its gain, and a head that is has a shift to take.
        assert sizes["untied"] - sizes["kept"] > 0.97 * original.get_input_embeddings().weight.nbytes
        model.save_pretrained(tmp_path / "again")
        again = rotaquant.load(tmp_path / "again")(input_ids=ids).logits
        torch.testing.assert_close(again, model(input_ids=ids).logits, rtol=1e-11, atol=1e-11)
