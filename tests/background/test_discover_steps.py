"""What discover does with its trials, by answers that are written out."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages
from seecause.background.discover import Discovery, Finding
from seecause.background.patch_kinds import Kind, Trials
from seecause.errors import BadOption
from tests.background.repair_toys import fitted, scenes

steps = importlib.import_module("seecause.background.discover")
COUNT = 40  # trials of a finding


def trials(sources, recipients, controls, patches=(0,)):
    sets = torch.zeros(len(sources), 4, dtype=torch.bool)
    sets[:, list(patches)] = True
    roles = (torch.tensor(part) for part in (sources, recipients, controls))
    return Trials(*roles, sets.unflatten(1, (2, 2)))


def kind(number, answer=0, **facts):
    """A kind whose trials carry its number."""
    own = trials([number] * 8, [0] * 8, list(range(8)))
    given = {"extent": "all", "evidence": 0.0, "on_object": None, **facts}
    sets = torch.zeros(3, 4, dtype=torch.bool)
    return Kind(answer, 1, tokens=torch.zeros(1, 2), sets=sets, trials=own, **given)


def finding(flips, control, patch, answer=0):
    """Of `COUNT` trials so many flip, and so many by the control; one patch of three pictures."""
    done = trials([patch] * COUNT, [0] * COUNT, [0] * COUNT)
    place = torch.arange(COUNT)
    done = replace(done, flipped=place < flips, control_flipped=place < control)
    sets = torch.zeros(3, 16, dtype=torch.bool)
    sets[:, patch] = True
    return Finding(answer, 1, "all", torch.zeros(1, 2), sets, done, 0.0, None, name="cat")


def test_a_finding_says_what_its_trials_came_to():
    half = finding(30, 10, 0)
    assert (half.flips, half.control, half.effect, half.patches) == (0.75, 0.25, 0.5, 1)
    low, high = half.interval
    assert 0.3 < low < 0.5 < high < 0.7  # of the difference
    for share, is_object in ((None, False), (0.49, False), (0.5, True)):
        assert replace(half, on_object=share).is_object is is_object


def test_the_best_findings_by_effect_and_those_that_are_the_same_lend_their_trials():
    strong, loud, again = finding(30, 0, 1), finding(40, 15, 2), finding(28, 0, 1)
    third, other = finding(27, 0, 1), finding(26, 0, 1, answer=1)
    chance, harmful = finding(2, 1, 3), finding(0, 9, 4)
    tried = [chance, loud, third, again, harmful, strong, other]
    best = steps._ranked(tried, 2)
    assert [found.effect for found in best] == [0.75, 0.65]  # not by flips, which are louder
    assert best[0].trials is strong.trials
    assert best[0].alike == (again.trials, third.trials) and best[1].answer == 1
    every = steps._ranked(tried, 9)
    assert [found.effect for found in every] == [0.75, 0.65, 0.625]  # none that may be chance
    assert every[2].trials is loud.trials and not every[2].alike


def test_two_pictures_that_show_both_do_not_make_two_kinds_one():
    first, second = (replace(finding(9, 0, 0), sets=torch.zeros(4, 9).bool()) for _ in range(2))
    first.sets[:3, :3], second.sets[1:, 2:6] = True, True
    assert not steps._is_same(first, second)  # pictures 1 and 2
    first.sets[3, :3] = True
    assert steps._is_same(first, second)


def test_log_odds_are_against_all_other_classes_together():
    logits, answers = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 1.0]]), torch.tensor([0, 2])
    plain = steps._log_odds(SimpleNamespace(sigmoid=False), logits, answers)
    against = (1 - math.log(math.exp(2) + math.exp(4)), 1 - math.log(math.exp(3) + math.exp(0)))
    assert_close(plain, torch.tensor(against, dtype=torch.float64))
    alone = steps._log_odds(SimpleNamespace(sigmoid=True), logits, answers)
    assert alone.tolist() == [1, 1]


def test_kinds_are_sorted_out_by_how_far_they_raise_their_answer_above_the_control(monkeypatch):
    raised = {0: (5.0, 5.5), 1: (3.0, 1.0), 2: (2.0, 1.0), 3: (4.0, 0.0), 4: (1.0, 1.0)}
    answers = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    kinds = [kind(number, answers[number]) for number in raised]
    seen = []

    def answered(model, pictures, parts, ended):
        results = []
        for at, part in enumerate(parts):
            numbers = part.sources.tolist()
            seen.extend(zip(numbers, part.controls.tolist(), strict=True))
            both = torch.zeros(2, len(part), 2)
            for row, number in enumerate(numbers):
                both[:, row, answers[number]] = torch.tensor(raised[number])
            results.append((both[0], both[1]))
            ended(at)
        return results

    monkeypatch.setattr(steps, "_pasted_logits", answered)
    monkeypatch.setattr(steps, "TOGETHER", 2)
    told, model = [], SimpleNamespace(sigmoid=False)

    class Told:
        def __init__(self, what, total): ...
        def __enter__(self):
            return told.append

        def __exit__(self, *_): ...

    likely = steps._screened(model, None, kinds, 9, Told)
    assert seen == [(number, trial) for number in raised for trial in range(6)] and told == [
        2,
        2,
        1,
    ]
    assert [each.trials.sources[0].item() for each in likely] == [3, 1, 2]  # by 4, 2 and 1
    assert [each.trials.controls.tolist() for each in likely] == [[6, 7]] * 3  # the others are new
    few = steps._screened(model, None, kinds, 2, Told)
    assert [each.trials.sources[0].item() for each in few] == [3, 1]


def test_half_of_the_places_are_for_kinds_off_the_object():
    kinds = [kind(n, on_object=share) for n, share in enumerate([1, 1, 0.5, 0.49, 1, 0, None])]

    def chosen(count):
        return [each.trials.sources[0].item() for each in steps._spread_over(kinds, count)]

    assert chosen(2) == [3, 0] and chosen(4) == [3, 5, 0, 1] and chosen(5) == [3, 5, 0, 1, 2]
    assert chosen(99) == [3, 5, 6, 0, 1, 2, 4]


def test_pastes_are_answered_beside_their_controls(monkeypatch):
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 4, 4)
    pictures = LabelledImages(images, name="scenes", ids=tuple("abcdef"))
    parts = [trials([0, 1], [2, 3], [4, 5], patches=(1,)), trials([5], [4], [3], patches=(0, 3))]
    shown = []

    def mean_colour(model, images):
        shown.append(images[:, 0, ::2, ::2].flatten(1).tolist())
        return images.mean(dim=(2, 3))

    monkeypatch.setattr(steps, "logits_of", mean_colour)
    first, second = steps._pasted_logits(None, pictures, parts, lambda *_: None)
    assert shown[0] == [[2, 0, 2, 2], [3, 1, 3, 3], [2, 4, 2, 2], [3, 5, 3, 3]]
    assert shown[1] == [[5, 4, 4, 5], [3, 4, 4, 3]]
    assert [part[:, 0].tolist() for part in (*first, *second)] == [
        [1.5, 2.5],
        [2.5, 3.5],
        [4.5],
        [3.5],
    ]


@pytest.mark.parametrize("labels", [None, torch.tensor([5, 6, 7, 8, 9, 4])])
def test_pairs_are_recipients_with_the_kind_and_sources_without_it(labels):
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 4, 4)
    pictures = LabelledImages(images, labels, name="scenes", ids=tuple("abcdef"))
    answers = torch.tensor([10, 11, 12, 13, 14, 15])
    one, two = finding(9, 0, 0), finding(9, 0, 1)
    one = replace(one, trials=trials([0], [2], [4], patches=(1,)))
    two = replace(two, trials=trials([1], [3], [5]), alike=(trials([0], [3], [2]),))
    pairs = Discovery(None, pictures, answers, (one, two)).pairs([1])
    assert pairs.ids == ("d~0", "d~1", "b~2", "a~3") and pairs.name == "discovered in scenes"
    assert pairs.images[:, 0, 0, 0].tolist() == [3, 3, 1, 0]
    corners = pairs.others[:, 0, ::2, ::2].flatten(1).tolist()
    assert corners == [[1, 3, 3, 3], [0, 3, 3, 3], [5, 1, 1, 1], [2, 0, 0, 0]]
    known = answers if labels is None else labels
    assert pairs.labels.tolist() == known[[3, 3, 1, 0]].tolist()
    assert len(Discovery(None, pictures, answers, (one, two)).pairs()) == 6


@pytest.mark.parametrize(
    ("depth", "layers"), [(12, (1, 3, 6, 9)), (6, (1, 2, 3, 4)), (24, (1, 6, 12, 18))]
)
def test_layers_are_the_first_and_three_quarters(depth, layers):
    model = SimpleNamespace(n_layers=depth)
    assert steps._layers(model, None) == layers and steps._layers(model, [2, 1, 2]) == (2, 1)


@pytest.mark.parametrize(
    ("asked", "area", "most_patches"),
    [({}, 0.25, 4), ({"area": 0.5}, 0.5, 8), ({"masks": True}, 1.0, 16)],
)
def test_what_is_asked_for_arrives(monkeypatch, asked, area, most_patches):
    model, pictures = fitted(scenes(24)), scenes(24)
    if not (asked := dict(asked)).pop("masks", False):
        pictures = replace(pictures, truth=None)
    heard = {}

    def evidence(view, pictures, method, layers, options, progress):
        heard.update(method=method, layers=layers, options=dict(options))
        return torch.zeros(len(pictures), 16)

    def kinds_at(tokens, scores, answers, objects, grid, layer, plan):
        heard.update(plan=plan, objects=objects, grid=grid)
        return [kind(layer)]

    def screened(view, pictures, candidates, count, progress):
        heard.update(screened=len(candidates), count=count)
        return []

    def ranked(tried, most):
        heard.update(most=most)
        return ()

    for fake in (evidence, screened, ranked):
        monkeypatch.setattr(steps, f"_{fake.__name__}", fake)
    monkeypatch.setattr(steps, "kinds_at", kinds_at)
    counts = {"kinds": 5, "top": 7, "trials": 9, "seed": 3}
    found = sc.discover(
        model, pictures, method="caap", layers=[2, 0], most=2, score="prob", **counts, **asked
    )
    assert (heard["method"], heard["layers"]) == ("caap", (2, 0)) and heard["grid"] == (4, 4)
    assert heard["options"] == {"score": "prob"} and heard["screened"] == 2
    assert heard["count"] == 3 * 2 and heard["most"] == 2
    plan = heard["plan"]
    assert (plan.kinds, plan.top, plan.trials, plan.seed) == (5, 7, 9, 3)
    assert plan.most == most_patches and (heard["objects"] is None) == (area < 1)
    about = found.protocol["options"]
    assert about == {"score": "prob", **counts, "area": area, "layers": [2, 0]}
    sc.discover(model, pictures, method="caap")
    assert heard["options"] == {"score": "logit"}
    sc.discover(model, pictures, method="rollout")
    assert heard["options"] == {}


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 2**32}, {"layers": []}])
def test_what_cannot_be_is_refused(options):
    with pytest.raises(BadOption, match=next(iter(options))):
        sc.discover(fitted(scenes(8)), scenes(8), **options)
