"""Options that the commands of `seecause lvlm` share, and what they open: a model, a picture and a
bank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import (
    Device,
    DeviceOption,
    Dtype,
    Output,
    Seed,
    only_downloads_have_bars,
    pick_device,
    tell_outside,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from PIL import Image

    from seecause.lvlm import LVLM, MaskEngine, MeanBank

DEFAULT_LVLM = "builtin:critters-llava"
OPENING = "reading the model and averaging calibration pictures"


class How(StrEnum):
    derivative = "derivative"
    corrected = "corrected"
    fit = "fit"


class BankMode(StrEnum):
    shape = "shape"
    fixed = "fixed"
    mean = "mean"
    grid = "grid"


LVLMName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="builtin:critters-llava, hf:NAME-OR-FOLDER, or a folder that transformers wrote.",
    ),
]
QuestionOption = Annotated[
    str, typer.Option("--question", help="What to ask about the picture.", show_default=False)
]
AnswerOption = Annotated[
    str | None, typer.Option(help="The answer to explain.", show_default="the model's own")
]
HEADS_HELP = "Heads to change, as `lvlm heads` names them: '(0, 4), (1, 1)', or 0.4,1.1."
Length = Annotated[int, typer.Option(help="Tokens of the model's own answer, at most.", min=1)]
Floor = Annotated[
    float, typer.Option(help="The least the picture must move the answer, in logits.", min=0)
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a vision-language model runs."""

    device: DeviceOption = Device.auto
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Precision of the model.",
            show_default="float32 on a CPU or for a builtin model, else as stored",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LVLMRun(Output, Machine):
    """The same, and the folder that is written."""

    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class CalibratedModel:
    """A vision-language model, and what its heads see that may not see the picture."""

    model: LVLMName = DEFAULT_LVLM
    bank_folder: Annotated[
        Path | None,
        typer.Option("--bank", help="A bank that `seecause lvlm bank` wrote.", show_default=False),
    ] = None
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="Calibration pictures, folders or quoted globs; repeat for more.",
            metavar="IMAGE",
            show_default="Critters for an embedded model",
        ),
    ] = None

    def check(self, *questions: str, bank: bool = True) -> None:
        """Refuse, before a model is loaded, an empty question, and what no bank can be made of."""
        for question in questions:
            if not question.strip():
                expected = "a question; heads carry the picture into its words"
                raise BadOption("--question", question, expected)
        if bank:
            self._check_bank()

    def _check_bank(self) -> None:
        from seecause.data.images import find_images

        folder, calibration = self.bank_folder, self.calibration
        if folder is not None and calibration:
            raise BadOption("--calibration", calibration[0], "--bank or --calibration, not both")
        if folder is None and not calibration and not self.knows_critters:
            raise BadOption(
                "--calibration",
                None,
                "about a hundred pictures like those the model is asked about (or --bank), whose"
                " average ablated heads see",
            )
        if folder is not None and not folder.is_dir():
            raise BadOption("--bank", str(folder), "a folder that `seecause lvlm bank` wrote")
        find_images(calibration or [], deep=True)

    @property
    def knows_critters(self) -> bool:
        """A builtin model, or a folder that `tools/critters` made of one: it knows nothing
        else, and needs no calibration pictures."""
        folder = Path(self.model.removeprefix("hf:"))
        return self.model.startswith("builtin:") or (folder / "card.json").is_file()

    def open(self, where: Machine) -> LVLM:
        return open_lvlm(self.model, where.device, where.dtype)

    def bank(self, lvlm: LVLM) -> MeanBank:
        """A saved bank, or one made now."""
        from seecause.data.images import find_images, read_image
        from seecause.lvlm import MeanBank, calibration_critters, make_bank

        if self.bank_folder is not None:
            return MeanBank.load(self.bank_folder)
        if not self.calibration:
            return make_bank(lvlm, calibration_critters())
        files = find_images(self.calibration, deep=True)
        return make_bank(lvlm, [read_image(file) for file in files])


