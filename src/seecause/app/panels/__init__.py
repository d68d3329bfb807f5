"""The panels of the page. A panel is a set of functions, each from a checked request to a reply.
Requests with unknown fields or values of another type are refused before anything runs.

This file holds what panels share: fields of requests, classes as bars, maps as layers, and the
lines of Python that do the same without the page."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.sessions import Recent
from seecause.app.state import ActionContext, Kind, picture_name
from seecause.data.dataset import to_pil
from seecause.engine.sweep import Tail
from seecause.engine.trace import Blank
from seecause.errors import BadOption, SeecauseError, UnknownName
from seecause.models.base import ImageModel
from seecause.models.block import spread_out, wide
from seecause.report import text
from seecause.report.figures import data_uri, heat_layer, number, scale_of
from seecause.target import spread

# the path, in its order, and then the tools of the menu
PANELS = ("explain", "doubt", "test", "repair", "swap", "heads", "parts", "ask", "runs")
PATH = PANELS[:4]
SHOWN = 5  # classes
Action = Callable[[ActionContext, Any], Reply]
Name = Annotated[str, Field(min_length=1, max_length=96)]
Names = Annotated[tuple[Name, ...], Field(max_length=8)]
Index = Annotated[int, Field(ge=0, le=1_000_000)]
Patches = Annotated[tuple[Annotated[int, Field(ge=0, le=65_535)], ...], Field(max_length=16_384)]


class PanelRequest(BaseModel):
    """What a client may ask of an action: these fields, of these types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, content: bytes) -> PanelRequest:
        """Parse JSON; raises with a sentence that says what is wrong."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as wrong:
            first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int))
            count = f" ({wrong.error_count()} in all)" if wrong.error_count() > 1 else ""
            raise SeecauseError(f"{where or 'the request'}: {first['msg']}{count}.") from None


class OnModel(PanelRequest):
    """A request that waits in a model's queue."""

    model: Name


class OnPicture(OnModel):
    picture: Name


class Patching(OnPicture):
    """How patches are put into another run. Without `target`: the class predicted for the image."""

    target: Index | None = None
    blank: Blank = "white"
    tail: Tail | None = None
    first: Index = 0
    last: Index | None = None


@dataclass(frozen=True)
class Panel:
    """One tab of the page. `kinds` are the models it is for; without any it needs no model.
    Replies of `kept` actions are stored under an id that links name. `blocks`: it needs a
    transformer."""

    name: str
    title: str
    question: str
    actions: tuple[Action, ...]
    kinds: tuple[Kind, ...] = ("classifier", "ifam")
    kept: tuple[Action, ...] = ()
    blocks: bool = False

    def facts(self) -> dict[str, Any]:
        named = ("name", "title", "question", "kinds", "blocks")
        return {name: getattr(self, name) for name in named} | {"path": self.name in PATH}

    def find(self, name: str) -> tuple[Action, type[PanelRequest]]:
        """An action and its request."""
        by_name = {action.__name__: action for action in self.actions}
        if name not in by_name:
            raise UnknownName("action", name, by_name)
        return by_name[name], get_type_hints(by_name[name])["request"]


def panels() -> dict[str, Panel]:
    """All panels, by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").PANEL for name in PANELS}


def find_panel(name: str) -> Panel:
    known = panels()
    if name not in known:
        raise UnknownName("panel", name, known)
    return known[name]


def checked_patches(model: ImageModel, patches: tuple[int, ...], name: str = "patches") -> None:
    """Raises for patch indices outside the model's grid."""
    count = model.layout.n_patches
    if any(place >= count for place in patches):
        raise BadOption(name, max(patches), f"patches 0-{count - 1}")


def brushed_mask(model: ImageModel, patches: tuple[int, ...]) -> Tensor:
    """The object [1, H, W] (bool) that brushed patches cover."""
    checked_patches(model, patches, "brushed")
    chosen = torch.zeros(1, model.layout.n_patches, dtype=torch.bool)
    chosen[0, list(patches)] = True
    return spread_out(chosen.unflatten(1, model.layout.grid), model.preprocess.size)


