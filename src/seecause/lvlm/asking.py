"""A class distribution from a prompt (CIGMA, section on vision-language models): two ways to ask,
none of which generates text.

    name_ll       s_c = mean (or sum) over tokens t of log p(name_c[t] | picture, question,
    name_c[<t]),     p(c) = softmax(s)
    label_token   options are listed as "A. name" lines; p(c) = softmax over the label tokens alone,
    at the row where the answer begins. The
                  list is turned round for each of `orders` prompts, so that no class owns the first
                  place, and log-probabilities are averaged

Either way, `prior` takes off the scores of a grey picture: some names are likely whatever there is
to see. Where the tokenizer has no letters or numbers, label_token takes names that are one token
each, and lists nothing.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption, BadPrompt
from seecause.lvlm.tree import Tree, plant
from seecause.types import wide, wide_dtype

By = Literal["name_ll", "label_token"]
Length = Literal["mean", "sum"]
Labels = Literal["letters", "numbers", "names"]
LISTED = "{question}\n{options}\nAnswer with the {kind} of the right option."


@dataclass(frozen=True, eq=False)
class Asked:
    """One sequence that asks about every class at once, and where the answers are read."""

    tree: Tree
    rows: Tensor  # [R], whose next word is read
    places: Tensor  # [n], for each thing that is read: where in `rows`
    tokens: Tensor  # [n], and which word
    share: (
        Tensor | None
        # [n, C] float64: what it counts for each class (name_ll); None: orders x classes
        # (label_token)
    )
    sequences: tuple[tuple[int, ...], ...]  # what the tree holds, one by one
    said: dict[str, Any]  # for protocols
    prior: Tensor | None = (
        None  # [C], taken off: what the model says to a picture that shows nothing
    )

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [B, R, V] of the words after `rows` -> logits [B, C] of classes."""
        found = self._scores(logits)
        return found if self.prior is None else found - self.prior.to(found)

    def _scores(self, logits: Tensor) -> Tensor:
        places, tokens = self.places.to(logits.device), self.tokens.to(logits.device)
        if self.share is not None:
            said = logits.log_softmax(dim=-1, dtype=wide_dtype(logits.dtype))[
                :, places, tokens
            ]  # [B, n]
            return said @ self.share.to(said)
        return (
            wide(logits[:, places, tokens])
            .unflatten(1, (len(self.sequences), -1))
            .log_softmax(dim=-1)
            .mean(dim=1)
        )


Tokens = Callable[
    [str, str], list[int]
]  # (question, answer) -> the answer's tokens, as they follow
Prompt = Callable[[str], list[int]]  # question -> the prompt's tokens


def ask_names(
    classes: Sequence[str],
    question: str,
    prompt: Prompt,
    tokens: Tokens,
    *,
    length: Length = "mean",
) -> Asked:
    """Every class name as the answer, teacher forced."""
    if length not in get_args(Length):
        raise BadOption("length", length, "mean or sum")
    before, names = prompt(question), [tokens(question, name) for name in classes]
    clash = next(
        (name for place, name in enumerate(classes) if names[place] in names[:place]), None
    )
    if clash is not None:
        raise BadPrompt(
            f"class {clash!r}",
            "another class has the same tokens",
            "give names that the tokenizer can tell apart",
        )
    sequences = [(*before, *name[:-1]) for name in names]  # the last token is read, never said
    tree = plant(sequences)
    read = [
        (tree.row(c, len(before) - 1 + t), token, c)
        for c, name in enumerate(names)
        for t, token in enumerate(name)
    ]
    share = torch.zeros(len(read), len(classes), dtype=torch.float64)
    for place, (_, _, c) in enumerate(read):
        share[place, c] = 1 if length == "sum" else 1 / len(names[c])
    return _asked(
        tree,
        [(row, token) for row, token, _ in read],
        share,
        sequences,
        {"by": "name_ll", "question": question, "length": length},
    )


def ask_labels(
    classes: Sequence[str],
    question: str,
    prompt: Prompt,
    tokens: Tokens,
    *,
    labels: Labels | None = None,
    orders: int = 3,
) -> Asked:
    """A list of options, and the likeliest label. `labels` None: the first kind that is one token
    each."""
    kind, chosen = _labels(classes, question, tokens, labels)
    if orders < 1:
        raise BadOption("orders", orders, "at least one order of the options")
    orders = 1 if kind == "names" else min(orders, len(classes))
    sequences, read = [], []
    for turn in range(orders):
        shift = turn * len(classes) // orders
        listed = [classes[(place + shift) % len(classes)] for place in range(len(classes))]
        text = question if kind == "names" else _listed(question, chosen, listed, kind)
        sequences.append(tuple(prompt(text)))
        words = [_one(tokens(text, label), label) for label in chosen]
        read.append([words[(c - shift) % len(classes)] for c in range(len(classes))])
    tree = plant(sequences)
    flat = [
        (tree.row(turn, len(sequences[turn]) - 1), word)
        for turn, words in enumerate(read)
        for word in words
    ]
    return _asked(
        tree,
        flat,
        None,
        sequences,
        {"by": "label_token", "question": question, "labels": kind, "orders": orders},
    )


def _asked(
    tree: Tree,
    read: list[tuple[int, int]],
    share: Tensor | None,
    sequences: Sequence[Sequence[int]],
    said: dict[str, Any],
) -> Asked:
    rows = sorted({row for row, _ in read})
    places = torch.tensor([rows.index(row) for row, _ in read])
    return Asked(
        tree,
        torch.tensor(rows),
        places,
        torch.tensor([word for _, word in read]),
        share,
        tuple(map(tuple, sequences)),
        said,
    )


def _labels(
    classes: Sequence[str], question: str, tokens: Tokens, wanted: Labels | None
) -> tuple[Labels, list[str]]:
    """The labels of all classes: different tokens, one each."""
    kinds: dict[Labels, list[str]] = {
        "letters": list(string.ascii_uppercase),
        "numbers": [str(place + 1) for place in range(len(classes))],
        "names": list(classes),
    }
    if wanted is not None and wanted not in kinds:
        raise BadOption("labels", wanted, f"one of {', '.join(kinds)}")
    for kind in [wanted] if wanted is not None else kinds:
        found = kinds[kind][: len(classes)]
        text = question if kind == "names" else _listed(question, found, classes, kind)
        if len(found) == len(classes) and _distinct(text, found, tokens):
            return kind, found
    tried = "letters, numbers or names" if wanted is None else wanted
    raise BadPrompt(
        f"{len(classes)} options by {tried}",
        "they are not one token each, and different ones",
        "ask by name_ll, or give fewer classes",
    )


def _distinct(text: str, labels: Sequence[str], tokens: Tokens) -> bool:
    try:
        found = [tuple(tokens(text, label)) for label in labels]
    except BadPrompt:  # a word that the tokenizer does not know
        return False
    return all(len(ids) == 1 for ids in found) and len(set(found)) == len(labels)


def _listed(question: str, labels: Sequence[str], names: Sequence[str], kind: str) -> str:
    options = "\n".join(f"{label}. {name}" for label, name in zip(labels, names, strict=False))
    return LISTED.format(question=question, options=options, kind=kind.removesuffix("s"))


def _one(ids: list[int], label: str) -> int:
    if len(ids) != 1:
        raise BadPrompt(
            f"label {label!r}",
            f"it is {len(ids)} tokens after this question",
            "ask by name_ll, or with other labels",
        )
    return ids[0]