@dataclass(frozen=True, kw_only=True)
class AskedPicture(CalibratedModel):
    """A question about a picture."""

    image: Annotated[
        str,
        typer.Argument(
            help="A picture, or one of a dataset: critters:clean:test#3.",
            metavar="IMAGE",
            show_default=False,
        ),
    ]
    question: QuestionOption

    def warn(self, *, quiet: bool) -> None:
        """That a model which knows Critters only is asked about another picture."""
        if self.knows_critters and not quiet:
            tell_outside(self.model, [self.image], suggest="hf:llava-hf/llava-1.5-7b-hf")


@dataclass(frozen=True, kw_only=True)
class AskedWord(AskedPicture):
    """One word of its answer."""

    answer: AnswerOption = None
    position: Annotated[
        int,
        typer.Option(
            help="Which token of the answer, from 0 on; those before it are taken as said.", min=0
        ),
    ] = 0
    floor: Floor = 1.0

    def engine(self, where: Machine) -> tuple[Image.Image, MaskEngine]:
        """The picture, and the engine that asks about it."""
        from seecause.data.images import open_picture
        from seecause.lvlm import MaskEngine

        self.check(self.question)
        picture, lvlm = open_picture(self.image), self.open(where)
        word = {"answer": self.answer, "position": self.position, "floor": self.floor}
        return picture, MaskEngine(lvlm, picture, self.question, self.bank(lvlm), **word)


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """How coefficients are estimated."""

    how: Annotated[
        How,
        typer.Option(
            "--how",
            help=(
                "derivative: its mean over masks, in seconds; corrected: the same and a fit of what"
                " it leaves unexplained; fit: the paper's, thousands of masks."
            ),
        ),
    ] = How.derivative
    masks: Annotated[
        int | None,
        typer.Option(help="Masked runs.", min=4, show_default="64; corrected 1000; fit 10000"),
    ] = None
    ablated: Annotated[
        float,
        typer.Option(
            "--ablated",
            help="Share of heads (or image tokens) that a mask ablates.",
            min=0.01,
            max=0.99,
        ),
    ] = 0.75

    def made(self, seed: int) -> dict[str, Any]:
        return {"how": self.how.value, "masks": self.masks, "p": self.ablated, "seed": seed}


@dataclass(frozen=True, kw_only=True)
class HeadEdit:
    """What some heads see instead."""

    blind: Annotated[bool, typer.Option("--blind", help="These heads see the average picture.")] = (
        False
    )
    redirect: Annotated[
        str | None,
        typer.Option(help="They see this picture.", metavar="IMAGE", show_default=False),
    ] = None
    boost: Annotated[
        float | None,
        typer.Option(
            help="The picture weighs so many times as much for them.", min=0, show_default=False
        ),
    ] = None

    def check(self) -> None:
        asked = {"--blind": self.blind, "--redirect": self.redirect is not None}
        flags = [flag for flag, on in (asked | {"--boost": self.boost is not None}).items() if on]
        if len(flags) != 1:
            expected = "one of --blind, --redirect and --boost"
            raise BadOption("edit", " ".join(flags) or None, expected)


def open_lvlm(name: str, device: Device, dtype: Dtype | None) -> LVLM:
    """Load and verify."""
    from seecause.lvlm import load

    only_downloads_have_bars()
    picked = pick_device(device)
    default = "float32" if picked == "cpu" else None  # half precision is slow on a CPU
    return load(name, device=picked, dtype=default if dtype is None else dtype.value)


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of HEIGHTxWIDTH."""
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise BadOption("--size", text, "HEIGHTxWIDTH, such as 336x336")
    return int(height), int(width)


def read_heads(text: str) -> list[tuple[int, int]]:
    """Pairs of (0, 4), (1, 1) or of 0.4,1.1."""
    pairs = []
    for word in re.sub(r"\((\d+),(\d+)\)", r"\1.\2", text.replace(" ", "")).split(","):
        layer, _, head = word.partition(".")
        if not (layer.isdigit() and head.isdigit()):
            raise BadOption("--heads", text, "pairs of layer and head, such as (0, 4), (1, 1)")
        pairs.append((int(layer), int(head)))
    return pairs
