"""Experts as single linears: the same function as transformers' stacked ones, read from every way they are stored."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import rotaquant.checkpoint.sources as sources
from rotaquant import RotaquantError
from rotaquant.architectures import Experts, describe
from rotaquant.checkpoint import open_source
from rotaquant.runtime.experts import SeparateExperts, unstack_experts
from tests.tiny_models import save_tiny, tiny_model, tokens

SPARSE = ["mixtral", "qwen3-moe-dense-first", "qwen2-moe-shared", "gpt-oss"]
LAYER = 1  # the sparse one where another is dense
PATH = f"model.layers.{LAYER}.mlp.experts"


def stock_experts(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Experts]:
    """transformers' own module, with random weights (and biases, where it has them), and its role."""
    model = tiny_model(name, dtype)
    experts = describe(model).blocks[LAYER].experts
    assert experts is not None
    return model.get_submodule(PATH), experts


def routed(stock: Any, dtype: torch.dtype, count: int = 29) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two experts each and their weights; no token goes to expert 1."""
    hidden = torch.randn(count, stock.down_proj.shape[2 if stock.is_transposed else 1], dtype=dtype)
    experts = [index for index in range(stock.num_experts) if index != 1]
    chosen = torch.stack([torch.tensor(experts)[torch.randperm(len(experts))[:2]] for _ in range(count)])
    return hidden, chosen, torch.rand(count, 2, dtype=dtype)


class TestForward:
    @pytest.mark.parametrize("name", SPARSE)
    @torch.no_grad()
    def test_is_that_of_the_stock_module(self, name: str) -> None:
        stock, experts = stock_experts(name)
        separate = SeparateExperts(stock, experts)
        hidden, chosen, weights = routed(stock, torch.float64)
        expected = stock(hidden, chosen, weights)
        found = separate(hidden, chosen, weights)
        assert expected.abs().max() > 0.1
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()

    @pytest.mark.parametrize("name", SPARSE)
    @torch.no_grad()
    def test_makes_the_same_model(self, name: str) -> None:
        model = tiny_model(name, torch.float64)
        ids = tokens(2, 17)
        expected = model(input_ids=ids).logits
        unstack_experts(model, describe(model))
        assert (model(input_ids=ids).logits - expected).abs().max() <= 1e-12 * expected.abs().max()
        assert sum(isinstance(module, SeparateExperts) for module in model.modules()) == (1 if "dense" in name else 2)

    @pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
    @torch.no_grad()
    def test_sums_in_the_dtype_of_the_tokens(self, weight_dtype: torch.dtype) -> None:
        """Mixtral's routing weights are float32 in a bfloat16 model; every step rounds where stock rounds."""
        stock, experts = stock_experts("mixtral", torch.bfloat16)
        hidden, chosen, weights = routed(stock, torch.bfloat16)
        weights = weights.to(weight_dtype)
        found = SeparateExperts(stock, experts)(hidden, chosen, weights)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, stock(hidden, chosen, weights), rtol=2**-7, atol=2**-7)

    @pytest.mark.parametrize("name", SPARSE)
    @torch.no_grad()
    def test_an_index_beyond_the_last_expert_is_masked(self, name: str) -> None:
        """As if the expert had weight zero (5.17's stock modules accept no such index)."""
        stock, experts = stock_experts(name)
        hidden, chosen, weights = routed(stock, torch.float64)
        masked = torch.zeros_like(chosen, dtype=torch.bool)
        masked[3:9, 0] = True
        masked[5] = True
        found = SeparateExperts(stock, experts)(hidden, chosen.masked_fill(masked, experts.count), weights)
        expected = stock(hidden, chosen, weights.masked_fill(masked, 0.0))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert not found[5].any() and found[3].any()

    @torch.no_grad()
    def test_no_tokens_give_none(self) -> None:
        stock, experts = stock_experts("mixtral")
        hidden, chosen, weights = routed(stock, torch.float64)
        assert SeparateExperts(stock, experts)(hidden[:0], chosen[:0], weights[:0]).shape == (0, 64)


