"""Audits: verdicts that follow from their interval, numbers, limits, and clear refusals."""

import dataclasses
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import seecause as sc
from seecause.background import LabelledImages
from seecause.background.audit import BackgroundAudit, missed_limits
from seecause.background.gains import information_gains
from seecause.background.transplant import Predictions, transplant, versions_to_test
from seecause.data import to_pil
from seecause.errors import BadInput, BadOption
from seecause.report.background import audit_lines
from tests.background.repair_toys import fitted, scenes


def shares(values, count):
    return torch.tensor(values, dtype=torch.float64).repeat(count)


def verdict_of(extra, control=0.0, masks="given", error=0.0):
    versions = SimpleNamespace(
        data=SimpleNamespace(masks=SimpleNamespace(kind=masks)), paired=False
    )
    judged = SimpleNamespace(control_flips=control, versions=versions, draw_error=error)
    audit = BackgroundAudit(judged)
    audit.__dict__["extra_flips_by_image"] = extra
    return audit.verdict


@pytest.mark.parametrize(
    ("extra", "options", "word"),
    [
        (shares([0.9, 1.0], 20), {}, "yes"),
        (shares([0.9, 1.0], 20), {"masks": "network"}, "yes"),
        (shares([0.9, 1.0], 20), {"masks": "own"}, "cannot tell"),
        (shares([0.0, 0.02], 20), {"masks": "own"}, "cannot tell"),  # nor do they clear a model
        (shares([0.0, 0.02], 20), {"masks": "discovered"}, "cannot tell"),
        (shares([0.0, 0.02], 20), {}, "no"),
        (shares([0.0, 0.0, 0.0, 0.5], 9), {}, "cannot tell"),  # 0.125, from few
        (shares([0.9, 1.0], 20), {"control": 0.7}, "cannot tell"),
        (shares([0.9, 1.0], 20), {"error": 0.5}, "cannot tell"),  # other draws could change it
        (
            shares([0.0], 25),
            {},
            "cannot tell",
        ),  # an eighth may still flip: 25 images do not show it
        (shares([0.0], 40), {}, "no"),
        (shares([0.9], 19), {}, "too few"),
    ],
)
def test_the_verdict_follows_from_its_interval(extra, options, word):
    assert verdict_of(extra, **options) == word


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critters-vit", "critters-biased"])
def test_verdicts_of_100_bootstrap_draws(name):
    """Of 100 correct predictions: at most 5 false alarms of a clean model, 5 misses of a biased
    one."""
    data = sc.data.open_data("critters:certified:test", limit=256)
    whole = sc.audit(sc.load(f"builtin:{name}"), data, fills=(), per_image=4)
    found, draw = Counter(), torch.Generator().manual_seed(0)
    for _ in range(100):
        rows = torch.randint(whole.compared_images, (100,), generator=draw)
        audit = BackgroundAudit(whole.judged)
        audit.__dict__["extra_flips_by_image"] = whole.extra_flips_by_image[rows]
        found[audit.verdict] += 1
    wrong = found["yes"] if name == "critters-vit" else 100 - found["yes"]
    assert wrong <= 5, found


@pytest.mark.slow
def test_eight_seeds_agree_on_the_verdict():
    """In 19 of 20 cases; no case is called both yes and no."""
    agreed = 0
    for case in range(20):
        model = fitted(scenes(96, usual=0.5 + case / 40, seed=case))
        cases = scenes(64, usual=0.5 + case / 40, seed=100 + case)
        verdicts = {sc.audit(model, cases, fills=(), seed=seed).verdict for seed in range(8)}
        assert not {"yes", "no"} <= verdicts
        agreed += len(verdicts) == 1
    assert agreed >= 19