def checked_target(model: ImageModel, target: int | None) -> int | None:
    return None if target is None else model.class_index(target)


def answers(
    model: ImageModel,
    logits: Tensor,
    whole: Tensor,
    *,
    count: int = SHOWN,
    target: int | None = None,
) -> list[dict[str, Any]]:
    """The `count` most probable classes of the whole image, in that order, so that rows keep their
    order while values change; then the target and the two classes with the highest current values,
    if they are not among them."""
    values = spread(wide(logits), "prob", sigmoid=model.sigmoid)
    first = whole.topk(min(count, whole.numel())).indices.tolist()
    first += [] if target is None else [target]
    return bars(values, first, lambda places: [model.class_name(place) for place in places])


def bars(
    values: Tensor, first: list[int], names: Callable[[list[int]], list[str]]
) -> list[dict[str, Any]]:
    """Probabilities [n] of the classes `first` and of the two most probable ones, as bars."""
    best, leading = int(values.argmax()), values.topk(min(2, values.numel())).indices.tolist()
    places = list(dict.fromkeys([*first, *leading]))
    return [
        {
            "class": place,
            "name": name,
            "probability": round(float(values[place]), 6),
            "leads": place == best,
        }
        for place, name in zip(places, names(places), strict=True)
    ]


def heat(
    values: Tensor, *, among: Tensor | None = None, signed: bool | None = None
) -> dict[str, Any]:
    """A map [gh, gw]: its numbers, and how it is drawn; on the scale of some maps, if they are
    given."""
    scale = scale_of(values if among is None else among, signed=signed)
    return {
        "grid": list(values.shape),
        "values": rounded(values),
        "layer": data_uri(heat_layer(values, scale)),
        "low": number(scale.low),
        "high": number(scale.high),
        "signed": scale.signed,
        "remark": scale.remark,
    }


def rounded(values: Tensor) -> list[float | None]:
    """Values rounded to four digits; None for NaN, which JSON cannot represent."""
    listed = values.detach().double().flatten().tolist()
    return [float(f"{value:.4g}") if abs(value) < 1e300 else None for value in listed]


def photo(model: ImageModel, image: Tensor, side: int | None = None) -> str:
    """The first of some inputs of a model as an image for the page, at most `side` pixels wide."""
    raw = wide(model.preprocess.raw(image))[0].clamp(0, 1).cpu()
    shown = to_pil(raw)
    if side is not None:
        shown.thumbnail((side, side))
    return data_uri(shown, photo=side is not None or max(raw.shape[-2:]) > 160)


def kept(
    context: ActionContext, what: str, most: int, key: Hashable, make: Callable[[], Any]
) -> Any:
    """One of the latest `most` results of the model, made if it is not there."""
    with context.served.lock:
        results = context.served.memo.setdefault(what, Recent(most))
    return results.get_or_make(key, make)


def counting(
    context: ActionContext, total: int, words: Callable[[int], str]
) -> Callable[[int], None]:
    """Returns `advance(count)`, which reports how much of `total` is done."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        context.progress(done / max(1, total), words(done))

    return advance


def offered(context: ActionContext, name: str, write: Callable[[Path], Path]) -> Reply:
    """The files written by `write(folder)`, as a zip file to download."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write(Path(scratch) / "model")
        context.progress(0.7, "packing it")
        packed = Path(shutil.make_archive(str(folder), "zip", folder))
        size = packed.stat().st_size
        return {"file": context.session.add_file(name, packed), "name": name, "bytes": size}


def class_word(model: ImageModel, index: int | None) -> str | int | None:
    """The name of a class if it is unique, otherwise its index; None stays None."""
    if index is None:
        return None
    name = model.class_name(index)
    alone = [known.casefold() for known in model.classes].count(name.casefold()) == 1
    return name if alone else index


def as_script(name: str, context: ActionContext, request: PanelRequest, **values: Any) -> Reply:
    """Python that computes this result without the app, by `templates/NAME.txt`."""
    samples = [picture_name(context.state.samples[id]) for id in context.state.averaged()]
    values |= {"context": context, "served": context.served, "samples": samples}
    return {"python": text(name, "seecause.app", request=request, **values).strip() + "\n"}
