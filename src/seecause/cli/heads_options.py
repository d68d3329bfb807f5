"""Options of the `seecause heads` commands, and what they open: a classifier, or a vision-language
model that is asked for classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import Dtype, ModelName, ModelOptions, ModelRun, value_of
from seecause.errors import BadOption, UnsupportedModel

if TYPE_CHECKING:
    from seecause.background.images import LabelledImages
    from seecause.data.dataset import Dataset
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
    given = "given"


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


class GuardChoice(StrEnum):
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
GuardOption = Annotated[
    GuardChoice,
    typer.Option(
        help=(
            "Subtract what the object loses (penalty), keep heads that cost 5 % of it or a point of"
            " accuracy (protect), or none."
        )
    ),
]
Draws = Annotated[
    int, typer.Option(help="Random sets of heads for the band beside the curves.", min=1)
]


@dataclass(frozen=True, kw_only=True)
class AskedRun(ModelRun):
    """Where a model runs and the folder that is written; precision as the kind of model has it."""

    dtype: Annotated[
        Dtype | None,
        typer.Option(
            "--dtype",
            help="Precision of the model.",
            show_default="float32; with --classify on a GPU, as stored",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AskedModel(ModelOptions):
    """A classifier, or a vision-language model that is asked for classes."""

    model: ModelName = BIASED
    classify: Annotated[
        Classify | None,
        typer.Option(
            help=(
                "Ask a vision-language model for the class: by the likelihood of each name"
                " (name_ll), or of labels of listed options (label_token)."
            ),
            show_default=f"name_ll for {ASKED}, else the model is a classifier",
        ),
    ] = None
    scope: Annotated[
        Scope | None,
        typer.Option(
            help="With --classify: heads of the vision tower, or of the language model.",
            show_default="vision",
        ),
    ] = None
    question: Annotated[
        str | None,
        typer.Option(
            help="With --classify: what to ask about the picture.",
            show_default="for Critters, the creature's name",
        ),
    ] = None

    def ask(self, data: str, run: AskedRun) -> ImageModel:
        """The model, loaded. A vision-language model is asked for the classes of `data`."""
        if self.classify is None and self.model != ASKED:
            return self._classifier(run)
        from seecause.cli.lvlm_options import open_lvlm
        from seecause.critters.questions import wordings
        from seecause.data.registry import open_data
        from seecause.lvlm import classifier

        if self.weights is not None:
            expected = "none: a vision-language model brings its own"
            raise BadOption("--weights", self.weights, expected)
        classes = open_data(data, limit=1).classes
        if not classes:
            raise BadOption("--data", data, "data with class names, which the model is asked for")
        critters = data.startswith("critters:")
        usual = wordings("creature")[0] if critters else "What is in the picture?"
        return classifier(
            open_lvlm(self.model, run.device, run.dtype),
            classes,
            question=self.question or usual,
            by=(self.classify or Classify.name_ll).value,
            scope=(self.scope or Scope.vision).value,
        )

    def _classifier(self, run: AskedRun) -> ImageModel:
        for flag, value in (("--scope", self.scope), ("--question", self.question)):
            if value is not None:
                raise BadOption(
                    flag,
                    str(value),
                    "--classify name_ll or label_token beside it: a classifier is asked nothing",
                )
        try:
            return self.open(run)
        except UnsupportedModel:
            raise BadOption(
                "--model",
                self.model,
                "a classifier, or --classify name_ll (or label_token) beside a vision-language"
                " model such as this one",
            ) from None


@dataclass(frozen=True, kw_only=True)
class SampledAnswers:
    """Which of the pictures heads are scored on."""

    share: Annotated[
        float,
        typer.Option(
            help="Use this share of the pictures that are answered right (CIGMA takes 0.4).",
            min=0.0,
            max=1.0,
        ),
    ] = 0.4
    cap: Annotated[int, typer.Option(help="Use so many right answers at most.", min=1)] = 512
    stratified: Annotated[
        bool, typer.Option("--stratified", help="The same number from every class.")
    ] = False

    def made(self) -> dict[str, Any]:
        return {"share": self.share, "cap": self.cap, "stratified": self.stratified}


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How masks are searched in the model."""

    steps: Annotated[
        int,
        typer.Option(
            help="Steps of the mask search; a step costs a picture about two forwards.", min=1
        ),
    ] = 250
    mask_option: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "An option of the mask search that has no flag, such as rho=0.2 or grid=16; repeat"
                " for more."
            ),
            metavar="KEY=VALUE",
        ),
    ] = None
    mask_cache: Annotated[
        Path | None,
        typer.Option(help="Keep discovered masks in this folder, and take them from there."),
    ] = None

    def made(self) -> dict[str, Any]:
        """Options of the mask search, from its flags and `key=value` words."""
        from seecause.background.masks import check_search

        options = _pairs("--mask-option", self.mask_option or [], "rho=0.2", SEARCH_FLAGS)
        check_search(options)
        cache = {} if self.mask_cache is None else {"cache": self.mask_cache}
        return {"steps": self.steps, **cache, **options}


