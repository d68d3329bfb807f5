"""A vision-language model as a classifier: pictures in, a distribution over class names out,
through the language model.

    picture -> vision tower -> projector -> [words, image tokens, words] -> decoder
            -> the words that name classes                              (see `class_prompts`)

It is a view like any other, so audits, head scores, ablation and masks work on it as they are.
`scope` says whose heads are meant: those of the vision tower (`vision`, as in CIGMA) or of the
decoder (`llm`). Scores of the two are not comparable with each other: decoder heads also carry the
question. Pictures enter as one tile in the processor's own frame.

`export` writes it without some heads: the same architecture, zeros where the output projections
read those heads. transformers loads it like any other model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.engine.verify import TOLERANCE, compare
from seecause.errors import BadOption, NotDefined, UnsupportedModel
from seecause.files import digest, write_atomic, write_json
from seecause.lvlm import prompt as prompts
from seecause.lvlm.class_prompts import (
    By,
    ClassQuery,
    Labels,
    Length,
    PromptLayout,
    SequenceTree,
    StatesReadout,
    TokenReadout,
    ask_labels,
    ask_names,
    refuse_pooled,
)
from seecause.lvlm.model import LVLM
from seecause.models.base import Architecture
from seecause.models.block import columns, output_weight
from seecause.models.decoder import VisionTower, image_tokens, run, vision_tower
from seecause.models.layout import At, TokenLayout
from seecause.models.preprocess import Preprocess, preprocess_from_processor
from seecause.models.view import VisionModel

Scope = Literal["vision", "llm"]
CARD = "seecause-heads.json"
_CHECKED = 4  # continuations that the native model is asked about when a classifier is made


@dataclass(eq=False, kw_only=True, repr=False)
class PromptClassifier(VisionModel):
    """`model(images)` gives logits [B, C] of class names, through the native modules; `blocks` and
    `gates` are those of `scope`."""

    architecture: ClassVar[Architecture] = "prompt"

    lvlm: LVLM
    query: ClassQuery
    scope: Scope

    @property
    def readout_name(self) -> str:
        words = ", ".join(f"{key} {value}" for key, value in self.query.metadata.items())
        return f"{words}; heads of scope {self.scope}"

    def forward_bytes(self, layout: TokenLayout) -> int:
        """The decoder's run and the vocabulary of the rows that are read, beside what the scope's
        own blocks hold."""
        config, element = self.lvlm.decoder.native.config, torch.finfo(self.dtype).bits // 8
        row = element * (12 * config.hidden_size + 3 * config.intermediate_size)
        words = 2 * len(self.query.rows) * self.lvlm.decoder.head.out_features * max(4, element)
        return super().forward_bytes(layout) + len(self.query.tree.ids) * row + words

    def fingerprint(self) -> str:
        """Of the weights, the question, the classes and what is read for each, and the gates."""
        key = self.state_key()
        if self.memo.get("fingerprint", (None,))[0] != key:
            query = self.query
            read = [tensor.tolist() for tensor in (query.rows, query.places, query.tokens)]
            classes = (self.classes, query.sequences, self.merged)
            decides = (query.metadata, classes, read, self.scope, self._gate_values())
            self.memo["fingerprint"] = (key, digest(self.lvlm.fingerprint(), repr(decides)))
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
    """A verified classifier for `classes`, read `by` name_ll (with `length`, mean by default) or
    label_token (with `labels` and `orders`, 3 by default): see `class_prompts`, also for `prior`.

    For LLaVA-1.5 and InternVL; others tile or pack their pictures. `preprocess` replaces what the
    processor tells about pictures, but for their size.
    """
    _check_options(classes, by, scope, length=length, labels=labels, orders=orders)
    tower = _tower(lvlm)
    frame = _frame(lvlm, tower, preprocess)
    height, width = frame.size
    picture = Image.new("RGB", (width, height))

    @cache
    def rendered(text: str) -> str:
        return prompts.render(lvlm.processor, text, lvlm.template)

    @cache
    def prompt(text: str) -> list[int]:
        return prompts.prompt_ids(lvlm, picture, rendered(text))

    @cache
    def tokens(text: str, answer: str) -> list[int]:
        return prompts.answer_ids(lvlm, picture, rendered(text), answer, before=prompt(text))

    rendered(question)  # refused before it stands in a longer one

    if by == "name_ll":
        query = ask_names(
            classes, question, prompt, tokens, length="mean" if length is None else length
        )
    else:
        count = 3 if orders is None else orders
        query = ask_labels(classes, question, prompt, tokens, labels=labels, orders=count)
    model = _view(lvlm, tower, query, tuple(classes), frame, scope)
    if prior:
        grey = torch.zeros(1, 3, *frame.size, device=model.device, dtype=model.dtype)  # normalised
        with torch.no_grad():
            scores = model(grey)[0]
        query = replace(query, prior=scores, metadata={**query.metadata, "prior": "grey"})
        model = _view(lvlm, tower, query, tuple(classes), frame, scope)
    if check:
        verify_answers(model)
    return model


def _tower(lvlm: LVLM) -> VisionTower:
    """The vision tower of a model that can be asked for classes."""
    if lvlm.decoder.reads_prefix:
        reason = "its image tokens read the question, so one run cannot serve several questions"
        raise UnsupportedModel(lvlm.name, reason, "use LLaVA-1.5 or InternVL")
    return vision_tower(lvlm.module)


def _check_options(classes: Sequence[str], by: str, scope: str, **options: Any) -> None:
    if scope not in get_args(Scope) or by not in get_args(By):
        expected = f"one of {', '.join(get_args(Scope))}, and one of {', '.join(get_args(By))}"
        raise BadOption("scope, by", (scope, by), expected)
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise BadOption("classes", list(classes)[:8], "two different names or more")
    for name, value in options.items():
        way = "name_ll" if name == "length" else "label_token"
        if value is not None and by != way:
            expected = f"None where classes are read by {by}: it belongs to {way}"
            raise BadOption(name, value, expected)


@torch.no_grad()
def verify_answers(model: PromptClassifier, *, seed: int = 0) -> None:
    """Compare the classifier's scores with those of plain native runs on noise; of many class
    names, the first few."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, *model.preprocess.size)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    images = noise.to(model.device, model.dtype)
    query, scores = model.query, model(images)
    if query.share is None or len(query.sequences) <= _CHECKED:
        native = model.native(images)
    else:
        native = _native(model.lvlm, query, images, _CHECKED)
    checked = native.shape[1]
    tolerance = TOLERANCE.get(model.dtype, 2e-4)
    compare("logits", "the classes", scores[:, :checked], native, tolerance, f"{checked} classes")


