"""Cards and configs of other people: read within bounds, and one error of ours for all damage."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.errors import MissingWeights, SeecauseError

# of sizes in cards and configs
_LIMITS = dict.fromkeys(("depth", "num_hidden_layers", "num_layers"), 1000) | dict.fromkeys(
    (
        *("embed_dim", "hidden_size", "num_heads", "num_attention_heads", "intermediate_size"),
        *("img_size", "image_size", "patch_size", "num_classes", "num_channels", "in_chans"),
        *("reg_tokens", "num_register_tokens", "projection_dim", "size", "height", "width"),
        *("shortest_edge", "crop_size"),
    ),
    1 << 17,
)


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """What other libraries raise on a card or config that is damaged or means nothing, as one error
    of ours that names the file."""
    try:
        yield
    except (SeecauseError, MemoryError):
        raise
    except Exception as failure:  # whatever a builder makes of words that are not its own
        reason = textwrap.shorten(f"{type(failure).__name__}: {failure}", 200, placeholder=" ...")
        raise MissingWeights(
            str(path),
            f"no model can be made of it ({reason})",
            "Give an intact folder, as its library wrote it",
        ) from failure


def read_card(path: Path) -> dict[str, Any]:
    """A JSON object whose numbers are those of a model: sizes that no model has would take all
    memory, or for ever."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise MissingWeights(
            str(path),
            f"it cannot be read ({type(failure).__name__})",
            "Give an intact folder, as its library wrote it",
        ) from failure
    if not isinstance(card, dict):
        raise MissingWeights(
            str(path), f"it holds a {type(card).__name__}, not a JSON object", "Give an intact one"
        )
    _check_numbers(path, card)
    return card


def _check_numbers(path: Path, value: Any, key: str = "") -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(path, inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(path, inner, key)
    elif isinstance(value, int) and key in _LIMITS and not 0 <= value <= _LIMITS[key]:
        raise MissingWeights(
            str(path), f"{key} is {value}, not 0 to {_LIMITS[key]}", "Give an intact one"
        )
