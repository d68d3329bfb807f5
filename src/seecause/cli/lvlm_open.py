"""What the `seecause lvlm` commands share: options, and opening a model, a picture and a bank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import Device, Dtype, pick_device, tell_outside
from seecause.errors import BadOption

if TYPE_CHECKING:
    from PIL import Image

    from seecause.lvlm import LVLM, MaskEngine, MeanBank

DEFAULT_LVLM = "builtin:critters-llava"

LVLMName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="builtin:critters-llava, hf:NAME-OR-FOLDER, or a folder that transformers wrote.",
    ),
]
Picture = Annotated[
    str,
    typer.Argument(
        help="A picture, or one of a dataset: critters:clean:test#3.",
        metavar="IMAGE",
        show_default=False,
    ),
]
Asking = Annotated[
    str, typer.Option("--question", help="What to ask about the picture.", show_default=False)
]
Answer = Annotated[
    str | None, typer.Option(help="The answer to explain.", show_default="the model's own")
]
Position = Annotated[
    int,
    typer.Option(
        help="Which token of the answer, from 0 on; those before it are taken as said.", min=0
    ),
]
Masks = Annotated[int, typer.Option(help="Masked runs for the fit.", min=2)]
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
    Dtype | None,
    typer.Option(
        help="Precision of the model.",
        show_default="float32 on a CPU or for a builtin model, else as stored",
    ),
]

Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the masked runs (GPU only): some seconds at first, then a quarter less time.",
    ),
]


def open_lvlm(name: str, device: Device, dtype: Dtype | None) -> LVLM:
    """Load and verify; transformers' own progress bars stay off."""
    from transformers.utils import logging

    from seecause.lvlm import load

    logging.disable_progress_bar()
    picked = pick_device(device)
    default = "float32" if picked == "cpu" else None  # half precision is slow on a CPU
    return load(name, device=picked, dtype=default if dtype is None else dtype.value)


def open_engine(
    image: str,
    question: str,
    model: str,
    *,
    bank: Path | None,
    calibration: list[str] | None,
    device: Device,
    dtype: Dtype | None,
    **asked: Any,
) -> tuple[Image.Image, MaskEngine]:
    """The picture, and the engine that asks about it; `asked` goes to `MaskEngine`. What cannot
    work is refused before a model is loaded."""
    from seecause.data.images import open_picture
    from seecause.lvlm import MaskEngine

    check_question(question)
    check_bank(model, bank, calibration)
    check_compile(asked.get("compile", False), device)
    shown, opened = open_picture(image), open_lvlm(model, device, dtype)
    return shown, MaskEngine(opened, shown, question, open_bank(opened, bank, calibration), **asked)


def tell_if_outside(model: str, image: str) -> None:
    """Warn that a model which knows Critters only is asked about another picture."""
    if _knows_critters(model):
        tell_outside(model, [image], suggest="hf:llava-hf/llava-1.5-7b-hf")


def check_question(question: str) -> None:
    """Refuse, before a model is loaded, an empty question."""
    if not question.strip():
        raise BadOption(
            "--question", question, "a question; heads carry the picture into its words"
        )


def check_bank(model: str, folder: Path | None, calibration: list[str] | None) -> None:
    """Refuse, before a model is loaded, what no bank can be made of."""
    from seecause.data.images import find_images

    if folder is not None and calibration:
        raise BadOption("--calibration", calibration[0], "--bank or --calibration, not both")
    if folder is None and not calibration and not _knows_critters(model):
        raise BadOption(
            "--calibration",
            None,
            "about a hundred pictures like those the model is asked about (or --bank), whose"
            " average ablated heads see",
        )
    if folder is not None and not folder.is_dir():
        raise BadOption("--bank", str(folder), "a folder that `seecause lvlm bank` wrote")
    find_images(calibration or [])


def check_compile(compile: bool, device: Device) -> None:
    """Refuse, before a model is loaded, what would only be slower."""
    if compile and pick_device(device) != "cuda":
        raise BadOption("--compile", "on a CPU", "a GPU; on a CPU it does not pay")


def _knows_critters(model: str) -> bool:
    """A builtin model, or a folder that `seecause zoo train` made of one."""
    return model.startswith("builtin:") or (Path(model.removeprefix("hf:")) / "card.json").is_file()


def open_bank(lvlm: LVLM, folder: Path | None, calibration: list[str] | None) -> MeanBank:
    """A saved bank, or one made now from pictures; for builtin models, and those that `seecause zoo
    train` made, Critters will do."""
    from seecause.data.images import find_images, read_image
    from seecause.lvlm import MeanBank, calibration_critters, make_bank

    if folder is not None:
        return MeanBank.load(folder)
    return make_bank(
        lvlm,
        (
            [read_image(file) for file in find_images(calibration)]
            if calibration
            else calibration_critters()
        ),
    )
