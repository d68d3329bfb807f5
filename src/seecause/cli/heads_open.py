"""What the `seecause heads` commands open: a classifier, or a vision-language model that is asked
for classes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seecause.cli.options import Device, Dtype, open_model
from seecause.errors import BadOption, NoClassifier

if TYPE_CHECKING:
    from seecause.heads.pictures import Pictures
    from seecause.heads.scores import Head
    from seecause.models.base import ImageModel
    from seecause.models.view import VisionModel

BIASED = "builtin:critters-biased"
TRAIN, TEST = "critters:certified:train", "critters:balanced:test"
ASKED = "builtin:critters-llava"  # asked by name_ll unless told otherwise: it can be nothing else
MIXED = ":mixed_rand"


class Classify(StrEnum):
    name_ll = "name_ll"
    label_token = "label_token"


class Scope(StrEnum):
    vision = "vision"
    llm = "llm"


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
        for flag, given in (("--scope", scope), ("--question", question)):
            if given is not None:
                raise BadOption(
                    flag,
                    str(given),
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
    from seecause.critters import wordings
    from seecause.data.registry import open_data
    from seecause.lvlm import classifier

    if weights is not None:
        raise BadOption("--weights", weights, "none: a vision-language model brings its own")
    classes = open_data(data, limit=1).classes
    if not classes:
        raise BadOption("--data", data, "data with class names, which the model is asked for")
    asked = question or (
        wordings("creature")[0] if data.startswith("critters:") else "What is in the picture?"
    )
    by = classify or Classify.name_ll
    return classifier(
        open_lvlm(name, device, dtype),
        classes,
        question=asked,
        by=by.value,
        scope=(scope or Scope.vision).value,
    )


def fitted(model: VisionModel, data: str) -> VisionModel:
    """The model, or for ImageNet-9 and a model with ImageNet's classes, the one that gives the nine
    answers."""
    from seecause.data.imagenet9 import IMAGENET_CLASSES, find_in9_map, read_in9_map
    from seecause.heads.outcomes import imagenet9_model

    if not data.startswith("imagenet9:") or model.n_classes != IMAGENET_CLASSES:
        return model
    return imagenet9_model(model, read_in9_map(find_in9_map(data)))


def twin_of(model: VisionModel, data: str, limit: int, *, quiet: bool) -> Pictures | None:
    """Of mixed_rand, mixed_same: together they tell the BG-gap."""
    from seecause.cli.heads_run import read

    if not (data.startswith("imagenet9:") and data.endswith(MIXED)):
        return None
    return read(model, f"{data.removesuffix(MIXED)}:mixed_same", limit, quiet=quiet)


def check_export(model: VisionModel, form: str) -> None:
    """Refuse, before anything is measured, a form that the model cannot be written in."""
    from seecause.heads.export import check_form
    from seecause.lvlm.prompt_classifier import PromptClassifier

    if not isinstance(model, PromptClassifier):
        check_form(model, form)
    elif form != "zeroed":
        raise BadOption("--form", form, "zeroed: a vision-language model keeps its architecture")


def write_model(
    model: VisionModel, heads: list[Head], folder: Path, *, form: str, note: str
) -> None:
    """The checkpoint without `heads`."""
    from seecause.heads.export import export
    from seecause.lvlm.prompt_classifier import PromptClassifier
    from seecause.lvlm.prompt_classifier import export as export_whole

    if isinstance(model, PromptClassifier):
        export_whole(model, heads, folder, note=note)
    else:
        export(model, heads, folder, form=form, note=note)  # type: ignore[arg-type]
