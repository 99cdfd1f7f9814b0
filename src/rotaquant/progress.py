"""Progress on stderr: on a terminal a live bar, anywhere else one plain line a block, so that a log stays readable."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rotaquant.memory import peak_process_bytes

if TYPE_CHECKING:
    from rotaquant.pipeline import Step


def human_size(size: float) -> str:
    """A number of bytes in decimal units: `812 B`, `97.3 MB`, `14.20 GB`."""
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    if size >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size:.0f} B"


def human_time(seconds: float) -> str:
    """A duration as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def peak_memory() -> str:
    """The most memory this process has held so far, and the most on CUDA devices where one is in use."""
    held = peak_process_bytes()
    parts = [human_size(held)] if held else []
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        parts.append(f"GPU {human_size(sum(torch.cuda.max_memory_allocated(device) for device in devices))}")
    return ", ".join(parts) or "unknown"


class BlockClock:
    """How long the blocks that are left will take, from those that are finished, phase by phase.

    Phases may alternate block by block; a phase that starts over is timed anew.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: dict[str, tuple[int, float]] = {}
        self._current: dict[str, tuple[int, float]] = {}

    def see(self, step: Step) -> float | None:
        """Seconds left when `step` is reported, or `None` before the first block is finished."""
        now = self._now()
        block, since = self._current.get(step.phase, (step.block, now))
        if step.phase not in self._began or step.block < block:
            # A resumed run begins in the middle: blocks done by an earlier one must not count as fast.
            self._began[step.phase] = (step.block, now)
        if step.block != block:
            block, since = step.block, now
        self._current[step.phase] = (block, since)
        first, began = self._began[step.phase]
        if block == first:
            return None
        each = (since - began) / (block - first)
        return each * (step.blocks - block - 1) + max(0.0, each - (now - since))


class Progress:
    """Receives steps and shows them; `notes` collects the remarks among them, each shown once."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._clock = BlockClock()

    def on_step(self, step: Step) -> None:
        """Show one progress event; a remark is no progress."""
        if step.note is None:
            self.show_step(step, self._clock.see(step))
        elif step.note not in self.notes:
            self.notes.append(step.note)
            self.show_note(step.note)

    def show_step(self, step: Step, seconds_left: float | None) -> None:
        """Shows nothing here."""

    def show_note(self, note: str) -> None:
        """Shows nothing here."""

    def close(self, finished: bool = True) -> None:
        """End; the block in work counts as done if the work is `finished`, not if it failed."""


class PlainProgress(Progress):
    """One flushed line for every block when it is finished, with its worst module."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Step | None = None
        self._announced: set[str] = set()
        self._worst: tuple[float, str] | None = None

    def show_step(self, step: Step, seconds_left: float | None) -> None:
        last = self._last
        if last is not None and (last.phase, last.block) != (step.phase, step.block):
            self._finish(last, seconds_left if last.phase == step.phase else None)
        if step.phase not in self._announced:
            self._announced.add(step.phase)
            _say(f"{step.phase}: {step.blocks} {_unit(step)}{'s' if step.blocks != 1 else ''}")
        self._last = step
        if step.error is not None and (self._worst is None or step.error > self._worst[0]):
            self._worst = (step.error, step.module)

    def show_note(self, note: str) -> None:
        _say(f"warning: {note}")

    def close(self, finished: bool = True) -> None:
        if finished and self._last is not None:
            self._finish(self._last, None)
        self._last = None

    def _finish(self, step: Step, seconds_left: float | None) -> None:
        parts = [f"{step.phase}: {_unit(step)} {step.block + 1}/{step.blocks}"]
        if self._worst is not None:
            parts.append(f"largest error {self._worst[0]:.4f} at {self._worst[1]}")
        if seconds_left is not None:
            parts.append(f"{human_time(seconds_left)} left")
        parts.append(f"peak memory {peak_memory()}")
        _say(", ".join(parts))
        self._worst = None


class LiveProgress(Progress):
    """A bar that is drawn over: block, module and error, time left, peak memory."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._began = time.monotonic()
        self._step: Step | None = None
        self._ends: float | None = None
        # Drawn anew four times a second, so that the times go on while a module takes its minutes.
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4, transient=True)

    def show_step(self, step: Step, seconds_left: float | None) -> None:
        self._step = step
        self._ends = None if seconds_left is None else time.monotonic() + seconds_left
        self._live.start()

    def show_note(self, note: str) -> None:
        self._live.console.print(f"warning: {note}", style="yellow", markup=False, highlight=False)

    def close(self, finished: bool = True) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        step, now = self._step, time.monotonic()
        if step is None:
            return Text("")
        left = "…" if self._ends is None else human_time(max(0.0, self._ends - now))
        bar = ProgressBar(total=max(step.blocks, 1), completed=step.block, width=30)
        grid = Table.grid(padding=(0, 2))
        place = f"{_unit(step)} {step.block + 1}/{step.blocks}"
        grid.add_row(Text(step.phase, style="bold"), bar, place, f"{left} left")
        error = "" if step.error is None else f"relative error {step.error:.4f}"
        detail = Text("  ".join(filter(None, (step.module, error))))
        so_far = human_time(now - self._began)
        return Group(grid, detail, Text(f"peak memory {peak_memory()}, {so_far} so far", style="dim"))


@contextmanager
def progress(enabled: bool = True) -> Iterator[Progress]:
    """Something to hand `on_step` of to whatever takes long; it writes to stderr alone.

    `enabled=False` shows nothing and still collects notes.
    """
    console = Console(stderr=True)
    shown: Progress
    if not enabled:
        shown = Progress()
    else:
        shown = LiveProgress(console) if console.is_terminal else PlainProgress()
    try:
        yield shown
    except BaseException:
        shown.close(finished=False)
        raise
    shown.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _unit(step: Step) -> str:
    return "window" if step.phase.endswith("evaluating") else "block"
