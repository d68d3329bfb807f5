"""The shortcut study: its pictures, its plan, and the whole of it on drawn animals and a tiny
transformer."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import time

import numpy as np
import pytest
import timm
import torch
import typer
from PIL import Image

import seecause as sc
from scripts import evidence_shortcut
from scripts.shortcut import choice, data, figure, page, plan, repair, rows, slices, words
from scripts.shortcut.data import both_ways, read_cutouts, train_pictures
from scripts.shortcut.methods import FILE, Job, Setup, control_masks, fit
from scripts.shortcut.textures import brightness
from seecause.errors import DataMissing
from seecause.heads import HeadScores

CPU = torch.device("cpu")
TINY = {
    "img_size": 48,
    "patch_size": 12,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 3,
}
FEW = {"epochs": 1, "batch": 8, "mask_steps": 1, "scored": 4, "draws": 2, "architecture": TINY}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two breeds of discs (cats) and two of squares (dogs), on grey, with a border; one photo whose
    trimap has no animal."""
    root = tmp_path_factory.mktemp("real")
    for folder in ("images", "annotations/trimaps"):
        (root / "pets_small" / folder).mkdir(parents=True)
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:40, :40]
    for split, each in (("trainval", 8), ("test", 3)):
        lines = []
        for breed in range(4):
            for number in range(each):
                name, species = f"breed{breed}_{split}{number}", 1 + breed // 2
                far = (
                    np.hypot(x - 20, y - 18)
                    if species == 1
                    else np.maximum(abs(x - 20), abs(y - 18))
                )
                ids = np.where(far < 10, 1, np.where(far < 13, 3, 2)).astype(np.uint8)
                colour = generator.integers(60, 250, 3)
                pixels = np.where((far < 12)[..., None], colour, 128).astype(np.uint8)
                empty = split == "test" and breed == 3 and number == 2
                Image.fromarray(np.full_like(ids, 2) if empty else ids).save(
                    root / "pets_small/annotations/trimaps" / f"{name}.png"
                )
                Image.fromarray(pixels).save(root / "pets_small/images" / f"{name}.jpg")
                lines.append(f"{name} {breed + 1} {species} 1")
        (root / "pets_small/annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def cutouts(real):
    return read_cutouts(real / "pets_small", size=48)


def test_a_silhouette_has_the_shape_and_nothing_else_of_its_photo(cutouts):
    black = dataclasses.replace(
        cutouts, rgba=cutouts.rgba * torch.tensor([0, 0, 0, 1], dtype=torch.uint8)[:, None, None]
    )
    one, other = (
        both_ways(figure.silhouettes(some), "test", size=48, device=CPU)
        for some in (cutouts, black)
    )
    assert (one.images == other.images).all() and (
        one.masks == both_ways(cutouts, "test", size=48, device=CPU).masks
    ).all()
    assert (
        one.images.permute(0, 2, 3, 1)[figure._edge(one.masks).logical_not() & one.masks]
        == figure.GREY
    ).float().mean() > 0.9


def test_splits_share_no_photo_and_validation_has_every_breed(cutouts):
    names = {
        split: {cutouts.names[row] for row in cutouts.rows(split).tolist()} for split in data.SPLITS
    }
    assert [len(names[split]) for split in data.SPLITS] == [24, 8, 11] and sum(
        map(len, names.values())
    ) == len(set().union(*names.values()))
    assert {name.partition("_")[0] for name in names["val"]} == {
        f"breed{breed}" for breed in range(4)
    }
    assert cutouts.without == (
        "breed3_test2",
    )  # a hole that is told, not an animal that is not there


def test_training_has_the_shortcut_and_the_test_pairs_have_not(cutouts, monkeypatch):
    monkeypatch.setattr(data, "UNUSUAL", 0.25)
    train, test = (
        train_pictures(cutouts, seed=1, size=48, device=CPU),
        both_ways(cutouts, "test", size=48, device=CPU),
    )
    for species in range(2):
        assert (train.places[train.labels == species] != species).sum() == 3  # of 12
    met = torch.tensor(
        [
            ((train.labels == species) & (train.places == place)).double().mean()
            for species, place in data.GROUPS
        ]
    )
    assert (
        met.tolist()
        == pytest.approx(data.training_shares(cutouts))
        == [9 / 24, 3 / 24, 3 / 24, 9 / 24]
    )
    others = train_pictures(cutouts, seed=2, size=48, device=CPU)
    assert not torch.equal(train.places, others.places) and torch.equal(train.photos, others.photos)
    boards, leaves = test.take(slice(0, 11)), test.take(slice(11, 22))
    assert (
        torch.equal(boards.photos, leaves.photos)
        and torch.equal(boards.masks, leaves.masks)
        and set(test.places.tolist()) == {0, 1}
    )
    inside = (
        torch.nn.functional.avg_pool2d(boards.masks[:, None].float(), 5, stride=1, padding=2)[:, 0]
        == 1
    )
    assert (
        inside.any()
        and (boards.images.int() - leaves.images.int()).abs().amax(dim=1)[inside].max() <= 1
    )  # the same animal
    assert (boards.images != leaves.images).any(dim=1)[
        ~boards.masks
    ].float().mean() > 0.9  # elsewhere


def test_a_picture_does_not_depend_on_its_neighbours(cutouts):
    rows = cutouts.rows("test")
    alone = data.compose(cutouts, rows[3:4], torch.tensor([1]), seed=0, size=48, device=CPU)
    assert torch.equal(
        alone.images[0], both_ways(cutouts, "test", size=48, device=CPU).images[len(rows) + 3]
    )


def test_an_animal_lies_whole_inside_the_frame_and_has_its_colour(cutouts):
    test = both_ways(cutouts, "test", size=48, device=CPU)
    area = test.masks.float().mean(dim=(1, 2))
    assert area.min() > 0.12 and area.max() < 0.5  # a disc or square of 50 to 70 % of the side
    edge = torch.cat(
        [test.masks[:, 0], test.masks[:, -1], test.masks[:, :, 0], test.masks[:, :, -1]], dim=1
    )
    assert edge.float().mean() < 0.1


def result(job, worst, average=0.9):
    return {
        **dataclasses.asdict(job),
        "val": {"worst": worst, "average": average, "kept": 0.213},
        "seconds": 1.0,
    }


def test_settings_are_chosen_on_validation_and_then_trained_with_seeds_that_chose_nothing():
    tried = plan.tuning("erm")
    assert (
        len(tried) == len(plan.tuning("ifam"))
        and {job.seed for job in tried} == {plan.TUNING_SEED}
        and plan.TUNING_SEED not in plan.SEEDS
    )
    results = {
        job.file: result(job, worst)
        for job, worst in zip(tried, (0.1, 0.5, 0.5, *[0.4] * 9), strict=True)
    }
    some = dict(list(results.items())[1:])
    assert (
        plan.chosen("erm", some) is None and plan.best_so_far("erm", some) == tried[1]
    )  # not before all are tried
    best = plan.chosen("erm", results)
    assert best == tried[1]  # the first of equals
    again = plan.seeds_of(best)
    results[again[1].file] = result(again[1], 0.9)
    jobs = plan.plan(results)
    assert set(again) <= set(jobs) and [job.seed for job in jobs if job.method == "repair"] == [
        again[1].seed
    ]  # what is repaired must be there
    assert not plan.is_complete(results) and len(jobs) == len(set(jobs)) == len(
        {job.file for job in jobs}
    )
    assert {job.seed for job in plan.missing(results, guess=True) if job.method == "repair"} == set(
        plan.SEEDS
    )  # but it is counted


def test_control_masks_show_as_much_as_ifam_and_know_nothing_of_the_animal():
    results = {job.file: result(job, 0.5) for method in plan.TUNED for job in plan.tuning(method)}
    jobs = [job for job in plan.plan(results) if job.method in plan.CONTROLS]
    assert (
        len(jobs) == 2 * len(plan.SEEDS)
        and {job.kept for job in jobs} == {0.21}
        and {job.rate for job in jobs} == {plan.chosen("mask", results).rate}
    )
    centre, lot = (control_masks(5, 14, 0.21, by_lot=by_lot, seed=1) for by_lot in (False, True))
    assert (centre.sum(dim=(1, 2)) == 41).all() and (lot.sum(dim=(1, 2)) == 41).all()  # of 196
    assert (
        (centre == centre[0]).all()
        and centre[0, 5:9, 5:9].all()
        and not centre[0, [0, -1]].any()
        and not centre[0, :, [0, -1]].any()
    )
    assert (lot[0] != lot[1]).any() and (
        lot != control_masks(5, 14, 0.21, by_lot=True, seed=2)
    ).any()


@pytest.mark.parametrize(("length", "epochs"), [(1.0, 3), (1 / 3, 1), (3.0, 9)])
def test_a_longer_training_is_so_many_times_the_epochs(cutouts, tmp_path, length, epochs):
    weight, steps = torch.nn.Parameter(torch.zeros(1)), []
    train = train_pictures(cutouts, seed=1, size=48, device=CPU)
    job, setup = (
        Job("erm", 1, 1e-3, length=length),
        Setup(tmp_path, tmp_path, device="cpu", epochs=3, batch=8, architecture=TINY),
    )
    fit(
        setup,
        job,
        [{"params": [weight], "lr": 1e-3}],
        train,
        lambda pictures, images, step: steps.append(step) or weight.sum(),
    )
    assert steps == list(range(epochs * len(train) // 8))


def test_every_row_owns_to_the_groups_that_chose_it():
    results = {job.file: result(job, 0.5) for method in plan.TUNED for job in plan.tuning(method)}
    table = {line.title: line.uses for line in rows.lines(results)}
    assert (
        all("groups of validation pictures, to choose" in uses for uses in table.values())
        and len(table) == 18
    )
    assert {title for title, uses in table.items() if "to fit" in uses} == {
        "DFR: ERM with a new last layer"
    }
    assert all(
        "grid of settings" in table[title] for title in ("iFAM, K = 4", "PDiscoFormer, K = 4")
    )


def test_random_controls_of_the_first_version_are_not_shown():
    job = Job("repair", 1, 1e-4)
    first = {
        "repair_1_0.0001.json": {
            "dfr": {"test": 1},
            "random": {"test": 2},
            "random best": {"test": 3},
        }
    }
    assert rows.repair_of(job, first) == {"dfr": {"test": 1}}
    assert (
        rows.repair_of(job, {**first, job.file: {"dfr": {"test": 4}}}) == {"dfr": {"test": 4}}
        and job.file == "repair-v2_1_0.0001.json"
    )


def test_leaves_are_darker_and_the_page_says_so():
    boards, leaves, pairs = brightness(draws=64)
    assert leaves < boards - 0.1 and pairs > 0.8


def test_removals_are_chosen_on_validation_alone():
    def outcome(heads, worst, average):
        return {
            "heads": heads,
            "val": {"worst": worst, "average": average},
            "test": {"worst": 1 - worst},
        }

    whole, one, two = (
        outcome([], 0.5, 0.8),
        outcome([[0, 1]], 0.6, 0.7),
        outcome([[0, 1], [1, 1]], 0.6, 0.7),
    )
    assert (
        repair.best([whole, two, one]) == one
        and repair.best([whole, outcome([[0, 0]], 0.4, 0.9)]) == whole
    )


def test_a_slice_that_is_too_short_for_any_job_does_one_and_remembers_its_time(
    tmp_path, monkeypatch
):
    setup, done = Setup(tmp_path, tmp_path, device="cpu"), []

    def run(setup, job):
        done.append(job)
        return {**result(job, 0.5), "seconds": 100.0, "test": {"average": 0.5, "worst": 0.5}}

    monkeypatch.setattr(evidence_shortcut, "run", run)
    for seconds, jobs in ((0.0, 0), (30.0, 1)):  # a job is expected to take a minute
        evidence_shortcut.carry_out(setup, ends=time.time() + seconds, workers=0)
        assert len(done) == jobs and [one["jobs"] for one in slices.kept(tmp_path)] == [1] * jobs
    refused: list[Job] = []

    def refuse(setup, job):
        refused.append(job)
        raise DataMissing("a", "b", "c")

    monkeypatch.setattr(evidence_shortcut, "run", refuse)
    evidence_shortcut.carry_out(setup, ends=time.time() + 30.0, workers=0)
    assert (
        len(refused) == 1
        and len(slices.kept(tmp_path)) == 1
        and not evidence_shortcut.finished(setup)
    )  # slices are no training


def test_the_study_runs_stops_goes_on_and_shows_its_holes(real, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "RATES", (1e-3, 1e-4))
    monkeypatch.setattr(plan, "LENGTHS", (1.0,))
    monkeypatch.setattr(plan, "PART_RATES", (1e-3,))
    monkeypatch.setattr(plan, "SHAPING", ((2.0, 0.3),))
    for module in (plan, page, rows, choice, words):
        monkeypatch.setattr(module, "SEEDS", (1, 2))
    for module in (plan, rows):
        monkeypatch.setattr(module, "OTHER_PARTS", (1,))
    monkeypatch.setattr(repair, "KS", (1, 2))
    monkeypatch.setattr(repair, "DFR", {"refits": 1, "strengths": (0.1,)})
    monkeypatch.setattr(evidence_shortcut, "SMALL", FEW)

    def go(minutes):
        evidence_shortcut.main(
            real=real,
            limit=12,
            device="cpu",
            minutes=minutes,
            out=tmp_path / "out",
            work=tmp_path / "work",
            workers=0,
        )

    first = evidence_shortcut.run
    done: list[Job] = []

    def some(setup, job):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job)
        return first(setup, job)

    with pytest.raises(typer.Exit) as wants_more:  # no time at all: a page of holes
        go(0.0)
    assert wants_more.value.exit_code == 1
    assert "**Not finished.**" in (tmp_path / "out/evidence-shortcut.md").read_text()
    monkeypatch.setattr(evidence_shortcut, "run", some)
    with pytest.raises(KeyboardInterrupt):
        go(60.0)
    stopped = list(done)
    monkeypatch.setattr(
        evidence_shortcut, "run", lambda setup, job: done.append(job) or first(setup, job)
    )
    go(60.0)
    assert len(done) == len(set(done)) and done[:3] == stopped  # nothing is done twice
    assert [one["jobs"] for one in slices.kept(next((tmp_path / "work").iterdir()))] == [
        3,
        len(done) - 3,
    ]
    text = (tmp_path / "out/evidence-shortcut.md").read_text()
    assert (
        "**Not finished.**" not in text
        and "its numbers mean nothing" in text
        and "nan" not in text.lower()
    )
    titles = {
        row["method"]
        for row in csv.DictReader((tmp_path / "out/evidence-shortcut.csv").read_text().splitlines())
    }
    assert len(titles) == 16 and all(
        f"| {title} |" in text and (f"**{title}**" in text or title.startswith("ERM: "))
        for title in titles
    )
    assert (
        len(re.findall(r"^\| \*\*", text, re.M)) == 4
    )  # one chosen setting for each method that is tuned
    for path in (tmp_path / "work").glob("*/repair-v2_*.json"):
        row = json.loads(path.read_text())
        for name in ("printed", "guarded"):
            assert set(row[f"random, {name}"]["removed"]) == {
                len(row[name]["heads"])
            }  # none stays none
        assert (
            len(row["random, chosen"]["worst"]) == FEW["draws"]
            and max(row["random, chosen"]["removed"]) <= 2
        )
    for name in ("evidence-shortcut.png", "evidence-shortcut-photos.png"):
        with Image.open(tmp_path / "out" / name) as drawn:
            assert drawn.size == (figure.LEFT + 8 * 144 - 4, figure.TOP + 3 * 144 - 4 + figure.FOOT)
    assert (
        "](evidence-shortcut.png)" in text and "](evidence-shortcut-photos.png)" not in text
    )  # photos are not in the repository
    before = (tmp_path / "out/evidence-shortcut.csv").read_bytes()
    monkeypatch.setattr(evidence_shortcut, "run", None)
    go(60.0)
    assert (tmp_path / "out/evidence-shortcut.csv").read_bytes() == before


def test_a_study_goes_on_only_with_what_it_began_with(real, tmp_path):
    for name in ("pets_small/annotations/trainval.txt", "pets_small/annotations/test.txt", FILE):
        (tmp_path / "real" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "real" / name).write_text(name)

    def folder(**told):
        return evidence_shortcut.open_study(tmp_path / "real", tmp_path, **told).folder

    first = folder(device="cuda")
    assert (
        folder(device="cuda:1", epochs=15) == first
    )  # the same kind of device, a default that is spelt out
    assert (
        len(
            {
                first,
                folder(device="cpu"),
                folder(device="cuda", epochs=14),
                folder(device="cuda", draws=21),
            }
        )
        == 4
    )
    (tmp_path / "real" / FILE).write_text("other weights")
    weights = folder(device="cuda")
    (tmp_path / "real" / "pets_small/annotations/test.txt").write_text("other photos")
    assert len({first, weights, folder(device="cuda")}) == 3


def test_random_orders_have_as_many_candidates_as_cigma_one_inside_the_other():
    model = sc.wrap(
        timm.models.VisionTransformer(**{**TINY, "depth": 4}).eval(),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    orders = repair.random_orders(model, [1, 2, 4], draws=3, seed=5)
    assert len(orders) == 3 and all(
        [len(heads) for heads in nested] == [1, 2, 4] for nested in orders
    )
    assert (
        all(set(one) < set(two) < set(four) for one, two, four in orders) and orders[0] != orders[1]
    )


def test_random_heads_are_as_many_as_each_way_removes(cutouts, monkeypatch):
    torch.manual_seed(0)
    model = sc.wrap(
        timm.models.VisionTransformer(**{**TINY, "num_classes": 2}).eval(),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    test = both_ways(cutouts, "test", size=48, device=CPU)
    monkeypatch.setattr(repair, "KS", (1, 2))
    monkeypatch.setattr(repair, "DFR", {"refits": 1, "strengths": (0.1,)})
    monkeypatch.setattr(
        repair, "score", lambda *given, **told: HeadScores(torch.tensor([[2.0, 1.0], [-1.0, -1.0]]))
    )  # two heads to remove
    monkeypatch.setattr(
        repair, "penalised", lambda scores: HeadScores(-scores.value.abs())
    )  # and none
    monkeypatch.setattr(
        repair, "best", lambda outcomes: dict(outcomes[-1])
    )  # the most heads, whatever it costs
    found = repair.repairs(
        model,
        0,
        train_pictures(cutouts, seed=0, size=48, device=CPU),
        test,
        test,
        mask_steps=1,
        scored=4,
        draws=3,
    )
    assert (
        found["printed"]["heads"] == [[0, 0], [0, 1]]
        and found["random, printed"]["removed"] == [2] * 3
    )
    assert found["guarded"]["heads"] == [] and found["random, guarded"]["removed"] == [0]
    assert found["random, guarded"]["test"] == found["whole"]["test"]
    assert (
        found["random, chosen"]["removed"] == [2] * 3 and len(found["random, chosen"]["worst"]) == 3
    )


def test_what_is_missing_is_named(real, tmp_path):
    with pytest.raises(DataMissing, match=r"vit_tiny_patch16_224\.safetensors"):
        evidence_shortcut.open_study(real, tmp_path)
    with pytest.raises(DataMissing, match=r"trainval\.txt"):
        evidence_shortcut.open_study(tmp_path, tmp_path)
