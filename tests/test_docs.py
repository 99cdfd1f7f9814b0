"""The documentation is generated from what was measured, and speaks of what exists."""

import importlib.util
import re
from pathlib import Path

from rotaquant.recipe import PRESETS

ROOT = Path(__file__).resolve().parents[1]


def test_the_accuracy_page_is_that_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert (ROOT / "docs" / "accuracy.md").read_text() == tables.render(), "run `make docs`"


def test_the_readme_lists_every_preset_and_every_folder() -> None:
    text = (ROOT / "README.md").read_text()
    for name in PRESETS:
        assert f"`{name}`" in text, name
    for folder in (ROOT / "src" / "rotaquant").iterdir():
        if folder.is_dir() and not folder.name.startswith("__"):
            assert re.search(rf"\b{folder.name}/", text), folder.name
