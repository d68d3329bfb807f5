"""Questions about a picture, for models that see and speak.

Every question is asked about every (creature, background) pair equally often, in every wording. So
each of its answers is equally frequent, and a model that has not looked at the picture can do no
better than chance.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from seecause import _random
from seecause.critters.latents import CLASSES, COLOURS, PARTS, VARIANT_COLOURS, Latents
from seecause.critters.picture import BACKGROUNDS, STYLES, Picture, Style, render
from seecause.critters.regimes import draw
from seecause.errors import BadOption, UnknownName

_QUESTIONS = resources.files("seecause.critters").joinpath("questions.toml").read_text()
_WORDINGS = {kind: entry["wordings"] for kind, entry in tomllib.loads(_QUESTIONS).items()}
# what can be asked about; a part is asked for its colour
SUBJECTS = ("creature", "background", *PARTS[1:])
_PAIRS = len(CLASSES) * len(BACKGROUNDS)


@dataclass(frozen=True)
class Question:
    subject: str  # one of SUBJECTS
    text: str
    answer: str  # one word


@dataclass(frozen=True)
class Exam:
    """Pictures to come and one question about each."""

    latents: Latents
    styles: tuple[Style, ...]
    questions: tuple[Question, ...]

    def pictures(self, *, size: int = 96) -> Picture:
        """Every scene in its own drawing style."""
        rows: dict[Style, list[int]] = {}
        for row, style in enumerate(self.styles):
            rows.setdefault(style, []).append(row)
        by_style = [
            render(self.latents[chosen], size=size, style=style) for style, chosen in rows.items()
        ]
        order = torch.tensor([row for chosen in rows.values() for row in chosen]).argsort()
        fields = [torch.cat(tensors) for tensors in zip(*by_style, strict=True)]
        return Picture(*(field[order.to(field.device)] for field in fields))


def ask(latents: Latents, subject: str, *, wording: int = 0) -> list[Question]:
    """The same question about every picture of a batch; `wording` wraps around.

    >>> from seecause import critters
    >>> ask(critters.draw("balanced", "test", 1), "background")
    [Question(subject='background', text='What is in the background?', answer='dunes')]
    """
    if subject not in SUBJECTS:
        raise UnknownName("subject", subject, SUBJECTS)
    texts = wordings(subject)
    text = texts[wording % len(texts)]
    return [Question(subject, text, answer) for answer in answers(latents, subject)]


def wordings(subject: str) -> tuple[str, ...]:
    """Every way to ask about a subject."""
    kind = subject if subject in _WORDINGS else "colour"
    return tuple(text.format(part=subject) for text in _WORDINGS[kind])


def answers(latents: Latents, subject: str) -> list[str]:
    """The true answer for each picture; refused where one has none."""
    if subject == "creature" and bool((latents.creature < 0).any()):
        raise BadOption("subject", subject, "another: a creature of mixed parts has no name")
    if subject in PARTS and not bool(latents.present[:, PARTS.index(subject)].all()):
        raise BadOption("subject", subject, "a part that no picture has lost")
    codes = answer_codes(latents)[:, SUBJECTS.index(subject)]
    return [choices(subject)[code] for code in codes.tolist()]


def answer_codes(latents: Latents) -> Tensor:
    """[B, SUBJECTS] int64: the true answer to every question about every picture, as an index into
    `choices(subject)`."""
    colours = torch.tensor(
        [[COLOURS.index(name) for name in VARIANT_COLOURS[part]] for part in PARTS[1:]],
        device=latents.seed.device,
    )  # [P, V]
    parts = torch.arange(len(colours), device=colours.device)
    return torch.cat(
        [latents.creature[:, None], latents.background[:, None], colours[parts, latents.variants]],
        dim=1,
    )


def choices(subject: str) -> tuple[str, ...]:
    """All answers to a question."""
    return {"creature": CLASSES, "background": BACKGROUNDS}.get(subject, COLOURS)


def draw_exam(split: str, n: int, *, seed: int = 0, start: int = 0) -> Exam:
    """n balanced questions. All pairs of cues come first, then the next subject, then the next
    wording; styles are drawn by lot."""
    latents = draw("balanced", split, n, seed=seed, start=start)
    styles = tuple(STYLES[code] for code in (_random.bits(latents.seed, 81) % len(STYLES)).tolist())
    questions: list[Question] = []
    for row, index in enumerate(range(start, start + n)):
        turn, place = divmod(index // _PAIRS, len(SUBJECTS))
        questions += ask(latents[row], SUBJECTS[place], wording=turn)
    return Exam(latents, styles, tuple(questions))


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks, the tokens of a word-level vocabulary."""
    return re.findall(r"[a-z]+|[?.]", text.lower())


def vocabulary() -> tuple[str, ...]:
    """Every word a question or an answer can contain, sorted."""
    known: set[str] = set()
    for subject in SUBJECTS:
        known.update(words(" ".join([*wordings(subject), *choices(subject)])))
    return tuple(sorted(known))
