"""CIGMA's experiments: what a cell holds equals what the library measures, step by step."""

from functools import lru_cache

import pytest
import torch

import seecause as sc
from seecause.background.gains import Gains
from seecause.background.heads import outcomes, select
from seecause.data.batch import true_positives
from seecause.data.dataset import sample_ids
from seecause.experiments import base, cigma
from seecause.experiments.base import Part
from seecause.metrics.statistics import ratio_interval, standard_error

PART = Part({"spec": "builtin:critters-biased"}, "critters:certified", 8, 0, 8, "label", "cpu")
TINY = {"steps": 1, "grid": 4}


@lru_cache
def cell(**options):
    """Values of an edited model by column and row."""
    rows = cigma.edited(PART, **{**TINY, **options})
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "image" and value is not None:
                found.setdefault(name, {})[row["image"]] = value
    return found


def mean(column):
    return sum(column.values()) / len(column)


@pytest.mark.parametrize("masks", [None, "discovered"])
def test_a_cell_is_what_the_library_measures(masks):
    found = cell(masks=masks, seeds=1, top=4, temperature=2.0)
    view, test = (sc.load("builtin:critters-biased"), "critters:certified:test")
    train, judge = (
        sc.background.read_images(view, sc.data.open_data(name, limit=8))
        for name in ("critters:certified:train", test)
    )
    right, known = (view(each.images).argmax(dim=1) == each.labels for each in (train, judge))
    chosen = train.take(right).take(true_positives(right[right], right[right]))

    def masked(images):
        if masks is None:
            return images.with_masks(images.truth)
        options = {"fill": "grey", "temperature": 2.0, **TINY}
        return images.with_masks(sc.background.discover_masks(view, images.images, **options))

    judged = masked(judge.take(known))  # of the whole model
    scores = select("cigma", view, masked(chosen), temperature=2.0)
    (whole,) = outcomes(view, judge, [scores.top(4)])
    assert mean(found["Acc"]) == pytest.approx(100 * whole.numbers["accuracy"])
    assert found["Worst group"]["seed 0"] == pytest.approx(100 * whole.numbers["worst group"])
    with sc.background.ablate(view, scores.top(4)):
        logits = view(judge.images) / 2
        gains = sc.background.information_gains(view, judged, temperature=2.0)
    losses = torch.nn.functional.cross_entropy(logits, judge.labels)
    assert mean(found["NLL"]) == pytest.approx(float(losses), rel=1e-5)
    assert mean(found["BIR"]) == pytest.approx(gains.bir_ratio_of_means, rel=1e-4)
    assert mean(found["FIG"]) == pytest.approx(float(gains.fig.mean()), rel=1e-4)
    assert ("IoU" in found) == ("BIR, true masks" in found) == (masks == "discovered")
    assert len(found["Acc"]) == 8 and len(found["BIR"]) == len(judged)


def test_as_printed_removes_as_many_heads_as_asked():
    ours, printed = cell(top=40), cell(top=40, positive=False)
    assert set(printed["heads"].values()) == {40} and max(ours["heads"].values()) < 40
    assert set(cell(selector="none")["heads"].values()) == {0}
    assert not any(cell(selector="none")["ΔAcc"].values())
    sizes = cell(selector="random", top=40)["heads"]  # as many as CIGMA at each seed
    assert len(sizes) == 21 and ours["heads"].items() <= sizes.items()


def test_groups_of_blocks_make_up_the_whole():
    parts = [cell(top=6, blocks=blocks) for blocks in ((0, 4), (4, 12))]
    for seed, count in cell(top=6)["heads"].items():
        assert sum(part["heads"][seed] for part in parts) == count
    alone = cell(top=48, positive=False, blocks=(0, 4))  # of six blocks of eight heads
    assert set(alone["heads"].values()) == {32}


def test_the_ratio_of_means_has_the_error_of_a_ratio():
    generator = torch.Generator().manual_seed(0)
    both = torch.rand(2, 3, 400, generator=generator, dtype=torch.float64)
    both[0] *= both[1]  # dependent
    shares = cigma.background_shares(both, "means")
    for place, values in enumerate(shares):
        big, fig = both[:, place]
        assert float(values.mean()) == pytest.approx(Gains(fig, big, 0.0).bir_ratio_of_means)
        low, high = ratio_interval(big, fig + big)
        assert float(standard_error(values)) == pytest.approx((high - low) / 3.92, rel=0.05)
        ratios = cigma.background_shares(both, "ratios")[place]
        assert float(ratios.mean()) == pytest.approx(Gains(fig, big, 0.0).bir_mean_of_ratios)


def test_stability_of_scores_that_are_known():
    first = torch.arange(12.0).reshape(3, 4).flip(0, 1).double()
    absent = first.clone()
    absent[0, 0] = torch.nan  # a block may have fewer heads
    rows = {row.pop("image"): row for row in cigma.stability([first, first, -first], 2)}
    assert rows["Spearman 0"]["Spearman"] == pytest.approx(1.0)
    assert rows["Spearman 1"]["Spearman"] == pytest.approx(-1.0)
    assert rows["% moved 0"] == {"% moved": 0.0}
    assert rows["% moved 1"]["% moved"] == pytest.approx(50.0)  # 11, 9, 7 places, on both ends
    assert {"image": "rank std 1", "rank std": 0.0} in cigma.stability([absent, absent], 2)


def test_heads_are_judged_on_other_images():
    for data in ("critters:certified", "critters:certified:test"):
        train, test = cigma.halves(data, 8)
        assert not {*sample_ids(train)} & {*sample_ids(test)}
        assert len(train) == len(test) == (8 if data == "critters:certified" else 4)


def test_the_floor_of_cigma_can_be_left_out(monkeypatch):
    view = sc.load("builtin:critters-biased")
    data = sc.background.read_images(view, sc.data.open_data("critters:certified", limit=2))
    data = data.with_masks(data.truth)
    high = Gains(torch.zeros(2), torch.zeros(2), noise_floor=1.0)
    monkeypatch.setattr("seecause.background.scoring.information_gains", lambda *a, **b: high)
    assert not select("cigma", view, data, guard=False).value.any()
    plain = sc.background.score(view, data, guard=False).value
    without = select("cigma", view, data, guard=False, floor=False).value
    assert torch.allclose(without, plain, atol=1e-6, rtol=0)


def test_a_printed_mean_over_all_models_stands_beside_each(tmp_path):
    sc.experiments.run("cigma/table-4", tmp_path, quick=True, as_printed=True, limit=2)
    table = sc.experiments.read_table(tmp_path, "cigma/table-4")
    assert table.cells["critters-biased, critters, 1.0"]["BIR"].published == (0.068,)
    assert "(0.068)" in (tmp_path / "cigma/table-4/table.md").read_text()
    found = base.find_experiment("cigma/table-1")
    setting = base.setting_of(found, quick=True, as_printed=True)["options"]
    assert setting["top"] == 16 and setting["bir"] == "ratios" and setting["cap"] == 0
