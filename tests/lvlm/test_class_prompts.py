"""What a classifier asks: prompts that share what they can, fingerprints, and what is refused."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from seecause.errors import BadInput, BadOption, NotDefined, UnsupportedModel
from seecause.lvlm.prompt_classifier import ask_labels, ask_names, sequence_tree
from tests.families.lvlm import tiny_lvlm
from tests.lvlm.classifiers import NAMES, QUESTION, asked, lvlm, pictures


def test_a_tree_holds_what_sequences_share_once():
    tree = sequence_tree([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6)])
    assert tree.ids.tolist() == [1, 2, 3, 4, 5, 3, 6] and tree.trunk == 2
    assert tree.positions.tolist() == [0, 1, 2, 3, 2, 2, 3]
    assert tree.branch.tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert [tree.row(2, place) for place in range(4)] == [0, 1, 5, 6]


def test_branches_hide_from_each_other():
    view, tree = lvlm("llava"), sequence_tree([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6)])
    block = tree.separated(view.blocks)[-1]
    at = view.decoder.at(tree.positions[None], view.decoder.head.weight[:1, :1])
    bias, few = block.bias(at, at), block.bias(at.take(torch.tensor([4, 1])), at)
    assert torch.equal(few, bias[:, :, [4, 1]])
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 5], [0, 1, 5, 6]]
    assert [(row == 0).nonzero()[:, 0].tolist() for row in bias[0, 0]] == seen


def test_names_and_labels_that_tokens_cannot_tell_apart_are_refused():
    many = [f"name{place}" for place in range(27)]
    with pytest.raises(BadInput, match="27 options by letters"):
        ask_labels(many, "what ?", lambda q: [1], lambda q, answer: [ord(answer)])
    with pytest.raises(BadInput, match="3 options by letters"):
        ask_labels(many[:3], "what ?", lambda q: [1], lambda q, answer: [1, 2])
    with pytest.raises(BadInput, match=r"class 'dog  '.*the same tokens"):
        ask_names(("dog", "dog  "), "what ?", lambda q: [1], lambda q, answer: [2])


def test_what_cannot_be_asked_is_refused(tmp_path):
    view, model, tiled = lvlm("llava"), asked("llava"), tiny_lvlm("llava_next")
    after = "{question} {image} ASSISTANT"
    behind = sc.lvlm.wrap(view.module, view.processor, template=after, check=False)
    bare = sc.lvlm.wrap(view.module, template="{image} {question}", check=False)
    other = sc.lvlm.wrap(tiled.module, tiled.processor)
    ask = sc.lvlm.classifier
    labels = {"question": QUESTION, "by": "label_token"}
    cases = {
        "a model wrapped with it": (BadOption, lambda: ask(bare, NAMES, question=QUESTION)),
        "^an empty question": (BadInput, lambda: ask(view, NAMES, question=" ")),
        "two different names": (BadOption, lambda: ask(view, ["cat"])),
        "by=": (BadOption, lambda: ask(view, NAMES, by="guess")),
        "words that the model's tokenizer does not know": (
            BadInput,
            lambda: ask(view, ["cat", "zebra"], question=QUESTION),
        ),
        "cuts images into tiles": (UnsupportedModel, lambda: ask(other, NAMES)),
        "after the question": (UnsupportedModel, lambda: ask(behind, NAMES[:2], **labels)),
        "or model.export": (NotDefined, lambda: sc.background.prune_heads(model, [(0, 0)])),
        "Use model.export": (NotDefined, lambda: sc.background.export(model, [(0, 0)], tmp_path)),
        "read by a language model": (NotDefined, lambda: sc.background.divprune(model, pictures())),
        "not for vision-language models that are asked": (
            NotDefined,
            lambda: sc.attribute(model, pictures(), method="caap"),
        ),
    }
    for message, (error, run) in cases.items():
        with pytest.raises(error, match=message):
            run()
