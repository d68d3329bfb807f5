"""Repairs: remedies on a tiny transformer whose last layer took the shortcut, the choice between
them, exports to plain libraries, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, repair as _repair
from seecause.background.last_layer import (
    LastLayer,
    change_directions,
    corrected_layer,
    last_layer,
)
from seecause.background.repair import REMEDIES, Candidate, Splits, model_card
from seecause.background.transplant import worst_cell
from seecause.errors import BadOption, UnknownName
from tests.background.repair_toys import (
    PATCH,
    SIDE,
    biased_clip,
    fitted,
    made_splits,
    plain_vit,
    scenes,
    wrapped,
)
from tests.families.native import tokenize


@pytest.fixture(scope="module")
def biased():
    return fitted(scenes(64))


@pytest.fixture(scope="module")
def splits(biased):
    return made_splits(biased)


def fit(name, model, splits, **options):
    return REMEDIES[name].fit(model, splits, **options)


@pytest.mark.parametrize("name", ["last-layer", "directions"])
def test_last_layers_repair_it_without_a_group_label(biased, splits, name):
    repaired = fit(name, biased, splits)
    before = fit("nothing", biased, splits).judge(biased, splits.validation)
    after = repaired.judge(biased, splits.validation)
    assert after.transplant_worst > before.transplant_worst + 0.3
    direct = splits.validation.predict(repaired.model)
    assert_close(after.moved, direct.moved.double(), atol=1e-4, rtol=1e-4)


def test_directions_are_folded_out_of_the_old_layer(biased, splits):
    moved = splits.train.features(biased)[1]
    directions = change_directions(moved, splits.train.source)
    folded = fit("directions", biased, splits)
    chosen = folded.details
    assert_close(folded.layer.weight, directions.fold(last_layer(biased), chosen["rank"]).weight)
    worst = {int(r): value for r, value in chosen["transplant-worst by rank"].items()}
    assert worst[chosen["rank"]] == pytest.approx(max(worst.values()), abs=1e-3)


def test_fine_tuning_learns_from_versions_and_keeps_its_state_in_the_cache(biased, tmp_path):
    splits = made_splits(biased, cache=tmp_path)
    options = {"epochs": 2, "rate": 3e-3, "batch": 32}
    first, again = (fit("fine-tune", biased, splits, **options) for _ in range(2))
    worst = splits.validation.predict(first.model).transplant_worst
    assert worst == pytest.approx(max(first.details["transplant-worst by epoch"]), abs=1e-4)
    assert again.details == first.details and len(list(tmp_path.iterdir())) == 1
    fit("fine-tune", biased, splits, **{**options, "rate": 1e-3})
    fit("fine-tune", biased, made_splits(biased, cache=tmp_path, seed=1), **options)
    assert len(list(tmp_path.iterdir())) == 3  # other settings, other files


def test_heads_are_removed_by_validation_images(biased, splits):
    repaired = fit("heads", biased, splits)
    tried, heads = repaired.details["transplant-worst by count"], repaired.details["heads"]
    judged = splits.validation.predict(repaired.model)
    assert judged.transplant_worst == pytest.approx(max(tried.values()), abs=1e-4)
    order = _repair.interchange_effects(biased, splits).order()
    assert heads == order[: len(heads)] and tried[str(len(heads))] == max(tried.values())
    images = splits.validation.data.images
    with sc.background.ablate(biased, heads):
        assert_close(repaired.model(images), biased(images))


@pytest.fixture(scope="module")
def repaired(biased):
    return sc.repair(biased, scenes(120, usual=0.9, seed=1), per_image=4)


def test_a_shortcut_is_repaired_and_reported_on_other_pictures(repaired):
    assert repaired.remedy != "nothing" and repaired.verdict == "yes"
    assert repaired.after.flips < repaired.before.flips - 0.3
    assert repaired.after.transplant_worst > repaired.before.transplant_worst + 0.3
    record = repaired.record
    assert record["train"] + record["validation"] + record["test"] == 120
    assert "repaired by" in repaired.sentence
    n = repaired.numbers()
    difference = n["after other accuracy"] - n["before other accuracy"]
    assert n["gain"] == pytest.approx(difference, abs=1e-12)  # of the same images and versions


def test_nothing_wins_where_there_is_nothing_to_repair_and_a_forced_repair_is_counted():
    fair, cases = fitted(scenes(256, usual=0.5, seed=3)), scenes(80, usual=0.5, seed=5)
    left = sc.repair(fair, cases, per_image=3)
    assert left.remedy == "nothing" and left.model is fair
    forced = sc.repair(fair, cases, per_image=3, force=True)
    assert forced.remedy != "nothing" and forced.before.accuracy == left.before.accuracy


@pytest.mark.parametrize("most", [1000, 10])
def test_fine_tuning_is_tried_where_the_cheap_remedies_leave_the_shortcut(
    biased, monkeypatch, most
):
    monkeypatch.setattr(_repair, "AFFORDED", {"cpu": most})
    weak = _repair.Remedy("last-layer", lambda model, splits: _repair.nothing(model), "none")
    for name in _repair.CHEAP:
        monkeypatch.setitem(REMEDIES, name, replace(weak, name=name))
    cases = scenes(200, usual=0.95, seed=1)
    result = sc.repair(biased, cases, per_image=2)
    assert result.verdict == "yes" and ("fine-tune" in result.candidates) == (most == 1000)
    noted = any("was not tried unasked" in note for note in result.record["notes"])
    assert noted == (most == 10)
    asked = sc.repair(biased, cases, per_image=2, remedies="directions")
    assert "fine-tune" not in asked.candidates


def test_fine_tuning_is_tried_where_the_worst_cell_stays_low(biased, monkeypatch):
    cases, tried = scenes(200, usual=0.95, seed=1), []
    for some, still in ((1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)):  # never low, never flips, both
        monkeypatch.setattr(_repair, "SOME", some)
        monkeypatch.setattr(_repair, "STILL", still)
        tried.append("fine-tune" in sc.repair(biased, cases, per_image=2).candidates)
    assert tried == [False, False, True]


def test_fine_tuning_of_pairs_learns_what_the_model_predicts_for_the_second_version(biased):
    cases = scenes(100, seed=4)
    names = tuple("abcde")
    many = wrapped(biased.module, head=torch.nn.Linear(32, 5), pool="cls", classes=names)
    pairs = pairs_of(cases, labels=None, groups=())
    options = {"remedies": "fine-tune", "options": {"fine-tune": {"rate": 1e-3}}, "force": True}
    result = sc.repair(many, pairs, max_loss=1.0, **options)  # three classes have no image
    assert result.remedy == "fine-tune" and result.before.data.own_labels

    def moved(model):
        first, second = (model(images).softmax(dim=1) for images in (pairs.images, cases.images))
        return (first - many(cases.images).softmax(dim=1)).abs().sum(), second

    before, after = moved(many), moved(result.model)
    assert after[0] < 0.8 * before[0]  # they come to the old ones
    assert (after[1] - before[1]).abs().max() < 0.3


def pairs_of(cases, **changes):
    """The same objects on the other class's background first, then as they usually are."""
    swapped = cases.images.clone()
    swapped[:, :2] = cases.images[:, [1, 0]]  # green for red
    return replace(cases, images=swapped, other_background=cases.images, truth=None, **changes)


