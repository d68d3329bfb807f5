"""Does the audit say what is true?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from scipy.stats import binomtest
from torch.testing import assert_close
from torchvision.models import resnet18

import seecause as sc
from seecause.background import HeadScores, Swapped, select
from seecause.background._heads_audit import Audit, heads_audit as audit
from seecause.background._outcomes import (
    outcomes,
)
from seecause.background.erase import Erasure
from seecause.background.gains import Gains
from seecause.background.images import (
    Pictures,
    answered_right,
)
from seecause.background.studies import StudySetup, ablation_table
from seecause.data.dataset import Hole
from seecause.errors import BadInput, BadOption
from seecause.report.heads_audit import verdict


def test_the_audit_has_every_look(model, cases):
    result = audit(model, cases, steps=2)
    assert list(result.gains) == [
        "discovered masks, mean",
        "discovered masks, grey",
        "true masks, mean",
        "true masks, grey",
        "exact swap",
    ]
    assert (
        result.trusted == "exact swap"
        and result.overlap.shape == (len(cases),)
        and result.groups is not None
    )
    big = result.gains["exact swap"].bir
    assert result.worst(1) == [int((big + 1e-3 * result.gains["exact swap"].big).argmax())]
    shown = result.examples
    assert list(shown.versions) == ["picture", "no background", "no object", "elsewhere"]
    assert shown.pictures.ids == tuple(cases.ids[place] for place in result.worst(6))
    assert shown.erasure.masks is not None and shown.logits["picture"].shape == (1, 6, 8)
    masked = {name: gains.bir_ratio_of_means for name, gains in result.gains.items()}
    del masked["exact swap"]
    assert result.shown is result.erasures[max(masked, key=masked.get)]
    assert result.accuracy == float(
        (model(cases.images).argmax(dim=1) == cases.labels).double().mean()
    )
    found = sc.background.discover_masks(model, cases.images, steps=2)
    assert_close(result.overlap, sc.background.iou(found, cases.truth))
    moved = model(cases.swapped.background).argmax(dim=1) != model(cases.images).argmax(dim=1)
    assert torch.equal(result.flips, moved)
    options = result.protocol["options"]
    assert options == {
        "masks": "both", "fills": "mean, grey", "temperature": 1.0, "count": "right", "steps": 2,
    }  # fmt: skip
    bare = audit(model, replace(cases, truth=None, swapped=None, labels=None, groups=()), steps=2)
    assert (
        list(bare.gains) == ["discovered masks, mean", "discovered masks, grey"]
        and bare.accuracy is None
        and bare.flips is None
    )
    json.dumps(result.protocol)


def told(big: dict[str, float], flips: float | None = None, count: int = 24) -> list[str]:
    """The verdict on made-up gains with FIG 0.3."""
    gains = {
        name: Gains(
            torch.full((count,), 0.3, dtype=torch.float64),
            torch.full((count,), value, dtype=torch.float64),
            0.0,
        )
        for name, value in big.items()
    }
    images = torch.zeros(count, 3, 2, 2)
    masks = Erasure(None, Swapped(images))
    truth = Erasure(sc.background.Masks.oracle(torch.ones(count, 2, 2, dtype=torch.bool)), "mean")
    searched = Erasure(replace(truth.masks, protocol={"source": "discovered"}), "mean")
    looks = {
        name: (
            masks if name == "exact swap" else searched if name.startswith("discovered") else truth
        )
        for name in big
    }
    moved = None if flips is None else torch.arange(count) < count * flips
    pictures = Pictures("c", tuple(map(str, range(count))), images)
    return verdict(Audit(pictures, torch.zeros(count, 2), looks, gains, flips=moved))


def test_the_verdict_says_when_there_is_nothing_to_repair():
    assert told({"true masks, mean": 0.001, "exact swap": 0.0}, flips=0.0)[0].startswith(
        "Nothing to repair"
    )
    assert told({"true masks, mean": 0.001})[0].startswith("Nothing to repair")


def test_the_verdict_is_not_fooled_by_a_small_number():
    words = told({"true masks, mean": 0.001, "exact swap": 0.6}, flips=1.0)
    assert (
        words[0] == "The model answers mostly from the background."
        and "24 of 24 answers" in words[1]
    )
    assert any(
        line.startswith("Do not be fooled by BIR 0.003 with true masks, mean") for line in words
    )
    assert told({"true masks, mean": 0.1})[0] == "The model answers partly from the background."
    assert (
        told({"true masks, mean": 0.001, "exact swap": 0.01}, flips=0.75)[0]
        == "The model answers mostly from the background."
    )  # flips count too


def test_true_masks_are_believed_before_discovered_ones():
    words = told({"discovered masks, mean": 0.2, "true masks, mean": 0.02})  # BIR 0.40 and 0.06
    assert words[0].startswith("Nothing to repair") and any(
        line.startswith("BIR 0.40 with discovered masks, mean is no proof") for line in words
    )
    assert told({"discovered masks, mean": 0.2})[0].startswith("Perhaps")  # alone, no more
    assert not any(
        "no proof" in line
        for line in told({"discovered masks, mean": 0.05, "true masks, mean": 0.04})
    )


def test_a_difference_between_fills_that_is_none_fools_nobody():
    assert not any(
        "fooled" in line for line in told({"true masks, mean": 0.03, "true masks, grey": 0.04})
    )  # BIR 0.09 and 0.12
    assert any(
        "fooled" in line for line in told({"true masks, mean": 0.03, "true masks, grey": 0.9})
    )


def test_means_are_those_of_right_answers(model, cases):
    labels = model(cases.images).argmax(dim=1)
    labels[0] = (labels[0] + 1) % model.n_classes
    wrong = replace(cases, labels=labels, holes=(Hole("a", "cut"),))
    result = audit(model, wrong, masks="oracle")
    assert result.holes == wrong.holes and answered_right(model, replace(wrong, labels=None))
    assert answered_right(model, wrong, share=1.0).ids == cases.ids[1:]
    assert result.counted.tolist() == [False, *[True] * (len(cases) - 1)] and len(
        result.gains["exact swap"].big
    ) == len(cases)
    assert_close(result.means["exact swap"].big, result.gains["exact swap"].big[1:])
    assert (
        audit(model, wrong, masks="oracle", count="all").means["exact swap"].bir_ratio_of_means
        == result.gains["exact swap"].bir_ratio_of_means
    )
    low, high = result.means["exact swap"].interval
    words = " ".join(verdict(result))
    assert (
        low < result.means["exact swap"].bir_ratio_of_means < high
        and f"95 % interval {low:.2f} to {high:.2f}" in words
        and "5 right answers" in words
    )
    assert (
        audit(
            model,
            replace(cases, labels=(model(cases.images).argmax(dim=1) + 1) % 8),
            masks="oracle",
        ).counted
        is None
    )  # none is right: all count


def test_the_finding_is_that_of_right_answers():
    fig = torch.full((80,), 0.3, dtype=torch.float64)
    big = torch.tensor([0.6, 0.6, 0.6, 0.001], dtype=torch.float64).repeat(20)
    images = torch.zeros(80, 3, 2, 2)
    result = Audit(
        Pictures("c", tuple(map(str, range(80))), images),
        torch.zeros(80, 2),
        {"exact swap": Erasure(None, Swapped(images))},
        {"exact swap": Gains(fig, big, 0.0)},
        counted=torch.tensor([False, False, False, True]).repeat(20),
    )
    assert result.background_share == pytest.approx(0.001 / 0.301) and result.finding == "hardly"
    of_all = replace(result, counted=None)
    assert of_all.background_share == pytest.approx(1.801 / 3.001) and of_all.finding == "mostly"


def test_the_finding_heeds_its_interval():
    """One answer in ten hangs on the background: 0.09 of all, between 0.02 and 0.18."""
    fig, big = torch.full((40,), 0.3).double(), torch.zeros(40).double()
    big[:4] = 0.3
    images, masks = torch.zeros(40, 3, 2, 2), torch.ones(40, 2, 2, dtype=torch.bool)
    truth = {"true masks, grey": Erasure(sc.background.Masks.oracle(masks), "grey")}
    ids = tuple(map(str, range(40)))
    result = Audit(
        Pictures("c", ids, images),
        torch.zeros(40, 2),
        truth,
        {"true masks, grey": Gains(fig, big, 0.0)},
    )
    assert result.interval[0] < 0.1 < result.interval[1] and result.finding == "cannot tell"
    assert told({"true masks, mean": 0.1}, count=19)[0].startswith("Too few")
    assert told({"true masks, mean": 0.1}, count=20)[0].startswith("The model answers partly")
    assert told({"true masks, mean": 0.25}, count=20)[0].startswith("The model answers partly")
    assert told({"true masks, mean": 0.3}, count=20)[0].startswith("The model answers mostly")


@pytest.mark.parametrize(
    ("interval", "share", "expected"),
    [
        ((0.0, 0.099), 0.05, "hardly"),
        ((0.05, 0.1), 0.08, "cannot tell"),
        ((0.1, 0.1), 0.1, "partly"),
        ((0.2, 0.7), 0.49, "partly"),
        ((0.2, 0.7), 0.5, "mostly"),
    ],
)
def test_the_background_matters_from_a_tenth_and_mostly_from_a_half(
    monkeypatch, interval, share, expected
):
    images, gains = torch.zeros(2, 3, 2, 2), Gains(torch.ones(2), torch.ones(2), 0.0)
    swap = {"exact swap": Erasure(None, Swapped(images))}
    result = Audit(
        Pictures("c", ("a", "b"), images), torch.zeros(2, 2), swap, {"exact swap": gains}
    )
    monkeypatch.setattr(Audit, "interval", interval)
    monkeypatch.setattr(Audit, "background_share", share)
    assert result.finding == expected


def test_the_interval_is_that_of_flips_where_they_are_more():
    images, flips = torch.zeros(40, 3, 2, 2), torch.arange(40) < 10
    gains = Gains(torch.full((40,), 0.9).double(), torch.full((40,), 0.1).double(), 0.0)
    result = Audit(
        Pictures("c", tuple(map(str, range(40))), images),
        torch.zeros(40, 2),
        {"exact swap": Erasure(None, Swapped(images))},
        {"exact swap": gains},
        flips=flips,
    )
    exact = binomtest(10, 40).proportion_ci(method="exact")
    assert result.interval == pytest.approx((exact.low, exact.high), abs=1e-6)
    assert result.background_share == 0.25 and result.finding == "partly"
    few = replace(result, flips=torch.arange(40) < 1)
    assert few.background_share == pytest.approx(0.1) and few.interval == pytest.approx((0.1, 0.1))


def test_a_temperature_is_that_of_masks_and_gains(model, cases):
    warm = audit(model, cases, temperature=3.0, steps=2, fills=("grey",))
    masks = sc.background.discover_masks(model, cases.images, steps=2, temperature=3.0)
    for name, given in (("discovered masks, grey", masks), ("true masks, grey", cases.oracle)):
        gains = sc.background.information_gains(
            model, cases.images, given, temperature=3.0, baseline="grey"
        )
        assert_close(warm.gains[name].big, gains.big)


def test_masks_of_the_models_own_are_searched_as_told_and_stand_alone(model, cases, tmp_path):
    search = {"steps": 1, "grid": 4, "cache": tmp_path}
    result = audit(model, cases, masks="discovered", fills=("blur",), **search)
    assert list(result.gains) == ["discovered masks, blur", "exact swap"]
    assert result.protocol["options"] == {
        "masks": "discovered", "fills": "blur", "temperature": 1.0, "count": "right", "steps": 1,
        "mask options": "grid=4",
    }  # fmt: skip
    found = sc.background.discover_masks(model, cases.images, steps=1, grid=4)
    assert_close(result.overlap, sc.background.iou(found, cases.truth))
    truth = audit(model, cases, masks="oracle", fills=("grey",), count="all")
    assert truth.counted is None and truth.overlap is None
    assert truth.protocol["options"] == {
        "masks": "oracle", "fills": "grey", "temperature": 1.0, "count": "all",
    }  # fmt: skip


def test_of_pictures_that_hang_on_the_background_alone_the_strongest_is_the_worst():
    fig, big = torch.zeros(3).double(), torch.tensor([0.1, 0.5, 0.2]).double()
    images = torch.zeros(3, 3, 2, 2)
    erasures = {"exact swap": Erasure(None, Swapped(images))}
    result = Audit(
        Pictures("c", tuple("abc"), images),
        torch.zeros(3, 2),
        erasures,
        {"exact swap": Gains(fig, big, 0.0)},
    )
    assert result.worst(2) == [1, 2] and result.shown is None
    alone = replace(result, counted=torch.tensor([True, False, False]))
    assert alone.interval == (1.0, 1.0)  # of one picture


def test_one_right_answer_has_no_interval(model, cases):
    labels = (model(cases.images).argmax(dim=1) + 1) % model.n_classes
    labels[0] = model(cases.images[:1]).argmax()
    words = " ".join(verdict(audit(model, replace(cases, labels=labels), masks="oracle")))
    assert "1 right answer, too few for an interval" in words and "nan" not in words


def test_bad_input_is_named(model, cases):
    with pytest.raises(BadOption, match="right, all"):
        audit(model, cases, count="some")
    with pytest.raises(BadOption, match="has none, so give masks='discovered'"):
        audit(model, replace(cases, truth=None), masks="oracle")
    with pytest.raises(BadOption, match="none for sample 1"):
        audit(
            model, replace(cases, groups=(cases.groups[0], None, *cases.groups[2:])), masks="oracle"
        )
    wrong = replace(cases, labels=(model(cases.images).argmax(dim=1) + 1) % model.n_classes)
    with pytest.raises(BadInput, match="none of the 6 images"):
        answered_right(model, wrong)
    labels = model(cases.images).argmax(dim=1)
    labels[0] = 7 if labels[0] != 7 else 6
    with pytest.raises(BadInput, match="no image of class"):
        answered_right(model, replace(cases, labels=labels), stratified=True)
    with pytest.raises(BadOption, match="masks"):
        outcomes(
            model,
            cases,
            [[]],
            [Erasure(sc.background.Masks.oracle(torch.ones(6, 32, 32, dtype=torch.bool)), "mean")],
        )
    with pytest.raises(BadOption, match="1 to 12 heads"):
        ablation_table("k", StudySetup(model, cases, cases, cases.oracle, top=13))
    with pytest.raises(BadOption, match="up to 12"):
        HeadScores(torch.ones(3, 4)).top(13)


def test_cigma_takes_any_baseline(model, cases):
    swap = select("cigma", model, cases.images, cases.labels, baseline=cases.swapped)
    grey = select(
        "cigma",
        model,
        cases.images,
        cases.labels,
        masks=cases.oracle,
        baseline="grey",
        guard="none",
    )
    assert swap.protocol["baseline"] == "swapped" and swap.protocol["masks"] == "none"
    assert_close(
        grey.value, sc.background.score(model, cases.images, cases.oracle, baseline="grey").value
    )


def test_the_gap_between_backgrounds_is_measured_of_a_convolution_too(cases):
    """Of mixed_same, each picture is answered as it should be; of mixed_rand, none."""
    staged = sc.wrap(resnet18(num_classes=8).eval(), mean=(0.5,) * 3, std=(0.5,) * 3, size=96)
    answers = staged(cases.images.float()).argmax(dim=1)
    same, other = (replace(cases, labels=labels) for labels in (answers, (answers + 1) % 8))
    result = audit(staged, other, masks="oracle", fills=("grey",), same=same)
    assert result.gap == (1.0, len(cases), len(cases))


def test_the_gap_says_how_many_pictures_of_each_variant_it_is_of(model, cases):
    ids = tuple(f"00_dog/fg_n{place}_bg_{place}.JPEG" for place in range(6))
    cut, lost = Hole(ids[5], "cut"), Hole("00_dog/fg_n9_bg_9.JPEG", "lost")
    same = replace(cases.take(torch.arange(4)), ids=ids[:4], holes=(cut,))
    mixed = replace(cases, ids=ids, holes=(lost,))
    result = audit(model, mixed, masks="oracle", fills=("grey",), same=same)
    assert result.gap[1:] == (4, 5) and result.holes == (lost, cut)
    assert audit(model, mixed, masks="oracle", fills=("grey",)).holes == (lost,)


def test_options_that_would_be_ignored_or_fail_late_are_refused_first(model, cases):
    with pytest.raises(BadOption, match=r"fills.*mean, grey, blur, noise"):
        audit(model, "folder:/nowhere", fills=("gray",))  # before anything is read
    with pytest.raises(BadOption, match="fills"):
        audit(model, cases, fills=())
    with pytest.raises(BadOption, match="masks='oracle' searches none"):
        audit(model, cases, masks="oracle", grid=16)
