"""Token streams for calibration and evaluation: where text comes from and how it is cut into sequences.

A text is a name (`wikitext2`, `c4`, `builtin`) or a UTF-8 file. Named texts give calibration and evaluation
different parts; a file gives both of them all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rotaquant.errors import RotaquantError

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["calibration", "evaluation"]

_HUB_TIMEOUT_SECONDS = 5.0
# Only the head of C4's first shard is read: some three times the default calibration, and the 256 windows of
# 2048 tokens on which C4 is customarily evaluated.
_C4_CHARACTERS = {"calibration": 4_000_000, "evaluation": 2_500_000}
_BUILTIN_CALIBRATION_SHARE = 0.8


@dataclass(frozen=True)
class Calibration:
    """What is calibrated on: `samples` sequences of `sequence_length` tokens each, out of `text`.

    Raises `RotaquantError` for fewer than one sample or sequences of fewer than two tokens.
    """

    text: str | Path = "wikitext2"
    samples: int = 128
    sequence_length: int = 2048

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise RotaquantError(f"samples (--samples) must be at least 1, not {self.samples}")
        check_sequence_length(self.sequence_length)


def check_sequence_length(length: int) -> None:
    """Refuse a sequence in which no token follows another."""
    if length < 2:
        raise RotaquantError(f"the sequence length (--sequence-length) must be at least 2, not {length}")


def read_text(source: str | Path, split: Split) -> str:
    """The text of a name or of a UTF-8 file, as one string.

    A name wins over a file of that name; write `./c4` for the file.

    - `wikitext2`: WikiText-2 raw, train or test, rows joined by a blank line.
    - `c4`: the first 4 (calibration) or 2.5 (evaluation) million characters of the English train or
      validation part, whole documents joined by a blank line.
    - `builtin`: the reference text inside Python's standard library, the first four fifths (without paragraphs
      of the rest) or the rest: English without a network, but another Python version holds another text.

    Raises `RotaquantError` where the hub cannot be reached, or the file is missing, empty, or no text.
    """
    reader = _NAMED.get(source) if isinstance(source, str) else None
    return reader(split) if reader is not None else _read_file(source)


def describe_text(source: str | Path, split: Split) -> str:
    """The words for a text in a printed protocol, such as `WikiText-2 test`."""
    if isinstance(source, str) and source in _NAMED:
        return _DESCRIPTIONS[source][0 if split == "calibration" else 1]
    return Path(source).name


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The tokens of the whole text, int64 `[tokens]`, without special tokens around it.

    Truncation that the tokenizer's own file asks for is switched off; `verbose=False` keeps it from warning
    that the text is longer than the model's context, which it is meant to be.
    """
    import torch

    encoded = tokenizer(
        text,
        add_special_tokens=False,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def calibration_sequences(tokens: Tensor, samples: int, length: int, seed: int) -> tuple[Tensor, str | None]:
    """Sequences from seeded random places of the token stream, int64 `[n, length]`, and a note or `None`.

    The note says when n falls short of `samples`: a stream shorter than samples * length gives what fits
    into it without overlap. Raises `RotaquantError` when it holds not even one.
    """
    import torch

    total = tokens.numel()
    if total < length:
        raise _too_short(total, length, "calibration sequence")
    generator = torch.Generator().manual_seed(seed)
    note = None
    if total < samples * length:
        count = total // length
        spare = total - count * length
        first = torch.randint(spare + 1, (1,), generator=generator)
        starts = first + length * torch.arange(count)
        note = (
            f"the calibration text holds {total} tokens: "
            f"{count} of the {samples} sequences of {length} asked for are used"
        )
    else:
        starts = torch.randint(total - length + 1, (samples,), generator=generator)
    return tokens.unfold(0, length, 1)[starts], note


def evaluation_windows(tokens: Tensor, length: int, count: int | None = None) -> Tensor:
    """The first `count` windows of the token stream, int64 `[n, length]`, end to end from its start.

    `None`, or more windows than there are, gives all; an incomplete last window is left out.
    Raises `RotaquantError` when the stream is shorter than one window.
    """
    check_sequence_length(length)
    if count is not None and count < 1:
        raise RotaquantError(f"the number of windows (--windows) must be at least 1, not {count}")
    total = tokens.numel()
    if total < length:
        raise _too_short(total, length, "evaluation window")
    whole = total // length
    kept = whole if count is None else min(whole, count)
    return tokens[: kept * length].reshape(kept, length)


def _too_short(total: int, length: int, unit: str) -> RotaquantError:
    return RotaquantError(
        f"the text holds {total} tokens, but one {unit} needs {length}: "
        "give a shorter sequence length (--sequence-length) or more text"
    )


def _read_file(source: str | Path) -> str:
    path = Path(source)
    if path.is_dir():
        raise RotaquantError(f"text {path} is a directory: give a text file in UTF-8")
    try:
        # A byte order mark would become a token of its own.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RotaquantError(
            f"text {str(source)!r} is neither a name ({', '.join(_NAMED)}) nor a file that exists"
        ) from None
    except UnicodeDecodeError as error:
        raise RotaquantError(f"text file {path} is not UTF-8 ({error}): convert it first") from error
    except OSError as error:
        raise RotaquantError(f"text file {path} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise RotaquantError(f"text file {path} is empty")
    return text


def _read_builtin(split: Split) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some Linux distributions split the standard library
        raise RotaquantError(
            "text 'builtin' needs the module pydoc_data of the standard library, which this Python was "
            "installed without: give a text FILE"
        ) from error
    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    cut = text.index("\n\n", int(_BUILTIN_CALIBRATION_SHARE * len(text)))
    evaluated = text[cut:].lstrip("\n")
    if split == "evaluation":
        return evaluated
    # Some sections stand under two topics: what is evaluated on must not be calibrated on.
    seen = {paragraph.strip() for paragraph in evaluated.split("\n\n")}
    return "\n\n".join(part for part in text[:cut].split("\n\n") if part.strip() not in seen)


def _read_wikitext2(split: Split) -> str:
    part = "train" if split == "calibration" else "test"
    with _hub("wikitext2") as hub:
        rows = hub.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=part)
        return "\n\n".join(rows["text"])


