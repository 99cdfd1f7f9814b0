"""How much memory this process has held, and how much the machine has left."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def peak_process_bytes() -> int:
    """The most memory this process has held so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # Linux counts in kilobytes, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_bytes() -> int | None:
    """Memory that can still be taken without swapping, or `None` where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
