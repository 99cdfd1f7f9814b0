"""What commands tell: tables, fields and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rotaquant import console
from rotaquant.checkpoint import FolderSummary, TensorGroup
from rotaquant.evaluate import Perplexity, Row
from rotaquant.pipeline import QuantizationReport
from rotaquant.recipe import PRESETS, IntFormat, Recipe
from rotaquant.survey import ModelSurvey, Site


def perplexity(value: float) -> Perplexity:
    return Perplexity(value, 4096, 4, 1024, "builtin", "some/model", "any")


ROWS = [
    Row("float", None, perplexity(11.5), 32.0, 538_060_000, 538_060_000),
    Row("w4a4kv4", PRESETS["w4a4kv4"], perplexity(28.25), 4.0312, 280_300_000, 538_060_000, ("a remark",)),
]
REPORT = QuantizationReport(
    output=Path("out"),
    recipe=PRESETS["w4a4kv4"],
    bytes_on_disk=134_500_000,
    original_bytes=538_000_000,
    bits_per_weight=4.031,
    seconds=754.2,
    peak_memory_bytes=2_345_000_000,
    notes=("a remark", "another remark"),
)
SUMMARY = FolderSummary(
    recipe=PRESETS["w4a4kv4-g64"],
    rotation_seed=7,
    sites={"residual": "576 = 36·16", "head_mix": "9 heads"},
    rows=(TensorGroup("q_proj", "int4, groups of 64", 5_000_000, 40_000_000, 4.25, 10_000_000, True),),
    total_bytes=5_000_000,
    original_bytes=40_000_000,
    base_model="some/model",
    notes=("layer 3 fell back",),
)

SURVEY = ModelSurvey(
    model="some/model",
    model_type="qwen3_moe",
    layers=4,
    hidden_size=60,
    heads=4,
    kv_heads=2,
    head_dim=12,
    down_widths=(214, 3424),
    experts=8,
    sparse_layers=3,
    tied_embeddings=True,
    parameters=1_234_567,
    dtype="bfloat16",
    original_bytes=2_469_134,
    recipe=PRESETS["w4a4kv4-g64"].model_copy(update={"skip": ("*.0.*", "*.o_proj")}),
    sites=(
        Site("residual", 60, "60 (paley-1)", "exact"),
        Site("value_head", 12, "12 (paley-1)", "exact"),
        Site("head_mix", 4, "4 heads mixed", "exact"),
        Site("down_input 214", 214, "dense 214", "dense"),
        Site("down_input 3424", 3424, "107 blocks of 2^5", "blocks"),
    ),
    key_bias="apart",
    value_bias="inside",
    linears=32,
    skipped=("model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.o_proj"),
    bits_per_weight=4.25,
    expected_bytes=987_654,
    notes=("a remark",),
)


def test_bits_of_recipes() -> None:
    assert console.bits_text(None) == "-/-/-"
    assert console.bits_text(PRESETS["w4a4kv4"]) == "4/4/4"
    assert console.bits_text(PRESETS["w4a16"]) == "4/-/-"
    uneven = Recipe(weights=IntFormat(bits=4), keys=IntFormat(bits=4), values=IntFormat(bits=3))
    assert console.bits_text(uneven) == "4/-/K4 V3"


def test_comparison_table(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_comparison(ROWS)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "recipe perplexity bits W/A/KV bits/weight size on disk".split()
    assert lines[2] == ["float", "11.500", "-/-/-", "32.00", "538.1", "MB"]
    assert lines[3] == ["w4a4kv4", "28.250", "4/4/4", "4.03", "280.3", "MB"]
    assert lines[4][:6] == ["built-in", "text", "(last", "fifth),", "4", "windows"]


def test_comparison_json() -> None:
    fields = json.loads(json.dumps(console.comparison_json(ROWS)))
    assert {key: value for key, value in fields.items() if key != "rows"} == {
        "model": "some/model",
        "text": "builtin",
        "tokens": 4096,
        "windows": 4,
        "sequence_length": 1024,
    }
    assert fields["rows"][1] == {
        "recipe": "w4a4kv4",
        "perplexity": 28.25,
        "bits_per_weight": 4.0312,
        "bytes_on_disk": 280_300_000,
        "notes": ["a remark"],
    }


def test_report_gives_size_against_the_original_and_repeats_no_remark(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.print_report(REPORT, ["a remark"])
    lines = capsys.readouterr().out.splitlines()
    assert "size on disk       134.5 MB, 25% of 538.0 MB" in lines
    assert "quantized linears  4.03 bits a weight".split() in [line.split() for line in lines]
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("note")] == ["another remark"]


def test_report_json() -> None:
    assert json.loads(json.dumps(console.report_json(REPORT))) == {
        "output": "out",
        "recipe": "w4a4kv4",
        "bytes_on_disk": 134_500_000,
        "original_bytes": 538_000_000,
        "bits_per_weight": 4.031,
        "seconds": 754.2,
        "peak_memory_bytes": 2_345_000_000,
        "notes": ["a remark", "another remark"],
    }


def test_summary_tells_formats_sites_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_summary(SUMMARY)
    out = capsys.readouterr().out
    facts = dict(line.split("  ", 1) for line in out.splitlines() if line[:1].strip() and "  " in line)
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["base model"] == "some/model"
    assert facts["weights"].startswith("4 bits, groups of 64")
    assert facts["tensors"] == "5.0 MB, 12% of 40.0 MB"
    assert facts["rotation seed"] == "7"
    assert facts["rotation residual"] == "576 = 36·16"
    assert facts["note"] == "layer 3 fell back"
    assert "q_proj int4, groups of 64 5.0 MB 40.0 MB 4.25".split() in [line.split() for line in out.splitlines()]


def test_survey_tells_the_model_its_size_and_every_rotation(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_survey(SURVEY)
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split("  ", 1) for line in lines if line[:1].strip())
    assert {name: value.strip() for name, value in facts.items()} == {
        "model": "some/model",
        "family": "qwen3_moe",
        "layers": "4",
        "hidden size": "60",
        "heads": "4 (2 of keys and values), 12 channels each",
        "feed-forward": "214, 3424 wide; 8 experts in 3 layers",
        "parameters": "1,234,567",
        "size": "2.5 MB in bfloat16",
        "embeddings": "tied to the head; the head gets its own weight",
        "recipe": "w4a4kv4-g64",
        "weights": "4 bits, groups of 64, searched clip",
        "activations": "4 bits, groups of 64, clip 0.9",
        "keys": "4 bits, clip 0.95",
        "values": "4 bits, clip 0.95",
        "bias of keys": "kept out of the cache, added exactly",
        "bias of values": "in the cache",
        "linears": "30 of 32 quantized, 4.25 bits a weight",
        "stays float": "embeddings, head, norms, routers; by skip 2 linears (*.0.*, *.o_proj)",
        "quantized": "about 987.7 kB, 40% of 2.5 MB",
        "note": "a remark",
    }
    rows = [" ".join(line.split()) for line in lines]
    assert "residual 60 (paley-1) one exact Hadamard matrix 60" in rows
    assert "head_mix 4 heads mixed one exact Hadamard matrix with value_head 4 heads" in rows
    assert "down_input 214 dense 214 dense orthogonal, no Hadamard 214" in rows
    assert "down_input 3424 107 blocks of 2^5 block-diagonal Hadamard 3424" in rows


def test_survey_of_a_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    """No experts, nothing tied or skipped, no weights quantized, no rotations."""
    plain = replace(SURVEY, experts=0, tied_embeddings=False, skipped=(), bits_per_weight=None, sites=(), notes=())
    console.print_survey(plain)
    lines = capsys.readouterr().out.splitlines()
    assert "feed-forward    214, 3424 wide" in lines
    assert "embeddings      not tied to the head" in lines
    assert "stays float     embeddings, head, norms" in lines
    assert "linears         32, none with quantized weights" in lines
    assert lines[-1].startswith("quantized ")


def test_survey_says_where_values_are_no_hadamard(capsys: pytest.CaptureFixture[str]) -> None:
    dense = Site("value_head", 6, "dense 6", "dense")
    console.print_survey(replace(SURVEY, sites=(dense, *SURVEY.sites[2:])))
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "head_mix 4 heads mixed one exact Hadamard matrix 4 heads" in rows


def test_survey_json_is_data() -> None:
    fields = json.loads(json.dumps(console.survey_json(SURVEY)))
    assert fields["quantized"] is False and fields["parameters"] == 1_234_567
    assert Recipe.model_validate(fields["recipe"]) == SURVEY.recipe
    assert fields["sites"][1] == {"name": "value_head", "width": 12, "transform": "12 (paley-1)", "form": "exact"}
    assert console.summary_json(SUMMARY)["quantized"] is True


def test_summary_json_holds_the_whole_recipe() -> None:
    fields = json.loads(json.dumps(console.summary_json(SUMMARY)))
    assert Recipe.model_validate(fields["recipe"]) == PRESETS["w4a4kv4-g64"]
    assert fields["sites"] == {"residual": "576 = 36·16", "head_mix": "9 heads"}
    assert fields["rows"][0]["bits_per_weight"] == 4.25
    assert fields["total_bytes"] == 5_000_000


def test_perplexity_is_printed_with_its_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_perplexity(perplexity(19.92199))
    assert capsys.readouterr().out.splitlines() == [
        "perplexity  19.9220",
        "model       some/model",
        "recipe      any",
        "protocol    built-in text (last fifth), 4 windows of 1024 tokens, non-overlapping, no special tokens, "
        "mean NLL over 4·1023 positions",
    ]