def test_pairs_need_no_labels_no_classes_and_no_masks(biased, monkeypatch):
    monkeypatch.setattr(_repair, "object_masks", lambda *_, **__: pytest.fail("masks were sought"))
    pairs = pairs_of(scenes(100, seed=4), labels=None, groups=())
    result = sc.repair(biased, pairs)
    assert {*result.candidates} - {"fine-tune"} == {"nothing", *_repair.PAIRED}
    assert "have no labels" in result.candidates["last-layer"].failed
    assert result.before.data.own_labels and result.outcome == "repaired"
    assert result.after.flips < result.before.flips - 0.3 and "both versions" in result.sentence
    assert result.record["max loss"] == 0.01 and result.numbers()["loss"] <= 0.05
    many = wrapped(plain_vit(), head=torch.nn.Linear(32, 40), pool="cls", classes=None)
    left = sc.repair(many, pairs, remedies=("least-squares", "directions"), force=True)
    assert not any(tried.failed for tried in left.candidates.values())  # 40 classes, 100 pairs
    tried = [c.validation["loss"] for name, c in left.candidates.items() if name != "nothing"]
    assert (left.remedy == "nothing") == (min(tried) > 0.01)


def test_a_corrected_layer_is_the_least_squares_one():
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(30, 5, generator=draw).double()
    images = torch.arange(30).repeat(2)
    moved = plain[images] + torch.randn(60, 5, generator=draw).double()
    # as many classes as features, so that least squares over classes is that over features
    old = LastLayer(torch.eye(5).double(), torch.randn(5, generator=draw).double())
    new = corrected_layer(old, plain, moved, images, ridge=0.3)
    x = torch.cat([plain, moved])
    weight = torch.cat([torch.full((30,), 1 / 60), torch.full((60,), 1 / 120)]).double()
    wanted = torch.cat([old(plain), old(plain[images])])
    centred = x - (weight[:, None] * x).sum(dim=0)
    penalty = 0.3 * (weight[:, None] * centred.square()).sum(dim=0).mean()
    rows = torch.cat([centred, torch.ones(90, 1)], dim=1).double() * weight.sqrt()[:, None]
    ridge = torch.cat([penalty.sqrt() * torch.eye(5), torch.zeros(5, 1)], dim=1).double()
    away = wanted - old(x)  # what the change of the layer should add
    target = torch.cat([away * weight.sqrt()[:, None], torch.zeros(5, 5)]).double()
    change = torch.linalg.lstsq(torch.cat([rows, ridge]), target).solution  # [6, 5]
    assert_close(new.weight - old.weight, change[:5].T, atol=1e-6, rtol=0)
    assert_close(new(x), old(x) + centred @ change[:5] + change[5], atol=1e-6, rtol=0)


