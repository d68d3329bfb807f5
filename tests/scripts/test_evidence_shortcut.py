"""The shortcut study: its pictures, its plan, and the whole of it on drawn animals and a tiny transformer."""

from __future__ import annotations

import csv
import dataclasses
import re

import numpy as np
import pytest
import torch
import typer
from PIL import Image

from scripts import evidence_shortcut
from scripts.shortcut import data, figure, page, plan, repair
from scripts.shortcut.data import both_ways, read_cutouts, train_pictures
from scripts.shortcut.methods import Job
from seecause.errors import DataMissing

CPU = torch.device("cpu")
TINY = {"img_size": 48, "patch_size": 12, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
FEW = {"epochs": 1, "batch": 8, "mask_steps": 1, "scored": 4, "draws": 2, "architecture": TINY}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two breeds of discs (cats) and two of squares (dogs), on grey, with a border; one photo whose trimap has no animal."""
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
                far = np.hypot(x - 20, y - 18) if species == 1 else np.maximum(abs(x - 20), abs(y - 18))
                ids = np.where(far < 10, 1, np.where(far < 13, 3, 2)).astype(np.uint8)
                colour = generator.integers(60, 250, 3)
                pixels = np.where((far < 12)[..., None], colour, 128).astype(np.uint8)
                empty = split == "test" and breed == 3 and number == 2
                Image.fromarray(np.full_like(ids, 2) if empty else ids).save(root / "pets_small/annotations/trimaps" / f"{name}.png")
                Image.fromarray(pixels).save(root / "pets_small/images" / f"{name}.jpg")
                lines.append(f"{name} {breed + 1} {species} 1")
        (root / "pets_small/annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def cutouts(real):
    return read_cutouts(real / "pets_small", size=48)


def test_a_silhouette_has_the_shape_and_nothing_else_of_its_photo(cutouts):
    black = dataclasses.replace(cutouts, rgba=cutouts.rgba * torch.tensor([0, 0, 0, 1], dtype=torch.uint8)[:, None, None])
    one, other = (both_ways(figure.silhouettes(some), "test", size=48, device=CPU) for some in (cutouts, black))
    assert (one.images == other.images).all() and (one.masks == both_ways(cutouts, "test", size=48, device=CPU).masks).all()
    assert (one.images.permute(0, 2, 3, 1)[figure._edge(one.masks).logical_not() & one.masks] == figure.GREY).float().mean() > 0.9


def test_splits_share_no_photo_and_validation_has_every_breed(cutouts):
    names = {split: {cutouts.names[row] for row in cutouts.rows(split).tolist()} for split in data.SPLITS}
    assert [len(names[split]) for split in data.SPLITS] == [24, 8, 11] and sum(map(len, names.values())) == len(set().union(*names.values()))
    assert {name.partition("_")[0] for name in names["val"]} == {f"breed{breed}" for breed in range(4)}
    assert cutouts.without == ("breed3_test2",)  # a hole that is told, not an animal that is not there


def test_training_has_the_shortcut_and_the_test_pairs_have_not(cutouts, monkeypatch):
    monkeypatch.setattr(data, "UNUSUAL", 0.25)
    train, test = train_pictures(cutouts, seed=1, size=48, device=CPU), both_ways(cutouts, "test", size=48, device=CPU)
    for species in range(2):
        assert (train.places[train.labels == species] != species).sum() == 3  # of 12
    others = train_pictures(cutouts, seed=2, size=48, device=CPU)
    assert not torch.equal(train.places, others.places) and torch.equal(train.photos, others.photos)
    boards, leaves = test.take(slice(0, 11)), test.take(slice(11, 22))
    assert torch.equal(boards.photos, leaves.photos) and torch.equal(boards.masks, leaves.masks) and set(test.places.tolist()) == {0, 1}
    inside = torch.nn.functional.avg_pool2d(boards.masks[:, None].float(), 5, stride=1, padding=2)[:, 0] == 1
    assert inside.any() and (boards.images.int() - leaves.images.int()).abs().amax(dim=1)[inside].max() <= 1  # the same animal
    assert (boards.images != leaves.images).any(dim=1)[~boards.masks].float().mean() > 0.9  # elsewhere


def test_a_picture_does_not_depend_on_its_neighbours(cutouts):
    rows = cutouts.rows("test")
    alone = data.compose(cutouts, rows[3:4], torch.tensor([1]), seed=0, size=48, device=CPU)
    assert torch.equal(alone.images[0], both_ways(cutouts, "test", size=48, device=CPU).images[len(rows) + 3])


def test_an_animal_lies_whole_inside_the_frame_and_has_its_colour(cutouts):
    test = both_ways(cutouts, "test", size=48, device=CPU)
    area = test.masks.float().mean(dim=(1, 2))
    assert area.min() > 0.12 and area.max() < 0.5  # a disc or square of 50 to 70 % of the side
    edge = torch.cat([test.masks[:, 0], test.masks[:, -1], test.masks[:, :, 0], test.masks[:, :, -1]], dim=1)
    assert edge.float().mean() < 0.1


def result(job, worst, average=0.9):
    return {**dataclasses.asdict(job), "val": {"worst": worst, "average": average}, "seconds": 1.0}


def test_settings_are_chosen_on_validation_and_then_trained_with_every_seed():
    tried = plan.tuning("erm")
    results = {job.file: result(job, worst) for job, worst in zip(tried, (0.1, 0.5, 0.5, 0.4), strict=True)}
    assert plan.chosen("erm", dict(list(results.items())[1:])) is None  # not before all are tried
    best = plan.chosen("erm", results)
    assert best == tried[1]  # the first of equals
    jobs = plan.plan(results)
    assert {job.seed for job in jobs if job.method == "erm" and job.rate == best.rate} == set(plan.SEEDS)
    assert [job.seed for job in jobs if job.method == "repair"] == [0]  # what is repaired must be there
    assert not plan.is_complete(results) and len(jobs) == len(set(jobs)) == len({job.file for job in jobs})


def test_removals_are_chosen_on_validation_alone():
    def outcome(heads, worst, average):
        return {"heads": heads, "val": {"worst": worst, "average": average}, "test": {"worst": 1 - worst}}

    whole, one, two = outcome([], 0.5, 0.8), outcome([[0, 1]], 0.6, 0.7), outcome([[0, 1], [1, 1]], 0.6, 0.7)
    assert repair.best([whole, two, one]) == one and repair.best([whole, outcome([[0, 0]], 0.4, 0.9)]) == whole


def test_a_gain_is_told_only_if_all_seeds_agree():
    def line(*worst):
        return page.Line("x", "labels", {seed: {"worst": value, "average": 0.9} for seed, value in enumerate(worst)})

    erm = line(0.5, 0.5, 0.5)
    assert page.verdict(line(0.6, 0.55, 0.51), erm).startswith("helps: WGA +5.3 points (+10.0, +5.0, +1.0)")
    assert page.verdict(line(0.9, 0.9, 0.49), erm).startswith("makes no clear difference")
    assert page.verdict(line(0.51, 0.51, 0.51), erm).startswith("makes no clear difference")
    assert page.verdict(line(0.4, 0.4), erm).startswith("costs (2 of 3 seeds)")


def test_the_study_runs_stops_goes_on_and_shows_its_holes(real, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "RATES", (1e-3, 1e-4))
    monkeypatch.setattr(plan, "PART_RATES", (1e-3,))
    monkeypatch.setattr(plan, "SHAPING", ((2.0, 0.3),))
    monkeypatch.setattr(plan, "SEEDS", (0, 1))
    monkeypatch.setattr(page, "SEEDS", (0, 1))
    monkeypatch.setattr(repair, "KS", (1, 2))
    monkeypatch.setattr(repair, "DFR", {"refits": 1, "strengths": (0.1,)})
    monkeypatch.setattr(evidence_shortcut, "SMALL", FEW)

    def go(minutes):
        evidence_shortcut.main(real=real, limit=12, device="cpu", minutes=minutes, out=tmp_path / "out", work=tmp_path / "work", workers=0)

    first = evidence_shortcut.run
    done: list[Job] = []

    def some(setup, job):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job)
        return first(setup, job)

    with pytest.raises(typer.Exit):  # no time at all: a page of holes
        go(0.0)
    assert "**Not finished.**" in (tmp_path / "out/evidence-shortcut.md").read_text()
    monkeypatch.setattr(evidence_shortcut, "run", some)
    with pytest.raises(KeyboardInterrupt):
        go(60.0)
    stopped = list(done)
    monkeypatch.setattr(evidence_shortcut, "run", lambda setup, job: done.append(job) or first(setup, job))
    go(60.0)
    assert len(done) == len(set(done)) and done[:3] == stopped  # nothing is done twice
    text = (tmp_path / "out/evidence-shortcut.md").read_text()
    assert "**Not finished.**" not in text and "its numbers mean nothing" in text and "nan" not in text.lower()
    titles = {row["method"] for row in csv.DictReader((tmp_path / "out/evidence-shortcut.csv").read_text().splitlines())}
    assert len(titles) == 15 and all(f"| {title} |" in text and (f"**{title}**" in text or title.startswith("ERM: ")) for title in titles)
    assert len(re.findall(r"^\| \*\*", text, re.M)) == 4  # one chosen setting for each method that is tuned
    for name in ("evidence-shortcut.png", "evidence-shortcut-photos.png"):
        with Image.open(tmp_path / "out" / name) as drawn:
            assert drawn.size == (figure.LEFT + 8 * 144 - 4, figure.TOP + 3 * 144 - 4 + figure.FOOT)
    assert "](evidence-shortcut.png)" in text and "](evidence-shortcut-photos.png)" not in text  # photos are not in the repository
    before = (tmp_path / "out/evidence-shortcut.csv").read_bytes()
    monkeypatch.setattr(evidence_shortcut, "run", None)
    go(60.0)
    assert (tmp_path / "out/evidence-shortcut.csv").read_bytes() == before


def test_what_is_missing_is_named(real, tmp_path):
    with pytest.raises(DataMissing, match=r"vit_tiny_patch16_224\.safetensors"):
        evidence_shortcut.open_study(real, tmp_path)
    with pytest.raises(DataMissing, match=r"trainval\.txt"):
        evidence_shortcut.open_study(tmp_path, tmp_path)
