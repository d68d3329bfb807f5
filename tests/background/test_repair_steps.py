"""A repair, step by step: who is chosen, what is dealt, what names a kept remedy, what is said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import seecause as sc
from seecause.background import Swapped, repair as _repair, result as results
from seecause.background._remedies import find_remedy
from seecause.background.objects import EyeMasks
from seecause.background.result import Candidate, Repair
from seecause.background.versions import Material
from seecause.errors import BadOption, NotDefined
from tests.background.repair_toys import fitted, scenes


def choice(numbers, gained, *, by="transplant-worst", verdict="yes", force=False):
    """Numbers by remedy: worst, worst group, transplants; flips are 0."""
    names = ("transplant-worst", "worst group", "transplants")
    candidates = {
        name: Candidate(name, "done", choose={**dict(zip(names, row, strict=True)), "flips": 0.0})
        for name, row in numbers.items()
    }

    def mended(share):
        judged = SimpleNamespace(right_by_picture=lambda: torch.tensor(share).double())
        return SimpleNamespace(judge=lambda part: judged)

    shares = {name: mended([0.5, 0.5, 0.5, 0.5]) for name in numbers}
    shares |= {name: mended(share) for name, share in gained.items()}
    return _repair._choice(candidates, shares, SimpleNamespace(choose=None), by, verdict, force)


def test_the_best_remedy_is_chosen_if_it_gains_more_than_chance():
    numbers = {"nothing": (0.4, 0.5, 0.5), "a": (0.5, 0.3, 0.6), "b": (0.5, 0.6, 0.5)}
    surely, perhaps = [1.0, 1.0, 0.9, 1.0], [1.0, 0.0, 1.0, 0.4]
    assert choice(numbers, {"a": surely}) == "a"  # of equals, by transplants
    assert choice(numbers, {"a": perhaps}) == "nothing"
    assert choice(numbers, {"b": surely}, by="worst group") == "b"
    assert choice(numbers, {"a": surely}, verdict="no") == "nothing"
    assert choice(numbers, {"a": perhaps}, verdict="no", force=True) == "a"
    assert choice(numbers, {"a": surely}, verdict="too few") == "a"
    worse = {**numbers, "nothing": (0.6, 0.5, 0.5)}
    assert choice(worse, {"a": surely}) == "nothing"  # the worst cell counts before the mean
    assert choice({"nothing": (0.4, 0.5, 0.5)}, {}, force=True) == "nothing"


def numbered(count, ids=None):
    pictures = scenes(count)
    names = tuple(map(str, range(count)))
    return Material(replace(pictures, ids=ids or names, swapped=Swapped(pictures.images)), None)


def places(part):
    return {int(name.split("~")[0]) for name in part.pictures.ids}


def test_pictures_are_dealt_once_and_none_that_is_reported_on_is_judged(monkeypatch):
    data = numbered(40)
    learn, choose, report, both = _repair._split(data, None, 3)
    assert [len(places(part)) for part in (learn, choose, report)] == [24, 8, 8]
    assert places(learn) | places(choose) | places(report) == set(range(40))
    assert places(both) == places(learn) | places(choose) and len(both.pictures) == 32
    assert places(_repair._split(data, None, 4)[2]) != places(report)
    monkeypatch.setattr(_repair, "JUDGED", 4)
    few = _repair._split(data, None, 3)[3].pictures.ids
    assert len(few) == 4 and int(few[-1]) > 20  # spread over all
    test = numbered(6)
    learn, choose, report, both = _repair._split(data, test, 3)
    assert report is test and [len(places(part)) for part in (learn, choose)] == [30, 10]
    versions = numbered(80, tuple(f"{n // 2}~{n % 2}" for n in range(80)))
    versions = replace(versions, pictures=replace(
        versions.pictures, labels=torch.arange(80) // 2 % 2))  # fmt: skip
    parts = _repair._split(versions, None, 3)[:3]
    assert sum(len(places(part)) for part in parts) == 40  # versions stay together


def test_remedies_by_name_and_all_that_data_allows():
    def names(*given, **options):
        return [entry.name for entry, _ in _repair._entries(*given, **options)]

    every = names("all", {}, groups=True)
    assert every[0] == "nothing" and {"dfr", "group-dro", "fine-tune"} < set(every)
    assert "ifam" not in every
    assert set(every) - set(names("all", {}, groups=False)) == {"dfr", "group-dro"}
    assert names(["ifam", "ifam"], {}, groups=False) == ["nothing", "ifam"]
    with pytest.raises(BadOption, match="groups=True"):
        names(["group-dro"], {}, groups=False)


def test_an_eye_of_given_masks_is_not_for_other_pictures():
    model = fitted(scenes(16))
    masks, network = scenes(4).truth, sc.eye("own", model=model)
    assert _repair._again(masks) is None and _repair._again(sc.eye(masks, model=model)) is None
    assert _repair._again(network) is network and _repair._again("given") == "given"


def test_what_is_kept_is_named_by_all_that_decides_it(tmp_path, monkeypatch):
    heard = []

    class Stop(Exception): ...

    def stop(view, entries, lesson, folder, key):
        names = [_repair.remedy_name(entry, settings, key) for entry, settings in entries]
        heard.append((names[1], lesson))
        raise Stop

    monkeypatch.setattr(_repair, "_try_all", stop)
    verdict = SimpleNamespace(verdict="yes")
    monkeypatch.setattr(_repair, "audit_part", lambda *_, with_gains: with_gains or verdict)
    model, cases = fitted(scenes(64)), scenes(40, usual=0.8, seed=1)
    settings = {"options": {"last-layer": {"strength": 0.5}}}
    masks = cases.truth.clone()
    masks[0] = masks[0].flip(0)
    images = cases.images.clone()
    images[0, 0, 0, 0] += 1
    runs = {
        "itself": {}, "versions": {"per_picture": 3}, "seed": {"seed": 1},
        "groups": {"groups": True}, "settings": settings,
        "weights": {"model": fitted(scenes(48))}, "masks": {"eye": masks},
        "pixels": {"data": replace(cases, images=images)},
        "labels": {"data": replace(cases, labels=cases.labels.roll(1))},
    }  # fmt: skip
    for asked in (*runs.values(), {}):
        asked = {"model": model, "data": cases, "per_picture": 2, **asked}
        with pytest.raises(Stop):
            _repair.repair(asked.pop("model"), asked.pop("data"), remedies="last-layer",
                           work=tmp_path, **asked)  # fmt: skip
    names = [name for name, _ in heard]
    assert len(set(names[:-1])) == len(runs) and names[-1] == names[0]
    lesson = heard[1][1]
    assert len(lesson.learn.moved) == 3 * 24 and len(lesson.choose.moved) == 4 * 8
    assert not set(lesson.learn.pictures.ids) & set(lesson.choose.pictures.ids)
    assert heard[2][1].seed == 1 and heard[3][1].groups


def test_pairs_are_kept_by_their_other_versions_too():
    data = numbered(4)
    other = replace(data.pictures, swapped=Swapped(data.pictures.images.flip(-1)))
    keys = {_repair.content_key(each, groups=False) for each in (data, Material(other, None))}
    entry = find_remedy("last-layer", {})
    assert len(keys) == 2 and _repair.remedy_name(entry, {}, ["k"]).startswith("last-layer-")


def test_views_that_change_answers_are_not_repaired():
    plain = fitted(scenes(16))
    for change in ({"merged": True}, {"gates": torch.ones(2, 4)}):
        facts = {"merged": False, "gates": None, **change}
        view = type("View", (type(plain),), facts).__new__(type("View", (type(plain),), facts))
        view.architecture = plain.architecture
        with pytest.raises(NotDefined, match="changes its module's answers"):
            _repair._view(view)


def test_the_record_names_both_data_and_the_overlap_that_is_known():
    model, data = fitted(scenes(16)), numbered(4)
    overlap = torch.tensor([0.5, torch.nan, 0.7, torch.nan])
    masks = EyeMasks(torch.ones(4, 4, 4).bool(), torch.ones(4), "maps of x", "network",
                     overlap=overlap, notes=("look",))  # fmt: skip
    seen, other = replace(data, masks=masks), numbered(2)
    other = replace(other, pictures=replace(other.pictures, name="others"))
    record = _repair._record(model, seen, data, other, other, 8, 5)
    assert record["mask IoU"] == pytest.approx(0.6) and record["eye"] == "maps of x"
    counts = [record[name] for name in ("learn", "choose", "report", "versions of each picture")]
    assert counts == [4, 2, 2, 8] and record["seed"] == 5 and record["notes"] == ["look"]
    assert (record["data"], record["report data"]) == ("scenes", "others")


def test_reports_are_of_other_versions_and_the_chosen_model_is_verified(monkeypatch):
    drawn, audits, verified = [], [], []
    report = SimpleNamespace(masks="masks", test=lambda *given, **how: drawn.append((given, how)))
    monkeypatch.setattr(_repair, "verify", verified.append)
    monkeypatch.setattr(
        _repair, "audit_part", lambda *given, judged: audits.append((given, judged)) or given[0]
    )

    def judged(name):
        return SimpleNamespace(numbers=lambda groups=False: {name: groups})

    answers = {name: judged(name) for name in ("nothing", "a")}
    mended = {
        name: SimpleNamespace(model=f"{name}'s", judge=lambda part, name=name: answers[name])
        for name in answers
    }
    tried = {name: Candidate(name, "done") for name in ("nothing", "a", "failed")}
    shown, before, after = _repair._reported("model", report, tried, mended, "a", 6)
    assert drawn == [(("model", 4), {"seed": 7})]  # not those that chose
    assert (before, after, verified) == ("model", "a's", ["a's"])
    assert audits == [
        (("model", None, "masks"), answers["nothing"]), (("a's", None, "masks"), answers["a"])
    ]  # fmt: skip
    reports = [candidate.report for candidate in shown.values()]
    assert reports == [{"nothing": True}, {"a": True}, {}]
    _, before, after = _repair._reported("model", report, tried, mended, "nothing", 6)
    assert before == after == "model" and verified == ["a's"]


def a_repair(remedy="a", verdict="yes"):
    def audit(accuracy, flips, transplants):
        numbers = {"accuracy": accuracy, "flips": flips, "transplants": transplants}
        judged = SimpleNamespace(numbers=lambda: numbers)
        return SimpleNamespace(judged=judged, numbers=lambda: {**numbers, "right answers": 7})

    tried = {
        "nothing": Candidate("nothing", "Nothing.", {}, 0.0, {"worst": 0.1}),
        "a": Candidate("a", "It was mended.", {"x": torch.nan, "y": 1}, 12.0, {"worst": 0.25},
                       {"worst": 0.5}),
        "b": Candidate("b", "not tried", failed="no last layer"),
    }  # fmt: skip
    record = {"model": "m", "eye": "masks", "data": "d", "learn": 6, "choose": 2, "report": 3,
              "report data": "e", "seed": 4, "seecause": "1", "notes": ["Take care."],
              "mask IoU": 0.5}  # fmt: skip
    before, after = audit(0.9, 0.8, 0.2), audit(0.85, 0.1, 0.7)
    model = SimpleNamespace(name="m")
    return Repair(model, model, remedy, verdict, before, after, tried, "worst", record)


def test_a_card_says_what_was_done_what_it_cost_and_what_was_tried():
    mended = a_repair()
    assert mended.sentence == (
        "m, mended by a: on other backgrounds 20% -> 70% right, answers that flip 80% -> 10%;"
        " on plain pictures 90% -> 85% right."
    )
    card = results.model_card(mended, "nothing of this\n## Load it\n\nso")
    for line in (
        "It was mended. Objects were found by: masks (IoU with known masks 0.50).",
        "Take care.",
        "d: 6 pictures to learn from, 2 to choose by; reported on 3 of e. Seed 4, seecause 1.",
        "5.0 points of accuracy on plain pictures, and 12 s.",
        "| flips | 0.800 | 0.100 |",
        "| a | It was mended. | 0.250 | 12.0 |",
        "| b | no last layer | nan | 0.0 |",
        "## Load it\n\nso",
    ):
        assert line in card, line
    assert "right answers |" not in card and "nothing of this" not in card
    facts = mended.facts()
    assert (facts["before"]["flips"], facts["after"]["flips"]) == (0.8, 0.1)
    assert facts["candidates"][1]["details"] == {"y": 1}


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("no", "m: nothing to repair"),
        ("too few", "m: too few right"),
        ("yes", "m: no remedy answers"),
    ],
)
def test_why_nothing_was_done(verdict, words):
    assert a_repair("nothing", verdict).sentence.startswith(words)
