"""Kernels compile for every architecture that is told to have them, by the plans that are taken there, and fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from rotaquant.ops import device_features
from rotaquant.ops.device_features import shared_memory
from rotaquant.ops.dispatch import CAPABILITIES, Capability

KERNELS = {"_product_tile", "product_sliced", "product_single", "_quantize_rows", "_rmsnorm_quantize", "_rotate"}
KERNELS |= {"product_tile", "to_planes", "_widen", "_append", "_attend", "_read"}
# Rows that want more than the 99 KiB of these devices.
SMALL = {(8, 6), (8, 9), (12, 0)}
WIDE_ROTATIONS = {"8960", "11008", "17920", "18944", "25600", "27648", "28672"}

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Capability, Future[Lines]]]:
    """What `compile_for` finds, for every capability, as many at once as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {capability: pool.submit(_compile, capability) for capability in CAPABILITIES}


def _compile(capability: Capability) -> Lines:
    major, minor = capability
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_for", f"{major}{minor}"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)
    # The compiler prints what it could not assemble.
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_and_fits(
    capability: Capability, compiled: dict[Capability, Future[Lines]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_features, "capability", lambda device: capability)
    room = shared_memory(torch.device("cuda"))
    lines = compiled[capability].result()
    kernels = [line for line in lines if "kernel" in line]
    assert not [line for line in kernels if line["shared"] > room]
    assert {line["kernel"] for line in kernels} == KERNELS | ({"_product_tma"} if capability >= (9, 0) else set())
    assert len(kernels) > 80
    missing = {line["missing"] for line in lines if "missing" in line}
    assert missing == (WIDE_ROTATIONS if capability in SMALL else set())
