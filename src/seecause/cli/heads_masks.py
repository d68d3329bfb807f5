"""How the `seecause heads` commands find masks: the flags of the search, and its other options by
name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.heads.erase import Masks
    from seecause.heads.pictures import Pictures
    from seecause.models.base import ImageModel

Steps = Annotated[
    int,
    typer.Option(
        help="Steps of the mask search; a step costs a picture about two forwards.", min=1
    ),
]
MaskCacheOption = Annotated[
    Path | None,
    typer.Option(
        "--mask-cache", help="Keep discovered masks in this folder, and take them from there."
    ),
]
MaskPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--mask-option",
        help=(
            "An option of the mask search that has no flag, such as rho=0.2 or grid=16; repeat for"
            " more."
        ),
        metavar="KEY=VALUE",
    ),
]
FLAGS = {"steps": "--steps", "cache": "--mask-cache"}
INNER = ("inside", "progress")  # not for people


@dataclass(frozen=True)
class Search:
    """What was asked of the mask search."""

    steps: int = 250
    cache: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def masks(self, model: ImageModel, cases: Pictures, *, quiet: bool) -> Masks:
        """The model's own masks of all pictures."""
        from seecause.cli.progress import counting
        from seecause.heads.masks import discover_masks

        with counting("searching masks", len(cases), quiet=quiet) as advance:
            return discover_masks(
                model,
                cases.images,
                steps=self.steps,
                cache=self.cache,
                progress=advance,
                **self.options,
            )

    def check_used(self, used: bool, instead: str) -> None:
        """Refuse options of a search that does not take place."""
        if self.options and not used:
            said = ", ".join(f"{key}={value}" for key, value in self.options.items())
            raise BadOption("--mask-option", said, f"masks that are searched: {instead}")

    @property
    def record(self) -> dict[str, Any]:
        """For a manifest: nothing where nothing was asked for."""
        return {"mask options": dict(self.options)} if self.options else {}


def search_of(steps: int, cache: Path | None, pairs: Sequence[str] | None) -> Search:
    """The flags and `key=value` words of a command, checked before any picture is read."""
    import inspect

    from seecause._options import check_options
    from seecause.heads.masks import discover_masks

    keywords = [
        name
        for name, one in inspect.signature(discover_masks).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    known = [name for name in keywords if name not in (*FLAGS, *INNER)]
    options = pairs_of("--mask-option", pairs or [], "rho=0.2")
    for name, value in options.items():
        if name in FLAGS:
            raise BadOption(
                "--mask-option", f"{name}={value}", f"{FLAGS[name]}, which is a flag of its own"
            )
        if name not in known:
            raise BadOption(
                f"option {name!r} of the mask search", value, f"one of {', '.join(known)}"
            )
    check_options("the mask search", discover_masks, options)
    return Search(steps, cache, options)


def pairs_of(flag: str, pairs: Sequence[str], example: str) -> dict[str, Any]:
    """`key=value` words as a dictionary."""
    from seecause.cli.options import value_of

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise BadOption(flag, pair, f"key=value, such as {example}")
        found[key] = value_of(text)
    return found
