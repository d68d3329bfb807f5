"""Options of the `seecause heads` commands, and what they open: a classifier, or a vision-language
model that is asked for classes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import Device, Dtype, open_model, tell_page
from seecause.cli.progress import Incomplete
from seecause.errors import BadOption, NoClassifier

if TYPE_CHECKING:
    from seecause.data.dataset import Dataset, Hole
    from seecause.heads._prune_and_test import Background
    from seecause.heads.pictures import Pictures
    from seecause.models.base import ImageModel

BIASED = "builtin:critters-biased"
TRAIN, TEST = "critters:certified:train", "critters:balanced:test"
ASKED = "builtin:critters-llava"  # asked by name_ll unless told otherwise: it can be nothing else
KINDS = (
    "critters:REGIME[:SPLIT], waterbirds:PATH, imagenet9:PATH[:VARIANT], folder:PATH,"
    " pairs:WITH:WITHOUT and others."
)
FLAGS = {  # options of selectors that have a flag
    "mask_steps": "--steps",
    "masks": "--masks",
    "baseline": "--fill",
    "operator": "--operator",
    "guard": "--guard",
    "screen": "--screen",
    "seed": "--seed",
}
SEARCH_FLAGS = {"steps": "--steps", "cache": "--mask-cache"}


class MaskChoice(StrEnum):
    auto = "auto"
    discovered = "discovered"
    oracle = "oracle"


class Filling(StrEnum):
    mean = "mean"
    grey = "grey"
    blur = "blur"
    noise = "noise"
    swap = "swap"


class OperatorName(StrEnum):
    zero = "zero"
    mean = "mean"
    resample = "resample"


class Guard(StrEnum):
    penalty = "penalty"
    protect = "protect"
    none = "none"


class Classify(StrEnum):
    name_ll = "name_ll"
    label_token = "label_token"


class Scope(StrEnum):
    vision = "vision"
    llm = "llm"


AuditData = Annotated[
    str, typer.Option("--data", help=f"Pictures whose answers are audited: {KINDS}")
]
DataOption = Annotated[str, typer.Option("--data", help=f"Pictures to score heads on: {KINDS}")]
TestOption = Annotated[
    str,
    typer.Option(
        "--test", help="Pictures to measure the result on; they should not be those of --data."
    ),
]
Limit = Annotated[int, typer.Option(help="Read so many pictures, spread evenly.", min=1)]
TestLimit = Annotated[int, typer.Option(help="Read so many pictures of --test.", min=1)]
Cap = Annotated[int, typer.Option("--cap", help="Use so many right answers at most.", min=1)]
Share = Annotated[
    float,
    typer.Option(
        help="Use this share of the pictures that are answered right (CIGMA takes 0.4).",
        min=0.0,
        max=1.0,
    ),
]
Stratified = Annotated[bool, typer.Option("--stratified", help="The same number from every class.")]
MaskOption = Annotated[
    MaskChoice,
    typer.Option(
        help=(
            "Masks from the data (oracle) or from the model (discovered); auto takes the data's if"
            " it has them."
        )
    ),
]
FillOption = Annotated[
    Filling,
    typer.Option(
        help=(
            "What replaces the background. The paper: mean. swap: other versions of the pictures,"
            " of Critters and pairs."
        )
    ),
]
OperatorOption = Annotated[
    OperatorName, typer.Option(help="What a removed head carries while it is scored.")
]
GuardOption = Annotated[
    Guard,
    typer.Option(
        help=(
            "Subtract what the object loses (penalty), keep heads that cost 5 % of it or a point of"
            " accuracy (protect), or none."
        )
    ),
]
By = Annotated[
    str,
    typer.Option(
        help=(
            "How to choose heads: cigma, greedy, regression, taylor and others; `seecause heads"
            " selectors` lists them."
        )
    ),
]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the selector that has no flag, such as temperature=2; repeat for more.",
        metavar="KEY=VALUE",
    ),
]
Screen = Annotated[
    int | None,
    typer.Option(
        help="Guess first, and measure only the likeliest 4 x N heads.",
        min=1,
        metavar="N",
        show_default="measure all",
    ),
]
Draws = Annotated[
    int, typer.Option(help="Random sets of heads for the band beside the curves.", min=1)
]
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
ClassifyOption = Annotated[
    Classify | None,
    typer.Option(
        "--classify",
        help=(
            "Ask a vision-language model for the class: by the likelihood of each name (name_ll),"
            " or of labels of listed options (label_token)."
        ),
        show_default=f"name_ll for {ASKED}, else the model is a classifier",
    ),
]
ScopeOption = Annotated[
    Scope | None,
    typer.Option(
        "--scope",
        help="With --classify: heads of the vision tower, or of the language model.",
        show_default="vision",
    ),
]
QuestionOption = Annotated[
    str | None,
    typer.Option(
        "--question",
        help="With --classify: what to ask about the picture.",
        show_default="for Critters, the creature's name",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="Precision of the model.",
        show_default="float32; with --classify on a GPU, as stored",
    ),
]


def open_asked(
    name: str,
    data: str,
    *,
    weights: str | None,
    device: Device,
    dtype: Dtype | None,
    seed: int,
    classify: Classify | None,
    scope: Scope | None,
    question: str | None,
) -> ImageModel:
    """A model by name. A vision-language model is asked for the classes of `data`."""
    if classify is None and name != ASKED:
        for flag, value in (("--scope", scope), ("--question", question)):
            if value is not None:
                raise BadOption(
                    flag,
                    str(value),
                    "--classify name_ll or label_token beside it: a classifier is asked nothing",
                )
        try:
            return open_model(
                name, weights=weights, device=device, dtype=dtype or Dtype.float32, seed=seed
            )
        except NoClassifier:
            raise BadOption(
                "--model",
                name,
                "a classifier, or --classify name_ll (or label_token) beside a vision-language"
                " model such as this one",
            ) from None
    from seecause.cli.lvlm_open import open_lvlm
    from seecause.critters.questions import wordings
    from seecause.data.registry import open_data
    from seecause.lvlm import classifier

    if weights is not None:
        raise BadOption("--weights", weights, "none: a vision-language model brings its own")
    classes = open_data(data, limit=1).classes
    if not classes:
        raise BadOption("--data", data, "data with class names, which the model is asked for")
    usual = wordings("creature")[0] if data.startswith("critters:") else "What is in the picture?"
    return classifier(
        open_lvlm(name, device, dtype),
        classes,
        question=question or usual,
        by=(classify or Classify.name_ll).value,
        scope=(scope or Scope.vision).value,
    )


def same_backgrounds(data: str, limit: int) -> Dataset | None:
    """Of ImageNet-9's mixed_rand, mixed_same: together they tell the BG-gap."""
    from seecause.data.registry import open_data

    mixed = ":mixed_rand"
    if not (data.startswith("imagenet9:") and data.endswith(mixed)):
        return None
    return open_data(f"{data.removesuffix(mixed)}:mixed_same", limit=limit)


