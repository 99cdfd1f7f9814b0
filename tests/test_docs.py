"""The documentation is generated from what was measured, and speaks of what exists."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from rotaquant.recipe import PRESETS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("tables")


def test_the_accuracy_page_is_that_of_the_results(tables: ModuleType) -> None:
    assert (ROOT / "docs" / "accuracy.md").read_text() == tables.render(), "run `make docs`"


def test_the_performance_page_is_that_of_the_results(tables: ModuleType) -> None:
    page = ROOT / "docs" / "performance.md"
    assert (page.read_text() if page.exists() else None) == tables.render_speed(), "run `make docs`"


def test_the_readme_lists_every_preset_and_every_folder() -> None:
    text = (ROOT / "README.md").read_text()
    for name in PRESETS:
        assert f"`{name}`" in text, name
    for folder in (ROOT / "src" / "rotaquant").iterdir():
        if folder.is_dir() and not folder.name.startswith("__"):
            assert re.search(rf"\b{folder.name}/", text), folder.name
