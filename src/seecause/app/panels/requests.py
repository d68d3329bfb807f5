"""Fields that requests of several panels share. Whatever a request holds beyond its fields, or of
another type, is refused in words before anything runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from seecause.engine.blanks import Blank
from seecause.engine.sweep import Tail
from seecause.errors import BadOption
from seecause.models.base import ImageModel

STRICT = ConfigDict(extra="forbid", strict=True)

Name = Annotated[str, Field(min_length=1, max_length=96)]
Index = Annotated[int, Field(ge=0, le=1_000_000)]
Patches = Annotated[tuple[Annotated[int, Field(ge=0, le=65_535)], ...], Field(max_length=16_384)]


@checked(frozen=True, config=STRICT)
class OnModel:
    """A request that waits in a model's queue."""

    model: Name


@checked(frozen=True, config=STRICT)
class OnPicture(OnModel):
    picture: Name


@checked(frozen=True, config=STRICT)
class Patching(OnPicture):
    """How patches are put into another run. `target` None: the answer of the whole picture."""

    target: Index | None = None
    blank: Blank = "white"
    tail: Tail | None = None
    first: Index = 0
    last: Index | None = None


def checked_patches(model: ImageModel, patches: tuple[int, ...], name: str = "patches") -> None:
    """Refuse places outside the model's grid."""
    count = model.layout.n_patches
    if any(place >= count for place in patches):
        raise BadOption(name, max(patches), f"places 0-{count - 1}")


def checked_target(model: ImageModel, target: int | None) -> int | None:
    return None if target is None else model.class_index(target)
