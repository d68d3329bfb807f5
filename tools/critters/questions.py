"""Questions about an image, for vision-language models.

Every question is asked about every (creature, background) pair equally often, in every wording, so
its answers are equally frequent, and a model that does not see the image is at chance.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch
from torch import Tensor

from seecause.critters.world import BACKGROUNDS, CLASSES, COLOURS, PARTS, VARIANT_COLOURS, Latents

_QUESTIONS = Path(__file__).with_name("questions.toml").read_text(encoding="utf-8")
_WORDINGS = {kind: entry["wordings"] for kind, entry in tomllib.loads(_QUESTIONS).items()}
# what can be asked about; a part is asked for its colour
SUBJECTS = ("creature", "background", *PARTS[1:])


def wordings(subject: str) -> tuple[str, ...]:
    """Every way to ask about a subject."""
    kind = subject if subject in _WORDINGS else "colour"
    return tuple(text.format(part=subject) for text in _WORDINGS[kind])


def answer_codes(latents: Latents) -> Tensor:
    """[B, SUBJECTS] int64: the true answer to every question about every image, as an index into
    `choices(subject)`; -1 for the name of a creature of mixed parts."""
    colours = torch.tensor(
        [[COLOURS.index(name) for name in VARIANT_COLOURS[part]] for part in PARTS[1:]],
        device=latents.seed.device,
    )  # [P, V]
    parts = torch.arange(len(colours), device=colours.device)
    shown = colours[parts, latents.variants]
    return torch.cat([latents.creature[:, None], latents.background[:, None], shown], dim=1)


def choices(subject: str) -> tuple[str, ...]:
    """All answers to a question."""
    return {"creature": CLASSES, "background": BACKGROUNDS}.get(subject, COLOURS)


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks, the tokens of a word-level vocabulary."""
    return re.findall(r"[a-z]+|[?.]", text.lower())


def vocabulary() -> tuple[str, ...]:
    """Every word a question or an answer can contain, sorted."""
    texts = (text for subject in SUBJECTS for text in (*wordings(subject), *choices(subject)))
    return tuple(sorted({word for text in texts for word in words(text)}))