@dataclass(frozen=True, kw_only=True)
class ErasedBackground(SearchOptions):
    """How the background is taken away."""

    masks: Annotated[
        MaskChoice,
        typer.Option(
            help=(
                "Masks from the data (given) or from the model (discovered); auto takes the"
                " data's if it has them."
            )
        ),
    ] = MaskChoice.auto
    fill: Annotated[
        Filling,
        typer.Option(
            help=(
                "What replaces the background. The paper: mean. swap: other versions of the"
                " pictures, of Critters and pairs."
            )
        ),
    ] = Filling.grey

    def background(self) -> dict[str, Any]:
        """Arguments of `score_heads`."""
        return {"masks": self.masks.value, "fill": self.fill.value, "mask_options": self.made()}


@dataclass(frozen=True, kw_only=True)
class HeadSelector:
    """How heads are chosen."""

    by: Annotated[
        str,
        typer.Option(
            help=(
                "How to choose heads: cigma, greedy, regression, taylor and others; `seecause heads"
                " selectors` lists them."
            )
        ),
    ] = "cigma"
    option: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "An option of the selector that has no flag, such as temperature=2; repeat for"
                " more."
            ),
            metavar="KEY=VALUE",
        ),
    ] = None
    operator: Annotated[
        OperatorName, typer.Option(help="What a removed head carries while it is scored.")
    ] = OperatorName.zero
    guard: GuardOption = GuardChoice.penalty
    screen: Annotated[
        int | None,
        typer.Option(
            help="Guess first, and measure only the likeliest 4 x N heads.",
            min=1,
            metavar="N",
            show_default="measure all",
        ),
    ] = None

    def options(self) -> dict[str, Any]:
        """What was asked of the selector; what it does not have is refused by the library."""
        options = _pairs("--option", self.option or [], "temperature=2", FLAGS)
        if self.operator is not OperatorName.zero:
            options["operator"] = self.operator.value
        if self.guard is not GuardChoice.penalty:
            options["guard"] = self.guard.value
        return options if self.screen is None else {**options, "screen": self.screen}


def same_backgrounds(data: str, limit: int) -> Dataset | None:
    """Of ImageNet-9's mixed_rand, mixed_same: together they tell the BG-gap."""
    from seecause.data.registry import open_data

    mixed = ":mixed_rand"
    if not (data.startswith("imagenet9:") and data.endswith(mixed)):
        return None
    return open_data(f"{data.removesuffix(mixed)}:mixed_same", limit=limit)


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
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise BadOption(flag, pair, f"key=value, such as {example}")
        if key in flags:
            raise BadOption(flag, pair, f"{flags[key]}, which is a flag of its own")
        options[key] = value_of(text)
    return options


def lead_of(model: ImageModel, pictures: LabelledImages) -> str:
    lead = f"{len(pictures)} pictures of {pictures.name}."
    if pictures.skipped:
        lead += f" {len(pictures.skipped)} could not be read."
    if model.random_weights:
        lead += " The model has random weights: its answers mean nothing."
    return lead
