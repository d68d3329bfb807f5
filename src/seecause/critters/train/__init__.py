"""How the embedded models are made, by name: a recipe each, the loop that follows it, and the card
of what came out.

A kind of recipe has a module here with RECIPES and one, often the same, with
`train(recipe, out=, device=, test_samples=)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from seecause.errors import BadOption, NeedlessOption, UnknownName

# module with RECIPES -> module with train
KINDS = {"classifier": "classifier", "llava_model": "llava", "ifam_recipe": "ifam"}
TEST_SAMPLES = 8192


def recipes() -> dict[str, Any]:
    """All recipes, in the order of the kinds."""
    everything: dict[str, Any] = {}
    for where in KINDS:
        everything |= _module(where).RECIPES
    return everything


def find_recipe(name: str, **changes: Any) -> Any:
    """A recipe of any kind by name, with fields changed where given (None leaves a field alone)."""
    by_name = recipes()
    if name not in by_name:
        raise UnknownName("recipe", name, by_name)
    fields = {key: value for key, value in changes.items() if value is not None}
    for key in fields.keys() - {field.name for field in dataclasses.fields(by_name[name])}:
        raise NeedlessOption(key, fields[key], f"{name} is not made that way")
    return dataclasses.replace(by_name[name], **fields)


def train(
    recipe: Any,
    *,
    out: Path,
    device: str = "cpu",
    test_samples: int = TEST_SAMPLES,
    start: Path | None = None,
) -> dict[str, Any]:
    """Follow the recipe with the loop of its kind; returns the evaluation of what was written.
    `start` is a folder to go on from, for LLaVA."""
    loop = next(loop for where, loop in KINDS.items() if recipe.name in _module(where).RECIPES)
    if start is not None and (loop != "llava" or not (start / "card.json").is_file()):
        raise BadOption(
            "start", start, "a folder with a card.json that critters-llava was written into before"
        )
    options = {} if start is None else {"start": start}
    return _module(loop).train(recipe, out=out, device=device, test_samples=test_samples, **options)


def card(folder: Path, name: str) -> dict[str, Any] | None:
    """What was recorded beside a model's weights, or None where there is no such model."""
    for path in (folder / f"{name}.json", folder / name / "card.json"):
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    return None


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
