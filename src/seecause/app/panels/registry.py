"""What a panel is: functions from a checked request to an answer, under a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from seecause.app.jobs import Answer
from seecause.app.workshop import Desk, Kind
from seecause.errors import SeecauseError, UnknownName

Action = Callable[[Desk, Any], Answer]


class BadRequest(SeecauseError):
    """A request that is not what the action takes."""


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
    def by_name(self) -> dict[str, tuple[Action, TypeAdapter[Any]]]:
        """Actions and what reads their requests; `copy` is one of them."""
        every = [*self.actions, self.copy]
        return {action.__name__: (action, _reader(action)) for action in every}

    def find(self, action: str) -> tuple[Action, TypeAdapter[Any]]:
        if action not in self.by_name:
            raise UnknownName("action", action, list(self.by_name))
        return self.by_name[action]


def _reader(action: Action) -> TypeAdapter[Any]:
    hints = get_type_hints(action)
    return TypeAdapter(hints["request"])


def read_request(reader: TypeAdapter[Any], content: bytes) -> Any:
    """A request of the action's own type, or in words what is wrong with it."""
    try:
        return reader.validate_json(content)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int))
        more = f" ({wrong.error_count()} in all)" if wrong.error_count() > 1 else ""
        raise BadRequest(f"{where or 'the request'}: {first['msg']}{more}.") from None