def test_what_is_written_answers_alike_in_plain_timm(repaired, tmp_path):
    folder = repaired.export(tmp_path / "model")
    native = timm.models.VisionTransformer(
        img_size=SIDE, patch_size=PATCH, embed_dim=32, depth=2, num_heads=4, num_classes=2
    ).eval()
    native.load_state_dict(load_file(folder / "model.safetensors"))
    images = repaired.before.data.images
    with torch.no_grad():
        assert_close(native(images), repaired.model(images), atol=1e-5, rtol=1e-5)
    audited = sc.audit(wrapped(native), repaired.before.data, fills=())
    assert repaired.outcome == "repaired" and audited.verdict != "yes"
    card = (folder / "README.md").read_text()
    for title in ("What was done", "On which data", "What it cost", "What was not tested", "Load"):
        assert title in card
    assert "unchanged. Layers and heads count" not in card  # of an export, how to load it alone
    page = (folder / "index.html").read_text()
    assert page.index("What changed?") > 0
    facts = json.loads((folder / "repair.json").read_text())
    assert facts["remedy"] == repaired.remedy and facts["after"]["flips"] < facts["before"]["flips"]


def test_a_zero_shot_model_gets_a_new_head_or_text_weights(tmp_path):
    model, cases = biased_clip(scenes(64)), scenes(80, usual=0.9, seed=1)
    before = sc.audit(model, cases)
    assert before.verdict == "yes" and before.flips > 0.8
    result = sc.repair(model, cases, per_image=4, remedies=("last-layer",))
    assert result.remedy == "last-layer"
    assert result.after.flips < 0.2 and result.after.accuracy > 0.9
    folder = result.export(tmp_path / "model")
    again = sc.load(str(folder), tokenizer=tokenize)
    assert again.classes == model.classes
    assert_close(again(cases.images), result.model(cases.images), atol=1e-4, rtol=1e-4)