def search_options(steps: int, cache: Path | None, pairs: Sequence[str] | None) -> dict[str, Any]:
    """Options of the mask search, from its flags and `key=value` words."""
    from seecause.heads.masks import check_search

    options = _pairs("--mask-option", pairs or [], "rho=0.2", SEARCH_FLAGS)
    check_search(options)
    return {"steps": steps, **({} if cache is None else {"cache": cache}), **options}


def background_of(masks: MaskChoice, fill: Filling, search: dict[str, Any]) -> Background:
    from seecause.heads._prune_and_test import Background

    return Background(masks.value, fill.value, search)


def selector_options(
    by: str,
    pairs: Sequence[str] | None,
    *,
    operator: OperatorName = OperatorName.zero,
    guard: Guard = Guard.penalty,
    screen: int | None = None,
) -> dict[str, Any]:
    """What was asked of a selector; what it does not have is refused by the library."""
    from seecause._options import check_options
    from seecause.heads._screen import Screening

    options = _pairs("--option", pairs or [], "temperature=2", FLAGS)
    for name, value, usual in (("operator", operator, "zero"), ("guard", guard, "penalty")):
        if value != usual:
            options[name] = value.value
    if screen is None:
        return options
    fields = [name for name in ("verify", "audit", "half") if name in options]
    screening = {name: options.pop(name) for name in fields}
    check_options(f"the screen of {by}", Screening, {"top": screen, **screening})
    return {**options, "screen": Screening(top=screen, **screening)}


def head_limit(text: str) -> int | float:
    """`16` is a count, `0.1` a share. What no model could do is refused here."""
    try:
        top = float(text) if "." in text else int(text)
    except ValueError:
        top = 0
    if top <= 0 or (isinstance(top, float) and top > 1) or top != top:
        raise BadOption(
            "--top",
            text,
            "a count from 1 on such as 16, or a share above 0.0 and up to 1.0 such as 0.1",
        )
    return top


def _pairs(flag: str, pairs: Sequence[str], example: str, flags: dict[str, str]) -> dict[str, Any]:
    """`key=value` words as a dictionary, without those that have a flag of their own."""
    from seecause.cli.options import value_of

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise BadOption(flag, pair, f"key=value, such as {example}")
        if key in flags:
            raise BadOption(flag, pair, f"{flags[key]}, which is a flag of its own")
        options[key] = value_of(text)
    return options


def lead_of(model: ImageModel, pictures: Pictures) -> str:
    lead = f"{len(pictures)} pictures of {pictures.name}."
    if pictures.holes:
        lead += f" {len(pictures.holes)} could not be read."
    if model.random_weights:
        lead += " The model has random weights: its answers mean nothing."
    return lead


def say(
    lines: list[str], out: Path, *, replaced: bool, quiet: bool, holes: Sequence[Hole] = ()
) -> None:
    """What came out, then where the page is. Pictures that could not be read have been named; the
    exit code tells of them."""
    if not quiet:
        for line in lines:
            typer.echo(line)
        tell_page(out, replaced=replaced)
    if holes:
        raise Incomplete