class TestModule:
    def test_holds_linears_and_guards_alone(self) -> None:
        stock, experts = stock_experts("gpt-oss", torch.bfloat16)
        state = SeparateExperts(stock, experts).state_dict()
        linears = {
            f"{part}.{i}.{kind}" for part in ("gate_up", "down") for i in range(4) for kind in ("weight", "bias")
        }
        assert state.keys() == linears | {"gate_up_proj", "down_proj"}
        assert all(state[guard].shape == (0,) for guard in ("gate_up_proj", "down_proj"))
        assert all(tensor.dtype == torch.bfloat16 for tensor in state.values())

    def test_the_stock_module_is_hidden_and_left_as_it_was(self) -> None:
        stock, experts = stock_experts("mixtral")
        separate = SeparateExperts(stock, experts)
        assert not any(type(module) is type(stock) for module in separate.modules())
        assert stock.gate_up_proj.shape == (4, 192, 64)
        assert not list(separate._gating[0].parameters())

    @torch.no_grad()
    def test_a_copy_stands_for_itself(self) -> None:
        stock, experts = stock_experts("gpt-oss")
        separate = SeparateExperts(stock, experts)
        hidden, chosen, weights = routed(stock, torch.float64)
        expected = separate(hidden, chosen, weights)
        other = copy.deepcopy(separate)
        for parameter in separate.parameters():
            parameter.zero_()
        separate._gating[0].limit = 0.0
        assert torch.equal(other(hidden, chosen, weights), expected)

    def test_plain_transformers_refuses_its_tensors(self, tmp_path: Path) -> None:
        """The names of the stock parameters are taken by empty tensors: no loader can miss that."""
        model = tiny_model("qwen2-moe-shared")
        model.config.save_pretrained(tmp_path)
        unstack_experts(model, describe(model))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match="mismatch"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


# --- reading ------------------------------------------------------------------------------------------------------


