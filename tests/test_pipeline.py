"""The pipeline: what is saved is what ran, the same seed gives the same bytes, interruptions lose nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

import rotaquant
import rotaquant.calibration as calibration_module
import rotaquant.pipeline as pipeline_module
from rotaquant import Calibration, RotaquantError
from rotaquant.pipeline import Step
from rotaquant.quantization.weights import QuantizedWeight
from rotaquant.recipe import PRESETS, Gptq, IntFormat, Recipe
from rotaquant.runtime.linear import QuantizedLinear
from tests.tiny_models import save_tiny, tiny_model, tokens

CALIBRATION = tokens(4, 32, seed=9)


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def run(source: Path, output: Path, recipe: str | Recipe = "w4a4kv4-tuned", seed: int = 0) -> Path:
    rotaquant.quantize(source, recipe, output=output, calibration=CALIBRATION, seed=seed)
    return output


@pytest.mark.parametrize("recipe", [name for name in PRESETS if "-g" not in name])
def test_every_preset_loads_and_runs_its_codes(recipe: str, tmp_path: Path) -> None:
    output = run(save_tiny(tmp_path / "float", "llama-9-heads"), tmp_path / "out", recipe)
    model = rotaquant.load(output)
    original = tiny_model("llama-9-heads")
    with torch.no_grad():
        expected = original(input_ids=tokens(2, 16)).logits
        got = model(input_ids=tokens(2, 16)).logits
    error = ((got - expected).norm() / expected.norm()).item()
    if recipe == "float-rotated":
        assert error < 1e-5
    else:
        assert 1e-4 < error < {"w8": 0.1, "w6": 0.3}.get(recipe[:2], 1.2)


@pytest.mark.parametrize("group_size", [48, 16])
def test_groups(group_size: int, tmp_path: Path) -> None:
    fmt = IntFormat(bits=4, group_size=group_size, clip_ratio="search")
    recipe = Recipe(weights=fmt, gptq=Gptq(), activations=fmt, keys=IntFormat(bits=4, group_size=8))
    output = run(save_tiny(tmp_path / "float", "llama-9-heads"), tmp_path / "out", recipe)
    model = rotaquant.load(output)
    assert model.model.layers[0].mlp.down_proj.weight_scale.shape == (144, 192 // group_size)
    assert torch.isfinite(model(input_ids=tokens(1, 8)).logits).all()


class TestSameBytes:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return save_tiny(tmp_path / "model", "qwen2")

    def test_the_same_seed_gives_the_same_bytes(self, source: Path, tmp_path: Path) -> None:
        assert digest(run(source, tmp_path / "a")) == digest(run(source, tmp_path / "b"))

    def test_another_seed_gives_another_model(self, source: Path, tmp_path: Path) -> None:
        first, second = digest(run(source, tmp_path / "a")), digest(run(source, tmp_path / "b", seed=1))
        weights = [name for name in first if name.endswith(".safetensors")]
        assert all(first[name] != second[name] for name in weights[:-1])

    @pytest.mark.parametrize(("recipe", "at"), [("w4a4kv4-tuned", 1), ("w4a4kv4-tuned", 2), ("w4a4kv4", 3)])
    def test_a_run_killed_midway_and_repeated_gives_the_same_folder(
        self, source: Path, tmp_path: Path, recipe: str, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = digest(run(source, tmp_path / "whole", recipe))
        write = pipeline_module.PartialFolder.write
        written = []

        def killed(self: object, part: int, *args: object) -> None:
            if len(written) == at:
                raise KeyboardInterrupt
            written.append(part)
            write(self, part, *args)

        output = tmp_path / "out"
        with monkeypatch.context() as patch:
            patch.setattr(pipeline_module.PartialFolder, "write", killed)
            with pytest.raises(KeyboardInterrupt):
                run(source, output, recipe)
        assert not output.exists()
        steps: list[Step] = []
        rotaquant.quantize(
            source, recipe, output=output, calibration=CALIBRATION, on_step=lambda step: steps.append(step)
        )
        assert sum(step.phase == "resuming" for step in steps) == max(0, at - 2)
        assert digest(output) == whole
        assert not (tmp_path / "out.partial").exists()

    def test_a_damaged_part_is_made_again(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = digest(run(source, tmp_path / "whole"))
        with monkeypatch.context() as patch:
            patch.setattr(
                pipeline_module.PartialFolder, "finish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                run(source, tmp_path / "out")
        partial = tmp_path / "out.partial"
        shard = partial / "model-00002-of-00004.safetensors"
        shard.write_bytes(shard.read_bytes()[:-50])
        (partial / "part-00003.json").write_text("")
        (partial / "part-00003.json.tmp").write_text("{")
        run(source, tmp_path / "out")
        assert digest(tmp_path / "out") == whole

    def test_a_model_changed_since_is_not_mixed_with_the_old_one(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                pipeline_module.PartialFolder, "finish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                run(source, tmp_path / "out")
        model = tiny_model("qwen2")
        model.model.layers[1].mlp.up_proj.weight.data *= 2
        model.save_pretrained(source)
        with pytest.raises(RotaquantError, match="other settings"):
            run(source, tmp_path / "out")

    def test_an_interrupted_run_of_other_settings_is_not_overwritten(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = tmp_path / "out"
        with monkeypatch.context() as patch:
            patch.setattr(pipeline_module, "_quantize_blocks", lambda run, sequences: (_ for _ in ()).throw(OSError))
            with pytest.raises(OSError):
                run(source, output)
        with pytest.raises(RotaquantError, match=r"out\.partial holds an interrupted run with other settings"):
            run(source, output, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reload_gives_the_logits_of_the_model_before_saving(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules that were quantized, run in place, against the folder loaded from disk."""
    kept: dict[str, dict[str, torch.Tensor]] = {}
    store = QuantizedLinear.store

    def keeping(self: QuantizedLinear, weight: QuantizedWeight, layout: object) -> None:
        store(self, weight, layout)
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        if self.out_features == 32:  # the bias of the keys goes to the attention module afterwards
            tensors.pop("bias", None)
        kept[f"{len(kept)}"] = tensors

    monkeypatch.setattr(QuantizedLinear, "store", keeping)
    source = save_tiny(tmp_path / "float", "qwen2", dtype)
    model = rotaquant.load(run(source, tmp_path / "out"))
    assert model.dtype == dtype
    loaded = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(loaded) == len(kept) == 14
    for module, before in zip(loaded, kept.values(), strict=True):
        assert module.weight_scale.dtype == dtype
        after = module.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
    again = rotaquant.load(tmp_path / "out")
    assert torch.equal(again(input_ids=tokens(1, 9)).logits, model(input_ids=tokens(1, 9)).logits)


