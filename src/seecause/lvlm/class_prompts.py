"""A class distribution from a prompt (CIGMA, section on vision-language models): two ways to ask,
none of which generates text.

    name_ll      s_c = mean (or sum) over t of log p(name_c[t] | picture, question, name_c[<t]),
                 p(c) = softmax(s)
    label_token  options are listed as "A. name" lines; p(c) = softmax over the label tokens alone,
                 where the answer begins. The list is turned round for each of `orders` prompts, so
                 that no class owns the first place, and log-probabilities are averaged

Either way, `prior` takes off the scores of a grey picture: some names are likely whatever there is
to see. Where the tokenizer has no letters or numbers, label_token takes names that are one token
each, and lists nothing.

All continuations run as a single sequence, a tree; rows of a branch see the trunk and what comes
before them in their own branch:

    trunk | branch 1 | branch 2 | ...

The picture, and whatever all continuations share, runs once. In a causal decoder this is exact:
positions of a branch go on where the trunk ends, and no row sees what stands behind it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadInput, BadOption, NotDefined
from seecause.models.block import Block, same
from seecause.models.layout import At, TokenLayout
from seecause.models.view import Readout
from seecause.types import wide, wide_dtype

By = Literal["name_ll", "label_token"]
Length = Literal["mean", "sum"]
Labels = Literal["letters", "numbers", "names"]
LISTED = "{question}\n{options}\nAnswer with the {kind} of the right option."
PromptTokens = Callable[[str], list[int]]  # question -> the prompt's tokens
AnswerTokens = Callable[[str, str], list[int]]  # question, answer -> the answer's, as they follow


@dataclass(frozen=True, eq=False)
class SequenceTree:
    """Sequences that begin alike, side by side."""

    ids: Tensor  # [S]
    positions: Tensor  # [S], of each token in its own sequence
    branch: Tensor  # [S]: 0 in the trunk, then 1, 2, ... by sequence
    trunk: int  # how many tokens all share
    starts: tuple[int, ...]  # for each sequence, the row its branch begins at

    def row(self, sequence: int, place: int) -> int:
        """Which row the token at `place` of a sequence is."""
        return place if place < self.trunk else self.starts[sequence] + place - self.trunk

    def separated(self, blocks: Sequence[Block]) -> list[Block]:
        """A decoder's blocks for this tree: branches do not see each other."""
        if self.trunk == len(self.ids):
            return list(blocks)
        return [replace(block, additive=partial(self._bias, block)) for block in blocks]

    def _bias(self, block: Block, rows: At, keys: At) -> Tensor:
        """The block's own (causal) bias, and -inf between branches: [1, 1|H, R, K]. Blocks with the
        same bias share one table in each run."""
        memo_key = ("tree", block.additive)
        if memo_key not in keys.memo:
            device = keys.index.device
            every, branch = keys.take(torch.arange(len(self.ids), device=device)), self.branch
            own = block.bias(every, every)
            assert own is not None
            branch = branch.to(device)
            hidden = (branch != 0) & (branch != branch[:, None])
            keys.memo[memo_key] = own.masked_fill(hidden, -torch.inf)  # [1, 1|H, S, S]
        return keys.memo[memo_key][:, :, rows.index[:, None], keys.index]


