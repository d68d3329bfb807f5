"""The background study on a toy folder: every piece, the page, resuming; and the photos it
makes."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import seecause as sc
from scripts import evidence_background as study
from scripts.background import composites, figures, numbers, removal, words
from scripts.background.numbers import Effect, Estimate, Removal, Removals
from scripts.head_methods import PRINTED
from scripts.kept_pieces import Pieces, pack, unpack
from seecause.data.imagenet import imagenet_wnids
from seecause.errors import BadOption
from tests.files import lines
from tests.tiny import scramble

SIDE, BREEDS = 48, ("Abyssinian", "pug", "beagle")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    module = scramble(
        VisionTransformer(
            img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=1000
        )
    )
    return sc.wrap(module, mean=(0.5,) * 3, std=(0.5,) * 3, size=(32, 32))


@pytest.fixture
def real(tmp_path, model):
    """The layout of the real folder. Photos of a breed are nearly alike and labelled as the model
    answers, so that it is right."""
    pets, rng, table, listed = (
        tmp_path / "real" / "pets",
        np.random.default_rng(0),
        ["image,breed,imagenet_index,wnid"],
        [],
    )
    (pets / "images").mkdir(parents=True)
    (pets / "annotations" / "trimaps").mkdir(parents=True)
    bases: dict[int, np.ndarray] = {}  # by answer
    while len(bases) < len(BREEDS):
        base = (rng.integers(20, 230, 3) + rng.integers(-19, 20, (SIDE, SIDE, 3))).astype(np.uint8)
        bases[int(model(model.preprocess(Image.fromarray(base))).argmax())] = base
    for number, (breed, (answer, base)) in enumerate(zip(BREEDS, bases.items(), strict=True)):
        for count in range(5):
            pixels = base + rng.integers(0, 2, base.shape, dtype=np.uint8)
            trimap = np.full((SIDE, SIDE), 2, np.uint8)
            trimap[12:36, 10:30], trimap[14:34, 12:28] = 3, 1
            Image.fromarray(pixels).save(pets / "images" / f"{breed}_{count}.jpg", format="PNG")
            Image.fromarray(trimap).save(pets / "annotations" / "trimaps" / f"{breed}_{count}.png")
            table.append(f"{breed}_{count},{breed},{answer},x")
            listed.append(f"{breed}_{count} {number + 1} 1 1")
    lines(pets / "imagenet_labels.csv", *table)
    lines(pets / "annotations" / "test.txt", *listed)
    for wnid in imagenet_wnids()[:3]:
        folder = tmp_path / "real" / "imagenet" / "val" / wnid
        folder.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(
            folder / "a.JPEG", format="PNG"
        )
    (tmp_path / "real" / study.WEIGHTS).write_bytes(b"")
    return tmp_path / "real"


def test_the_study_runs_in_parts_and_its_page_follows_from_its_pieces(
    real, model, tmp_path, monkeypatch, capsys
):
    small = study.Sizes(
        ks=(1, 2),
        mask_steps=2,
        mixes=1,
        draws=2,
        regression_draws=32,
        gating_masks=1,
        gating_steps=1,
        gating_batch=4,
    )
    monkeypatch.setattr(study, "SMALL", small)
    monkeypatch.setattr(study, "load", lambda real, device: model)

    def run(minutes, **told):
        with pytest.raises(typer.Exit) as ended:
            study.main(
                real=real,
                limit=9,
                device="cpu",
                minutes=minutes,
                tf32=True,
                seed=0,
                out=tmp_path / "out",
                work=tmp_path / "work",
                **told,
            )
        return ended.value.exit_code, (tmp_path / "out" / "evidence-background.md").read_text()

    code, page = run(-1.0)
    assert code == 1 and "stopped before 'plain'" in page and page.count("Not there yet") == 7
    code, page = run(5.0)
    assert code == 0 and "Not there yet" not in page and "nan" not in page
    monkeypatch.setattr(
        study.figures, "write", lambda *given: None
    )  # drawn, which takes most of the time
    said = capsys.readouterr().out
    assert re.search(
        r"plain accuracy, 8 photos of pets: [\d.]+\nplain accuracy, 3 photos of imagenet", said
    )  # first
    for name in ("plain", "searched", "audited"):  # finished pieces are not made again
        monkeypatch.setattr(study, name, lambda *given: pytest.fail("made again"))
    kept = next((tmp_path / "work").glob("*/random-2.json"))
    kept.unlink()
    again = run(5.0)
    assert (
        again[0] == 0
        and kept.is_file()
        and again[1].split("## Seconds")[0] == page.split("## Seconds")[0]
    )  # what is missing is
    assert (
        "](evidence-background.png)" in page and "](evidence-background-photos.png)" not in page
    )  # photos are not in the repository
    monkeypatch.setattr(study, "machine", lambda device: "another machine")
    assert run(5.0, only_page=True) == again  # it tells of the machine that made the pieces

    rows = list(
        csv.DictReader((tmp_path / "out" / "evidence-background.csv").read_text().splitlines())
    )
    methods = {row["row"] for row in rows if row["table"] == "removal"}
    assert {
        "cigma as printed",
        "cigma as printed + guard",
        "cigma, true masks, grey",
        "regression, true masks, grey",
        "largest weight norm",
    } <= methods
    assert {
        "smallest Taylor",
        "most attention on background",
        "loss gain",
        "gating",
        "gating, contrastive",
        "random",
    } <= methods
    assert {
        f"head {layer}.{head}" for layer in range(2) for head in range(2)
    } <= methods and "Not measured yet" not in page  # each alone
    gap = {
        row["row"]: float(row["value"])
        for row in rows
        if row["table"] == "composites" and row["measure"] == "right"
    }
    assert gap["BG-gap"] == pytest.approx(gap["mixed_same"] - gap["mixed_rand"], abs=1e-5)
    assert all(
        f"| {method} |" in page
        for method in methods
        if method != "random" and not method.startswith("head ")
    )
    assert "| control | each of 4 |" in page and "| control: another photo's breed |" in page
    assert (
        page.count("Rows of gating: 1 masks and 1 updates, where its authors take 10 and 500.") == 3
        and "G- was not kept" not in page
    )  # heads, both K
    assert (
        "Beside controls, all with the same fill (grey): BIR with discovered masks "
        in page.split("## How it was made")[0]
    )
    assert sum(row["measure"].startswith("difference of BIR") for row in rows) == 4
    assert "| random, 1 head | 1 |" in page and "control: another photo's true mask" in page
    for picture in ("evidence-background.png", "evidence-background-photos.png"):
        with Image.open(tmp_path / "out" / picture) as drawn:
            assert drawn.width > 300
    kept.unlink()
    monkeypatch.setattr(
        "scripts.background.audit.verdict_lines",
        lambda audit: [
            f"It believes {audit.trusted}, with {int(audit.counted.sum())} right answers."
        ],
    )
    code, page = run(5.0, only_page=True)
    assert code == 1 and not kept.is_file()
    assert re.search(
        r"\n> It believes (true|discovered) masks, \w+, with [1-8] right answers\.\n", page
    )  # by the rules an audit has when it is written


def test_pieces_of_other_sizes_or_another_device_are_not_taken(real, model):
    one = study.opened(model, real, sizes=study.SMALL, limit=9, seed=0, fast=False, device="cuda:1")
    changes = (
        {"device": "cpu"},
        {"sizes": study.Sizes()},
        {"limit": 12},
        {"seed": 1},
        {"fast": True},
        {"data": ("other", "photos")},
    )
    states = [one.state, *(replace(one, **some).state for some in changes)]
    assert one.device == "cuda" and len(set(states)) == len(states)


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"vit_tiny.* is not there"):
        study.main(real=tmp_path)


def test_filling_keeps_what_is_known_and_takes_the_rest_from_around_it():
    pixels = torch.rand(
        2, 3, 37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    holes = torch.zeros(2, 37, 24, dtype=torch.bool)
    holes[0, 10:20, 8:16] = True
    filled = composites.fill_holes(pixels, holes, margin=2)
    wide = torch.zeros(37, 24, dtype=torch.bool)
    wide[8:22, 6:18] = True
    assert torch.equal(filled[0][:, ~wide], pixels[0][:, ~wide]) and torch.equal(
        filled[1], pixels[1]
    )
    other = pixels.clone()
    other[0][:, wide] = 7.0  # nothing of the object is left in it
    assert torch.allclose(composites.fill_holes(other, holes, margin=2), filled)
    flat = torch.full_like(pixels, 0.3)
    assert torch.allclose(composites.fill_holes(flat, holes), flat)


def test_backgrounds_come_from_the_right_class_and_half():
    classes, parts = (
        torch.tensor([0] * 6 + [1] * 4 + [2] * 6),
        composites.halves(torch.tensor([0] * 6 + [1] * 4 + [2] * 6)),
    )
    assert [int(parts[classes == c].sum()) for c in range(3)] == [3, 2, 3]
    same, other = (
        pick(classes, parts, draws=3, seed=1)
        for pick in (composites.same_class, composites.other_class)
    )
    places = torch.arange(16)
    for rows in (*same, *other):
        assert torch.equal(rows.sort().values, places) and torch.equal(
            parts[rows], parts
        )  # each background once, of the same half
    assert (
        (classes[same] == classes).all()
        and (same != places).all()
        and (classes[other] != classes).all()
    )
    assert not torch.equal(other[0], other[1])
    with pytest.raises(BadOption, match="at least two of each class"):
        composites.same_class(torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.long), draws=1)


def test_composites_are_what_their_names_say():
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    shapes = torch.zeros(4, 32, 32, dtype=torch.bool)
    shapes[:, 12:20, 12:20] = True
    shapes[:, 12, 12] = False  # the box is larger than the shape
    shapes[3] = True
    classes, parts = torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.long)
    made = composites.compose(pixels, shapes, classes, parts, draws=1)
    shown, inside = shapes[0], torch.zeros(32, 32, dtype=torch.bool)
    inside[12:20, 12:20] = True
    assert (made.alone["only_fg"][0][:, ~shown] == 0).all() and torch.equal(
        made.alone["only_fg"][0][:, shown], pixels[0][:, shown]
    )
    for kind in ("only_bg_b", "only_bg_t"):
        assert torch.equal(made.alone[kind][0][:, ~inside], pixels[0][:, ~inside])
    assert (made.alone["only_bg_b"][0][:, inside] == 0).all()
    assert torch.equal(
        made.alone["only_bg_t"][0][:, 12:20, 12:20], pixels[0][:, 0:8, 12:20]
    )  # the first strip, above: 12 rows, and again from the 13th
    assert made.untiled == 1 and made.boxes.tolist() == pytest.approx([1 / 16] * 3 + [1])
    for kind in composites.MIXED:
        donor = made.donors[kind][0, 0]
        assert torch.equal(made.mixed[kind][0, 0][:, shown], pixels[0][:, shown])
        assert torch.equal(
            made.mixed[kind][0, 0][:, ~shown], made.alone["only_bg_f"][donor][:, ~shown]
        )


def whole_and_better():
    whole = {
        "heads": [],
        "imagenet": "1110",
        "pets": "1100",
        "mixed_same": [1, 1, 0, 0],
        "mixed_rand": [0, 0, 0, 0],
    }
    whole["gains"] = {name: [[0.2, 0.4], [0.2, 0.2]] for name in (*numbers.AFTER, numbers.SWAP)}
    better = {
        **whole,
        "heads": [[0, 1]],
        "mixed_rand": [1, 1, 0, 0],
        "gains": {name: [[0.2, 0.4], [0.0, 0.0]] for name in whole["gains"]},
    }
    return whole, better


def test_changes_are_paired():
    whole, better = whole_and_better()
    found, same = numbers.effects(better, whole), numbers.effects(whole, whole)
    assert found["BG-gap"].value == 0 and found["BG-gap"].change.value == -0.5
    grey = found["BIR, true masks, grey"]
    assert (
        grey.value == 0
        and grey.change.value == pytest.approx(-0.4)
        and grey.change.low == pytest.approx(-0.5)
        and grey.change.high < 0
    )
    worse = numbers.effects({**better, "pets": "1000"}, whole)
    assert [
        numbers.falls(Removal((), one), "BIR, true masks, grey") for one in (found, worse, same)
    ] == [True, False, False]
    assert same["pets accuracy"].change == Estimate(0.0, 0.0, 0.0)


def test_a_difference_of_bir_is_paired_and_of_ratios():
    rng = np.random.default_rng(0)
    one, other = ({"fig": rng.random(6).tolist(), "big": rng.random(6).tolist()} for _ in range(2))
    rows, kept = torch.tensor([True, True, False, True, True, True]), [0, 1, 3, 4, 5]
    found, drawn = numbers.bir_difference(one, other, rows), []

    def ratio(gains, photos):
        fig, big = (sum(gains[key][photo] for photo in photos) for key in ("fig", "big"))
        return big / (fig + big)

    for weights in numbers.resamplings(5).tolist():
        photos = [
            photo for photo, weight in zip(kept, weights, strict=True) for _ in range(int(weight))
        ]
        drawn.append(ratio(one, photos) - ratio(other, photos))
    assert found.value == pytest.approx(
        ratio(one, kept) - ratio(other, kept)
    ) and found.value == pytest.approx(
        numbers.bir(one, rows).value - numbers.bir(other, rows).value
    )
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))


def test_discovered_masks_are_judged_beside_masks_that_know_nothing():
    def told(*big):
        names = (
            "discovered masks, grey",
            "true masks, grey",
            "control: another photo's true mask, grey",
            "control: centre, grey",
        )
        gains = {
            name: {"fig": [0.5, 0.5], "big": list(one)}
            for name, one in zip(names, big, strict=True)
        }
        return " ".join(
            words.beside_controls({"audit": {"gains": gains}, "plain": {"pets": {"top 1": "11"}}})
        )

    said = told((0.3, 0.2), (0.1, 0.1), (0.2, 0.3), (0.1, 0.1))
    assert (
        "BIR with discovered masks cannot be told from BIR with another photo's true mask (+0.000 ["
        in said
    )
    assert (
        "and is above BIR with a box in the centre (+" in said
        and "BIR with true masks is below BIR with another photo's true mask (-" in said
    )
    assert (
        "**So BIR with discovered masks is no evidence of background use here: another photo's true"
        " mask, which knows nothing" in said
    )
    assert "**So" not in told((0.5, 0.5), (0.1, 0.1), (0.2, 0.3), (0.1, 0.1))


def test_a_removal_at_the_limit_or_found_by_a_plain_control_is_told():
    def told(method, cost):
        kept, fallen = (
            Effect(0.7, Estimate(cost, -0.03, 0.01)),
            Effect(0.1, Estimate(-0.02, -0.03, -0.01)),
        )
        one = Removal(
            ((0, 1),),
            {name: fallen for name in numbers.MEASURES}
            | {"ImageNet accuracy": kept, "pets accuracy": Effect(0.7, Estimate(0, 0, 0))},
        )
        return words.consequences(
            one, Removals({("cigma as printed", 1): one, (method, 1): one}, {}, [one], [])
        )

    both = told("most attention on background", -0.0100001)
    assert (
        "ImageNet accuracy passes the rule exactly at its limit. It takes no CIGMA to find it: most"
        " attention on background, a plain control" in both
    )
    assert "limit" not in told("cigma, true masks", -0.009) and "It takes no" not in told(
        "cigma, true masks", -0.009
    )


def test_panels_show_heads_that_really_go_and_cut_off_what_breaks_the_model():
    def without(*heads, value):
        return Removal(
            tuple((0, head) for head in heads),
            {"BG-gap": Effect(value, Estimate(value - 0.5, value - 0.6, value - 0.4))},
        )

    chosen = {(PRINTED, k): without(*range(min(k, 2)), value=0.4) for k in (1, 2, 4)} | {
        ("another", 1): without(5, value=9.0)
    }
    removals = Removals(
        chosen,
        {
            1: [without(7, value=0.2), without(8, value=0.8)],
            2: [without(7, 8, value=-5.0), without(6, 8, value=5.0)],
        },
        [],
        [],
    )
    assert list(figures.by_size(removals, PRINTED, "BG-gap")) == [1, 2]
    low, high = figures.reach(removals, "BG-gap", 0.5)
    assert (low, high) == pytest.approx(
        (0.0 - 0.025, 0.5 + 0.025)
    )  # intervals reach from 0.3, random means are 0.5 and 0


def test_a_set_is_measured_against_others_and_never_against_itself():
    whole, better = whole_and_better()
    rows = [
        {**whole, "heads": [[0, 0]]},
        better,
        {**better, "heads": [[1, 1]], "gains": whole["gains"]},
    ]
    found = {
        "nothing removed": [whole], "random 1": [rows[1], rows[0], rows[1]],
        "without 1.1": [rows[2]],
        "scores, a": {"cigma as printed": {"value": [[0.0, 2.0], [-1.0, -1.0]], "error": [[1.0,
        0.5], [1.0, 1.0]]}},
    }  # fmt: skip
    every = [((layer, head),) for layer in (0, 1) for head in (0, 1)]
    removals = numbers.removed(found, (1, 2), every)
    one = removals.chosen["cigma as printed", 2]
    assert one.heads == ((0, 1),) and removals.unseen == [((1, 0),)] and len(removals.lots[1]) == 3
    assert [other.heads for other in removals.rivals(one)] == [
        ((0, 0),),
        ((1, 1),),
    ]  # it was drawn by lot too, twice
    assert words.first(one, removals, "BIR, true masks, grey") and not words.first(
        one, removals, "BG-gap"
    )  # without 1.1 it falls as far
    said = " ".join(words.helped(removals, complete=False))
    assert (
        "BIR, true masks, grey: without 0.1 to 0.000, -0.400" in said
        and "the lowest of 3 single heads, 1 are not measured yet" in said
    )
    assert (
        "Without 0.1 (chosen by cigma as printed) BG-gap does not clearly change: -0.500 [-1.000,"
        " +0.000]" in said
    )


def test_advice_needs_a_smaller_gap_and_an_excluded_cost():
    def without(head, low, gap):
        accuracy, fallen = (
            Effect(0.7, Estimate(-0.005, low, 0.005)),
            Effect(0.1, Estimate(-0.02, -0.03, -0.01)),
        )
        return Removal(
            ((0, head),),
            {name: accuracy for name in numbers.ACCURACIES}
            | {name: fallen for name in numbers.BACKGROUND}
            | {"BG-gap": gap},
        )

    closed, same = (
        Effect(0.01, Estimate(-0.02, -0.03, -0.01)),
        Effect(0.03, Estimate(0.0, -0.01, 0.01)),
    )
    other = Removal(
        ((0, 9),), {name: Effect(0.3, Estimate(0.1, 0.1, 0.1)) for name in numbers.MEASURES}
    )

    def advised(one, *, complete=True):
        return " ".join(
            words.helped(Removals({("a", 1): one}, {}, [one, other], []), complete=complete)
        )

    assert "**Worth trying: the model without 0.1.**" in advised(without(1, -0.01, closed))
    unsure = advised(without(1, -0.012, closed))
    assert (
        "No removal is shown to be worth it" in unsure
        and "A cost of more than 0.01 is not excluded" in unsure
    )
    assert "No removal is shown to be worth it" in advised(
        without(1, -0.01, same)
    ) and "BG-gap does not clearly change" in advised(without(1, -0.01, same))
    assert "**So remove no head" in advised(other) and "remove no head" not in advised(
        other, complete=False
    )


def test_a_gap_is_judged_as_it_is_printed():
    same, rand = (
        [1, 0.666667, 0.333333, 0] * 5,
        [
            0.666667,
            0.333333,
            0,
            0.333333,
        ]
        * 5,
    )  # thirds, kept with six digits
    gap = numbers.gap_of(
        {"kinds": {"mixed_same": {"right": same}, "mixed_rand": {"right": rand}}}, "right", 3
    )
    assert gap.value == 10 / 20 / 3
    sure, at_end, inside, negative = (
        Estimate(0.022, low, 0.04) for low in (0.004, 1.98e-8, -0.004, -0.03)
    )
    verdicts = [
        words.repair(*pair).split(".**")[0]
        for pair in ((sure, sure), (at_end, sure), (sure, inside), (inside, negative))
    ]
    borderline = "**Borderline, and little to repair at most"
    assert verdicts == [
        "**Little to repair",
        borderline,
        borderline,
        "**Nothing to repair that these photos could show",
    ]
    assert words.repair(Estimate(0.2, 0.1, 0.3), Estimate(0.2, 0.1, 0.3)).startswith(
        "**Something to repair.**"
    )


def test_breeds_are_drawn_whole():
    values, breeds = (
        torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        [
            7,
            3,
            7,
            7,
            3,
            5,
        ],
    )
    found, drawn = numbers.mean_by_group(values, breeds), []
    for weights in numbers.resamplings(3).tolist():
        breed_of = [
            breed
            for breed, weight in zip((3, 5, 7), weights, strict=True)
            for _ in range(int(weight))
        ]
        taken = [
            value
            for drawn_breed in breed_of
            for value, breed in zip(values.tolist(), breeds, strict=True)
            if breed == drawn_breed
        ]
        drawn.append(sum(taken) / len(taken))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert found.value == 0.5 and (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_gating_removes_only_heads_it_calls_interfering():
    kept = {"value": [[0.9, 0.8], [0.45, 0.0162]], "error": None, "accuracy": None}  # 1 - G+
    assert removal.best(removal.interfering(kept), 4) == ((0, 0), (0, 1))
    both = {**kept, "shut": [[0.1, 0.7], [0.1, 0.1]]}  # pushed shut, head 0.1 is open: unclear
    assert removal.best(removal.interfering(both), 4) == ((0, 0),) and removal.interfering(both)[
        "value"
    ][1] == pytest.approx([-0.55, -0.9838])
    named = removal.methods(
        {"scores, gating": {"gating": kept}, "scores, controls": {"taylor": kept}}
    )
    assert list(named) == ["gating", "smallest Taylor"] and named["smallest Taylor"] is kept


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    kept = Pieces(tmp_path).get("a, b", lambda: pack(values))
    assert torch.equal(unpack(kept), values) and [path.name for path in tmp_path.iterdir()] == [
        "a--b.json"
    ]


def test_finished_pieces_are_taken_up_and_stand_in_the_order_they_are_asked_for(tmp_path):
    for name in ("b", "a", "c"):
        Pieces(tmp_path).get(name, lambda name=name: name)
    pieces = Pieces(tmp_path, ends=float("-inf"))
    pieces.look()
    assert [pieces.get(name, lambda: pytest.fail("made again")) for name in ("b", "a")] == [
        "b",
        "a",
    ] and list(pieces.found) == ["c", "b", "a"]
