"""Options that the commands of `seecause lvlm` share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.lvlm_open import (
    DEFAULT_LVLM,
    check_bank,
    check_question,
    open_bank,
    open_engine,
    open_lvlm,
)
from seecause.cli.options import Device, DeviceOption, Dtype, Output, Seed
from seecause.errors import BadOption

if TYPE_CHECKING:
    from PIL import Image

    from seecause.lvlm import LVLM, MaskEngine, MeanBank

MODEL_HELP = "builtin:critters-llava, hf:NAME-OR-FOLDER, or a folder that transformers wrote."
HOW_HELP = (
    "derivative: its mean over masks, in seconds; corrected: the same and a fit of what it leaves"
    " unexplained; fit: the paper's, thousands of masks."
)
MASKS_DEFAULT = "64; corrected 1000; fit 10000"
PICTURE_HELP = "A picture, or one of a dataset: critters:clean:test#3."
POSITION_HELP = "Which token of the answer, from 0 on; those before it are taken as said."
DTYPE_DEFAULT = "float32 on a CPU or for a builtin model, else as stored"


class How(StrEnum):
    derivative = "derivative"
    corrected = "corrected"
    fit = "fit"


LVLMName = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Picture = Annotated[str, typer.Argument(help=PICTURE_HELP, metavar="IMAGE", show_default=False)]
Question = Annotated[
    str, typer.Option("--question", help="What to ask about the picture.", show_default=False)
]
Answer = Annotated[
    str | None, typer.Option(help="The answer to explain.", show_default="the model's own")
]
Position = Annotated[int, typer.Option(help=POSITION_HELP, min=0)]
MaskCount = Annotated[
    int | None, typer.Option(help="Masked runs.", min=4, show_default=MASKS_DEFAULT)
]
Estimate = Annotated[How, typer.Option("--how", help=HOW_HELP)]
Share = Annotated[
    float,
    typer.Option(
        "--ablated",
        help="Share of heads (or image tokens) that a mask ablates.",
        min=0.01,
        max=0.99,
    ),
]
Floor = Annotated[
    float, typer.Option(help="The least the picture must move the answer, in logits.", min=0)
]
BankFolder = Annotated[
    Path | None,
    typer.Option("--bank", help="A bank that `seecause lvlm bank` wrote.", show_default=False),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        help="Calibration pictures, folders or quoted globs; repeat for more.",
        metavar="IMAGE",
        show_default="Critters for a model of the zoo",
    ),
]
LVLMDtype = Annotated[
    Dtype | None, typer.Option(help="Precision of the model.", show_default=DTYPE_DEFAULT)
]
StudyData = Annotated[
    str,
    typer.Argument(
        help="critters:REGIME[:SPLIT], folder:PATH and others.",
        metavar="DATA",
        show_default=False,
    ),
]
SampleLimit = Annotated[int, typer.Option(help="Use so many samples, spread evenly.", min=1)]
TokenMasks = Annotated[
    int | None,
    typer.Option(
        help="Masked runs for image tokens; 0 leaves them out.",
        min=0,
        show_default="as many as --masks",
    ),
]
RightOnly = Annotated[
    bool,
    typer.Option(
        "--right-only", help="Leave out samples whose answer is not the name of their class."
    ),
]
StudyFolder = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="The folder of the study; the same command again continues in it."
    ),
]
StudyWork = Annotated[
    str | None,
    typer.Option(
        "--work",
        help="Where finished samples are kept: a folder, or a URL (s3://...).",
        metavar="DIR|URL",
        show_default="--out",
    ),
]
Wordings = Annotated[
    list[str] | None,
    typer.Option(
        "--wording",
        help="The question in other words: do they use the same heads? Repeat for more.",
        show_default=False,
    ),
]
Ratios = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio",
        help="Another share of ablated heads to compare with. Repeat for more.",
        min=0.01,
        max=0.99,
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a vision-language model runs."""

    device: DeviceOption = Device.auto
    dtype: LVLMDtype = None


@dataclass(frozen=True, kw_only=True)
class LVLMRun(Output, Machine):
    """The same, and the folder that is written."""

    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class CalibratedModel:
    """A vision-language model, and what its heads see that may not see the picture."""

    model: LVLMName = DEFAULT_LVLM
    bank_folder: BankFolder = None
    calibration: Calibration = None

    def check(self, *questions: str, bank: bool = True) -> None:
        """Refuse, before a model is loaded, what cannot work."""
        for question in questions:
            check_question(question)
        if bank:
            check_bank(self.model, self.bank_folder, self.calibration)

    def open(self, where: Machine) -> LVLM:
        return open_lvlm(self.model, where.device, where.dtype)

    def bank(self, lvlm: LVLM) -> MeanBank:
        return open_bank(lvlm, self.bank_folder, self.calibration)


@dataclass(frozen=True, kw_only=True)
class AskedPicture(CalibratedModel):
    """A question about a picture."""

    image: Picture
    question: Question


@dataclass(frozen=True, kw_only=True)
class AskedWord(AskedPicture):
    """One word of its answer."""

    answer: Answer = None
    position: Position = 0
    floor: Floor = 1.0

    def engine(self, where: Machine) -> tuple[Image.Image, MaskEngine]:
        return open_engine(
            self.image, self.question, self.model, bank=self.bank_folder,
            calibration=self.calibration, device=where.device, dtype=where.dtype,
            answer=self.answer, position=self.position, floor=self.floor,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """How coefficients are estimated."""

    how: Estimate = How.derivative
    masks: MaskCount = None
    ablated: Share = 0.75

    def made(self, seed: int) -> dict[str, Any]:
        return {"how": self.how.value, "masks": self.masks, "p": self.ablated, "seed": seed}


@dataclass(frozen=True, kw_only=True)
class StudyEstimation(Estimation):
    """The same of heads and of image tokens."""

    token_masks: TokenMasks = None

    def counts(self) -> tuple[int, int]:
        """Masks for heads, and for image tokens."""
        from seecause.lvlm.masks import MASKS

        masks = self.masks or MASKS[self.how.value]
        return masks, masks if self.token_masks is None else self.token_masks


@dataclass(frozen=True, kw_only=True)
class StudySamples:
    """What a study asks about."""

    data: StudyData
    limit: SampleLimit = 100
    right_only: RightOnly = False


@dataclass(frozen=True, kw_only=True)
class Variations:
    """What a study asks again."""

    wording: Wordings = None
    ratio: Ratios = None

    def made(self) -> dict[str, Any]:
        return {"wordings": tuple(self.wording or ()), "ratios": tuple(self.ratio or ())}


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
        if sum((self.blind, self.redirect is not None, self.boost is not None)) != 1:
            raise BadOption("edit", None, "one of --blind, --redirect and --boost")