def test_a_model_in_memory_is_left_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rotaquant.quantize(model, output=tmp_path / "out", calibration=CALIBRATION)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.tie_word_embeddings is True
    assert not hasattr(model.config, "quantization_config")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_gptq_is_better_than_nearest_where_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "float", "llama")

    def errors(output: Path) -> dict[str, float]:
        run(source, output, "w4a16")
        report = json.loads((output / "quantization_report.json").read_text())
        return report["output_errors"]

    improved = errors(tmp_path / "gptq")
    monkeypatch.setattr(calibration_module, "gptq", lambda *args: None)
    nearest = errors(tmp_path / "nearest")
    assert len(improved) == len(nearest) == 14
    assert sum(improved.values()) < 0.8 * sum(nearest.values())
    # The first site sees the same inputs in both runs.
    first = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert all(0 < improved[name] < nearest[name] for name in first)


def test_nearest_is_kept_and_reported_where_gptq_is_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(weight: torch.Tensor, hessian: torch.Tensor, fmt: IntFormat, scale: torch.Tensor, _: Gptq) -> object:
        return QuantizedWeight(torch.full(weight.shape, 7, dtype=torch.int8), scale)

    monkeypatch.setattr(calibration_module, "gptq", spoilt)
    source = save_tiny(tmp_path / "float", "llama")
    steps: list[Step] = []
    report = rotaquant.quantize(
        source, "w4a16", output=tmp_path / "out", calibration=CALIBRATION, on_step=lambda step: steps.append(step)
    )
    assert len(report.notes) == 14
    assert "model.layers.0.self_attn.q_proj: round-to-nearest kept" in report.notes[0]
    assert sum(step.note is not None for step in steps) == 14
    monkeypatch.undo()
    nearest = Recipe(weights=PRESETS["w4a16"].weights, rotations=PRESETS["w4a16"].rotations)
    run(source, tmp_path / "rtn", nearest)
    ids = tokens(1, 8)
    kept, rounded = rotaquant.load(tmp_path / "out"), rotaquant.load(tmp_path / "rtn")
    assert torch.equal(kept(input_ids=ids).logits, rounded(input_ids=ids).logits)