def sequence_tree(sequences: Sequence[Sequence[int]]) -> SequenceTree:
    """The tree of several sequences of token ids."""
    trunk = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        trunk += 1
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
    """One sequence that asks about every class at once, and where the answers are read."""

    tree: SequenceTree
    rows: Tensor  # [R], whose next word is read
    places: Tensor  # [n], for each thing that is read: where in `rows`
    tokens: Tensor  # [n], and which word
    # [n, C] float64: what it counts for each class (name_ll); None: orders x classes (label_token)
    share: Tensor | None
    sequences: tuple[tuple[int, ...], ...]  # what the tree holds, one by one
    metadata: dict[str, Any]  # for protocols
    prior: Tensor | None = None  # [C], taken off: scores of a picture that shows nothing

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [B, R, V] of the words after `rows` -> logits [B, C] of classes."""
        scores = self._scores(logits)
        return scores if self.prior is None else scores - self.prior.to(scores)

    def _scores(self, logits: Tensor) -> Tensor:
        places, tokens = self.places.to(logits.device), self.tokens.to(logits.device)
        if self.share is not None:
            log_probs = logits.log_softmax(dim=-1, dtype=wide_dtype(logits.dtype))
            read = log_probs[:, places, tokens]  # [B, n]
            return read @ self.share.to(read)
        by_order = wide(logits[:, places, tokens]).unflatten(1, (len(self.sequences), -1))
        return by_order.log_softmax(dim=-1).mean(dim=1)


def ask_names(
    classes: Sequence[str],
    question: str,
    prompt: PromptTokens,
    tokens: AnswerTokens,
    *,
    length: Length = "mean",
) -> ClassQuery:
    """Every class name as the answer, teacher forced."""
    if length not in get_args(Length):
        raise BadOption("length", length, "mean or sum")
    before, names = prompt(question), [tokens(question, name) for name in classes]
    for place, name in enumerate(classes):
        if names[place] in names[:place]:
            raise BadInput(
                f"class {name!r}",
                "another class has the same tokens",
                "give names that the tokenizer can tell apart",
            )
    sequences = [(*before, *name[:-1]) for name in names]  # the last token is read, never said
    tree = sequence_tree(sequences)
    read, share = [], torch.zeros(sum(map(len, names)), len(classes), dtype=torch.float64)
    for c, name in enumerate(names):
        for t, token in enumerate(name):
            share[len(read), c] = 1 if length == "sum" else 1 / len(name)
            read.append((tree.row(c, len(before) - 1 + t), token))
    metadata = {"by": "name_ll", "question": question, "length": length}
    return _query(tree, read, share, sequences, metadata)


def ask_labels(
    classes: Sequence[str],
    question: str,
    prompt: PromptTokens,
    tokens: AnswerTokens,
    *,
    labels: Labels | None = None,
    orders: int = 3,
) -> ClassQuery:
    """A list of options, and the likeliest label. `labels` None: the first kind that is one token
    each."""
    kind, chosen = _labels(classes, question, tokens, labels)
    if orders < 1:
        raise BadOption("orders", orders, "at least one order of the options")
    orders = 1 if kind == "names" else min(orders, len(classes))
    sequences, words = [], []
    for turn in range(orders):
        shift = turn * len(classes) // orders
        listed = [classes[(place + shift) % len(classes)] for place in range(len(classes))]
        text = question if kind == "names" else _listed(question, chosen, listed, kind)
        sequences.append(tuple(prompt(text)))
        ids = [_single_token(tokens(text, label), label) for label in chosen]
        words.append([ids[(c - shift) % len(classes)] for c in range(len(classes))])
    tree = sequence_tree(sequences)
    ends = [tree.row(turn, len(sequence) - 1) for turn, sequence in enumerate(sequences)]
    read = [(row, word) for row, of_turn in zip(ends, words, strict=True) for word in of_turn]
    metadata = {"by": "label_token", "question": question, "labels": kind, "orders": orders}
    return _query(tree, read, None, sequences, metadata)


def _query(
    tree: SequenceTree,
    read: list[tuple[int, int]],
    share: Tensor | None,
    sequences: Sequence[tuple[int, ...]],
    metadata: dict[str, Any],
) -> ClassQuery:
    """`read`: row and word of everything that is read."""
    rows = sorted({row for row, _ in read})
    places = torch.tensor([rows.index(row) for row, _ in read])
    words = torch.tensor([word for _, word in read])
    return ClassQuery(tree, torch.tensor(rows), places, words, share, tuple(sequences), metadata)


def _labels(
    classes: Sequence[str], question: str, tokens: AnswerTokens, wanted: Labels | None
) -> tuple[Labels, list[str]]:
    """The labels of all classes: different tokens, one each."""
    kinds: dict[Labels, list[str]] = {
        "letters": list(string.ascii_uppercase),
        "numbers": [str(place + 1) for place in range(len(classes))],
        "names": list(classes),
    }
    if wanted is not None and wanted not in kinds:
        raise BadOption("labels", wanted, f"one of {', '.join(kinds)}")
    wanted_kinds: Sequence[Labels] = tuple(kinds) if wanted is None else (wanted,)
    for kind in wanted_kinds:
        labels = kinds[kind][: len(classes)]
        text = question if kind == "names" else _listed(question, labels, classes, kind)
        if len(labels) == len(classes) and _distinct(text, labels, tokens):
            return kind, labels
    tried = "letters, numbers or names" if wanted is None else wanted
    raise BadInput(
        f"{len(classes)} options by {tried}",
        "they are not one token each, and different ones",
        "ask by name_ll, or give fewer classes",
    )


def _distinct(text: str, labels: Sequence[str], tokens: AnswerTokens) -> bool:
    try:
        ids = [tuple(tokens(text, label)) for label in labels]
    except BadInput:  # a word that the tokenizer does not know
        return False
    return all(len(label) == 1 for label in ids) and len(set(ids)) == len(labels)


def _listed(question: str, labels: Sequence[str], names: Sequence[str], kind: str) -> str:
    options = "\n".join(f"{label}. {name}" for label, name in zip(labels, names, strict=False))
    return LISTED.format(question=question, options=options, kind=kind.removesuffix("s"))


def _single_token(ids: list[int], label: str) -> int:
    if len(ids) != 1:
        raise BadInput(
            f"label {label!r}",
            f"it is {len(ids)} tokens after this question",
            "ask by name_ll, or with other labels",
        )
    return ids[0]


@dataclass(frozen=True)
class PromptLayout(TokenLayout):
    """Words, the grid of image tokens, words again. Positions are the decoder's."""

    suffix: int = 0  # tokens behind the picture
    places: Callable[[], At] | None = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        return self.prefix + self.n_patches + self.suffix

    @property
    def patches(self) -> slice:
        return slice(self.prefix, self.prefix + self.n_patches)

    def at(self, device: torch.device | str = "cpu") -> At:
        assert self.places is not None
        at = self.places()
        return At(at.index, self, at.memo)


@dataclass(eq=False)
class TokenReadout(Readout):
    """Reads some rows of the decoder: the words they would say next."""

    words: tuple[int, ...] = ()  # rows that speak

    def read_prefix(self, layout: TokenLayout) -> tuple[int, ...]:
        return self.words


@dataclass(eq=False)
class StatesReadout(Readout):
    """Hands all states of a vision tower to the rest of the model. No single token is read, and no
    mean of them."""

    rest: Callable[[Tensor], Tensor] = same  # states [B, T, D] -> logits [B, C]

    @property
    def has_mean(self) -> bool:
        return True  # attention rows of all patches count alike

    def __call__(self, h: Tensor, layout: TokenLayout) -> Tensor:
        return self.rest(h)


def refuse_pooled(pooled: Tensor) -> Tensor:
    """In place of a head on pooled features, for methods that pool by themselves."""
    raise NotDefined(
        "this method",
        "a language model reads the answer from all image tokens, which no pooled features replace",
        "Use head scores",
    )
