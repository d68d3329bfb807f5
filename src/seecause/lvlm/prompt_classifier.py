"""A vision-language model as a classifier (CIGMA): images in, logits of class names out, without
generating text.

    image -> vision tower -> projector -> [words, image tokens, words] -> decoder
          -> the words that name classes

Two ways to read the classes:

    name_ll      s_c = mean over t of log p(name_c[t] | image, question, name_c[<t])
    label_token  options are listed as "A. name" lines; log-softmax over the letters alone, where
                 the answer begins. The list is rotated for each of three prompts, so that no class
                 is always first, and log-probabilities are averaged

It is a view like any other, so audits, head scores, ablation and masks work on it as they are; its
heads are those of the vision tower. Images enter as one tile in the processor's own frame.

All prompts and names run as a single sequence, a tree; rows of a branch see the trunk and what
comes before them in their own branch:

    trunk | branch 1 | branch 2 | ...

The image, and whatever all branches share, runs once. In a causal decoder this is exact: positions
of a branch continue where the trunk ends, and no row sees what follows it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from seecause import __version__
from seecause.engine.canary import prove_export
from seecause.engine.verify import compare, random_images, tolerance_of
from seecause.errors import BadInput, BadOption, NotDefined, UnsupportedModel
from seecause.files import digest, write_atomic, write_json
from seecause.lvlm import prompt as prompts
from seecause.lvlm.model import LVLM, load
from seecause.models.base import Architecture
from seecause.models.block import (
    At,
    Block,
    TokenLayout,
    columns,
    output_weight,
    same,
    wide,
    wide_dtype,
)
from seecause.models.decoder import VisionTower, native_images, run, vision_tower
from seecause.models.preprocess import Preprocess, preprocess_from_processor
from seecause.models.view import Readout, VisionModel
from seecause.options import checked

By = Literal["name_ll", "label_token"]
LISTED = "{question}\n{options}\nAnswer with the letter of the right option."
ORDERS = 3  # of the options in a list
CARD = "seecause-heads.json"
_CHECKED = 4  # number of names for which a new classifier is compared with the native model


# Prompts and names as one sequence.


@dataclass(frozen=True, eq=False)
class SequenceTree:
    """Sequences that begin alike, side by side."""

    ids: Tensor  # [S]
    positions: Tensor  # [S], of each token in its own sequence
    branch: Tensor  # [S]: 0 in the trunk, then 1, 2, ... by sequence
    trunk: int  # how many tokens all share
    starts: tuple[int, ...]  # for each sequence, the first row of its branch

    def row(self, sequence: int, place: int) -> int:
        """The row of the token at index `place` of a sequence."""
        return place if place < self.trunk else self.starts[sequence] + place - self.trunk

    def separated(self, blocks: Sequence[Block]) -> list[Block]:
        """A decoder's blocks for this tree: branches do not see each other."""
        return [replace(block, additive=partial(self._bias, block)) for block in blocks]

    def _bias(self, block: Block, rows: At, keys: At) -> Tensor:
        """The block's own (causal) bias, and -inf between branches: [1, 1|H, R, K]."""
        own, branch = block.bias(rows, keys), self.branch.to(keys.index.device)
        assert own is not None
        theirs = branch[keys.index]
        hidden = (theirs != 0) & (theirs != branch[rows.index][:, None])
        return own.masked_fill(hidden, -torch.inf)


def sequence_tree(sequences: Sequence[Sequence[int]]) -> SequenceTree:
    """The tree of several sequences of token ids."""
    shared = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))
    trunk = len(list(shared))
    ids, positions, branch, starts = list(sequences[0][:trunk]), list(range(trunk)), [0] * trunk, []
    for number, sequence in enumerate(sequences, start=1):
        rest = sequence[trunk:]
        starts.append(len(ids))
        ids += rest
        positions += range(trunk, trunk + len(rest))
        branch += [number] * len(rest)
    return SequenceTree(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(branch), trunk, tuple(starts)
    )


