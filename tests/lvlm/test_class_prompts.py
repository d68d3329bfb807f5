"""What a classifier asks: prompts that share what they can, fingerprints, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadInput, BadOption, NotDefined, UnsupportedModel
from seecause.lvlm.class_prompts import ask_labels, ask_names, refuse_pooled, sequence_tree
from seecause.models.decoder import causal
from seecause.types import wide
from tests.families.lvlm import tiny_lvlm
from tests.helpers import noise
from tests.lvlm.classifiers import NAMES, QUESTION, asked, lvlm, pictures


def test_a_tree_holds_what_sequences_share_once():
    tree = sequence_tree([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6)])
    assert tree.ids.tolist() == [1, 2, 3, 4, 5, 3, 6] and tree.trunk == 2
    assert tree.positions.tolist() == [0, 1, 2, 3, 2, 2, 3] and tree.branch.tolist() == [
        0,
        0,
        1,
        1,
        2,
        3,
        3,
    ]
    assert [tree.row(2, place) for place in range(4)] == [0, 1, 5, 6]


class Words:
    """A tokenizer that numbers words as they come; digits of a number are tokens of their own."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    def split(self, text):
        words = [part for word in text.split() for part in (word if word.isdigit() else [word])]
        return [self.ids.setdefault(word, len(self.ids)) for word in words]

    def prompt(self, question):
        return self.split(f"USER {question} ASSISTANT")

    def tokens(self, question, answer):
        return self.split(answer)


def test_names_are_read_word_by_word_behind_what_they_share():
    words, names = Words(), ("red cat", "dog", "red big cat")
    for length, share in (("mean", [1 / 2, 1 / 2, 1, 1 / 3, 1 / 3, 1 / 3]), ("sum", [1] * 6)):
        query = ask_names(names, "what ?", words.prompt, words.tokens, length=length)
        before = words.prompt("what ?")
        red, cat, dog, big = (words.ids[word] for word in ("red", "cat", "dog", "big"))
        assert query.sequences == ((*before, red), tuple(before), (*before, red, big))
        assert query.tokens.tolist() == [red, cat, dog, red, big, cat]
        rows = query.rows[query.places].tolist()  # the last word of the prompt, then each branch
        end = len(before) - 1
        assert rows == [end, end + 1, end, end, end + 2, end + 3]
        assert query.share.sum(dim=1).tolist() == pytest.approx(share)
        assert query.share.argmax(dim=1).tolist() == [0, 0, 1, 2, 2, 2]
        assert query.metadata == {"by": "name_ll", "question": "what ?", "length": length}
    with pytest.raises(BadInput, match=r"class 'dog  '.*the same tokens"):
        ask_names(("dog", "dog  "), "what ?", words.prompt, words.tokens)


@pytest.mark.parametrize(("orders", "shifts"), [(1, [0]), (2, [0, 2]), (3, [0, 1, 3]), (9, None)])
def test_options_are_turned_round_evenly(orders, shifts):
    words, names = Words(), ("cat", "dog", "fox", "hen", "pig")
    shifts = list(range(5)) if shifts is None else shifts
    query = ask_labels(names, "what ?", words.prompt, words.tokens, orders=orders)
    assert query.metadata == {
        **{"by": "label_token", "question": "what ?", "labels": "letters", "orders": len(shifts)}
    }
    ids = [words.ids[letter] for letter in "ABCDE"]
    read = query.tokens.reshape(len(shifts), 5).tolist()
    for shift, sequence, of_turn in zip(shifts, query.sequences, read, strict=True):
        listed = [names[(place + shift) % 5] for place in range(5)]
        options = " ".join(
            f"{letter}. {name}" for letter, name in zip("ABCDE", listed, strict=True)
        )
        text = f"what ? {options} Answer with the letter of the right option."
        assert list(sequence) == words.prompt(text)
        assert of_turn == [ids[listed.index(name)] for name in names]  # each class its own label


