"""The commands as tests call them, the pictures they are given, and what they print and write."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from seecause import critters
from seecause.cli import app

MODEL = (
    "--model",
    "timm:test_vit",
    "--weights",
    "random",
)  # timm ships it: 6 blocks of width 64 at 160 pixels
SMALL = ("--device", "cpu", "--out")


def explain(*words: object):
    return CliRunner().invoke(app, ["explain", *map(str, words)])


def photo(path: Path, mode: str = "RGB", **options: object) -> Path:
    noise = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save(path, **options)
    return path


def grey_noise(size: tuple[int, int], spread: float) -> Image.Image:
    """The same noise every time, which `Image.effect_noise` is not."""
    values = 128 + spread * np.random.default_rng(0).standard_normal(size[::-1])
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")


def faithful(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["faithful", *map(str, words)], env={"COLUMNS": "120"})
    assert done.exit_code == code, done.output
    return done.output


def number(text: str, name: str) -> list[str]:
    """What a table says about the plain network, and about the changed one where there is one."""
    return next(
        line.removeprefix(name).split()
        for line in map(str.strip, text.splitlines())
        if line.startswith(f"{name} ")
    )


def heads(*words: object):
    return CliRunner().invoke(app, ["heads", *map(str, words)])


def whole(page: str) -> str:
    assert (
        not re.search(r'(src|href)="(?!data:|#)', page)
        and "http:" not in page
        and "https:" not in page
    )
    return page


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def photos(root, *, names=critters.CLASSES, colour="grey") -> str:
    """One plain picture of each class."""
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (96, 96), colour).save(root / name / "a.png")
    return f"folder:{root}"