def _view(
    lvlm: LVLM,
    tower: VisionTower,
    query: ClassQuery,
    classes: tuple[str, ...],
    frame: Preprocess,
    scope: Scope,
) -> PromptClassifier:
    decoder, tree, module = lvlm.decoder, query.tree, lvlm.module
    image = _image_span(lvlm, tree)
    separated = replace(decoder, blocks=tree.separated(decoder.blocks))
    rows = tuple(query.rows.tolist())

    def at() -> At:
        return decoder.at(tree.positions[None].to(lvlm.device), decoder.head.weight[:1, :1])

    def enter(features: Tensor) -> Tensor:
        """Image tokens [B, N, D] among the words: what enters the decoder, [B, S, D]."""
        words = module.get_input_embeddings()(tree.ids.to(lvlm.device))
        words = words.expand(len(features), -1, -1)
        parts = [words[:, : image.start], features.to(words), words[:, image.stop :]]
        return torch.cat(parts, dim=1)

    def speak(pooled: Tensor) -> Tensor:
        """Normed states of all rows, side by side [B, R * D] -> logits [B, C]."""
        return query.scores(decoder.head(pooled.unflatten(-1, (len(rows), -1))))

    def describe(states: Tensor) -> Tensor:
        h = run(separated, enter(tower.features(states)), at())
        return speak(decoder.norm(h[:, list(rows)]).flatten(1))

    shared: dict[str, Any] = {
        "module": module, "name": lvlm.name, "family": lvlm.family, "preprocess": frame,
        "patch": tower.patch, "classes": classes, "lvlm": lvlm, "query": query, "scope": scope,
        "native": lambda images: _native(lvlm, query, images, len(query.sequences)),
    }  # fmt: skip
    if scope == "vision":
        return PromptClassifier(
            **shared,
            embed=tower.embed,
            layout_at=tower.layout_at,
            blocks=tower.blocks,
            readout=StatesReadout("words", refuse_pooled, rest=describe),
        )
    places = torch.ones(image.stop - image.start, dtype=torch.bool)
    grids = image_tokens(module.config, {}, places, frame.size).parts
    grid = grids[-1]  # a class token that is kept stands before it
    before, behind = image.stop - grid.tokens, len(tree.ids) - image.stop
    layout = PromptLayout((grid.rows, grid.columns), before, suffix=behind, places=at)
    return PromptClassifier(
        **shared,
        embed=lambda images: enter(tower.tokens(images)),
        layout_at=lambda height, width: layout,
        blocks=separated.blocks,
        readout=TokenReadout("words", speak, norm=decoder.norm, words=rows),
    )