def _read_c4(split: Split) -> str:
    part, shards = ("train", 1024) if split == "calibration" else ("validation", 8)
    shard = f"en/c4-{part}.00000-of-{shards:05d}.json.gz"
    documents: list[str] = []
    characters = 0
    with _hub("c4") as hub:
        # Streaming stops the download where reading stops; the shard is a third of a gigabyte.
        for row in hub.load_dataset("allenai/c4", data_files={part: shard}, split=part, streaming=True):
            documents.append(row["text"])
            characters += len(row["text"])
            if characters >= _C4_CHARACTERS[split]:
                break
    return "\n\n".join(documents)


@contextmanager
def _hub(name: str) -> Iterator[Any]:
    """The `datasets` library behind one quick look whether the hub answers; any failure names the way out."""
    try:
        import datasets

        # Offline, `datasets` looks in its cache at once; without an answer it would retry for half a minute.
        if not datasets.config.HF_HUB_OFFLINE:
            _knock()
        yield datasets
    except Exception as error:  # the hub's clients raise OSErrors, httpx errors and their own
        cause = " ".join(str(error).split()) or type(error).__name__
        raise RotaquantError(
            f"text {name!r} could not be had from the Hugging Face hub ({cause}): use 'builtin' (no network "
            "needed) or a text FILE; a copy in the cache of `datasets` is used with HF_HUB_OFFLINE=1"
        ) from error


def _knock() -> None:
    """Ask the hub for its front page once; any answer will do."""
    from huggingface_hub import constants, get_session

    get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS)


_NAMED: dict[str, Callable[[Split], str]] = {
    "wikitext2": _read_wikitext2,
    "c4": _read_c4,
    "builtin": _read_builtin,
}
_DESCRIPTIONS = {
    "wikitext2": ("WikiText-2 train", "WikiText-2 test"),
    "c4": ("C4 train (first 4 million characters)", "C4 validation (first 2.5 million characters)"),
    "builtin": ("built-in text (first four fifths)", "built-in text (last fifth)"),
}