def test_labels_are_the_first_kind_that_is_one_token_each():
    words, many = Words(), [f"name{place}" for place in range(27)]
    asked = (words.prompt, words.tokens)
    for classes, labels, kind in (
        (many[:26], None, "letters"),
        (many[:9], "numbers", "numbers"),
        (many, None, "names"),  # too many for letters, and 10 is two tokens
        (many[:3], "names", "names"),
    ):
        query = ask_labels(classes, "what ?", *asked, labels=labels)
        assert query.metadata["labels"] == kind
        assert query.metadata["orders"] == (1 if kind == "names" else 3)
    first = ask_labels(many[:9], "what ?", *asked, labels="numbers").tokens[:9].tolist()
    assert first == [words.ids[digit] for digit in "123456789"]
    for labels, tried in (("numbers", "numbers"), ("letters", "letters")):
        with pytest.raises(BadInput, match=f"27 options by {tried}"):
            ask_labels(many, "what ?", *asked, labels=labels)
    with pytest.raises(BadInput, match="3 options by letters, numbers or names"):
        ask_labels(("a b", "c", "d"), "what ?", words.prompt, lambda q, a: [1, 2])
    with pytest.raises(BadOption, match="one of letters, numbers, names"):
        ask_labels(many[:3], "what ?", *asked, labels="roman")
    with pytest.raises(BadOption, match="orders=0"):
        ask_labels(many[:3], "what ?", *asked, orders=0)

    def later(question, answer):  # one token each in the first list, two in the others
        return words.split(answer) * (1 if "A. name0" in question else 2)

    with pytest.raises(BadInput, match=r"label 'A'.*2 tokens after this question"):
        ask_labels(many[:3], "what ?", words.prompt, later)


def test_no_pooled_features_stand_for_all_image_tokens():
    with pytest.raises(NotDefined, match="Use head scores"):
        refuse_pooled(torch.zeros(1, 4))


def test_the_question_and_the_gates_are_part_of_the_fingerprint():
    model = asked("llava")
    other = sc.lvlm.classifier(
        lvlm("llava"), NAMES, question="what is in the picture ?", check=False
    )
    assert len({model.fingerprint(), other.fingerprint(), asked("llava", "llm").fingerprint()}) == 3
    pairs = [
        sc.lvlm.classifier(lvlm("llava"), names, question=QUESTION, check=False)
        for names in (("cat", "dog"), ("cat", "blue"), ("dog", "cat"))
    ]
    assert (
        len({pair.query.sequences for pair in pairs}) == 1
    )  # the last token of a name is read, never said
    assert len({pair.fingerprint() for pair in pairs}) == 3
    whole = model.fingerprint()
    with sc.background.ablate(model, [(0, 0)]):
        assert model.fingerprint() != whole
    assert model.fingerprint() == whole


def test_branches_hide_from_each_other_by_one_table_in_a_run():
    view, tree, made = lvlm("llava"), sequence_tree([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6)]), []

    def own(rows, keys):
        made.append(len(rows.index))
        return causal(rows, keys)

    blocks = tree.separated([replace(block, additive=own) for block in view.blocks])
    at = view.decoder.at(tree.positions[None], view.decoder.head.weight[:1, :1])
    some = at.take(torch.tensor([4, 1]))
    result, few = [block.bias(at, at) for block in blocks], blocks[-1].bias(some, at)
    assert (
        made == [7]
        and all(torch.equal(one, result[0]) for one in result)
        and torch.equal(few, result[0][:, :, [4, 1]])
    )
    blind = replace(view.blocks[0], additive=lambda rows, keys: causal(rows, keys) - 1)
    (other,) = tree.separated([blind])  # a bias of its own has a table of its own
    assert torch.equal(other.bias(at, at), result[0] - 1)
    alone = sequence_tree([(1, 2, 3)])
    assert alone.separated([blind]) == [blind]  # nothing to part
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 5], [0, 1, 5, 6]]
    assert [(row == 0).nonzero()[:, 0].tolist() for row in result[0][0, 0]] == seen


class Counting:
    """A processor that counts how often it is called."""

    def __init__(self, processor):
        self.processor, self.calls = processor, 0

    def __getattr__(self, name):
        return getattr(self.processor, name)

    def __call__(self, **given):
        self.calls += 1
        return self.processor(**given)


