"""Plans that `rotaquant tune` found on this machine: where they are kept, and which of them a product takes.

One file a kind of device and version of Triton, in `$ROTAQUANT_CACHE`, else `$XDG_CACHE_HOME/rotaquant`, else
`~/.cache/rotaquant`. Plans are keyed by shape and number of tokens. A file is good for the kernels that it was made
with: it holds a fingerprint of their source, and one that does not fit is reported once and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from rotaquant.errors import RotaquantError
from rotaquant.ops import device_features
from rotaquant.ops.dispatch import OUT_BYTES, Capability, refusal
from rotaquant.ops.product_plans import MOST_SINGLE, Plan, Problem

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1

# A plan serves its own regime: beyond a bound other kernels are the better ones, and single tokens have their own.
REGIMES = (MOST_SINGLE, 16, 64, 256)

_TRITON_PACKAGES = ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm")

Shape = tuple[int, int, bool, int]


@dataclass(frozen=True)
class DeviceKind:
    """What plans are tuned for: a device's name and capability, and the version of Triton that compiles them."""

    name: str
    capability: Capability
    triton: str

    @property
    def file(self) -> Path:
        """Where the plans of this kind are kept."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        major, minor = self.capability
        return cache_folder() / f"plans-{slug}-sm{major}{minor}-triton{self.triton}.json"


class TunedPlan(BaseModel):
    """The fastest plan of a problem, its time and that of the standard plan, in seconds (`None`: it did not run)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    outputs: int = Field(ge=1)
    plane: int = Field(ge=1)
    packed: bool
    groups: int = Field(ge=1)
    tokens: int = Field(ge=1)
    plan: Plan
    seconds: float = Field(gt=0)
    standard_seconds: float | None = None

    @property
    def problem(self) -> Problem:
        """The problem that was timed."""
        return Problem(
            tokens=self.tokens, outputs=self.outputs, plane=self.plane, packed=self.packed, groups=self.groups
        )


class _PlanFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: int
    device: str
    capability: Capability
    triton: str
    kernels: str
    plans: tuple[TunedPlan, ...]


@dataclass(frozen=True)
class PlanFileState:
    """Whether a file of tuned plans is used: "in use" with so many plans, "absent", or "ignored" for a reason."""

    path: Path
    state: Literal["in use", "absent", "ignored"]
    plans: int = 0
    reason: str | None = None


# --- in a product ----------------------------------------------------------------------------------------------


def lookup(problem: Problem, device: torch.device, out_bytes: int = OUT_BYTES) -> Plan | None:
    """The tuned plan for a problem: that of the nearest tuned number of tokens not smaller, in the same regime.

    `None` where nothing fits, and for outputs that are not of half precision. The file is read once a process.
    """
    if device.type != "cuda" or out_bytes != OUT_BYTES:
        return None
    shapes = _plans(torch.cuda.current_device() if device.index is None else device.index)
    if not shapes:
        return None
    tuned = shapes.get((problem.outputs, problem.plane, problem.packed, problem.groups))
    if tuned is None:
        return None
    tokens, plans = tuned
    at = bisect_left(tokens, problem.tokens)
    if at == len(tokens) or regime(tokens[at]) != regime(problem.tokens):
        return None
    return plans[at]


def regime(tokens: int) -> int:
    """The index of the regime that a number of tokens is in."""
    return bisect_left(REGIMES, tokens)


@lru_cache(maxsize=64)
def _plans(index: int) -> dict[Shape, tuple[tuple[int, ...], tuple[Plan, ...]]]:
    """Shape -> numbers of tokens, ascending, and the plan of each."""
    kind = device_kind(torch.device("cuda", index))
    if kind is None:
        return {}
    try:
        entries = read(kind)
    except RotaquantError as error:
        logger.warning("%s; the standard plans are used", error)
        return {}
    shapes: dict[Shape, list[TunedPlan]] = {}
    for entry in sorted(entries, key=lambda entry: entry.tokens):
        shapes.setdefault((entry.outputs, entry.plane, entry.packed, entry.groups), []).append(entry)
    return {
        shape: (tuple(entry.tokens for entry in tuned), tuple(entry.plan for entry in tuned))
        for shape, tuned in shapes.items()
    }


