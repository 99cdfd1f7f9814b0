"""Progress on a terminal and off it."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from rotaquant import progress
from rotaquant.pipeline import Step


def quantizing(block: int, module: str = "", error: float | None = None, blocks: int = 3) -> Step:
    return Step("quantizing", block, blocks, module, error)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (97_340_000, "97.3 MB"), (14_204_000_000, "14.20 GB")],
)
def test_sizes(size: int, words: str) -> None:
    assert progress.human_size(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0:00"), (59.6, "1:00"), (754.2, "12:34"), (3600, "1:00:00"), (86399, "23:59:59")]
)
def test_times(seconds: float, words: str) -> None:
    assert progress.human_time(seconds) == words


def test_peak_memory_is_that_of_this_process() -> None:
    held = bytearray(300_000_000)
    held[::4096] = b"x" * len(held[::4096])
    number, unit = progress.peak_memory().split(",")[0].split()
    assert float(number) * {"MB": 1e6, "GB": 1e9}[unit] > len(held)


# --- time left ----------------------------------------------------------------


def test_time_left_is_taken_from_finished_blocks() -> None:
    now = 100.0
    clock = progress.BlockClock(lambda: now)
    assert clock.see(quantizing(0, blocks=10)) is None
    now = 108.0
    assert clock.see(quantizing(0, blocks=10)) is None
    now = 110.0  # the first block took 10 seconds: nine are left
    assert clock.see(quantizing(1, blocks=10)) == pytest.approx(90.0)
    now = 114.0  # within the second block
    assert clock.see(quantizing(1, blocks=10)) == pytest.approx(86.0)
    now = 150.0  # a block slower than the average: the eight after it remain
    assert clock.see(quantizing(1, blocks=10)) == pytest.approx(80.0)


def test_blocks_of_an_earlier_run_do_not_count_as_fast() -> None:
    now = 0.0
    clock = progress.BlockClock(lambda: now)
    clock.see(quantizing(6, blocks=10))
    now = 5.0
    assert clock.see(quantizing(7, blocks=10)) == pytest.approx(15.0)


def test_phases_may_alternate_and_a_phase_may_start_over() -> None:
    now = 0.0
    clock = progress.BlockClock(lambda: now)
    for block in range(3):
        clock.see(quantizing(block, blocks=10))
        now += 2.0
        clock.see(Step("writing", block, 10))
        now += 2.0
    assert clock.see(quantizing(3, blocks=10)) == pytest.approx(28.0)
    now = 100.0
    assert clock.see(quantizing(0, blocks=10)) is None
    now = 101.0
    assert clock.see(quantizing(1, blocks=10)) == pytest.approx(9.0)


# --- progress -----------------------------------------------------------------


def test_off_a_terminal_every_block_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress() as shown:
        shown.on_step(Step("checking", 0, 1))
        for block in range(2):
            shown.on_step(quantizing(block, "self_attn.q_proj", 0.01 + block, blocks=2))
            shown.on_step(quantizing(block, "mlp.down_proj", 0.5, blocks=2))
        shown.on_step(Step("quantizing", 1, 2, note="block 1: fell back"))
        shown.on_step(Step("float: evaluating", 0, 3))
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    starts = [line.split(", ")[:2] for line in lines]
    assert lines[0] == "checking: 1 block"
    assert starts[1][0] == "checking: block 1/1"
    assert lines[2] == "quantizing: 2 blocks"
    assert starts[3] == ["quantizing: block 1/2", "largest error 0.5000 at mlp.down_proj"]
    assert lines[4] == "warning: block 1: fell back"
    assert starts[5] == ["quantizing: block 2/2", "largest error 1.0100 at self_attn.q_proj"]
    assert lines[6:7] == ["float: evaluating: 3 windows"]
    assert starts[7][0] == "float: evaluating: window 1/3"
    assert all("peak memory" in lines[index] for index in (1, 3, 5, 7)) and len(lines) == 8


def test_lines_are_written_as_blocks_end_not_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress() as shown:
        shown.on_step(quantizing(0))
        assert capsys.readouterr().err == "quantizing: 3 blocks\n"
        shown.on_step(quantizing(1))
        line = capsys.readouterr().err
        assert line.startswith("quantizing: block 1/3, ") and " left, peak memory " in line


def test_a_block_that_was_interrupted_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), progress.progress() as shown:
        shown.on_step(quantizing(0))
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "quantizing: 3 blocks\n"


def test_a_remark_is_shown_and_collected_once(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled in (True, False):
        with progress.progress(enabled) as shown:
            for _ in range(2):
                shown.on_step(Step("reading", 0, 30, note="little text"))
        assert shown.notes == ["little text"]
        assert capsys.readouterr().err == ("warning: little text\n" if enabled else "")


def test_disabled_progress_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress(enabled=False) as shown:
        shown.on_step(quantizing(0))
        shown.on_step(quantizing(1))
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_bar_shows_block_module_error_time_and_memory() -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=100, legacy_windows=False)
    shown = progress.LiveProgress(terminal)
    shown.on_step(quantizing(0, "self_attn.q_proj", 0.25))
    shown.on_step(quantizing(1, "mlp.down_proj", 0.125))
    with terminal.capture() as drawn:
        terminal.print(shown._draw())
    shown.on_step(Step("quantizing", 1, 3, note="fell back [to nearest]"))
    shown.close()
    for part in ("quantizing", "block 2/3", "0:00 left", "mlp.down_proj", "relative error 0.1250", "peak memory"):
        assert part in drawn.get()
    assert "warning: fell back [to nearest]" in stream.getvalue()


def test_a_terminal_gets_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.progress() as shown:
        assert isinstance(shown, progress.LiveProgress)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
