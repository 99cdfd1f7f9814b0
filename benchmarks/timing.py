"""What the benchmarks of speed share: a clock over CUDA graphs, a cold cache, a file of results that is always whole.

A call is timed as it runs in a model, back to back with others: a graph of many calls is replayed, and each replay
divided by the calls in it. Calls take turns with copies of their data, so that together they exceed the cache.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from provenance import commit

ROOT = Path(__file__).resolve().parents[1]

Call = Callable[[], Any]
Row = dict[str, Any]

COLD_ROWS = 256  # up to so many tokens, weights are read from memory, not from the cache
_COLD_CACHES = 4  # data between two uses of the same memory, in sizes of the L2 cache
_FEWEST_CALLS = ((256, 48), (4096, 8))  # in a graph, up to so many tokens: its own start counts little beside them
_FEWEST_REPLAYS, _MOST_REPLAYS = 30, 100
_WARM_UP_US, _BUDGET_US = 60_000.0, 200_000.0
_COPIED_BYTES = 4 << 30


# --- the device and the clock ----------------------------------------------------------------------------------


def device() -> torch.device:
    """The device that is measured."""
    return torch.device("cuda", torch.cuda.current_device())


def l2_bytes() -> int:
    """The size of the device's L2 cache."""
    return int(torch.cuda.get_device_properties(device()).L2_cache_size)


