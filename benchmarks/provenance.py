"""Which state of the project a figure was measured on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The short hash of the checkout, `-dirty` where files differ from it; `COMMIT` says it where there is no git."""
    given = os.environ.get("COMMIT")
    if given:
        return given
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        asked = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return "unknown"
    return asked.stdout.strip() if asked.returncode == 0 else "unknown"
