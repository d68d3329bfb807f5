"""What removals do to pictures: as an ablated model does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    Gains,
    HeadScores,
    _outcomes,
    ablate,
    information_gains,
    random_sets,
    score,
    select,
)
from seecause.background._outcomes import (
    background_gaps,
    curve,
    logits_without,
    outcomes,
    over_groups,
    readable_twins,
)
from seecause.background.erase import Erasure
from seecause.background.images import (
    Pictures,
    imagenet9_model,
)
from seecause.data.batch import group_shares
from seecause.data.dataset import Hole
from seecause.engine import forks
from seecause.errors import BadOption, NotDefined
from seecause.metrics import background_gap, in9_predictions
from seecause.metrics.accuracy import calibration, group_accuracy, in9_right
from seecause.metrics.sanity import copied_view
from tests.tiny import scramble


def test_removals_are_those_of_the_ablated_model(model, cases):
    sets = [[], [(0, 1), (2, 3)], [(1, 0)]]
    result = logits_without(model, cases.images, sets)
    for place, heads in enumerate(sets):
        with ablate(model, heads):
            assert_close(result[place], model(cases.images), atol=1e-10, rtol=0)


def test_equal_sets_run_once_and_memory_decides_chunks_only(model, cases, monkeypatch):
    sets = [[(1, 0)], [], [(2, 1), (1, 3)], [], [(1, 0)], [(2, 2)]]
    whole = logits_without(model, cases.images, sets)
    assert torch.equal(whole[0], whole[4]) and torch.equal(whole[1], whole[3])
    rows, rest = list[tuple[int, int]](), forks._gated_rest
    monkeypatch.setattr(
        forks,
        "_gated_rest",
        lambda m, h, at, gates, start, content: (
            rows.append((start, len(h))) or rest(m, h, at, gates, start, content)
        ),
    )
    with sc.budget(2 * model.forward_bytes(model.layout)):
        assert_close(logits_without(model, cases.images, sets), whole, atol=1e-12, rtol=0)
    assert sum(count for start, count in rows if start == 1) == 2 * len(
        cases
    )  # two different sets begin in block 1
    assert sum(count for start, count in rows if start == 2) == len(cases) and max(
        count for _, count in rows
    ) < 2 * len(cases)


def test_outcomes_are_the_gains_and_flips_of_the_ablated_model(model, cases):
    looks = [Erasure(cases.oracle, "grey"), Erasure(None, cases.swapped)]
    heads = [(0, 2), (2, 1)]
    result = outcomes(model, cases, [heads], looks)[0]
    with ablate(model, heads):
        gains = information_gains(model, cases.images, cases.oracle, baseline="grey")
        answers, others = (
            model(cases.images).argmax(dim=1),
            model(cases.swapped.background).argmax(dim=1),
        )
    assert_close(result.gains["true masks, grey"].big, gains.big, atol=1e-10, rtol=0)
    assert_close(result.gains["true masks, grey"].fig, gains.fig, atol=1e-10, rtol=0)
    assert result.accuracy == pytest.approx(float((answers == cases.labels).double().mean()))
    assert result.flips == pytest.approx(float((answers != others).double().mean()))
    assert (
        outcomes(model, cases, [heads], looks[:1])[0].flips == result.flips
    )  # also where no look is a swap


def test_the_curve_starts_at_the_whole_model_and_has_a_random_band(model, cases):
    scores = select("weight-norm", model, cases.images, cases.labels)
    result = curve(model, cases, scores, [0, 3], [Erasure(None, cases.swapped)], draws=4)
    assert result.chosen[0].heads == [] and sorted(result.chosen[1].heads) == sorted(scores.top(3))
    assert len(result.random[1]) == 4 and all(len(draw.heads) == 3 for draw in result.random[1])
    few = HeadScores(torch.where(torch.arange(12).view(3, 4) < 2, 1.0, -1.0).double())
    assert [len(draw.heads) for draw in curve(model, cases, few, [8], draws=2).random[0]] == [
        2,
        2,
    ]  # as many as really went
    assert result.band("accuracy")[0] == (pytest.approx(result.chosen[0].accuracy), 0.0)
    drawn = torch.tensor([draw.nll for draw in result.random[1]], dtype=torch.float64)
    mean, deviation = result.band("NLL")[1]
    assert mean == pytest.approx(float(drawn.mean())) and deviation > 0
    assert deviation == pytest.approx(float(drawn.std(correction=0)))
    assert result.at(3) is result.chosen[1] and result.ks == [0, 3]
    assert [draw.heads for draw in result.random[1]] == random_sets(model, 3, draws=4)
    weights = group_shares(cases.groups)
    done = []
    again = curve(model, cases, scores, [3], draws=1, seed=2, train=weights, progress=done.append)
    assert again.random[0][0].heads == random_sets(model, 3, draws=1, seed=2)[0]
    assert "groups weighted as in training" in again.chosen[0].numbers() and sum(done) == 6


def test_more_pictures_than_are_measured_together(model, cases, monkeypatch):
    looks = [Erasure(cases.oracle, "grey"), Erasure(None, cases.swapped)]
    whole, done = outcomes(model, cases, [[], [(1, 2)]], looks), []
    monkeypatch.setattr(_outcomes, "_TOGETHER", 4)
    parts = outcomes(model, cases, [[], [(1, 2)]], looks, progress=done.append)
    assert done == [4, 2]
    for first, second in zip(whole, parts, strict=True):
        assert first.numbers() == pytest.approx(second.numbers()) and first.heads == second.heads


def test_numbers_are_those_of_the_logits(model, cases):
    labels = cases.labels.clone()
    labels[:2] = model(cases.images[:2]).argmax(dim=1)  # some are right
    pictures = replace(cases, labels=labels)
    result = outcomes(model, pictures, [[]], [Erasure(None, cases.swapped)])[0]
    p = model(cases.images).softmax(dim=1)
    assert result.nll == pytest.approx(float(-p[range(6), labels].log().mean()))
    right = p.argmax(dim=1) == labels
    assert result.worst == group_accuracy(right, cases.groups).worst
    assert result.ece == pytest.approx(calibration(p.log(), labels).error)
    numbers = result.numbers()
    assert list(numbers)[:3] == ["removed", "accuracy", "worst group"]
    gains = result.gains["exact swap"]
    assert numbers == {
        "removed": 0, "accuracy": float(right.double().mean()), "worst group": result.worst,
        "mean of groups": group_accuracy(right, cases.groups).unweighted_average,
        "NLL": result.nll, "ECE": result.ece, "flips": result.flips,
        "FIG, exact swap": float(gains.fig.mean()), "BIG, exact swap": float(gains.big.mean()),
        "BIR, exact swap": gains.bir_ratio_of_means,
    }  # fmt: skip
    bare = outcomes(model, replace(cases, labels=None, swapped=None, groups=()), [[(0, 1)]])[0]
    assert bare.numbers() == {"removed": 1}  # what the data does not tell is not there
    still = replace(result, gains={"x": Gains(torch.zeros(2), torch.zeros(2), 0.0)})
    assert still.numbers()["BIR, x"] == 0.5


def test_averages_over_groups_have_their_own_names(model, cases, caplog):
    labels = model(cases.images[:4]).argmax(dim=1)
    labels[1] = (labels[1] + 1) % model.n_classes  # one wrong answer, in group (0, 1)
    four = replace(
        cases.take(torch.arange(4)), groups=((0, 0), (0, 1), (1, 0), (1, 1)), labels=labels
    )
    train = {(0, 0): 0.7, (0, 1): 0.1, (1, 1): 0.2, (5, 5): 0.0}  # the last never occurred
    result = outcomes(model, four, [[]], train=train)[0].numbers()
    assert result["mean of groups"] == pytest.approx(0.75) and result[
        "groups weighted as in training"
    ] == pytest.approx(0.9)
    assert result["worst group"] == result["worst of groups (0, 1) and (1, 0)"] == 0
    assert not caplog.records
    assert (
        "groups weighted as in training"
        not in outcomes(model, four, [[], []], train={(2, 0): 0.9, (0, 0): 0.1})[0].numbers()
    )  # was not tested
    assert [
        record.getMessage()
        for record in caplog.records
        if "no picture of group (2, 0)," in record.getMessage()
    ]
    assert (
        "worst of groups (0, 1) and (1, 0)" not in outcomes(model, cases, [[]])[0].numbers()
    )  # Critters have more groups


def test_the_worst_of_two_groups_is_of_those_where_object_and_background_disagree():
    groups = [(0, 0)] * 4 + [(0, 1)] * 4 + [(1, 0)] * 4 + [(1, 1)] * 4
    for wrong, worst in (((1, 4, 8, 9, 12, 13, 14), 0.5), ((0, 1, 4, 5, 6, 8), 0.25)):
        right = torch.tensor([place not in wrong for place in range(16)])
        averages = over_groups(group_accuracy(right, groups))
        assert averages["worst of groups (0, 1) and (1, 0)"] == worst


def test_nine_answers_are_those_of_the_release(tmp_path):
    mapping = torch.tensor([*range(9), -1, 3, -1, 0, 8])
    module = scramble(
        VisionTransformer(
            img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=14
        )
    )
    model = sc.wrap(module.double(), mean=(0.5,) * 3, std=(0.5,) * 3, size=16, check=False)
    images = torch.randn(
        40, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    labels = torch.arange(40) % 9
    ten = imagenet9_model(model, mapping)
    assert ten.memo is not model.memo  # what is kept of its answers is not kept of the others'
    assert (
        ten(images).argmax(dim=1) == in9_predictions(model(images), mapping) % 10
    ).all() and ten.n_classes == 10
    for lacking in (mapping.clamp_min(0), torch.where(mapping == 5, 4, mapping)):
        with pytest.raises(BadOption, match="classes for each of the nine"):
            imagenet9_model(model, lacking)
    swapped = torch.tensor([1, 0, *range(2, 9), -1, 3, -1, 0, 8])
    assert (
        len({model.fingerprint(), ten.fingerprint(), imagenet9_model(model, swapped).fingerprint()})
        == 3
    )  # masks are kept by it
    with ablate(ten, [(0, 0)]):
        assert (
            ten.fingerprint().startswith(model.fingerprint())
            and ten.fingerprint() != imagenet9_model(model, mapping).fingerprint()
        )
    for edit in (
        lambda: sc.background.prune_heads(ten, [(0, 0)]),
        lambda: sc.background.export(ten, [(0, 0)], tmp_path / "out"),
        lambda: copied_view(ten),
    ):
        with pytest.raises(
            NotDefined, match="14 classes of VisionTransformer count as 10 answers"
        ):  # a copy would have the 14
            edit()
    same, random = (
        Pictures(name, tuple(map(str, range(20))), images[part], labels[part])
        for name, part in (("s", slice(20)), ("r", slice(20, 40)))
    )
    heads = [(0, 1), (1, 2)]
    with ablate(model, heads):
        right = in9_right(model(images), labels, mapping)
    whole = in9_right(model(images), labels, mapping)
    expected = [background_gap(answers[:20], answers[20:]) for answers in (whole, right)]
    assert background_gaps(ten, same, random, [[], heads]) == pytest.approx(expected)


def test_the_gap_is_of_objects_that_both_variants_show(cases):
    names = tuple(f"00_dog/fg_n{i}_bg_{i}.JPEG" for i in range(6))
    same = replace(cases.take(torch.arange(5)), ids=names[:5], holes=(Hole(names[5], "cut"),))
    elsewhere = tuple(name.replace("_bg_", "_bg_x") for name in names)
    random = replace(cases.take(torch.arange(6)), ids=elsewhere)
    first, second = readable_twins(same, random)
    assert first.ids == same.ids and second.ids == elsewhere[:5]
    assert torch.equal(second.images, random.images[:5])


def test_a_share_is_one_of_all_heads_also_after_a_screen(model, cases):
    result = score(
        model,
        cases.images,
        cases.oracle,
        baseline="grey",
        heads=[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
    )
    assert (
        result.total == 12
        and len(result.top(0.25, positive=False)) == 3
        and len(result.top(12, positive=False)) == 6
    )