def test_a_remedy_that_cannot_be_done_is_a_hole_with_its_reason():
    model = wrapped(plain_vit(), head=torch.nn.Sequential(torch.nn.Linear(32, 2)), pool="cls")
    result = sc.repair(model, scenes(60, seed=1), per_image=2, remedies=("directions",))
    assert "linear layer" in result.candidates["directions"].failed
    assert result.remedy == "nothing"


def test_group_labels_choose_only_where_they_are_allowed(biased):
    cases = scenes(80, usual=0.8, seed=1)
    with pytest.raises(BadOption, match="groups=True"):
        sc.repair(biased, cases, remedies=("dfr",))
    result = sc.repair(biased, cases, remedies=("dfr", "last-layer"), groups=True, per_image=3)
    assert result.chosen_by == "worst group" and not result.candidates["dfr"].failed
    numbers = {name: tried.validation for name, tried in result.candidates.items()}
    assert all(0 <= tried["worst group"] <= 1 for tried in numbers.values())
    best = max(numbers[name]["worst group"] for name in ("dfr", "last-layer"))
    assert numbers[result.remedy]["worst group"] == pytest.approx(best, abs=1e-3)


def test_classes_without_images_are_refused_or_judged_by_images_that_are_kept():
    names = ("dark", "light", "red", "green", "blue")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = torch.nn.Linear(32, 5)
    model = wrapped(plain_vit(), head=head, pool="cls", classes=names)
    options = {"per_image": 2, "remedies": "last-layer", "force": True}
    result = sc.repair(model, scenes(60, seed=1), **options)
    assert "3 of 5 classes have no image" in result.candidates["last-layer"].failed
    assert any("2 of the model's 5 classes" in note for note in result.record["notes"])
    others = LabelledImages(torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    kept = sc.repair(model, scenes(60, seed=1), keep=others, max_loss=1.0, **options)
    new, old = kept.model.extra.weight, kept.original.extra.weight
    assert_close(new[2:], old[2:])
    assert not torch.allclose(new[:2], old[:2])
    assert kept.candidates["last-layer"].test["loss"] > 0  # by its own probabilities: no labels
    strict = sc.repair(model, scenes(60, seed=1), keep=others, max_loss=0.0, **options)
    numbers = strict.candidates["last-layer"].validation
    assert numbers["loss"] <= 0 or (strict.remedy == "nothing" and "loses more" in strict.sentence)


def test_too_few_images_are_refused(biased):
    with pytest.raises(BadOption, match="five images of each class"):
        sc.repair(biased, scenes(6))


def test_remedies_and_their_options_are_checked_before_any_work(biased, monkeypatch):
    monkeypatch.setattr(_repair, "masked_or_paired", lambda *_: pytest.fail("images were read"))
    for name, options in (
        ("fine-tune", {"epochs": 0}),
        ("fine-tune", {"rate": 0.0}),
        ("last-layer", {"strenght": 1}),
    ):
        with pytest.raises(BadOption, match=f"{name} option {next(iter(options))}"):
            sc.repair(biased, scenes(60), remedies=name, options={name: options})
    with pytest.raises(UnknownName, match="last-layer"):
        sc.repair(biased, scenes(60), remedies="last-layr")
    with pytest.raises(BadOption, match="remedies that are tried"):
        sc.repair(biased, scenes(60), remedies="last-layer", options={"fine-tune": {"epochs": 1}})


def test_a_model_with_few_right_answers_is_repaired_by_what_held_out_versions_gain():
    cases = scenes(60, usual=0.1, seed=1)  # answered from the background: nearly all wrong
    result = sc.repair(fitted(scenes(64)), cases, per_image=3)
    assert result.verdict == "too few" and result.remedy != "nothing"
    assert result.after.accuracy > 0.9 and result.before.accuracy < 0.4


def test_given_masks_stay_with_their_own_pictures(biased):
    cases, test = scenes(60, usual=0.9, seed=1), scenes(40, usual=0.5, seed=2)
    options = {"test": test, "per_image": 2, "remedies": "last-layer"}
    result = sc.repair(biased, cases, masks=cases.truth.hard, **options)
    assert result.record["test"] == 40
    assert torch.equal(result.before.masks.hard, test.truth.hard)


def choice(numbers, gained, *, verdict="yes", force=False, **options):
    """Numbers by remedy: worst, worst group, other accuracy, flips, loss."""
    names = ("transplant-worst", "worst group", "other accuracy", "flips", "loss")

    class Tried(Candidate):
        def judge(self, model, part):
            share = torch.tensor(gained.get(self.name, [0.5] * 4)).double()
            return SimpleNamespace(
                accuracy_by_image=lambda: share, flips_by_image=lambda: 1 - share
            )

    candidates = {
        name: Tried(name, "", validation=dict(zip(names, numbers[name], strict=True)))
        for name in REMEDIES  # in order of cost
        if name in numbers
    }
    splits = Splits(None, None, **options)
    return _repair._choice(None, candidates, splits, verdict, force)[0]


def test_the_best_remedy_is_chosen_if_it_gains_more_than_chance():
    first, second = "last-layer", "fine-tune"
    numbers = {
        "nothing": (0.4, 0.5, 0.5, 0.5, 0.0),
        second: (0.5, 0.6, 0.5, 0.0, 0.0),
        first: (0.5, 0.3, 0.6, 0.1, 0.02),
    }
    surely, perhaps = [1.0, 1.0, 0.9, 1.0], [1.0, 0.0, 1.0, 0.4]
    assert choice(numbers, {first: surely}) == first  # of equals, by the other accuracy
    assert choice(numbers, {first: perhaps}) == "nothing"
    assert choice(numbers, {second: surely}, groups=True) == second
    assert choice(numbers, {first: surely}, verdict="no") == "nothing"
    assert choice(numbers, {first: perhaps}, verdict="no", force=True) == first
    assert choice(numbers, {first: surely}, verdict="too few") == first
    assert choice(numbers, {second: surely}, max_loss=0.01) == second  # the first loses more
    assert choice({**numbers, second: numbers[first]}, {}, max_loss=0.01, force=True) == "nothing"
    alike = {**numbers, second: (0.5, 0.6, 0.6, 0.0, 0.0)}
    assert choice(alike, {second: surely}) == second  # of equals in all else, by flips
    tied = {**numbers, second: (0.5002, 0.6, 0.602, 0.101, 0.0)}
    assert choice(tied, {first: surely}) == first  # of equals in all, the cheaper
    worse = {**numbers, "nothing": (0.6, 0.5, 0.5, 0.5, 0.0)}
    assert choice(worse, {first: surely}) == "nothing"  # the worst cell counts before the mean
    assert choice({"nothing": (0.4, 0.5, 0.5, 0.5, 0.0)}, {}, force=True) == "nothing"


def numbered(count, ids=None):
    cases = scenes(count)
    return replace(cases, ids=ids or tuple(map(str, range(count))), masks=cases.truth)


def places(part):
    return {int(name.split("~")[0]) for name in part.ids}


def test_pictures_are_dealt_once_and_none_that_is_reported_on_is_judged(monkeypatch):
    data = numbered(40)
    learn, choose, report, both = _repair._split(data, None, 3)
    assert [len(places(part)) for part in (learn, choose, report)] == [24, 8, 8]
    assert places(learn) | places(choose) | places(report) == set(range(40))
    assert places(both) == places(learn) | places(choose) and len(both) == 32
    assert places(_repair._split(data, None, 4)[2]) != places(report)
    monkeypatch.setattr(_repair, "JUDGED", 4)
    few = places(_repair._split(data, None, 3)[3])
    turned = data.take(torch.arange(40).flip(0))
    assert len(few) == 4 and places(_repair._split(turned, None, 3)[3]) == few  # by content
    test = numbered(6)
    learn, choose, report, both = _repair._split(data, test, 3)
    assert report is test and [len(places(part)) for part in (learn, choose)] == [30, 10]
    pairs = replace(numbered(40), masks=None, other_background=data.images)
    assert [len(part) for part in _repair._split(pairs, None, 3)[:3]] == [16, 16, 8]
    rare = replace(pairs, labels=torch.arange(40))  # many classes: one image each
    assert [len(part) for part in _repair._split(rare, None, 3)[:3]] == [16, 16, 8]
    versions = numbered(80, tuple(f"{n // 2}~{n % 2}" for n in range(80)))
    versions = replace(versions, labels=torch.arange(80) // 2 % 2)
    parts = _repair._split(versions, None, 3)[:3]
    assert sum(len(places(part)) for part in parts) == 40  # versions stay together


def test_words_follow_from_the_interval_the_loss_and_a_second_audit(repaired):
    assert "improved, but still" in replace(repaired, verdict_after="yes").sentence
    strict = replace(repaired, record={**repaired.record, "max loss": -1.0})
    assert "at a loss above its limit" in strict.sentence
    backwards = replace(repaired, before=repaired.after, after=repaired.before)  # no gain
    assert "not shown to be repaired" in backwards.sentence
    nothing = {
        "no": "nothing to repair",
        "too few": "too few: 64 of at least 20",
        "yes": "no remedy",
    }
    for verdict, words in nothing.items():
        record = {**repaired.record, "counted": 64}
        left = replace(repaired, remedy="nothing", verdict=verdict, record=record)
        assert left.sentence.startswith(f"{repaired.original.name}: {words}")


def test_the_card_says_what_was_done_what_it_cost_and_on_which_data(repaired):
    noted = replace(repaired, record={**repaired.record, "notes": ["Take care."]})
    card, n = model_card(noted, "nothing of this\n## Load it\n\nso"), repaired.numbers()
    for line in (
        f"{repaired.candidates[repaired.remedy].done} Object masks: given masks.",
        "Take care.",
        "scenes: 72 training images, 24 validation images; reported on 24 images of scenes. Seed 0",
        f"| flips | {n['before flips']:.3f} | {n['after flips']:.3f} |",
        "## Load it\n\nso",
    ):
        assert line in card, line
    assert "compared images |" not in card and "nothing of this" not in card


def test_small_cells_are_pooled_before_the_worst_is_taken():
    labels = torch.tensor([0] * 10 + [1] * 12)
    donors = torch.tensor([0] * 10 + [0] * 2 + [1] * 10)
    right, each = torch.ones(22, dtype=torch.bool), torch.arange(22)
    right[10:12] = False  # a cell of two
    assert worst_cell(right, labels, donors, each, fewest=2) == 0.0
    assert worst_cell(right, labels, donors, each, fewest=3) == pytest.approx(10 / 12)  # its class
    assert worst_cell(right, labels, donors, each, fewest=13) == pytest.approx(20 / 22)  # all
    wrong = ~right
    wrong[0] = True  # of class 0 one in ten is right, of the rest of class 1 none
    assert worst_cell(wrong, labels, donors, each, fewest=3) == 0.0


def test_a_cell_is_as_large_as_it_has_pictures_not_versions():
    labels, donors = torch.zeros(24, dtype=torch.long), torch.tensor([0] * 8 + [1] * 16)
    right = donors == 1  # the cell of eight versions is all wrong
    few = torch.cat([torch.arange(2).repeat(4), torch.arange(2, 10).repeat(2)])
    assert worst_cell(right, labels, donors, few, fewest=3) == pytest.approx(16 / 24)
    assert worst_cell(right, labels, donors, torch.arange(24), fewest=3) == 0.0


def test_images_of_one_origin_count_as_one_when_cells_are_judged(biased, splits):
    judged = splits.validation.predict(biased)
    everything = float(judged._correct_versions().double().mean())
    assert judged.transplant_worst < everything - 0.1
    data = splits.validation.data
    ids = tuple(f"scene~{place}.png" for place in range(len(data)))  # versions of one
    together = replace(splits.validation, data=replace(data, ids=ids))
    assert replace(judged, versions=together).transplant_worst == pytest.approx(everything)
