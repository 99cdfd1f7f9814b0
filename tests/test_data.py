"""Where text comes from, how it is cut, and what is said when it cannot be had."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from rotaquant import data
from rotaquant.data import (
    Calibration,
    calibration_sequences,
    describe_text,
    evaluation_windows,
    read_text,
    tokenize,
)
from rotaquant.errors import RotaquantError
from tests.tiny_models import tiny_tokenizer

# --- texts --------------------------------------------------------------------


def test_builtin_parts_are_english_large_and_disjoint() -> None:
    calibration, evaluation = read_text("builtin", "calibration"), read_text("builtin", "evaluation")

    assert 300_000 < len(calibration) < 500_000
    assert 0.15 < len(evaluation) / (len(calibration) + len(evaluation)) < 0.21
    assert calibration.count(" the ") > 1000
    assert 'The "assert" statement' in calibration and 'The "yield" statement' in evaluation
    # Python's reference repeats whole sections: the paragraphs themselves must differ.
    paragraphs = [{part.strip() for part in text.split("\n\n")} for text in (calibration, evaluation)]
    assert len(paragraphs[0]) > 1000 and len(paragraphs[1]) > 200
    assert not paragraphs[0] & paragraphs[1]
    assert read_text("builtin", "calibration") == calibration


def test_builtin_evaluation_part_is_the_end_of_the_text() -> None:
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    assert whole.endswith(read_text("builtin", "evaluation"))
    assert whole.startswith(read_text("builtin", "calibration")[:1000])


def test_file_is_read_whole_for_both_uses_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfgr\xc3\xbc\xc3\x9fe\r\nzwei")
    assert read_text(path, "calibration") == "grüße\nzwei"
    assert read_text(str(path), "evaluation") == "grüße\nzwei"


def test_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("builtin").write_text("a file")
    assert read_text("builtin", "evaluation") != "a file"
    assert read_text("./builtin", "evaluation") == "a file"


def test_bad_files_are_named_with_the_way_out(tmp_path: Path) -> None:
    latin, blank = tmp_path / "latin.txt", tmp_path / "blank.txt"
    latin.write_bytes("Bär".encode("latin-1"))
    blank.write_text(" \n\n")
    with pytest.raises(RotaquantError, match=r"latin\.txt is not UTF-8 .*convert"):
        read_text(latin, "evaluation")
    with pytest.raises(RotaquantError, match=r"blank\.txt is empty"):
        read_text(blank, "evaluation")
    with pytest.raises(RotaquantError, match="is a directory"):
        read_text(tmp_path, "evaluation")
    with pytest.raises(RotaquantError, match=r"'wikitxt2' is neither a name \(wikitext2, c4, builtin\) nor a file"):
        read_text("wikitxt2", "evaluation")


def test_texts_are_described_by_the_part_that_is_read() -> None:
    assert describe_text("wikitext2", "calibration") == "WikiText-2 train"
    assert describe_text("wikitext2", "evaluation") == "WikiText-2 test"
    assert describe_text("some/where/novel.txt", "evaluation") == "novel.txt"


# --- the hub ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wikitext2", "c4"])
def test_offline_mode_fails_at_once_and_names_the_ways_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    began = time.monotonic()
    with pytest.raises(RotaquantError, match=rf"'{name}' could not be had .*'builtin'.*FILE"):
        read_text(name, "calibration")
    assert time.monotonic() - began < 5


def test_unreachable_hub_is_asked_once_and_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    knocks: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            assert timeout <= 10
            knocks.append(url)
            raise TimeoutError("no answer")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("datasets would retry for half a minute")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr(datasets, "load_dataset", never)
    with pytest.raises(RotaquantError, match=r"no answer.*'builtin'"):
        read_text("wikitext2", "evaluation")
    assert len(knocks) == 1 and knocks[0].startswith("http")


@pytest.mark.parametrize(("split", "part"), [("calibration", "train"), ("evaluation", "test")])
def test_wikitext_rows_are_joined_by_a_blank_line(
    split: data.Split, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str, name: str, split: str) -> dict[str, list[str]]:
        assert (path, name, split) == ("Salesforce/wikitext", "wikitext-2-raw-v1", part)
        return {"text": ["", " = Title = \n", "words"]}

    monkeypatch.setattr(data, "_knock", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_text("wikitext2", split) == "\n\n = Title = \n\n\nwords"


@pytest.mark.parametrize(
    ("split", "shard", "documents"),
    [
        ("calibration", "en/c4-train.00000-of-01024.json.gz", 40),
        ("evaluation", "en/c4-validation.00000-of-00008.json.gz", 25),
    ],
)
def test_c4_reads_no_more_documents_than_it_promises(
    split: data.Split, shard: str, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    def rows() -> Iterator[dict[str, str]]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield {"text": "x" * 100_000}

    def load(path: str, data_files: dict[str, str], split: str, streaming: bool) -> Iterator[dict[str, str]]:
        assert path == "allenai/c4" and data_files == {split: shard} and streaming
        return rows()

    monkeypatch.setattr(data, "_knock", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    text = read_text("c4", split)
    assert taken == documents
    assert text.split("\n\n") == ["x" * 100_000] * documents


def test_failure_in_the_middle_of_a_stream_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("the line went dead")

    monkeypatch.setattr(data, "_knock", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(RotaquantError, match="the line went dead"):
        read_text("c4", "calibration")


# --- tokens -------------------------------------------------------------------


def test_tokens_are_those_of_the_text_alone() -> None:
    tokens = tokenize(tiny_tokenizer(), "w7 w3\nw95")
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [7, 3, 95]


def test_long_text_is_neither_cut_nor_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 4
    # Some published tokenizer files carry a truncation of their own.
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = tokenize(tokenizer, "w3 w4 w5 " * 5)
    assert tokens.tolist() == [3, 4, 5] * 5
    assert caplog.records == []


def test_calibration_sequences_are_pieces_of_the_stream_at_seeded_places() -> None:
    stream = torch.arange(1000)
    sequences, note = calibration_sequences(stream, samples=16, length=20, seed=3)
    assert note is None
    assert sequences.shape == (16, 20)
    assert torch.equal(sequences, sequences[:, :1] + torch.arange(20))
    assert len(set(sequences[:, 0].tolist())) > 10
    assert torch.equal(sequences, calibration_sequences(stream, 16, 20, seed=3)[0])
    assert not torch.equal(sequences, calibration_sequences(stream, 16, 20, seed=4)[0])


def test_every_place_of_the_stream_can_be_drawn() -> None:
    starts = {int(calibration_sequences(torch.arange(11), 1, 10, seed)[0][0, 0]) for seed in range(20)}
    assert starts == {0, 1}


def test_too_little_text_gives_what_fits_without_overlap_and_says_so() -> None:
    sequences, note = calibration_sequences(torch.arange(105), samples=16, length=20, seed=0)
    assert sequences.shape == (5, 20)
    assert sequences.flatten().tolist() == list(range(int(sequences[0, 0]), int(sequences[0, 0]) + 100))
    assert note == "the calibration text holds 105 tokens: 5 of the 16 sequences of 20 asked for are used"


def test_exactly_enough_text_is_used_without_a_note() -> None:
    sequences, note = calibration_sequences(torch.arange(20), samples=1, length=20, seed=9)
    assert sequences.tolist() == [list(range(20))] and note is None


def test_text_shorter_than_one_sequence_is_refused_with_both_counts() -> None:
    with pytest.raises(RotaquantError, match=r"holds 19 tokens.*sequence needs 20.*--sequence-length.*more text"):
        calibration_sequences(torch.arange(19), samples=4, length=20, seed=0)


@pytest.mark.parametrize(("count", "kept"), [(None, 3), (2, 2), (3, 3), (50, 3)])
def test_windows_lie_end_to_end_from_the_start(count: int | None, kept: int) -> None:
    windows = evaluation_windows(torch.arange(35), 10, count)
    assert windows.tolist() == [list(range(10 * index, 10 * index + 10)) for index in range(kept)]


def test_window_faults_are_named() -> None:
    with pytest.raises(RotaquantError, match=r"holds 9 tokens.*window needs 10"):
        evaluation_windows(torch.arange(9), 10)
    with pytest.raises(RotaquantError, match=r"--windows.*at least 1, not 0"):
        evaluation_windows(torch.arange(30), 10, 0)
    with pytest.raises(RotaquantError, match=r"--sequence-length.*at least 2, not 1"):
        evaluation_windows(torch.arange(30), 1)


def test_calibration_settings_are_checked() -> None:
    assert Calibration() == Calibration("wikitext2", 128, 2048)
    with pytest.raises(RotaquantError, match=r"--samples.*not 0"):
        Calibration(samples=0)
    with pytest.raises(RotaquantError, match=r"--sequence-length.*not 1"):
        Calibration(sequence_length=1)