def _image_span(lvlm: LVLM, tree: SequenceTree) -> slice:
    """The image tokens of a question: in its trunk, where this model can have them."""
    places = (tree.ids == lvlm.module.config.image_token_id).nonzero()[:, 0]
    if not len(places) or places[-1] >= tree.trunk:
        raise UnsupportedModel(
            lvlm.name,
            "its template puts the picture behind the question, or nowhere",
            "wrap it with a template that begins with {image}",
        )
    image = slice(int(places[0]), int(places[-1]) + 1)
    prompts.check_span(lvlm, image, len(tree.ids))
    return image


@torch.no_grad()
def _native(lvlm: LVLM, query: ClassQuery, images: Tensor, count: int) -> Tensor:
    """Scores of classes by the native forward, one continuation at a time; with `count` of them, of
    the first classes only."""
    shape = (len(images), len(query.rows), lvlm.decoder.head.out_features)
    logits = torch.zeros(shape, dtype=lvlm.dtype, device=lvlm.device)
    place_of = {int(row): place for place, row in enumerate(query.rows)}
    for number, sequence in enumerate(query.sequences[:count]):
        ids = torch.tensor([sequence], device=lvlm.device).expand(len(images), -1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images}
        native = lvlm.module(**inputs, use_cache=False).logits
        for place in range(len(sequence)):
            row = query.tree.row(number, place)
            if row in place_of:
                logits[:, place_of[row]] = native[:, place]
    scores = query.scores(logits)
    whole = count == len(query.sequences) or query.share is None
    return scores if whole else scores[:, :count]


def _frame(lvlm: LVLM, tower: VisionTower, preprocess: Preprocess | None) -> Preprocess:
    """`preprocess`, or what the processor does to pictures, as one tile of the tower's size."""
    if lvlm.processor is None:
        raise BadOption(
            "processor", None, "a model wrapped with its processor: wrap(module, processor)"
        )
    if preprocess is not None:
        if preprocess.size != tower.size:
            expected = f"pictures of the size that the vision tower takes, {tower.size}"
            raise BadOption("preprocess", f"size {preprocess.size}", expected)
        return preprocess
    config = json.loads(lvlm.processor.image_processor.to_json_string())
    if config.get("do_pad"):
        raise UnsupportedModel(
            lvlm.name,
            "its processor pads pictures to a square",
            "give preprocess= for pictures that need no padding",
        )
    return replace(preprocess_from_processor(config), size=tower.size)


def export(
    model: PromptClassifier, heads: Iterable[tuple[int, int]], folder: str | Path, *, note: str = ""
) -> Path:
    """Write the whole model, its processor, a card and a README to `folder`, without `heads` of the
    classifier's scope. Only the weights that change are copied."""
    from seecause.background._export import check_place
    from seecause.background.heads import checked_heads

    removed = checked_heads(model, heads)
    if model.gates is not None:
        raise NotDefined(
            "export",
            "this model has gates on its heads, which a file would not have",
            "Leave the `ablate` block first",
        )
    folder = Path(folder)
    check_place(folder, CARD)
    module, state = model.lvlm.module, dict(model.lvlm.module.state_dict())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for layer in sorted({layer for layer, _ in removed}):
        block = model.blocks[layer]
        weight = output_weight(block.native)
        gone = [head for at, head in removed if at == layer]
        edited = weight.detach().clone()
        edited[:, columns(gone, weight.shape[1] // block.heads).to(weight.device)] = 0
        state[names[id(weight)]] = edited
    with torch.no_grad():
        module.save_pretrained(folder, state_dict=state)
    model.lvlm.processor.save_pretrained(folder)
    card = {
        "form": "zeroed", "model": model.name, "scope": model.scope, "removed": removed,
        "layers": [block.heads for block in model.blocks], "query": model.query.metadata,
        "template": model.lvlm.template, "classes": list(model.classes),
        "fingerprint": model.lvlm.fingerprint(), "seecause": __version__,
    }  # fmt: skip
    write_json(folder / CARD, card)
    write_atomic(folder / "README.md", _readme(card, type(module).__name__, note))
    return folder


def _readme(card: dict[str, Any], kind: str, note: str) -> str:
    from seecause.background._export import readme

    part = "vision tower" if card["scope"] == "vision" else "language model"
    template = "" if card["template"] is None else f", template={card['template']!r}"
    how = (
        f"from transformers import AutoProcessor, {kind}\n"
        f"model = {kind}.from_pretrained(FOLDER)\n"
        "processor = AutoProcessor.from_pretrained(FOLDER)\n\n"
        "# or\nimport seecause as sc\n"
        f"lvlm = sc.lvlm.load(FOLDER{template})"
    )
    more = [f"It came from weights {card['fingerprint']} (seecause {card['seecause']})."]
    more.insert(0, f"The heads are those of its {part}.")
    return readme(card, note, how=how, more=more)