@pytest.mark.parametrize(("by", "calls"), [("name_ll", 1 + 4), ("label_token", 3 * (1 + 3))])
def test_a_prompt_is_processed_once_and_each_answer_to_it_once(by, calls):
    counting = Counting(lvlm("internvl").processor)
    names = NAMES if by == "name_ll" else ("cat", "dog", "blue")
    sc.lvlm.classifier(
        replace(lvlm("internvl"), processor=counting), names, question=QUESTION, by=by, check=False
    )
    assert counting.calls == calls


def test_half_precision_is_widened_only_where_it_is_read(monkeypatch):
    logits, widened, models = (
        noise(2, 9, 40).bfloat16(),
        [],
        [asked("llava", by=by) for by in ("name_ll", "label_token")],
    )
    monkeypatch.setattr(
        "seecause.lvlm.class_prompts.wide", lambda x: (widened.append(list(x.shape)), wide(x))[1]
    )
    for model in models:
        some = logits[:, : len(model.query.rows)]
        assert_close(model.query.scores(some), model.query.scores(some.float()), atol=1e-6, rtol=0)
    assert widened == [[2, 9]] * 2  # three labels in each of three orders, and no vocabulary


def test_what_cannot_be_asked_is_refused(tmp_path):
    view, model, tiled = lvlm("llava"), asked("llava"), tiny_lvlm("llava_next")
    behind = sc.lvlm.wrap(
        view.module, view.processor, template="{question} {image} ASSISTANT", check=False
    )
    bare, wide = (
        sc.lvlm.wrap(view.module, template="{image} {question}", check=False),
        replace(model.preprocess, size=(32, 40)),
    )
    cases = {
        "a model wrapped with its processor": (
            BadOption,
            lambda: sc.lvlm.classifier(bare, NAMES, question=QUESTION, preprocess=model.preprocess),
        ),
        "the size that the vision tower takes, .32, 32.": (
            BadOption,
            lambda: sc.lvlm.classifier(view, NAMES, question=QUESTION, preprocess=wide),
        ),
        "length='sum'.*it belongs to name_ll": (
            BadOption,
            lambda: sc.lvlm.classifier(
                view, NAMES, question=QUESTION, by="label_token", length="sum"
            ),
        ),
        "labels='names'.*it belongs to label_token": (
            BadOption,
            lambda: sc.lvlm.classifier(view, NAMES, question=QUESTION, labels="names"),
        ),
        "orders=2.*it belongs to label_token": (
            BadOption,
            lambda: sc.lvlm.classifier(view, NAMES, question=QUESTION, orders=2),
        ),
        "an empty question": (
            BadInput,
            lambda: sc.lvlm.classifier(view, ("cat", "dog"), question=" ", by="label_token"),
        ),
        "^an empty question": (BadInput, lambda: sc.lvlm.classifier(view, NAMES, question=" ")),
        "two different names": (BadOption, lambda: sc.lvlm.classifier(view, ["cat"])),
        "words that the model's tokenizer does not know": (
            BadInput,
            lambda: sc.lvlm.classifier(view, ["cat", "zebra"], question=QUESTION),
        ),
        "not one token each": (
            BadInput,
            lambda: sc.lvlm.classifier(
                view, NAMES, question=QUESTION, by="label_token", labels="names"
            ),
        ),
        "scope, by": (BadOption, lambda: sc.lvlm.classifier(view, NAMES, scope="text")),
        "mean or sum": (
            BadOption,
            lambda: sc.lvlm.classifier(view, NAMES, question=QUESTION, length="max"),
        ),
        "tiled or packed": (
            UnsupportedModel,
            lambda: sc.lvlm.classifier(sc.lvlm.wrap(tiled.module, tiled.processor), NAMES),
        ),
        "behind the question": (
            UnsupportedModel,
            lambda: sc.lvlm.classifier(
                behind, ("cat", "dog", "blue"), question=QUESTION, by="label_token"
            ),
        ),
        "or lvlm.export": (NotDefined, lambda: sc.background.prune_heads(model, [(0, 0)])),
        "Use lvlm.export": (NotDefined, lambda: sc.background.export(model, [(0, 0)], tmp_path)),
        "read by a language model": (NotDefined, lambda: sc.background.divprune(model, pictures())),
        "not for vision-language models that are asked": (
            NotDefined,
            lambda: sc.attribute(model, pictures(), method="caap"),
        ),
    }
    for message, (error, run) in cases.items():
        with pytest.raises(error, match=message):
            run()