@dataclass(frozen=True, eq=False)
class ClassQuery:
    """A sequence that asks for all classes at once, and the rows that give their scores."""

    by: By
    question: str
    tree: SequenceTree
    rows: Tensor  # [R], rows whose next-token probabilities are read
    places: Tensor  # [n], for each value that is read: its index in `rows`
    tokens: Tensor  # [n], and its token
    # [n, C] float64: its share of each class (name_ll); None: orders x classes (label_token)
    share: Tensor | None
    sequences: tuple[tuple[int, ...], ...]  # what the tree holds, one by one

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [B, R, V] of the words after `rows` -> logits [B, C] of classes."""
        places, tokens = self.places.to(logits.device), self.tokens.to(logits.device)
        if self.share is not None:
            log_probs = logits.log_softmax(dim=-1, dtype=wide_dtype(logits.dtype))
            read = log_probs[:, places, tokens]  # [B, n]
            return read @ self.share.to(read)
        by_order = wide(logits[:, places, tokens]).unflatten(1, (len(self.sequences), -1))
        return by_order.log_softmax(dim=-1).mean(dim=1)


PromptTokens = Callable[[str], list[int]]  # question -> the prompt's tokens
AnswerTokens = Callable[[str, str], list[int]]  # question, answer -> the answer's, as they follow


def ask_names(
    classes: Sequence[str], question: str, prompt: PromptTokens, tokens: AnswerTokens
) -> ClassQuery:
    """Every class name as the answer, teacher forced."""
    before, names = prompt(question), [tokens(question, name) for name in classes]
    for place, name in enumerate(classes):
        if names[place] in names[:place]:
            raise BadInput(
                f"class {name!r}",
                "another class has the same tokens",
                "give names that the tokenizer can tell apart",
            )
    sequences = [(*before, *name[:-1]) for name in names]  # the last token is read, not fed
    read, share = [], torch.zeros(sum(map(len, names)), len(classes), dtype=torch.float64)
    for c, name in enumerate(names):
        for t, token in enumerate(name):
            share[len(read), c] = 1 / len(name)
            read.append((c, len(before) - 1 + t, token))
    return _query("name_ll", question, sequences, read, share)


def ask_labels(
    classes: Sequence[str], question: str, prompt: PromptTokens, tokens: AnswerTokens
) -> ClassQuery:
    """A list of options, and the likeliest letter, in several orders of the options."""
    letters = string.ascii_uppercase[: len(classes)]
    sequences, read = [], []
    turns = min(ORDERS, len(classes))
    for turn in range(turns):
        shift = turn * len(classes) // turns
        listed = [*classes[shift:], *classes[:shift]]
        options = "\n".join(f"{a}. {name}" for a, name in zip(letters, listed, strict=False))
        text = LISTED.format(question=question, options=options)
        sequences.append(tuple(prompt(text)))
        ids = [tuple(tokens(text, letter)) for letter in letters]
        if len(set(ids)) < len(classes) or max(map(len, ids)) > 1:
            raise BadInput(
                f"{len(classes)} options by letters",
                "they are not one token each, and different ones",
                "use by='name_ll', or give fewer classes",
            )
        last = len(sequences[turn]) - 1
        read += [(turn, last, ids[listed.index(name)][0]) for name in classes]
    return _query("label_token", question, sequences, read, None)


def _query(
    by: By,
    question: str,
    sequences: Sequence[tuple[int, ...]],
    read: Sequence[tuple[int, int, int]],
    share: Tensor | None,
) -> ClassQuery:
    """`read`: sequence, index and next token of every value that is read."""
    tree = sequence_tree(sequences)
    every = torch.tensor([(tree.row(number, place), word) for number, place, word in read])
    rows, places = every[:, 0].unique(return_inverse=True)
    return ClassQuery(by, question, tree, rows, places, every[:, 1], share, tuple(sequences))


# The view.


@dataclass(eq=False)
class StatesReadout(Readout):
    """A readout that passes all states of a vision tower to the rest of the model."""

    rest: Callable[[Tensor], Tensor] = same  # states [B, T, D] -> logits [B, C]

    @property
    def has_mean(self) -> bool:
        return True  # attention rows of all patches count alike

    def __call__(self, h: Tensor, layout: TokenLayout) -> Tensor:
        return self.rest(h)


def refuse_pooled(pooled: Tensor) -> Tensor:
    """Raises; stands in for a head on pooled features, for methods that pool by themselves."""
    raise NotDefined(
        "this method",
        "a language model reads the answer from all image tokens, which no pooled features replace",
        "Use head scores",
    )


@dataclass(eq=False, kw_only=True, repr=False)
class PromptClassifier(VisionModel):
    """A vision-language model as a classifier, returned by `classifier`.

    `model(images)` gives logits [B, C] of class names, through the native modules; `blocks` and
    `gates` are those of the vision tower.

    Attributes:
        lvlm: The vision-language model.
        query: The question, the class names, and how their logits are read.

    Example:
        >>> import torch, seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> model = sc.lvlm.classifier(lvlm, ["quillow", "mossling"])
        >>> type(model).__name__, model.classes
        ('PromptClassifier', ('quillow', 'mossling'))
    """

    architecture: ClassVar[Architecture] = "prompt"

    lvlm: LVLM
    query: ClassQuery

    @property
    def readout_name(self) -> str:
        return f"by {self.query.by}, question {self.query.question}"

    def forward_bytes(self, layout: TokenLayout) -> int:
        """The decoder's run and the vocabulary of the rows that are read, beside what the vision
        tower holds."""
        config, element = self.lvlm.decoder.native.config, torch.finfo(self.dtype).bits // 8
        row = element * (12 * config.hidden_size + 3 * config.intermediate_size)
        words = 2 * len(self.query.rows) * self.lvlm.decoder.head.out_features * max(4, element)
        return super().forward_bytes(layout) + len(self.query.tree.ids) * row + words

    def weights_digest(self, name: str = "") -> str:
        """A digest of all that decides predictions but gates: the weights, the question and the
        classes."""
        query, words = self.query, self.query.tokens.tolist()
        asked = (query.by, query.question, self.classes, query.sequences, words)
        return digest(self.lvlm.fingerprint(), repr(asked))

    def export(
        self, heads: Iterable[tuple[int, int]], folder: str | Path, *, note: str = ""
    ) -> Path:
        """Write the whole model without some heads: the same architecture, with zeros where the
        output projections read those heads. transformers loads it like any other model.

        Args:
            heads: Pairs (layer, head) of the vision tower.
            folder: A new or empty folder; gets the model, its processor, a card and a README.
            note: A paragraph for the README.

        Returns:
            The folder.
        """
        from seecause.background._export import check_place, removable, rendered

        removed, folder = removable(self, heads), Path(folder)
        check_place(folder, CARD)
        lvlm, state = self.lvlm, dict(self.lvlm.module.state_dict())
        names = {id(parameter): name for name, parameter in lvlm.module.named_parameters()}
        for layer in sorted({layer for layer, _ in removed}):
            weight, count = output_weight(self.blocks[layer].native), self.blocks[layer].heads
            gone = columns([h for at, h in removed if at == layer], weight.shape[1] // count)
            edited = weight.detach().clone()
            edited[:, gone.to(weight.device)] = 0
            state[names[id(weight)]] = edited
        with torch.no_grad():
            lvlm.module.save_pretrained(folder, state_dict=state)
        lvlm.processor.save_pretrained(folder)
        card = {
            "form": "zeroed", "model": self.name, "removed": removed, "by": self.query.by,
            "layers": [block.heads for block in self.blocks], "question": self.query.question,
            "template": lvlm.template, "classes": list(self.classes),
            "fingerprint": lvlm.fingerprint(), "seecause": __version__,
        }  # fmt: skip
        write_json(folder / CARD, card)
        write_atomic(folder / "README.md", rendered("heads.md.j2", card=card, note=note))
        del state
        prove_export(self, removed, folder, lambda: self._reloaded(folder))
        return folder

    def _reloaded(self, folder: Path) -> PromptClassifier:
        where = {"device": self.device, "template": self.lvlm.template}
        lvlm = load(str(folder), **where, check=False)
        query = self.query
        return classifier(lvlm, self.classes, question=query.question, by=query.by, check=False)


@checked
def classifier(
    lvlm: LVLM,
    classes: Sequence[str],
    *,
    question: str = "What is in the picture?",
    by: By = "name_ll",
    check: bool = True,
) -> PromptClassifier:
    """Make a classifier of LLaVA-1.5, InternVL, or a LLaVA-NeXT whose `image_grid_pinpoints` hold
    one tile; other families tile or pack their images.

    Args:
        lvlm: A model returned by `sc.lvlm.load` or `sc.lvlm.wrap`.
        classes: Class names.
        question: What is asked about the image.
        by: "name_ll" reads the mean log-likelihood of each name's tokens; "label_token" lists the
            classes and reads the letter.
        check: Whether to compare its logits with those of native runs.

    Returns:
        A `PromptClassifier`, which takes normalised images [B, 3, H, W].

    Raises:
        ViewMismatch: If native runs give other logits.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> model = sc.lvlm.classifier(lvlm, ["quillow", "mossling"], question="What is this?")
        >>> model(torch.zeros(1, 3, 96, 96)).shape
        torch.Size([1, 2])
    """
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise BadOption("classes", list(classes)[:8], "two different names or more")
    tower = vision_tower(lvlm.module)
    frame = _frame(lvlm, tower)
    height, width = frame.size
    blank = Image.new("RGB", (width, height))

    @cache
    def rendered(text: str) -> str:
        return prompts.render(lvlm.processor, text, lvlm.template)

    @cache
    def prompt(text: str) -> list[int]:
        return prompts.native_inputs(lvlm, blank, rendered(text))["input_ids"][0].tolist()

    @cache
    def tokens(text: str, answer: str) -> list[int]:
        return prompts.answer_ids(lvlm, blank, rendered(text), answer, before=prompt(text))

    rendered(question)  # raises before longer questions contain it
    ask = ask_names if by == "name_ll" else ask_labels
    query = ask(classes, question, prompt, tokens)
    model = _view(lvlm, tower, query, tuple(classes), frame)
    if check:
        verify_answers(model)
    return model


@torch.no_grad()
def verify_answers(model: PromptClassifier) -> None:
    """Compare the classifier's logits with those of plain native runs on noise; of many class
    names, the first few."""
    images, query = random_images(model), model.query
    count = len(query.sequences) if query.share is None else min(_CHECKED, len(query.sequences))
    native, scores = _native(model.lvlm, query, images, count), model(images)
    checked = native.shape[1]
    near = tolerance_of(model.dtype)
    compare("logits", "the classes", scores[:, :checked], native, near, f"{checked} classes")


def _view(
    lvlm: LVLM,
    tower: VisionTower,
    query: ClassQuery,
    classes: tuple[str, ...],
    frame: Preprocess,
) -> PromptClassifier:
    decoder, tree, module = lvlm.decoder, query.tree, lvlm.module
    places = (tree.ids == module.config.image_token_id).nonzero()[:, 0]
    if not len(places) or places[-1] >= tree.trunk:
        raise UnsupportedModel(
            lvlm.name,
            "its template puts the image after the question, or nowhere",
            "wrap it with a template that begins with {image}",
        )
    image = slice(int(places[0]), int(places[-1]) + 1)
    prompts.check_span(lvlm, image, len(tree.ids))
    separated = replace(decoder, blocks=tree.separated(decoder.blocks))

    def describe(states: Tensor) -> Tensor:
        """States [B, T, D] of the vision tower -> logits [B, C] of classes."""
        features = tower.features(states)
        words = module.get_input_embeddings()(tree.ids.to(lvlm.device))
        words = words.expand(len(features), -1, -1)
        parts = [words[:, : image.start], features.to(words), words[:, image.stop :]]
        at = decoder.at(tree.positions[None].to(lvlm.device), decoder.head.weight[:1, :1])
        h = run(separated, torch.cat(parts, dim=1) * decoder.multiplier, at)
        return query.scores(decoder.logits(decoder.norm(h[:, query.rows.to(h.device)])))

    return PromptClassifier(
        module=module,
        name=lvlm.name,
        family=lvlm.family,
        preprocess=frame,
        patch=tower.patch,
        classes=classes,
        lvlm=lvlm,
        query=query,
        native=lambda images: _native(lvlm, query, images, len(query.sequences)),
        embed=tower.embed,
        layout_at=tower.layout_at,
        blocks=tower.blocks,
        readout=StatesReadout("words", refuse_pooled, rest=describe),
    )


@torch.no_grad()
def _native(lvlm: LVLM, query: ClassQuery, images: Tensor, count: int) -> Tensor:
    """Logits of classes by the native forward, one of the first `count` sequences at a time."""
    shape = (len(images), len(query.rows), lvlm.decoder.head.out_features)
    logits = torch.zeros(shape, dtype=lvlm.dtype, device=lvlm.device)
    shown = native_images(lvlm.module.config, images)
    for number, sequence in enumerate(query.sequences[:count]):
        ids = torch.tensor([sequence], device=lvlm.device).expand(len(images), -1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **shown}
        native = lvlm.module(**inputs, use_cache=False).logits
        rows = torch.tensor([query.tree.row(number, place) for place in range(len(sequence))])
        read = torch.isin(rows, query.rows)
        logits[:, torch.searchsorted(query.rows, rows[read])] = native[:, read]
    scores = query.scores(logits)
    return scores if query.share is None else scores[:, :count]


def _frame(lvlm: LVLM, tower: VisionTower) -> Preprocess:
    """The preprocessing of images by the processor, as one tile of the tower's size."""
    if lvlm.processor is None:
        raise BadOption("processor", None, "a model wrapped with it: wrap(module, processor)")
    config = json.loads(lvlm.processor.image_processor.to_json_string())
    tiles = getattr(lvlm.module.config, "image_grid_pinpoints", None)
    if tiles != config.get("image_grid_pinpoints"):
        expected = f"{tiles}, as in the model's config"
        raise BadOption("image_grid_pinpoints", config.get("image_grid_pinpoints"), expected)
    if config.get("do_pad") and tiles is None:  # one tile is not padded
        raise UnsupportedModel(
            lvlm.name,
            "its processor pads images to a square",
            "set lvlm.processor.image_processor.do_pad = False, and crop images instead",
        )
    return replace(preprocess_from_processor(config), size=tower.size)
