"""A vision-language model as a classifier: pictures in, a distribution over class names out,
through the language model.

    picture -> vision tower -> projector -> [words, image tokens, words] -> decoder -> the words
    that name classes        (see `asking`)

It is a view like any other, so audits, head scores, ablation and masks work on it as they are.
`scope` says whose heads are meant: those of the vision tower (`vision`, as in CIGMA) or of the
decoder (`llm`). Scores of the two are not comparable with each other: decoder heads also carry the
question. Pictures enter as one tile in the processor's own frame.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from seecause.engine.verify import TOLERANCE, compare
from seecause.errors import BadOption, UnsupportedModel
from seecause.lvlm import prompt as prompts
from seecause.lvlm.asking import Asked, By, Labels, Length, ask_labels, ask_names
from seecause.lvlm.spoken import Described, PromptLayout, Spoken, refuse
from seecause.lvlm.view import LVLM
from seecause.models import tower as towers
from seecause.models.base import Architecture
from seecause.models.decoder import planted_span, run
from seecause.models.image_tokens import image_tokens
from seecause.models.layout import At, TokenLayout
from seecause.models.preprocess import Preprocess, preprocess_from_processor
from seecause.models.readout import Readout
from seecause.models.tower import Tower
from seecause.models.view import VisionModel

Scope = Literal["vision", "llm"]
_CHECKED = 4  # continuations that the native model is asked about when a classifier is made


@dataclass(eq=False, kw_only=True, repr=False)
class PromptClassifier(VisionModel):
    """`model(images)` gives logits [B, C] of class names, through the native modules; `blocks` and
    `gates` are those of `scope`."""

    architecture: ClassVar[Architecture] = "prompt"

    lvlm: LVLM
    asked: Asked
    scope: Scope

    @property
    def readout_name(self) -> str:
        told = ", ".join(f"{key} {value}" for key, value in self.asked.said.items())
        return f"{told}; heads of scope {self.scope}"

    def forward_bytes(self, layout: TokenLayout) -> int:
        """The decoder's run and the vocabulary of the rows that are read, beside what the scope's
        own blocks hold."""
        config, element = self.lvlm.decoder.native.config, torch.finfo(self.dtype).bits // 8
        decoder = (
            len(self.asked.tree.ids)
            * element
            * (12 * config.hidden_size + 3 * config.intermediate_size)
        )
        return (
            super().forward_bytes(layout)
            + decoder
            + 2 * len(self.asked.rows) * self.lvlm.decoder.head.out_features * max(4, element)
        )

    def fingerprint(self) -> str:
        """Of the weights, the question, the classes and what is read for each, and the gates."""
        key = self.state_key()
        if self.memo.get("fingerprint", (None,))[0] != key:
            asked = self.asked
            read = (
                self.classes,
                asked.sequences,
                asked.rows.tolist(),
                asked.places.tolist(),
                asked.tokens.tolist(),
                self.merged,
            )
            told = repr(
                (self.lvlm.fingerprint(), asked.said, read, self.scope, self._gate_values())
            )
            self.memo["fingerprint"] = (key, hashlib.sha256(told.encode()).hexdigest()[:16])
        return self.memo["fingerprint"][1]


def classifier(
    lvlm: LVLM,
    classes: Sequence[str],
    *,
    question: str = "What is in the picture?",
    by: By = "name_ll",
    scope: Scope = "vision",
    length: Length | None = None,
    labels: Labels | None = None,
    orders: int | None = None,
    prior: bool = False,
    preprocess: Preprocess | None = None,
    check: bool = True,
) -> PromptClassifier:
    """A verified classifier for `classes`, read `by` name_ll (with `length`, mean unless told) or
    label_token (with `labels` and `orders`, 3 unless told): see `asking`, also for `prior`.

    For LLaVA-1.5 and InternVL; others tile or pack their pictures. `preprocess` replaces what the
    processor tells about pictures, but for their size.
    """
    if scope not in get_args(Scope) or by not in get_args(By):
        raise BadOption(
            "scope, by",
            (scope, by),
            f"one of {', '.join(get_args(Scope))}, and one of {', '.join(get_args(By))}",
        )
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise BadOption("classes", list(classes)[:8], "two different names or more")
    for name, given, way in (
        ("length", length, "name_ll"),
        ("labels", labels, "label_token"),
        ("orders", orders, "label_token"),
    ):
        if given is not None and by != way:
            raise BadOption(
                name, given, f"None where classes are read by {by}: it belongs to {way}"
            )
    tower = towers.find(lvlm.module)
    frame = _frame(lvlm, tower, preprocess)
    picture = Image.new("RGB", frame.size[::-1])
    prompts.render(
        lvlm.processor, question, lvlm.template
    )  # refused before it stands in a longer one

    @cache
    def prompt(text: str) -> list[int]:
        return prompts.prompt_ids(lvlm, picture, _rendered(lvlm, text))

    @cache
    def tokens(text: str, answer: str) -> list[int]:
        return prompts.answer_ids(lvlm, picture, _rendered(lvlm, text), answer, before=prompt(text))

    if by == "name_ll":
        asked = ask_names(
            classes, question, prompt, tokens, length="mean" if length is None else length
        )
    else:
        asked = ask_labels(
            classes, question, prompt, tokens, labels=labels, orders=3 if orders is None else orders
        )
    made = _view(lvlm, tower, asked, tuple(classes), frame, scope)
    if prior:
        with torch.no_grad():
            grey = made(torch.zeros(1, 3, *frame.size, device=made.device, dtype=made.dtype))[
                0
            ]  # 0 is grey once normalised
        made = _view(
            lvlm,
            tower,
            replace(asked, prior=grey, said={**asked.said, "prior": "grey"}),
            tuple(classes),
            frame,
            scope,
        )
    if check:
        verify_answers(made)
    return made


@torch.no_grad()
def verify_answers(model: PromptClassifier, *, seed: int = 0) -> None:
    """Compare the classifier's scores with those of plain native runs on noise; of many class
    names, the first few."""
    images = torch.randn(
        2, 3, *model.preprocess.size, generator=torch.Generator().manual_seed(seed)
    ).to(model.device, model.dtype)
    sequences = model.asked.sequences
    few = len(sequences) if model.asked.share is None else min(len(sequences), _CHECKED)
    mine, native = (
        model(images),
        (
            model.native(images)
            if few == len(sequences)
            else _native(model.lvlm, model.asked, images, few)
        ),
    )
    tolerance = TOLERANCE.get(model.dtype, 2e-4)
    compare(
        "logits",
        "the classes",
        mine[:, : native.shape[1]],
        native,
        tolerance,
        f"{native.shape[1]} classes",
    )


def _view(
    lvlm: LVLM,
    tower: Tower,
    asked: Asked,
    classes: tuple[str, ...],
    frame: Preprocess,
    scope: Scope,
) -> PromptClassifier:
    decoder, tree, module = lvlm.decoder, asked.tree, lvlm.module
    places = (tree.ids == module.config.image_token_id).nonzero()[:, 0]
    image = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)
    _check_place(lvlm, tree.trunk, len(tree.ids), image)
    grown = replace(decoder, blocks=tree.grown(decoder.blocks))
    rows = tuple(asked.rows.tolist())

    def at() -> At:
        return decoder.at(tree.positions[None].to(lvlm.device), decoder.head.weight[:1, :1])

    def enter(features: Tensor) -> Tensor:
        """Image tokens [B, N, D] among the words: what enters the decoder, [B, S, D]."""
        words = module.get_input_embeddings()(tree.ids.to(lvlm.device)).expand(
            len(features), -1, -1
        )
        return torch.cat(
            [words[:, : image.start], features.to(words), words[:, image.stop :]], dim=1
        )

    def speak(pooled: Tensor) -> Tensor:
        """Normed states of all rows, side by side [B, R * D] -> logits [B, C]."""
        return asked.scores(decoder.head(pooled.unflatten(-1, (len(rows), -1))))

    def describe(states: Tensor) -> Tensor:
        h = run(grown, enter(tower.features(states)), at())
        return speak(decoder.norm(h[:, list(rows)]).flatten(1))

    def native(images: Tensor) -> Tensor:
        return _native(lvlm, asked, images, len(asked.sequences))

    shared: dict[str, Any] = {
        "module": module,
        "name": lvlm.name,
        "family": lvlm.family,
        "preprocess": frame,
        "patch": tower.patch,
        "native": native,
        "classes": classes,
        "lvlm": lvlm,
        "asked": asked,
        "scope": scope,
    }
    if scope == "vision":
        readout: Readout = Described("words", refuse, rest=describe)
        return PromptClassifier(
            **shared,
            embed=tower.embed,
            layout_at=tower.layout_at,
            blocks=tower.blocks,
            readout=readout,
        )
    grid = image_tokens(module.config, {}, image.stop - image.start, frame.size).parts[
        -1
    ]  # a class token that is kept stands before it
    layout = PromptLayout(
        (grid.rows, grid.columns),
        image.stop - grid.tokens,
        suffix=len(tree.ids) - image.stop,
        places=at,
    )
    return PromptClassifier(
        **shared,
        embed=lambda images: enter(tower.tokens(images)),
        layout_at=lambda height, width: layout,
        blocks=grown.blocks,
        readout=Spoken("words", speak, norm=decoder.norm, rows=rows),
    )


@torch.no_grad()
def _native(lvlm: LVLM, asked: Asked, images: Tensor, few: int) -> Tensor:
    """Scores of classes by the native forward, one continuation at a time; with `few` of them, of
    the first classes only."""
    vocabulary = lvlm.decoder.head.out_features
    logits = torch.zeros(
        len(images), len(asked.rows), vocabulary, dtype=lvlm.dtype, device=lvlm.device
    )
    seen = {int(row): place for place, row in enumerate(asked.rows)}
    for number, sequence in enumerate(asked.sequences[:few]):
        ids = torch.tensor([sequence], device=lvlm.device).expand(len(images), -1)
        said = lvlm.module(
            input_ids=ids, pixel_values=images, attention_mask=torch.ones_like(ids), use_cache=False
        ).logits
        for place in range(len(sequence)):
            row = asked.tree.row(number, place)
            if row in seen:
                logits[:, seen[row]] = said[:, place]
    scores = asked.scores(logits)
    return scores if few == len(asked.sequences) or asked.share is None else scores[:, :few]


def _check_place(lvlm: LVLM, trunk: int, tokens: int, image: slice) -> None:
    if image.stop == image.start or image.stop > trunk:
        raise UnsupportedModel(
            lvlm.name,
            "its template puts the picture behind the question, or nowhere",
            "wrap it with a template that begins with {image}",
        )
    span, window = planted_span(lvlm.decoder.native.config), lvlm.decoder.window
    if span is not None and span != (image.start, image.stop):
        raise UnsupportedModel(
            lvlm.name,
            f"image tokens {image.start} to {image.stop}, where this planted model expects {span}",
            "use its own template",
        )
    if window is not None and tokens > window:
        raise UnsupportedModel(
            lvlm.name,
            f"{tokens} tokens do not fit its sliding window of {window}",
            "give fewer classes or a shorter question",
        )


def _frame(lvlm: LVLM, tower: Tower, given: Preprocess | None) -> Preprocess:
    """What is `given`, or what the processor does to pictures, as one tile of the tower's size."""
    if lvlm.processor is None:
        raise BadOption(
            "processor", None, "a model wrapped with its processor: wrap(module, processor)"
        )
    if given is not None:
        if given.size != tower.size:
            raise BadOption(
                "preprocess",
                f"size {given.size}",
                f"pictures of the size that the vision tower takes, {tower.size}",
            )
        return given
    config = json.loads(lvlm.processor.image_processor.to_json_string())
    if config.get("do_pad"):
        raise UnsupportedModel(
            lvlm.name,
            "its processor pads pictures to a square",
            "give preprocess= for pictures that need no padding",
        )
    return replace(preprocess_from_processor(config), size=tower.size)


def _rendered(lvlm: LVLM, text: str) -> str:
    return prompts.render(lvlm.processor, text, lvlm.template)
