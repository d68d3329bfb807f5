"""Opening a vision-language model, a picture and a bank by what stands on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from seecause.cli.options import Device, Dtype, pick_device, tell_outside
from seecause.errors import BadOption

if TYPE_CHECKING:
    from PIL import Image

    from seecause.lvlm import LVLM, MaskEngine, MeanBank

DEFAULT_LVLM = "builtin:critters-llava"
OPENING = "reading the model and averaging calibration pictures"


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
    **options: Any,
) -> tuple[Image.Image, MaskEngine]:
    """The picture, and the engine that asks about it with `options` of `MaskEngine`. What cannot
    work is refused before a model is loaded."""
    from seecause.data.images import open_picture
    from seecause.lvlm import MaskEngine

    check_question(question)
    check_bank(model, bank, calibration)
    picture, lvlm = open_picture(image), open_lvlm(model, device, dtype)
    engine = MaskEngine(lvlm, picture, question, open_bank(lvlm, bank, calibration), **options)
    return picture, engine


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
    if not calibration:
        return make_bank(lvlm, calibration_critters())
    return make_bank(lvlm, [read_image(file) for file in find_images(calibration)])


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of HEIGHTxWIDTH."""
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise BadOption("--size", text, "HEIGHTxWIDTH, such as 336x336")
    return int(height), int(width)