def forget() -> None:
    """Read files anew at the next product."""
    _plans.cache_clear()


# --- on disk ---------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of tuned plans."""
    own = os.environ.get("ROTAQUANT_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "rotaquant"


def device_kind(device: torch.device) -> DeviceKind | None:
    """What plans of a CUDA device are kept under; `None` for any other device, and without Triton."""
    capability, triton = device_features.capability(device), triton_version()
    if capability is None or triton is None:
        return None
    return DeviceKind(torch.cuda.get_device_properties(device).name, capability, triton)


def triton_version() -> str | None:
    """The installed version of Triton, without importing it."""
    for package in _TRITON_PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


@lru_cache(maxsize=1)
def kernels_fingerprint() -> str:
    """A fingerprint of the source of the product kernels: a plan that was checked is so for these alone."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("product_*.py")):
        if source.name != "product_plans.py":
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def read(kind: DeviceKind) -> tuple[TunedPlan, ...]:
    """The plans of a kind of device, none where there is no file.

    Raises `RotaquantError` for a file that is damaged, of another version, device or other kernels, or that holds a
    plan which its kernel does not admit.
    """
    path = kind.file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise _unfit(path, f"cannot be read ({error})") from error
    found = _parse(text, path)
    if (found.device, found.capability, found.triton) != (kind.name, kind.capability, kind.triton):
        raise _unfit(path, f"was made for {found.device} with Triton {found.triton}")
    if found.kernels != kernels_fingerprint():
        raise _unfit(path, "was made for the kernels of another version")
    for entry in found.plans:
        fault = refusal(entry.plan, entry.problem, kind.capability)
        if fault is not None:
            raise _unfit(path, f"holds a plan that cannot run ({fault})")
    return found.plans


def _parse(text: str, path: Path) -> _PlanFile:
    try:
        fields = json.loads(text)
        version = fields.get("format_version") if isinstance(fields, dict) else None
        # Fields of another version may be others: that is told first.
        if isinstance(version, int) and version != FORMAT_VERSION:
            raise _unfit(path, f"is of format version {version}, not {FORMAT_VERSION}")
        return _PlanFile.model_validate_json(text)
    except (ValueError, RecursionError) as error:  # pydantic's is a ValueError, and so is that of JSON
        raise _unfit(path, "is damaged") from error


def state(kind: DeviceKind) -> PlanFileState:
    """Whether the plans of a kind of device are used, or why not."""
    try:
        plans = read(kind)
    except RotaquantError as error:
        return PlanFileState(kind.file, "ignored", reason=str(error))
    return PlanFileState(kind.file, "in use" if plans else "absent", len(plans))


def store(kind: DeviceKind, tuned: Iterable[TunedPlan]) -> Path:
    """Write plans beside those that are there, replacing those of the same problems; a file that is unfit goes."""
    path = kind.file
    try:
        entries = {entry.problem: entry for entry in read(kind)}
    except RotaquantError as error:
        logger.warning("%s; it is replaced", error)
        entries = {}
    entries |= {entry.problem: entry for entry in tuned}
    content = _PlanFile(
        format_version=FORMAT_VERSION,
        device=kind.name,
        capability=kind.capability,
        triton=kind.triton,
        kernels=kernels_fingerprint(),
        plans=tuple(sorted(entries.values(), key=lambda entry: (*_shape(entry), entry.tokens))),
    )
    _replace(path, content.model_dump_json(indent=1) + "\n")
    forget()
    return path


def _shape(entry: TunedPlan) -> Shape:
    return (entry.outputs, entry.plane, entry.packed, entry.groups)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _unfit(path: Path, fault: str) -> RotaquantError:
    return RotaquantError(f"the file of tuned plans {path} {fault}: make it anew by `rotaquant tune`, or delete it")
