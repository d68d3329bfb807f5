"""The panels of the page, and what a panel is: functions from a checked request to an answer, under
a name; and the fields that requests of several panels share. Whatever a request holds beyond its
fields, or of another type, is refused in words before anything runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seecause.app.jobs import Reply
from seecause.app.state import ActionContext, Kind
from seecause.engine.blanks import Blank
from seecause.engine.sweep import Tail
from seecause.errors import BadOption, SeecauseError, UnknownName
from seecause.models.base import ImageModel

PANELS = ("explain", "swap", "heads", "repair", "parts", "ask", "runs")  # in the order of tabs
Action = Callable[[ActionContext, Any], Reply]
Name = Annotated[str, Field(min_length=1, max_length=96)]
Index = Annotated[int, Field(ge=0, le=1_000_000)]
Patches = Annotated[tuple[Annotated[int, Field(ge=0, le=65_535)], ...], Field(max_length=16_384)]


class BadRequest(SeecauseError):
    """A request that is not what the action takes."""


class Request(BaseModel):
    """What a client may ask of an action: these fields, of these types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, content: bytes) -> Request:
        """From JSON, or in words what is wrong with it."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as wrong:
            first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int))
            count = f" ({wrong.error_count()} in all)" if wrong.error_count() > 1 else ""
            raise BadRequest(f"{where or 'the request'}: {first['msg']}{count}.") from None


class OnModel(Request):
    """A request that waits in a model's queue."""

    model: Name


class OnPicture(OnModel):
    picture: Name


class Patching(OnPicture):
    """How patches are put into another run. `target` None: the answer of the whole picture."""

    target: Index | None = None
    blank: Blank = "white"
    tail: Tail | None = None
    first: Index = 0
    last: Index | None = None


@dataclass(frozen=True)
class Panel:
    """One tab of the page. `kinds` are the models it is for; without any it needs no model."""

    name: str
    title: str
    question: str
    actions: tuple[Action, ...]
    copy: Action
    kinds: tuple[Kind, ...] = ("classifier", "ifam")

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "question": self.question,
            "kinds": list(self.kinds),
        }

    @cached_property
    def by_name(self) -> dict[str, tuple[Action, type[Request]]]:
        """Actions and their requests; `copy` is one of them."""
        every = [*self.actions, self.copy]
        return {action.__name__: (action, get_type_hints(action)["request"]) for action in every}

    def find(self, action: str) -> tuple[Action, type[Request]]:
        if action not in self.by_name:
            raise UnknownName("action", action, list(self.by_name))
        return self.by_name[action]


def panels() -> dict[str, Panel]:
    """All panels, by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PANEL for name in PANELS}


def find_panel(name: str) -> Panel:
    known = panels()
    if name not in known:
        raise UnknownName("panel", name, known)
    return known[name]


def checked_patches(model: ImageModel, patches: tuple[int, ...], name: str = "patches") -> None:
    """Refuse places outside the model's grid."""
    count = model.layout.n_patches
    if any(place >= count for place in patches):
        raise BadOption(name, max(patches), f"places 0-{count - 1}")


def checked_target(model: ImageModel, target: int | None) -> int | None:
    return None if target is None else model.class_index(target)