def copies_beyond_cache(size: int) -> int:
    """Copies of `size` bytes that no cache holds until their turn comes again."""
    return max(2, -(-_COLD_CACHES * l2_bytes() // size))


def turns(copies: int, m: int) -> int:
    """Calls in a graph for `m` tokens: whole turns over the copies, and enough of them where calls are short."""
    fewest = next((calls for rows, calls in _FEWEST_CALLS if m <= rows), 2)
    return copies * -(-fewest // copies)


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, extremes and interquartile range over the replays of a graph of `calls` calls."""

    us: float
    us_min: float
    us_max: float
    us_iqr: float
    replays: int
    calls: int

    @classmethod
    def of(cls, replays: Sequence[float], calls: int) -> Timing:
        """Summarise the microseconds of whole replays."""
        each = [us / calls for us in replays]
        low, _, high = statistics.quantiles(each, n=4, method="inclusive")
        median, least, most, spread = (
            round(us, 3) for us in (statistics.median(each), min(each), max(each), high - low)
        )
        return cls(us=median, us_min=least, us_max=most, us_iqr=spread, replays=len(each), calls=calls)


def measure(calls: Sequence[Call]) -> tuple[Timing, list[Any]]:
    """Time `calls`, captured one after another in one graph; also what each of them gave in the last replay."""
    graph, results = _capture(calls)
    once = statistics.median(_replay(graph, 3))
    _replay(graph, min(max(int(_WARM_UP_US / once), 2), 1000))
    replays = min(max(int(_BUDGET_US / once), _FEWEST_REPLAYS), _MOST_REPLAYS)
    return Timing.of(_replay(graph, replays), len(calls)), results


def _capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # what compiles or takes a workspace does so here
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        # All results are kept: each call writes memory of its own.
        results = [call() for call in calls]
    return graph, results


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Microseconds of each of several replays."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in marks]


def copy_bandwidth() -> float:
    """Bytes a microsecond that a copy within the device's memory reads and writes."""
    size = _COPIED_BYTES if device().type == "cuda" else 1 << 20
    source = torch.randn(size // 4, device=device())
    target = torch.empty_like(source)
    # By a kernel: a copy captured as such runs on the copy engines, at two thirds of the speed.
    timing, _ = measure([lambda: torch.add(source, 1.0, out=target)] * 4)
    return 2 * size / timing.us


# --- what is measured, and whether it may be --------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    import triton

    properties = torch.cuda.get_device_properties(device())
    return {
        "device": torch.cuda.get_device_name(device()),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": l2_bytes(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "plans": _plans(),
    }


def _plans() -> str:
    """Whether products took plans that were tuned on this machine."""
    from rotaquant.ops import tuned_plans

    kind = tuned_plans.device_kind(device())
    return "tuned here" if kind is not None and kind.file.exists() else "built in"


def require_green() -> None:
    """Run the kernels' tests on this device, and refuse to measure on a red one."""
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/ops"]
    if subprocess.run(tests, cwd=ROOT).returncode:
        raise SystemExit("no benchmark on a red test: `pytest -m gpu tests/ops` failed or found nothing to run")


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected; infinite where anything is not finite."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


def sample(count: int, most: int) -> Tensor:
    """Up to `most` indices below `count`, evenly spread, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


# --- results ---------------------------------------------------------------------------------------------------


class Results:
    """The rows of a benchmark and the file that holds them, written anew after every row."""

    def __init__(self, path: Path, benchmark: str, key: Sequence[str], *, merge: bool) -> None:
        self.path, self.key = path, tuple(key)
        held = json.loads(path.read_text()) if merge and path.exists() else {"runs": [], "rows": []}
        self._benchmark = benchmark
        self._runs: list[Row] = held["runs"]
        self._rows = {self._identity(row): row for row in held["rows"]}

    def begin(self, run: Row) -> None:
        """Rows from now on were measured in `run`: an environment and a copy bandwidth."""
        self._runs.append(run)

    def holds(self, row: Row) -> bool:
        """Whether there is a row of the same identity."""
        return self._identity(row) in self._rows

    def put(self, row: Row) -> None:
        """Take a row in place of one of the same identity, and write the file."""
        self._rows[self._identity(row)] = row | {"run": len(self._runs) - 1}
        self._write()

    def _identity(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    def _write(self) -> None:
        used = sorted({row["run"] for row in self._rows.values()} | {len(self._runs) - 1})
        place = {run: index for index, run in enumerate(used)}
        self._runs = [self._runs[run] for run in used]
        self._rows = {name: row | {"run": place[row["run"]]} for name, row in self._rows.items()}
        rows = list(self._rows.values())
        text = json.dumps({"benchmark": self._benchmark, "runs": self._runs, "rows": rows}, indent=1)
        scratch = self.path.with_suffix(".partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text + "\n")
        os.replace(scratch, self.path)


class Session:
    """One run of a benchmark's script: its results, its end, and what becomes of a cell that fails."""

    def __init__(self, results: Results, limit_s: float, missing: bool) -> None:
        self.results, self._missing = results, missing
        self._end = time.monotonic() + limit_s

    def due(self, identity: Row) -> bool:
        """Whether a cell is still to be measured, and there is time to start it."""
        return time.monotonic() < self._end and not (self._missing and self.results.holds(identity))

    @property
    def over(self) -> bool:
        """Whether nothing more may be started."""
        return time.monotonic() >= self._end

    def cell(self, identity: Row, work: Callable[[], Row]) -> Row:
        """Measure one cell; an error becomes its result."""
        try:
            row = identity | work()
        except Exception as error:
            row = identity | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
        self.results.put(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if "error" in row:
            self._survive()
        return row

    def _survive(self) -> None:
        """Go on in a new process where an error has spoilt the device for this one."""
        try:
            if device().type == "cuda":
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()
        except Exception:
            left = str(max(self._end - time.monotonic(), 0))
            again = ["--merge", "--missing", "--tested", "--limit-s", left]
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, *sys.argv, *again])


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options by which a run ends early and another goes on."""
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no cell after so many seconds")
    parser.add_argument("--merge", action="store_true", help="keep the other cells that the file holds")
    parser.add_argument("--missing", action="store_true", help="measure only cells that the file lacks")
    parser.add_argument("--tested", action="store_true", help="the kernels' tests were run on this device just now")


def start(arguments: argparse.Namespace, benchmark: str, key: Sequence[str], started: float) -> tuple[Session, float]:
    """Test the kernels and measure the copy bandwidth (bytes a microsecond); a session that rows go to."""
    if not arguments.tested:
        require_green()
    results = Results(arguments.output, benchmark, key, merge=arguments.merge)
    if device().type == "cuda":
        gc.freeze()  # capturing a graph may collect garbage, which takes long among all that was imported
        atexit.register(gc.unfreeze)
    bandwidth = copy_bandwidth()
    results.begin(environment() | {"copy_gb_per_s": round(bandwidth / 1000, 1)})
    limit = arguments.limit_s - (time.monotonic() - started)
    return Session(results, limit, arguments.missing), bandwidth


def timed(calls: Sequence[Call], moved_bytes: int, bandwidth: float) -> tuple[Row, list[Any]]:
    """The figures of a cell that moves at least so many bytes, and the results of its calls."""
    timing, results = measure(calls)
    floor = moved_bytes / bandwidth
    figures = {"bytes": moved_bytes, "floor_us": round(floor, 6), "fraction_of_copy": round(floor / timing.us, 4)}
    return asdict(timing) | figures, results
