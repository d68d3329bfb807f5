"""True positives are drawn from right answers only: the share, the cap, the strata, the seed, and
what cannot be drawn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seecause.data import (
    Sample,
    answers,
    group_shares,
    open_data,
    true_positives,
)
from seecause.errors import BadInput, BadOption
from tests.helpers import view
from tests.tiny import tiny

LABELS = torch.tensor([0] * 90 + [1] * 10)
RIGHT = torch.ones(100).bool().index_fill(0, torch.tensor([0, 1, 95]), False)


def test_a_share_of_right_answers_without_replacement():
    chosen = true_positives(RIGHT, LABELS)
    assert (
        len(chosen) == 39 and len(set(chosen.tolist())) == 39 and RIGHT[chosen].all()
    )  # 40 % of 97
    assert torch.equal(chosen, chosen.sort().values) and torch.equal(
        chosen, true_positives(RIGHT, LABELS)
    )
    assert not torch.equal(chosen, true_positives(RIGHT, LABELS, seed=1))
    assert (
        len(true_positives(RIGHT, LABELS, cap=7)) == 7
        and len(true_positives(RIGHT, LABELS, share=1.0, cap=None)) == 97
    )


def test_every_right_answer_is_as_likely():
    counts = torch.zeros(100)
    for seed in range(400):
        counts[true_positives(RIGHT, LABELS, share=0.2, cap=None, seed=seed)] += 1
    expected = 400 * 19 / 97
    assert counts[~RIGHT].sum() == 0 and (counts[RIGHT] - expected).abs().max() < 5 * expected**0.5


def test_strata_keep_a_large_class_from_crowding_out_the_others():
    chosen = true_positives(RIGHT, LABELS, cap=8, stratified=True)
    assert LABELS[chosen].bincount().tolist() == [4, 4]
    assert LABELS[true_positives(RIGHT, LABELS, cap=20, stratified=True)].bincount().tolist() == [
        16,
        4,
    ]  # 40 % of nine is all of class 1
    assert LABELS[true_positives(RIGHT, LABELS, cap=None, stratified=True)].bincount().tolist() == [
        35,
        4,
    ]


@pytest.mark.parametrize(
    "options", [{"share": 0.0}, {"share": 1.1}, {"cap": 0}, {"cap": 1, "stratified": True}]
)
def test_odd_options_are_refused(options):
    with pytest.raises(BadOption, match=r"share|cap"):
        true_positives(RIGHT, LABELS, **options)


def test_nothing_right_is_said():
    with pytest.raises(BadInput, match="none of the 100 images right"):
        true_positives(torch.zeros(100).bool(), LABELS)
    with pytest.raises(BadInput, match=r"no image of class owl right \(1 such"):
        true_positives(LABELS == 0, LABELS, stratified=True, classes=["cat", "owl"])
    assert len(true_positives(LABELS == 0, LABELS)) == 36
    with pytest.raises(BadOption, match="labels"):
        true_positives(RIGHT, LABELS[:-1])


class Given:
    """Two groups of noise, labelled with what the model answers except where told otherwise."""

    name, fingerprint, classes = "given", "x", ()

    def __init__(self, model, *, wrong=(), labels=True):
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(70, 3, 32, 48, generator=generator)
        with torch.no_grad():
            self.said = model(model.preprocess.normalise(pictures)).argmax(dim=1)
        self.samples = [
            Sample(
                picture,
                (int(said) + (place in wrong)) % 10 if labels else None,
                group=(0, place % 2),
                id=f"{place}",
            )
            for place, (picture, said) in enumerate(zip(pictures, self.said, strict=True))
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


@pytest.fixture(scope="module")
def model():
    return view(tiny("timm_deit3", torch.float32), check=False)


def test_answers_are_in_the_order_of_the_data(model):
    data = Given(model, wrong={3, 69})
    result = answers(model, data)
    assert (
        result.logits.shape[0] == 70
        and (~result.right).nonzero()[:, 0].tolist() == [3, 69]
        and result.ids[69] == "69"
        and result.groups[3] == (0, 1)
    )
    with pytest.raises(BadOption, match="labels"):
        answers(model, Given(model, labels=False))


def test_answers_are_right_by_the_names_of_classes(model):
    """The data may number its classes in another order than the model does."""
    names = [f"class {place}" for place in range(10)]
    data = Given(model)
    data.samples = [replace(sample, label=9 - sample.label) for sample in data.samples]
    data.classes = tuple(names[::-1])
    named = view(tiny("timm_deit3", torch.float32), check=False)
    named.classes = tuple(names)
    assert answers(named, data).right.all()


def test_critters_have_groups_too(model):
    assert group_shares([sample.group for sample in open_data("critters:clean", limit=2)])