def random_audit(seed):
    """An audit of random predictions for images with masks, or for pairs."""
    draw = torch.Generator().manual_seed(seed)
    count, paired = int(torch.randint(21, 60, (), generator=draw)), seed % 3 == 0
    images = torch.rand(count, 3, 8, 8, generator=draw)
    labels, masks = torch.arange(count) % 3, torch.zeros(count, 4, 4, dtype=torch.bool)
    masks[:, 1:3, 1:3] = True
    cases = LabelledImages(images, labels, None if paired else masks)
    if paired:
        part = versions_to_test(
            None, dataclasses.replace(cases, other_background=images.flip(2)), 4, seed=0
        )
    else:
        part, same = (
            transplant(cases, per_image=3, donors=f"{d}-class") for d in ("other", "same")
        )
        names = ("source", "donor", "number")
        both = {name: torch.cat([getattr(part, name), getattr(same, name)]) for name in names}
        control = torch.cat([part.control, torch.ones_like(same.control)])
        part = dataclasses.replace(part, **both, control=control, memo={})
    sure = 4 * torch.rand((), generator=draw)
    plain = torch.randn(count, 3, generator=draw) + sure * torch.eye(3)[labels]
    moved = torch.randn(len(part), 3, generator=draw) + sure * torch.eye(3)[part.labels]
    return BackgroundAudit(Predictions(part, plain, moved))


@pytest.mark.parametrize("seed", range(200))
def test_numbers_in_sentences_are_those_in_json_and_python(seed):
    audit = random_audit(seed)
    numbers, text = json.loads(json.dumps(audit.numbers())), " ".join(audit_lines(audit))
    for name, value in numbers.items():
        assert getattr(audit, re.sub("[ -]", "_", name)) == value
    said = dict(
        re.findall(r"(?i)\b(control flips|extra flips|flips|accuracy) ([+-]?[\d.]+%)", text)
    )
    names = {name.lower(): value for name, value in said.items()}
    assert "accuracy" in names and (audit.verdict == "too few" or "flips" in names)
    for name, value in names.items():
        sign = "+" if name == "extra flips" else ""
        assert value == f"{numbers[name]:{sign}.1%}"
    if "extra flips" in names:
        low, high = re.search(r"interval ([+-][\d.]+%) to ([+-][\d.]+%)", text).groups()
        assert (low, high) == tuple(
            f"{numbers[f'extra flips {end}']:+.1%}" for end in ("low", "high")
        )
        assert f"compared images {numbers['compared images']}" in text
        difference = numbers["flips"] - numbers.get("control flips", 0.0)
        assert numbers["extra flips"] == pytest.approx(difference)


def test_own_masks_never_clear_a_biased_model_and_others_convict_it(models):
    cases = scenes(80, usual=0.9, seed=2)
    verdicts = {
        source: sc.audit(models["biased"], cases, masks=source, fills=()).verdict
        for source in ("given", "own")
    }
    assert verdicts == {"given": "yes", "own": "cannot tell"}
    assert sc.audit(models["biased"], cases, masks=models["fair"], fills=()).verdict == "yes"


@pytest.fixture(scope="module")
def models():
    return {"biased": fitted(scenes(64)), "fair": fitted(scenes(128, usual=0.5, seed=3))}


@pytest.fixture(scope="module")
def found(models):
    return sc.audit(models["biased"], scenes(80, usual=0.5, seed=2), fills=("grey", "mean"))


def test_a_shortcut_is_found_also_where_backgrounds_tell_nothing_of_the_class(models, found):
    usual = sc.audit(models["biased"], scenes(80, usual=0.95, seed=2))
    assert usual.verdict == found.verdict == "yes" and min(usual.flips, found.flips) > 0.5
    numbers = found.numbers()
    assert numbers["worst group"] < 0.5 and numbers["BIR"] > 0.1
    image, version = found.worst(3)[0]
    assert found.judged.correct[image]
    assert int(found.judged.versions.source[version]) == image
    places = [place for place, _ in found.worst(80)]  # however many are asked for
    assert 0 < len(places) < 80 and bool(found.judged.counted[places].all())
    assert sc.audit(models["fair"], scenes(80, usual=0.95, seed=2)).verdict in ("no", "cannot tell")


def test_gains_are_those_of_correct_predictions_by_every_fill(models, found):
    data = found.data.take(found.judged.correct)
    for fill in ("grey", "mean"):
        expected = information_gains(models["biased"], data, fill=fill)
        assert torch.equal(found.erasures[f"true masks, {fill}"].big, expected.big)
    assert found.gains is found.erasures["true masks, grey"]
    numbers = found.numbers()
    assert numbers["FIG"] == float(found.gains.fig.mean())
    mean = found.erasures["true masks, mean"]
    assert numbers["BIR, true masks, mean"] == mean.bir_ratio_of_means
    assert list(found.rows()) == [numbers]


