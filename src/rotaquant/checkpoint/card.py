"""The model card of a quantized folder."""

from __future__ import annotations

import yaml

from rotaquant.recipe import IntFormat, Recipe
from rotaquant.rotation.plan import RotationPlan


def model_card(base_model: str, recipe: Recipe, plan: RotationPlan) -> str:
    """README.md: metadata that a hub reads, what was done, and how to load it."""
    metadata = {
        "library_name": "transformers",
        "base_model": base_model,
        "base_model_relation": "quantized",
        "tags": ["rotaquant", "quarot", "4-bit"],
    }
    formats = {part: describe_format(getattr(recipe, part)) for part in ("weights", "activations", "keys", "values")}
    sites = plan.describe()
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False).strip(),
        "---",
        "",
        f"# {base_model.rsplit('/', 1)[-1]}, quantized with rotaquant ({recipe.name})",
        "",
        "| part | format |",
        "| --- | --- |",
        *(f"| {part} | {text} |" for part, text in formats.items()),
        "| embedding, head, norms | float |",
        "",
        "Rotations: " + ("; ".join(f"{site}: {text}" for site, text in sites.items()) or "none") + ".",
        f"Rotation seed: {plan.seed}. The whole recipe is in `recipe.yaml` and in `config.json`.",
        "",
        "```python",
        "import rotaquant",
        "",
        'model = rotaquant.load("THIS_FOLDER")',
        "```",
        "",
    ]
    return "\n".join(lines)


def describe_format(fmt: IntFormat | None) -> str:
    """A number format in words."""
    if fmt is None:
        return "float"
    clip = "searched clip" if fmt.clip_ratio == "search" else f"clip {fmt.clip_ratio}"
    group = f", groups of {fmt.group_size}" if fmt.group_size else ""
    return f"{fmt.bits} bits{group}, {clip}"