def stacked_folder(model: PreTrainedModel, folder: Path) -> Path:
    """A folder whose experts are stacked in the file too."""
    model.save_pretrained(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unstacked(name: str) -> dict[str, Tensor]:
    """What a skeleton's parameters are to be filled with."""
    model = tiny_model(name)
    unstack_experts(model, describe(model))
    return dict(model.named_parameters())


class TestReading:
    @pytest.mark.parametrize("name", SPARSE)
    @pytest.mark.parametrize("kind", ["saved", "stacked", "in memory"])
    def test_every_source_gives_the_same_tensors(self, name: str, kind: str, tmp_path: Path) -> None:
        model = tiny_model(name)
        if kind == "saved":
            source = open_source(save_tiny(tmp_path / "float", name))
            apart = [stored for stored in source.names if re.search(r"experts\.\d+\.", stored)]
            assert bool(apart) == (name != "gpt-oss")  # what transformers writes for this family
        else:
            source = open_source(model if kind == "in memory" else stacked_folder(model, tmp_path / "float"))
        skeleton, _ = source.skeleton()
        expected = unstacked(name)
        assert dict(skeleton.named_parameters()).keys() == expected.keys()
        for parameter, tensor in expected.items():
            found = source.read(parameter)
            assert torch.equal(found, tensor), parameter
            assert found.is_contiguous()
        assert source.unread(skeleton) == []

    def test_a_slice_of_a_stack_is_read_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = open_source(stacked_folder(tiny_model("gpt-oss"), tmp_path / "float"))
        read: list[tuple[int, ...]] = []
        safe_open = sources.safe_open

        class Watched:
            def __init__(self, path: Path, framework: str) -> None:
                self.opened = safe_open(path, framework=framework)

            def __enter__(self) -> Watched:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def get_tensor(self, name: str) -> Tensor:
                tensor = self.opened.get_tensor(name)
                read.append(tuple(tensor.shape))
                return tensor

            def get_slice(self, name: str) -> Any:
                part = self.opened.get_slice(name)

                class Slice:
                    def __getitem__(self, index: Any) -> Tensor:
                        tensor = part[index]
                        read.append(tuple(tensor.shape))
                        return tensor

                return Slice()

        monkeypatch.setattr(sources, "safe_open", Watched)
        assert source.read(f"{PATH}.gate_up.2.weight").shape == (192, 64)
        assert source.read(f"{PATH}.down.3.bias").shape == (64,)
        assert read == [(64, 192), (64,)]

    def test_a_skeleton_module_is_filled(self, tmp_path: Path) -> None:
        source = open_source(save_tiny(tmp_path / "float", "mixtral"))
        skeleton, architecture = source.skeleton()
        block = architecture.blocks[LAYER]
        module = skeleton.get_submodule(block.path)
        source.fill(module, block.path, device=torch.device("cpu"), dtype=torch.float64)
        expected = unstacked("mixtral")
        for path in block.linears:
            linear = module.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            assert torch.equal(linear.weight.float(), expected[f"{block.path}.{path}.weight"])

    def test_what_no_expert_of_the_config_reads_is_unread(self, tmp_path: Path) -> None:
        folder = save_tiny(tmp_path / "float", "mixtral")
        tensors = load_file(folder / "model.safetensors")
        extra = "model.layers.1.block_sparse_moe.experts.4.w1.weight"
        tensors[extra] = torch.zeros(96, 64)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        source = open_source(folder)
        assert source.unread(source.skeleton()[0]) == [extra]

    def test_a_missing_part_of_an_expert_is_named(self, tmp_path: Path) -> None:
        folder = save_tiny(tmp_path / "float", "qwen2-moe-shared")
        tensors = load_file(folder / "model.safetensors")
        del tensors[f"{PATH}.2.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        source = open_source(folder)
        assert source.read(f"{PATH}.gate_up.1.weight").shape == (96, 64)
        with pytest.raises(RotaquantError, match=rf"lacks tensor {re.escape(PATH)}\.2\.up_proj\.weight"):
            source.read(f"{PATH}.gate_up.2.weight")

    def test_a_stack_of_too_few_experts_is_refused(self, tmp_path: Path) -> None:
        folder = stacked_folder(tiny_model("mixtral"), tmp_path / "float")
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{PATH}.down_proj"] = tensors[f"{PATH}.down_proj"][:3].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RotaquantError, match=r"experts\.down_proj of .* holds fewer experts than its config"):
            open_source(folder).read(f"{PATH}.down.3.weight")

    @pytest.mark.parametrize("missing", ["gate_up", "down"])
    @pytest.mark.parametrize("stacked", [True, False])
    def test_what_is_missing_is_named_as_the_checkpoint_would(
        self, missing: str, stacked: bool, tmp_path: Path
    ) -> None:
        folder = tmp_path / "float"
        _ = stacked_folder(tiny_model("mixtral"), folder) if stacked else save_tiny(folder, "mixtral")
        tensors = load_file(folder / "model.safetensors")
        gone = r"1\.(w1|w3)\." if missing == "gate_up" else r"1\.w2\."
        pattern = rf"layers\.1\..*experts\.({f'{missing}_proj' if stacked else gone})"
        kept = {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}
        assert len(kept) < len(tensors)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RotaquantError, match=rf"lacks tensor model\.{pattern}.*; get an undamaged copy"):
            open_source(folder).read(f"{PATH}.{missing}.1.weight")

    def test_a_damaged_expert_is_named_as_it_is_stored(self, tmp_path: Path) -> None:
        def told(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> str:
            path = folder / "model.safetensors"
            tensors = load_file(path)
            save_file({**tensors, name: change(tensors[name]).contiguous()}, path, metadata={"format": "pt"})
            source = open_source(folder)
            skeleton, architecture = source.skeleton()
            block = architecture.blocks[LAYER].path
            with pytest.raises(RotaquantError) as caught:
                source.fill(skeleton.get_submodule(block), block, device=torch.device("cpu"), dtype=torch.float64)
            save_file(tensors, path, metadata={"format": "pt"})
            return str(caught.value)

        def spoil(tensor: Tensor) -> Tensor:
            spoilt = tensor.clone()
            spoilt[2, 0, 0] = float("nan")
            return spoilt

        stacked = stacked_folder(tiny_model("gpt-oss"), tmp_path / "stacked")
        name = f"{PATH}.gate_up_proj"
        assert f"tensor {name} (expert 2) of " in told(stacked, name, spoil)
        narrow = told(stacked, name, lambda tensor: tensor[:, :60])
        assert f"tensor {name} (expert 0) of " in narrow
        assert "has shape [60, 192], the config asks for [64, 192]" in narrow  # as stored, [in, out]
        apart = save_tiny(tmp_path / "apart", "qwen2-moe-shared")
        pair = f"{PATH}.3.gate_proj.weight and {PATH}.3.up_proj.weight"
        assert f"tensor {pair} of " in told(apart, f"{PATH}.3.up_proj.weight", lambda tensor: tensor / 0)
        unlike = told(apart, f"{PATH}.3.up_proj.weight", lambda tensor: tensor[:, :60])
        assert f"{pair} of " in unlike
        assert "do not fit together: [48, 64] torch.float32 and [48, 60] torch.float32" in unlike
        short = told(apart, f"{PATH}.3.up_proj.weight", lambda tensor: tensor[:44])
        assert "do not fit together: [48, 64] torch.float32 and [44, 64] torch.float32" in short

    @pytest.mark.parametrize("name", ["gpt-neox", "gpt-neox-sequential", "opt"])
    def test_a_head_is_found_by_its_role(self, name: str, tmp_path: Path) -> None:
        """Stored as embed_out, or tied to an embedding of another name than Llama's."""
        model = tiny_model(name)
        source = open_source(save_tiny(tmp_path / "float", name))
        skeleton, architecture = source.skeleton()
        head = model.get_output_embeddings().weight
        assert torch.equal(source.read(f"{architecture.head}.weight"), head)
        assert source.unread(skeleton) == []

    @pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
    def test_experts_in_a_gguf_file_are_refused(self, kind: str, tmp_path: Path) -> None:
        """Mixtral's call themselves llama: transformers would take them for a Llama without feed-forward weights."""
        path = tmp_path / "experts.gguf"
        writer = GGUFWriter(path, kind)
        writer.add_block_count(1)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_vocab_size(96)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_tensor("token_embd.weight", numpy.zeros((96, 64), numpy.float32))
        writer.add_tensor("blk.0.ffn_down_exps.weight", numpy.zeros((4, 64, 96), numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(RotaquantError, match=r"experts\.gguf .* experts are not read from GGUF files"):
            open_source(path)
