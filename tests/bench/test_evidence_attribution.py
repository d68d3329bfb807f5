"""The attribution study on a tiny folder of the real layout: it says what is missing, stops, goes
on, and shows its holes."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import timm
import torch
import typer
from PIL import Image
from safetensors.torch import save_file

import seecause as sc
from scripts import (
    attribution_figures,
    attribution_parts,
    attribution_words,
    evidence_attribution,
    tables,
)
from scripts.attribution_changed import changes, read_changed, smoothed
from scripts.attribution_parts import PIXELS
from scripts.attribution_patches import read_patches
from scripts.attribution_tables import costs, counted, merged, missing, undefined
from seecause.attribution.registry import methods
from seecause.bench.ablate import DEPTH_FILE as DEPTH
from seecause.bench.measures import UNDEFINED
from seecause.bench.plan import Request, Store
from seecause.bench.tables import table_of
from seecause.data.batch import to_batch
from seecause.data.imagenet import imagenet_wnids
from seecause.metrics import insertion_deletion, localization
from tests.files import grey, lines, photo

MODEL = "timm:test_vit"
METHODS = "caap,random,sobel"
FOLDER = evidence_attribution.work_folder(None, METHODS, MODEL)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """Two pets and two ImageNet photos; a model with random weights, 160 pixels and 100 patches."""
    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), folder / "test_vit.safetensors")
    for seed, name in enumerate(("Abyssinian_1", "beagle_2")):
        photo(folder / "pets" / "images" / f"{name}.jpg", (200, 180), seed)
        trimap = np.full((180, 200), 2)
        trimap[40:120, 50:150], trimap[40:44, 50:150] = 1, 3
        grey(folder / "pets" / "annotations" / "trimaps" / f"{name}.png", trimap)
    lines(folder / "pets" / "annotations" / "test.txt", "Abyssinian_1 1 1 1", "beagle_2 5 2 1")
    lines(
        folder / "pets" / "imagenet_labels.csv",
        "breed,imagenet_index",
        "Abyssinian,285",
        "beagle,162",
    )
    for seed, wnid in enumerate(imagenet_wnids()[:2]):
        photo(folder / "imagenet" / "val" / wnid / "a.JPEG", (170, 190), seed + 2)
    return folder


def study(
    real: Path, out: Path, *, minutes: float = 9, method: str = METHODS, only_page: bool = False
) -> int:
    """The exit code."""
    try:
        evidence_attribution.main(
            str(real), None, "cpu", minutes, out / "page", out / "work", method, MODEL, only_page
        )
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def test_a_study_stops_goes_on_and_shows_its_holes(real, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attribution_parts, "STUDIES", {"score": "Does the score decide?"})
    monkeypatch.setattr(tables, "EXPENSIVE", ("random",))
    assert study(real, tmp_path, minutes=0) == 1  # nothing yet
    page = tmp_path / "page" / "evidence-attribution.md"
    assert (
        "not complete" in page.read_text()
        and "- pets-label: 0 of 2 shards are done (2 methods, 2 photos)" in page.read_text()
    )
    assert "no value" not in page.read_text()  # one line for each part that is not done

    assert study(real, tmp_path) == 0
    whole, said = page.read_text(), capsys.readouterr().out
    assert said.index("answered right") < said.index("forwards") < said.rindex("pets-label: 2 of")
    assert (
        "not complete" not in whole
        and "random *" in whole
        and "not made yet" not in whole
        and "Not done yet" not in whole
    )
    assert "| sobel † |" in whole and "| sobel, patches |" in whole
    assert (
        "](evidence-attribution-gallery.png)" in whole
        and "](evidence-attribution-photos.png)" not in whole
    )  # photos are not in the repository
    for part in ("radar", "curves", "gallery", "photos"):
        with Image.open(tmp_path / "page" / f"evidence-attribution-{part}.png") as drawn:
            assert min(drawn.size) > 200
    for picture in ("radar", "curves", "gallery"):  # once is enough
        monkeypatch.setattr(attribution_figures, picture, lambda *given, **told: None)
    rows = list(
        csv.DictReader((tmp_path / "page" / "evidence-attribution.csv").read_text().splitlines())
    )
    assert {row["table"] for row in rows} == {
        *(f"{photos}, {kind}" for photos in ("pets", "imagenet") for kind in ("label", "predicted",
        "pixels and patches")), "sanity", "ablate score",
        "pets, label, changed maps", "pets, predicted, changed maps",
    }  # fmt: skip
    assert {row["method"] for row in rows if row["table"] == "imagenet, predicted"} == {
        "caap",
        "sobel",
        "random *",
    }
    assert all(
        row["missing"] == "0"
        for row in rows
        if row["table"] == "pets, predicted"
        and row["metric"] == "ins-del"
        and row["method"] != "random *"
    )

    store = Store(tmp_path / "work" / FOLDER / "imagenet-label")
    lost = next(shard for shard in store.plan().shards if shard.method == "sobel")
    store.file(lost.id, "parquet").unlink()
    assert study(real, tmp_path, minutes=0) == 1
    assert "- imagenet-label: 1 of 2 shards are done (2 methods, 2 photos)" in page.read_text()
    assert (
        "imagenet, label (" not in page.read_text()
        and "imagenet, predicted (" not in page.read_text()
    )  # no place before all methods have one
    assert study(real, tmp_path) == 0
    assert _timeless(page.read_text()) == _timeless(whole)  # the same numbers
    again = page.read_text()
    with (
        monkeypatch.context() as elsewhere
    ):  # other versions ask for other shards; the page alone takes those that are there
        elsewhere.setattr("seecause.bench.plan.versions", lambda: {"torch": "0.0"})
        elsewhere.setattr(evidence_attribution, "machine", lambda device: "another machine")
        assert study(real, tmp_path, only_page=True) == 0 and page.read_text() == again
        for folder, refused in (
            (evidence_attribution.work_folder, "no work of this study"),
            (lambda *asked: FOLDER, "other photos"),
        ):
            elsewhere.setattr(evidence_attribution, "work_folder", folder)
            with pytest.raises(typer.Exit):
                evidence_attribution.main(
                    str(real),
                    1,
                    "cpu",
                    9,
                    tmp_path / "page",
                    tmp_path / "work",
                    METHODS,
                    MODEL,
                    True,
                )
            assert refused in capsys.readouterr().err
    ended = [event["shard"] for event in store.events() if event["event"] == "done"]
    assert sorted(ended) == sorted(
        [*(shard.id for shard in store.plan().shards), lost.id]
    )  # nothing else was done twice


def _timeless(page: str) -> list[str]:
    return [
        line
        for line in page.splitlines()
        if not re.search(r"\| machine|[\d.]+ \|$", line) or "±" in line
    ]


def test_an_outline_shows_nothing_of_the_photo(real):
    data = evidence_attribution._photos(f"pets:{real / 'pets'}", None)
    drawn = attribution_figures._seen(data, 0, photos=False)
    assert drawn.shape == data[0].image.shape and drawn.unique().tolist() == pytest.approx(
        [0.7, 0.88, 1.0]
    )
    assert (attribution_figures._seen(data, 0, photos=True) == data[0].image).all()


def test_what_is_missing_is_named(real, tmp_path, capsys):
    assert study(Path(), tmp_path) == 2 and "test_vit.safetensors" in capsys.readouterr().err
    evidence = [("", "REAL=PATH"), (str(tmp_path), "test_vit.safetensors")]
    for given, said in evidence:
        with pytest.raises(typer.Exit):
            evidence_attribution.main(
                given, None, "cpu", 0, tmp_path / "page", tmp_path / "work", METHODS, MODEL
            )
        assert said in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def _part(
    real: Path, name: str, method: str, options: dict
) -> tuple[attribution_parts.Part, sc.VisionModel]:
    """One part of the study on the pets, with one method."""
    model = sc.load(MODEL, weights=str(real / "test_vit.safetensors"))
    sets = [
        attribution_parts.photoset(
            "pets", "", evidence_attribution._photos(f"pets:{real / 'pets'}", None), model
        )
    ]
    base = Request(model=MODEL, data="", methods={}, weights=str(real / "test_vit.safetensors"))
    part = next(
        p
        for p in attribution_parts.parts(model, sets, ["caap"], attribution_parts.Sizes(), base)
        if p.name == name
    )
    return (
        replace(
            part,
            request=replace(
                part.request, methods={method: options or part.request.methods[method]}
            ),
        ),
        model,
    )


def test_maps_of_pixels_are_scored_on_patches_too(real, tmp_path):
    part, model = _part(real, "pets-label", "integrated-gradients", {"steps": 2})
    found = read_patches(evidence_attribution._perform(part, model, tmp_path, float("inf")))
    assert list(found.values) == ["integrated-gradients"] and not found.missing
    plan = Store(tmp_path / "pets-label").plan()

    batch = to_batch(model, [part.data[0], part.data[1]])
    target = torch.tensor(plan.places)[batch.labels]
    maps = sc.attribute(
        model, batch.images, target, "integrated-gradients", steps=2
    ).maps  # of patches
    placed, curves = (
        localization(maps, batch.masks),
        insertion_deletion(model, batch.images, maps, target),
    )
    torch.testing.assert_close(
        found.values["integrated-gradients"]["aupr1"], placed.aupr1, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        found.values["integrated-gradients"]["ins-del"], curves.difference, atol=1e-5, rtol=0
    )
    (file,) = (tmp_path / "pets-label" / "patches").glob("*insertion*")
    file.unlink()  # without an answer of the model there is no curve
    left = read_patches(evidence_attribution._kept(part, model, tmp_path))
    assert left.missing == 1 and set(left.values["integrated-gradients"]) == {
        "aupr1",
        "aupr0",
        "pointing",
    }


def test_methods_of_pixels_are_those_that_are_marked(real):
    model = sc.load(MODEL, weights=str(real / "test_vit.safetensors"))
    cheap = {
        "integrated-gradients": {"steps": 1},
        "smoothgrad": {"samples": 1},
        "rise": {"masks": 2},
    }
    slow = {
        "mda",
        "tis",
        "atman",
        "simple-insertion",
        "simple-deletion",
        "caap",
    }  # many forwards; they sweep over patches
    names = [name for name in sorted(methods()) if name not in slow]
    native = [
        name
        for name in names
        if sc.attribute(
            model,
            torch.linspace(-1, 1, 3 * 160 * 160).view(1, 3, 160, 160),
            0,
            name,
            **cheap.get(name, {}),
        ).native
        is not None
    ]
    assert native == list(PIXELS)


def test_the_attention_by_depth_is_that_of_these_photos(real, tmp_path):
    part, model = _part(real, "ablate-layers", "from 0", {})
    evidence_attribution._perform(part, model, tmp_path, float("inf"))
    file = tmp_path / "ablate-layers" / DEPTH
    fresh = file.read_bytes()
    file.write_bytes(b"of other photos")
    evidence_attribution._perform(part, model, tmp_path, float("inf"))
    assert file.read_bytes() == fresh


def test_every_choice_has_a_work_folder_of_its_own():
    folder = evidence_attribution.work_folder
    names = {
        folder(*given)
        for given in (
            (None, None, evidence_attribution.MODEL),
            (40, None, evidence_attribution.MODEL),
            (None, None, MODEL),
            (40, "gae", MODEL),
        )
    }
    assert len(names) == 4 and folder(None, None, evidence_attribution.MODEL) == "attribution"


def _run(kept: dict[str, list[float]], *, pending: bool = False):
    """A part whose rows are given by method."""
    status = type("Status", (), {"pending": [1] if pending else []})
    return type(
        "Run",
        (),
        {
            "store": kept,
            "plan": None,
            "status": status,
            "finished": lambda self: [] if pending else list(kept),
        },
    )()


def test_the_predicted_class_is_computed_where_it_is_another(monkeypatch):
    class Photos(attribution_parts.Photoset):
        names = ("a", "b", "c")

    photos = Photos("pets", "", None, torch.tensor([1, 2, 3]), torch.tensor([1, 5, -1]))
    monkeypatch.setattr(
        "scripts.attribution_tables.over",
        lambda names, store, plan: {
            m: {"ins-del": torch.tensor(v, dtype=torch.float64)} for m, v in store.items()
        },
    )
    by = {
        "pets-label": _run({"caap": [1.0, 2.0, 3.0]}),
        "pets-predicted": _run({"caap": [torch.nan, 20.0, torch.nan]}),
    }
    assert merged(photos, "label", by)["caap"]["ins-del"].tolist() == [1, 2, 3]
    found = merged(photos, "predicted", by)["caap"]["ins-del"]
    assert found[:2].tolist() == [1, 20] and found[2].isnan()
    assert photos.right.tolist() == [True, False]

    by["pets-predicted"] = _run({"caap": []}, pending=True)
    assert merged(photos, "predicted", by) == {} and merged(
        photos, "label", by
    )  # no table of the photos that are answered right alone
    by["pets-label-few"] = _run({"mda": [1.0, 2.0, 3.0]}, pending=True)
    assert list(merged(photos, "label", by)) == ["caap"]


def _values(
    count: int = 20, metric: str = "ins-del", **means: float
) -> dict[str, dict[str, torch.Tensor]]:
    """Values of some methods: `_` stands for the star of fewer photos, `__` for a change of the
    map."""
    noise = torch.linspace(-0.1, 0.1, count, dtype=torch.float64)
    turned = torch.stack([noise, noise.flip(0)])
    names = {name: name.replace("__", ", ").replace("_", " *") for name in means}
    return {
        names[m]: {metric: mean + turned[place % 2]}
        for place, (m, mean) in enumerate(means.items())
    }


def _table(count: int = 20, metric: str = "ins-del", **means: float):
    return table_of(_values(count, metric, **means))


def test_a_claim_is_held_where_caap_is_clearly_ahead_of_all():
    def said(table, equal=None):
        return attribution_words._claim(
            table, ("pets", "predicted"), table.metrics[0], "CAAP is best", equal
        )

    assert "pets, the predicted class: held. CAAP has place 1 of 2 methods" in said(
        _table(caap=0.5, gae=0.4, center=0.42)
    )  # a control has no place
    assert "first, not separated from gae. CAAP has place 1" in said(
        _table(caap=0.5, gae=0.49, rise_=0.3)
    )
    assert "not separated from center" in said(_table(caap=0.5, center=0.49))  # but must be beaten
    assert "not contradicted (gae has the best mean" in said(_table(caap=0.5, gae=0.51))
    assert "did not hold: gae is clearly better" in said(_table(caap=0.5, gae=0.7))
    few = said(_table(9, caap=0.5, random_=0.1))
    assert (
        "not separated from random *" in few and "random * -0.400 (n 9)" in few
    )  # nine photos say nothing
    assert "held" in said(_table(10, caap=0.5, random_=0.1))

    plain = _table(metric="aupr1", caap=0.9, ixg=0.5)
    assert ": held" in said(
        plain, _table(metric="aupr1", caap=0.9, ixg=0.5, ixg__absolute=0.7, ixg__smoothed=0.89)
    )
    close = said(
        plain, _table(metric="aupr1", caap=0.9, ixg=0.5, caap__smoothed=0.95, ixg__absolute=0.89)
    )
    assert (
        "first, not separated from ixg (absolute)" in close
        and "Without signs the best other is ixg with 0.890; not separated" in close
    )


def test_whether_it_is_the_smoothing():
    found = {
        "caap": 0.9,
        "caap without neighbours": 0.8,
        "caap without neighbours, smoothed": 0.7,
        "caap, smoothed": 0.85,
    }
    values = _values(metric="aupr1", a=0.9, b=0.8, c=0.7, d=0.85)
    said = attribution_words._smoothing(
        "pets", table_of(dict(zip(found, values.values(), strict=True)))
    )
    assert (
        "(select none) has 0.800, its maps smoothed over the same neighbours 0.700, clearly less"
        " than CAAP with them (0.900)" in said
    )


def test_what_a_setting_does_to_the_object_is_said():
    both = {
        m: {**_values(caap=a)["caap"], **_values(metric="aupr1", caap=b)["caap"]}
        for m, (a, b) in {"box1": (0.5, 0.9), "none": (0.5, 0.8)}.items()
    }
    for column in both["none"].values():
        column[0] += 0.01  # not the same change for every photo
    alike = type(
        "Alike",
        (),
        {"images": 20, "names": ["box1", "none"], "mean": torch.tensor([[1, 0.6], [0.6, 1]])},
    )
    said = attribution_words._settings("select", table_of(both), alike)
    assert (
        "0 of 1 other settings change Ins-Del clearly; 1 of 1 other settings change AUPR_1 clearly"
        " (none -0.099)"
        in said
        and "0.600 (none)" in said
    )


def test_a_signed_method_can_beat_the_controls_without_its_signs():
    plain = _values(
        metric="aupr1", caap=0.9, random=0.3, center=0.7, ixg=0.5, smoothgrad=0.6, gae=0.8
    )
    again = _values(
        metric="aupr1",
        caap=0.9,
        random=0.3,
        center=0.7,
        ixg__absolute=0.8,
        smoothgrad__patches=0.69,
        ixg__smoothed=0.5,
    )
    said = attribution_words._no_better(plain, "pets", "aupr1", again)
    assert (
        "in aupr1, pets: ixg, smoothgrad. Of these, better than the controls on patches instead of"
        " pixels: none." in said
    )
    assert "better than the controls without their signs: ixg." in said


def test_sanity_names_its_counts_its_highest_and_what_is_missing():
    values = {
        m: {k: v.clone() for k in ("mprt", "random-logit")}
        for m, v in (
            ("caap", torch.tensor([0.1, 0.2] * 5)),
            ("rollout", torch.tensor([0.4, 0.5] * 5)),
            ("tis *", torch.tensor([0.9, 0.9] + [torch.nan] * 8)),
        )
    }
    table = table_of(values)
    assert "(2) |" in counted(table) and "(10) |" in counted(table) and "**" not in counted(table)
    (said,) = attribution_words._sane(table, ["caap", "rollout", "tis", "rise"])
    assert (
        "none of 2 methods; the highest is rollout with 0.450. Values of fewer than 10 photos, so"
        " nothing is said: tis * (2). Not checked yet: rise." in said
    )
    assert missing(["caap", "rise"], None) == ["caap", "rise"]


def test_values_that_are_not_defined_have_a_reason_and_methods():
    rows = [
        {"method": m, "metric": "mprt", "index": i, "reason": UNDEFINED if m != "caap" else ""}
        for m, i in (("bt", 0), ("tam", 0), ("bt", 1), ("caap", 0))
    ]

    class Kept:
        maps = staticmethod(
            lambda plan: {
                "bt": {0: torch.arange(4.0).view(2, 2), 1: torch.ones(2, 2)},
                "tam": {0: torch.arange(4.0).view(2, 2)},
            }
        )
        rows = staticmethod(lambda plan: pa.Table.from_pylist(rows))

    _, said = undefined([type("Run", (), {"store": Kept, "plan": None})])
    assert "- mprt: 3 values are not defined" in said and "bt 2, tam 1" in said
    assert "flat is the map itself in 1, the map of a model with redrawn weights in 2" in said


def test_smoothing_is_the_mean_over_the_neighbours():
    maps = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = smoothed(maps)
    for row in range(3):
        for column in range(4):
            box = maps[:, max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
            torch.testing.assert_close(found[:, row, column], box.mean(dim=(1, 2)))
    assert changes("ixg", maps) == ["absolute", "smoothed", "absolute, smoothed"] and changes(
        "rise", maps.abs()
    ) == ["patches", "smoothed"]


def test_changed_maps_are_placed_again(real, tmp_path):
    part, model = _part(real, "pets-label", "caap", {})
    part = replace(
        part,
        request=replace(part.request, methods={"ixg": {}}, metrics=("aupr1", "aupr0", "pointing")),
    )
    done = evidence_attribution._perform(part, model, tmp_path, float("inf"))
    found, kept = read_changed(done), done.store.maps(done.plan)["ixg"]
    maps, masks = (
        torch.stack([kept[0], kept[1]]),
        to_batch(model, [part.data[0], part.data[1]]).masks,
    )
    assert not found.missing and set(found.values) == {
        "ixg, absolute",
        "ixg, smoothed",
        "ixg, absolute, smoothed",
    }
    for name, changed in (
        ("ixg, absolute", maps.abs()),
        ("ixg, absolute, smoothed", smoothed(maps.abs())),
    ):
        torch.testing.assert_close(found.values[name]["aupr1"], localization(changed, masks).aupr1)
    next((tmp_path / "pets-label" / "changed").iterdir()).unlink()
    assert read_changed(done).missing == 1


def test_every_line_has_a_look_of_its_own_and_nothing_is_counted_twice():
    shown = ["caap", *"abcdef", "random", "center"]
    looks = attribution_figures.styles(shown)
    assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == len(
        shown
    ) and attribution_figures.GREY not in str(looks)
    table = table_of(
        {
            m: {k: torch.full((3,), v) for k in ("insertion", "deletion", "ins-del")}
            for m, v in (("caap", 0.5), ("gae", 0.4))
        }
    )
    assert list(attribution_figures.axes({"pets": table})) == ["insertion\npets", "deletion\npets"]


def test_the_first_shard_of_a_run_is_no_cost():
    shards = {
        m: [type("Shard", (), {"id": f"{m}{i}", "method": m})() for i in range(3)]
        for m in ("caap", "gae")
    }
    seconds = {"caap0": 9.0, "caap1": 0.1, "caap2": 0.3, "gae0": 0.5, "gae1": 0.2, "gae2": 0.2}

    class Kept:
        events = staticmethod(
            lambda: [
                {"event": "start", "process": 7, "time": t, "shard": s}
                for t, s in enumerate(seconds)
            ]
        )
        finished = staticmethod(lambda plan: [one for some in shards.values() for one in some])
        metadata = staticmethod(
            lambda shard: {"images": 10, "seconds": {"attribute": seconds[shard]}}
        )

    found = costs([type("Run", (), {"store": Kept, "plan": None})])
    assert {m: (round(spent, 6), count) for m, (spent, count) in found.items()} == {
        "caap": (20.0, 2),
        "gae": (20.0, 3),
    }


def test_the_pictures_of_a_small_part_are_among_those_of_a_larger_one(real):
    data = evidence_attribution._photos(f"imagenet:{real / 'imagenet'}", None)
    fewer, more = (attribution_parts.some(data, count, 0).photos for count in (1, 2))
    assert len(fewer) == 1 and set(fewer) < set(more) and more == data.photos
