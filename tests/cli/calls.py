"""The commands as tests call them, and the images they are given."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from seecause.cli import app, run

# timm ships it: 6 blocks of width 64 at 160 pixels
MODEL = ("--model", "timm:test_vit", "--weights", "random")


@dataclass(frozen=True)
class Done:
    """What a command left with and printed."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*words: object) -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())


def explain(*words: object) -> Done:
    return invoke("explain", *words)


def photo(path: Path, mode: str = "RGB", **options: object) -> Path:
    noise = np.random.default_rng(0).integers(0, 255, (60, 90, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save(path, **options)
    return path


def flags_of(words: Sequence[str]) -> set[str]:
    """All options of the command that some words begin with."""
    command, flags = app, set[str]()
    for word in words:
        if command.default_command is not None:
            break
        command = command[word]
    for argument in command.assemble_argument_collection():
        flags |= {name for name in argument.names if name.startswith("--")}
    negatives = {flag for flag in flags if flag.startswith(("--no-", "--empty-"))}
    return flags - negatives | {"--help", "--version"}  # the app has no negatives