def with_data(found, **changes):
    """The audit of other data with the same predictions."""
    versions = found.judged.versions
    versions = dataclasses.replace(versions, data=dataclasses.replace(versions.data, **changes))
    judged = dataclasses.replace(found.judged, versions=versions)
    return dataclasses.replace(found, judged=judged)


def test_pairs_need_no_masks(models):
    cases = scenes(48, usual=1.0, seed=4)
    swapped = cases.images.clone()
    swapped[:, :2] = cases.images[:, [1, 0]]  # green for red
    pairs = dataclasses.replace(cases, truth=None, other_background=swapped)
    result = sc.audit(models["biased"], pairs)
    assert result.verdict == "yes" and result.masks is None and result.gains is None
    # the other way round every prediction is wrong as it is, and just these are turned by the mark
    turned = dataclasses.replace(pairs, images=swapped, other_background=cases.images)
    other = sc.audit(models["biased"], turned)
    assert other.verdict == "yes" and other.flips == result.flips > 0.5


def test_limits_are_met_by_whole_intervals(found):
    assert missed_limits(found, min_accuracy=0.2, max_bir=1.0) == []
    reasons = missed_limits(found, max_flips=0.1, min_accuracy=1.0, min_worst_group=0.9)
    assert [reason.split()[0] for reason in reasons] == ["extra", "accuracy", "worst"]
    assert all("(95 %)" in reason for reason in reasons)
    own = with_data(found, masks=dataclasses.replace(found.masks, kind="own"))
    assert "masks of the model's own" in missed_limits(own, max_flips=1.0)[0]
    random = dataclasses.replace(found, protocol={"random_weights": True})
    assert "random weights" in missed_limits(random, min_accuracy=0.0)[0]
    never = found.extra_flips_by_image * 0
    still = BackgroundAudit(found.judged, found.erasures)
    still.__dict__["extra_flips_by_image"] = (
        never  # an interval without spread is wider than it looks
    )
    high = 3.0 / len(never)
    assert missed_limits(still, max_flips=high / 2) and not missed_limits(still, max_flips=2 * high)
    for options in ({"max_bir": 0.1}, {"min_worst_group": 0.5}):
        bare = dataclasses.replace(with_data(found, groups=()), erasures={})
        with pytest.raises(BadOption, match="no limit"):
            missed_limits(bare, **options)
    with pytest.raises(BadOption, match="from 0 to 1"):
        missed_limits(found, max_flips=1.5)


def test_bad_input_is_refused(models):
    model, cases = models["biased"], scenes(20)
    for data, options, message in (
        (dataclasses.replace(cases, truth=None), {}, "neither masks nor"),
        (cases.take(torch.arange(0, 20, 2)), {}, "one class only"),
        (dataclasses.replace(cases, labels=None), {}, "labels"),
        (cases, {"masks": torch.zeros(20, 5, 5, dtype=torch.bool)}, "masks"),
        (cases, {"masks": torch.zeros(20, 32, 32)}, "0 of 20 with an object"),
        (cases, {"per_image": 0}, "at least 1"),
        (cases, {"fills": ("white",)}, "fills"),
    ):
        with pytest.raises(BadOption, match=message):
            sc.audit(model, data, **options)
    wrong = dataclasses.replace(cases, labels=1 - model(cases.images).argmax(dim=1))
    with pytest.raises(BadInput, match="none of 20 images correctly"):
        sc.audit(model, wrong)


def test_data_may_be_a_name_and_results_print_one_line(tmp_path, models):
    for place, image in enumerate(scenes(24, seed=4).images):
        folder = tmp_path / ("light" if place % 2 else "dark")
        folder.mkdir(exist_ok=True)
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(folder / f"{place}.png")
    (tmp_path / "dark" / "bad.png").write_text("no image")
    result = sc.audit(models["biased"], f"folder:{tmp_path}", masks="own", per_image=1)
    assert len(result.data) == 24 and result.data.skipped[0].name == "dark/bad.png"
    assert "\n" not in repr(result) and repr(result).startswith(f"BackgroundAudit({result.verdict}")
    with pytest.raises(BadOption, match="folder:"):
        sc.audit(models["biased"], str(tmp_path))