def test_a_hessian_beyond_help_is_rounded_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_module, "gptq", lambda *args: None)
    source = save_tiny(tmp_path / "float", "llama")
    report = rotaquant.quantize(source, "w4a16", output=tmp_path / "out", calibration=CALIBRATION)
    assert "model.layers.1.mlp.down_proj: the Hessian could not be factored" in report.notes[-1]
    assert torch.isfinite(rotaquant.load(tmp_path / "out")(input_ids=tokens(1, 4)).logits).all()


def test_hessians_see_the_online_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPTQ is given for o and down is the Hessian of the rotated inputs: no channel stands out."""
    seen: list[torch.Tensor] = []
    original = calibration_module.gptq

    def spy(weight: torch.Tensor, hessian: torch.Tensor, *args: object) -> object:
        seen.append(hessian)
        return original(weight, hessian, *args)

    monkeypatch.setattr(calibration_module, "gptq", spy)
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data[7] *= 1000  # one enormous channel before down
    rotaquant.quantize(model, "w4a16", output=tmp_path / "out", calibration=CALIBRATION)
    diagonal = seen[3].diagonal()
    assert diagonal.max() < 2 * diagonal.min()


def test_searched_ratios_are_stored_and_used(tmp_path: Path) -> None:
    output = run(save_tiny(tmp_path / "float", "llama"), tmp_path / "out")
    stored = json.loads((output / "config.json").read_text())["quantization_config"]["clip_ratios"]
    assert len(stored) == 14
    model = rotaquant.load(output)
    for name, ratio in stored.items():
        assert model.get_submodule(name).layout.activations.clip_ratio == ratio
        assert 0.5 <= ratio <= 1.0
    site = {stored[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv"}
    assert len(site) == 1  # one quantization of the shared input


def test_the_rotation_of_a_checkpoint_is_read_not_chosen_anew(tmp_path: Path) -> None:
    """Another factorisation of the same width, written into the config, is what then runs."""
    output = run(save_tiny(tmp_path / "float", "llama-9-heads"), tmp_path / "out")
    expected = rotaquant.load(output)(input_ids=tokens(1, 8)).logits
    config = json.loads((output / "config.json").read_text())
    rotation = config["quantization_config"]["rotation"]
    assert (rotation["down_input"][0]["order"], rotation["down_input"][0]["exponent"]) == (12, 4)
    rotation["down_input"][0] |= {"order": 24, "exponent": 3, "construction": "paley-1"}
    (output / "config.json").write_text(json.dumps(config))
    got = rotaquant.load(output)(input_ids=tokens(1, 8)).logits
    assert ((got - expected).norm() / expected.norm()).item() > 0.1


def test_tensors_that_the_config_does_not_explain_are_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = save_tiny(tmp_path / "float")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = rotaquant.quantize(source, "w4a4kv4-rtn", output=tmp_path / "out")
    assert len(report.notes) == 1
    assert report.notes[0].endswith("left out: model.layers.0.self_attn.o_proj.bias")


class TestBadInput:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return save_tiny(tmp_path / "float")

    def refused(self, source: Path | str, output: Path, match: str, **kwargs: object) -> None:
        kwargs.setdefault("calibration", CALIBRATION)
        with pytest.raises(RotaquantError, match=match):
            rotaquant.quantize(source, kwargs.pop("recipe", "w4a4kv4"), output=output, **kwargs)
        assert not output.with_name(output.name + ".partial").exists()
        assert not (output / "config.json").exists()

    def test_a_group_that_does_not_divide(self, source: Path, tmp_path: Path) -> None:
        self.refused(
            source,
            tmp_path / "out",
            "group_size 128 does not divide hidden 64, attention output 64, down input 96; group sizes that fit: 16",
            recipe="w4a4kv4-g128",
        )

    def test_an_output_that_is_not_empty(self, source: Path, tmp_path: Path) -> None:
        output = tmp_path / "out"
        output.mkdir()
        (output / "precious.txt").write_text("keep")
        self.refused(source, output, "out exists and is not empty")
        assert (output / "precious.txt").read_text() == "keep"

    def test_an_empty_output_folder_is_used(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        run(source, tmp_path / "out", "w4a4kv4-rtn")
        assert (tmp_path / "out" / "config.json").is_file()

    def test_a_disk_without_room(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import shutil

        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        self.refused(source, tmp_path / "out", "MB free; free some space")

    def test_a_machine_without_memory(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import rotaquant.preflight as preflight

        monkeypatch.setattr(preflight, "available_bytes", lambda: 1000)
        self.refused(source, tmp_path / "out", "GB of memory on cpu, and 0.0 GB are free: give fewer --samples")

    def test_a_disk_that_fills_up(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was finished stays for the next try; nothing looks complete."""
        import errno

        import rotaquant.checkpoint.writer as writer

        save_file = writer.save_file

        def full(tensors: dict[str, torch.Tensor], path: Path, **kwargs: object) -> None:
            if "00003-of" in path.name:
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            save_file(tensors, path, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(writer, "save_file", full)
            with pytest.raises(RotaquantError, match=r"disk is full, .* what is finished is kept in .*out\.partial"):
                run(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not list((tmp_path / "out.partial").glob("*.tmp"))
        assert not (tmp_path / "out.partial" / "config.json").exists()
        run(source, tmp_path / "out")
        assert digest(tmp_path / "out") == digest(run(source, tmp_path / "whole"))

    def test_no_permission(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.access", lambda path, mode: False)
        self.refused(source, tmp_path / "out", "no permission to write in")

    def test_a_quantized_folder(self, source: Path, tmp_path: Path) -> None:
        run(source, tmp_path / "once", "w4a4kv4-rtn")
        self.refused(tmp_path / "once", tmp_path / "out", r"already quantized \(rotaquant\); give the float model")

    def test_a_config_that_cannot_be_run(self, tmp_path: Path) -> None:
        """transformers builds the model, and finds out in its first forward pass."""
        folder = save_tiny(tmp_path / "float", "glm4")
        fields = json.loads((folder / "config.json").read_text())
        fields["rope_parameters"]["partial_rotary_factor"] = 2.0
        (folder / "config.json").write_text(json.dumps(fields))
        self.refused(folder, tmp_path / "out", "the config of .* is not one that transformers can use: The size")

    def test_not_a_number_in_a_weight(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
        save_tiny(tmp_path / "bad")
        model.save_pretrained(tmp_path / "bad")
        self.refused(tmp_path / "bad", tmp_path / "out", r"layers\.1\.self_attn\.v_proj\.weight", recipe="w4a4kv4-rtn")

    def test_weights_that_are_no_floats(self, source: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(source / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int32)
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        self.refused(source, tmp_path / "out", rf"{name} .*stored as torch\.int32", recipe="w4a4kv4-rtn")

    def test_text_shorter_than_a_sequence(self, source: Path, tmp_path: Path) -> None:
        text = tmp_path / "short.txt"
        text.write_text("w3 w4 w5 w6")
        self.refused(source, tmp_path / "out", "4", calibration=Calibration(text=text, samples=1, sequence_length=64))

    def test_sequences_longer_than_the_model(self, source: Path, tmp_path: Path) -> None:
        self.refused(
            source,
            tmp_path / "out",
            "sequences of 257 tokens exceed the 256 positions of .*float",
            calibration=tokens(2, 257),
        )

    def test_tokens_outside_the_vocabulary(self, source: Path, tmp_path: Path) -> None:
        self.refused(
            source,
            tmp_path / "out",
            "token 100 is outside the vocabulary of 96",
            calibration=tokens(2, 8) * 0 + 100,
        )

    @pytest.mark.parametrize("text", ["{bad", "[]", '{"num_beams": 4, "num_return_sequences": 9}'])
    def test_a_generation_config_that_is_no_use(self, source: Path, tmp_path: Path, text: str) -> None:
        (source / "generation_config.json").write_text(text)
        self.refused(source, tmp_path / "out", r"generation_config\.json cannot be used", recipe="w4a4kv4-rtn")

    @pytest.mark.parametrize("seed", [-1, 2**64])
    def test_a_seed_out_of_range(self, source: Path, tmp_path: Path, seed: int) -> None:
        self.refused(source, tmp_path / "out", r"seed \(--seed\) must be a whole number from 0", seed=seed)

    def test_an_output_that_cannot_be_replaced(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        self.refused(source, tmp_path / "link", "is a link, a mount point or the current directory")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        self.refused(source, tmp_path / "dangling", "is a link")
        monkeypatch.chdir(tmp_path / "real")
        with pytest.raises(RotaquantError, match="the current directory"):
            rotaquant.quantize(source, "w4a4kv4-rtn", output=".")

    @pytest.mark.parametrize(
        "change", [{"hidden_size": "64"}, {"hidden_act": "bogus"}, {"num_attention_heads": 0}, {"num_hidden_layers": 0}]
    )
    def test_a_config_that_makes_no_model(self, source: Path, tmp_path: Path, change: dict[str, object]) -> None:
        fields = json.loads((source / "config.json").read_text()) | change
        (source / "config.json").write_text(json.dumps(fields))
        self.refused(source, tmp_path / "out", "not one that transformers can use|has no layers", recipe="w4a4kv4-rtn")

    def test_a_folder_without_tokenizer(self, source: Path, tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (source / name).unlink()
        self.refused(source, tmp_path / "out", "no usable tokenizer", calibration=Calibration(text="builtin"))


def test_memory_is_bounded_by_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a deep model no more than one block has weights at a time."""
    most = 0
    original = pipeline_module.quantize_block

    def counting(module: torch.nn.Module, block: object, *args: object) -> object:
        nonlocal most
        model = holder[0]
        filled = [
            name
            for name, layer in model.model.layers.named_children()
            if any(not tensor.is_meta for tensor in layer.parameters())
            or any(not tensor.is_meta for tensor in layer.buffers())
        ]
        most = max(most, len(filled))
        return original(module, block, *args)

    holder: list[torch.nn.Module] = []
    run_class = pipeline_module._Run

    def remembering(*args: object, **kwargs: object) -> object:
        made = run_class(*args, **kwargs)
        holder.append(made.model)
        return made

    monkeypatch.setattr(pipeline_module, "_Run", remembering)
    monkeypatch.setattr(pipeline_module, "quantize_block", counting)
    model = tiny_model("llama")
    config = model.config
    config.num_hidden_layers = 12
    deep = type(model)(config).eval()
    rotaquant.quantize(deep, "w4a4kv4", output=tmp_path / "out", calibration=CALIBRATION)
    assert most == 1
