"""`seecause faithful` from the outside: train, evaluate, intervene, parts, export."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

import seecause as sc
from seecause.data.registry import open_data
from seecause.errors import BadOption
from seecause.faithful import calibrate, example_parts, open_network
from seecause.faithful.data import match_classes
from seecause.faithful.evaluation import examine
from tests.cli.calls import faithful, number
from tests.faithful.runs import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    config = tiny_config(folder)
    flags = (
        "--data",
        config.data,
        "--backbone",
        config.backbone,
        "--parts",
        "2",
        "--out",
        config.out,
        "--epochs",
        "1",
        "--batch",
        "4",
        "--device",
        "cpu",
    )
    text = faithful(
        "train",
        *flags,
        "--option",
        "workers=0",
        "--option",
        "learning_rate=1e-3",
        "--option",
        "options.gradient=none",
        "--option",
        "head_factor=10",
    )
    assert "4 steps; best average on validation" in text and "step 4 of 4, epoch 1: loss" in text
    return config.folder


def test_settings_reach_the_run(run):
    config = json.loads((run / "config.json").read_text())
    assert (
        config["options"] == {"gradient": "none"}
        and config["learning_rate"] == 1e-3
        and config["augment"] == "birds"
    )


def test_evaluation_tells_what_was_chosen_and_where(run):
    text = faithful("evaluate", run, "--device", "cpu", "--quantiles", "0.9")
    assert "AA" in text and "WGA" in text and "plain" in text
    result = next(iter(json.loads((run / "evaluation.json").read_text()).values()))
    assert (
        result["data"].endswith("test")
        and result["chosen_on"].endswith("val")
        and len(result["tried"]) == 6
    )
    assert result["chosen_by"] == "auc" and result["chosen"]["auc"] == max(
        one["auc"] for one in result["tried"]
    )  # two classes without groups
    assert (
        result["plain"]["worst"] <= result["plain"]["average"] and 0 < result["plain"]["kept"] <= 1
    )
    network = open_network(str(run))
    row = examine(network.net, network.test_pictures()).table()
    assert result["plain"] == pytest.approx(row) and result["pictures"] == 6
    change = {name: result["chosen"][name] for name in ("quantile", "by")}
    with sc.faithful.intervene(network.net, drop_parts=result["chosen"]["drop"], **change):
        changed = examine(network.net, network.test_pictures()).table()
    assert result["changed"] == pytest.approx(changed)
    for name, cell in {"AA": "average", "WGA": "worst", "AUC": "auc", "kept": "kept"}.items():
        assert number(text, name) == [f"{row[cell]:.4f}", f"{changed[cell]:.4f}"], name
    assert number(text, "stage")[1:] == [
        f"{numbers['stage1_average']:.4f}" for numbers in (row, changed)
    ]
    card = json.loads((run / "best" / "ifam.json").read_text())
    assert (
        card["thresholds"][0]["quantile"] == 0.9
        and card["thresholds"][0]["pictures"] == 16
        and card["epoch"] == 0
    )


def test_an_evaluation_on_other_pictures_stands_beside_the_first(run):
    flags = ("--device", "cpu", "--no-interventions")
    other = f"folder:{run.parent / 'pictures' / 'val'}"
    faithful("evaluate", run, *flags)
    before = json.loads((run / "evaluation.json").read_text())
    faithful("evaluate", run, "--data", other, *flags)
    after = json.loads((run / "evaluation.json").read_text())
    assert len(after) == 2 and after[other]["data"] == other and before.items() <= after.items()
    faithful("evaluate", run, "--limit", 2, *flags)
    quick = json.loads((run / "evaluation.json").read_text())
    assert after.items() < quick.items() and len(quick) == 3
    (name,) = quick.keys() - after.keys()
    assert name.endswith("test --limit 2") and quick[name]["pictures"] == 2
    assert {"chosen", "changed"}.isdisjoint(quick[name])


def test_tokens_are_trusted_by_dot_product_where_that_is_asked(run):
    text = faithful("intervene", run, "--quantile", "0.7", "--by", "dot", "--device", "cpu")
    assert "tokens beyond 0.7 by dot product" in text
    faithful(
        "evaluate", run, "--quantiles", "0.7", "--by", "dot", "--choose", "worst", "--device", "cpu"
    )
    result = next(iter(json.loads((run / "evaluation.json").read_text()).values()))
    assert result["chosen_by"] == "worst" and {one["by"] for one in result["tried"]} == {"dot"}
    _, net = sc.faithful.open_run(run)
    assert (0.7, "dot") in net.thresholds and (0.7, "distance") not in net.thresholds
    with sc.faithful.intervene(net, quantile=0.7, by="dot"):
        row = examine(net, open_network(str(run)).test_pictures()).table()
    assert (
        number(text, "kept")[1] == f"{row['kept']:.4f}"
        and number(text, "AA")[1] == f"{row['average']:.4f}"
    )
    assert "distance, dot" in faithful(
        "intervene", run, "--by", "cosine", "--device", "cpu", code=2
    )


def test_thresholds_of_a_few_pictures_are_not_kept(run, monkeypatch):
    """A quick look must not decide what every later command trusts."""
    asked_for = []

    def spy(net, images, quantiles, **options):
        made = calibrate(net, images, quantiles, **options)
        asked_for.append(made[0].pictures)
        return made

    monkeypatch.setattr("seecause.faithful.evaluation.calibrate", spy)
    for flags in (("--calibration", "4"), (), (), ("--calibration", "4")):
        faithful("intervene", run, "--quantile", "0.8", "--device", "cpu", "--limit", "1", *flags)
    assert asked_for == [4, 16, 4]  # the third finds what the second kept


def test_intervening_shows_before_and_after(run):
    text = faithful("intervene", run, "--drop", "0,1", "--quantile", "0.95", "--device", "cpu")
    assert "without part 0, 1 and tokens beyond 0.95" in text
    assert number(text, "empty") == [
        "0",
        "6",
    ]  # nothing is left to see in any of the six pictures


def test_what_cannot_be_left_out_is_refused_before_any_picture_is_read(run, monkeypatch):
    monkeypatch.setattr(
        "seecause.faithful.evaluation.examine",
        lambda *_, **__: pytest.fail("pictures were examined"),
    )
    assert (
        "drop_parts=[5]"
        in (text := faithful("intervene", run, "--drop", "5", "--device", "cpu", code=2))
        and "parts 0-1 of" in text
    )
    for drop in ("two", "0.7"):
        assert "--drop" in faithful("intervene", run, "--drop", drop, "--device", "cpu", code=2)
    assert "nothing would be changed" in faithful("intervene", run, "--device", "cpu", code=2)
    assert "quantile='1.5'" in faithful(
        "intervene", run, "--quantile", "1.5", "--device", "cpu", code=2
    )
    for quantiles in ("0,0.9", "most", ""):
        assert "quantile" in faithful(
            "evaluate", run, "--quantiles", quantiles, "--device", "cpu", code=2
        )


def test_auc_of_many_classes_is_refused_before_any_picture_is_read(monkeypatch):
    monkeypatch.setattr(
        "seecause.faithful.evaluation.examine",
        lambda *_, **__: pytest.fail("pictures were examined"),
    )
    text = faithful(
        "evaluate", "builtin:critters-ifam", "--choose", "auc", "--device", "cpu", code=2
    )
    assert (
        "choose='auc'" in text and "AUC needs two classes, and builtin:critters-ifam has 8" in text
    )


def test_labels_of_another_dataset_go_by_name(run, tmp_path):
    """Class folders are sorted, so `right` comes before `sinister`; pictures of `right` alone have
    it at place 0."""
    pictures = run.parent / "pictures" / "test"
    shutil.copytree(pictures / "right", tmp_path / "one" / "right")
    _, net = sc.faithful.open_run(run)
    data, mapping = match_classes(net, open_data(f"folder:{tmp_path / 'one'}"))
    assert (
        [sample.label for sample in data] == [1, 1, 1]
        and data.classes == ("left", "right")
        and mapping is None
    )
    (tmp_path / "one" / "right").rename(tmp_path / "one" / "sinister")
    for command in ("evaluate", "intervene", "parts"):
        flags = {"parts": ("--out", tmp_path / "page"), "intervene": ("--drop", 0)}.get(command, ())
        assert "'sinister' is none of them" in faithful(
            command,
            run,
            "--data",
            f"folder:{tmp_path / 'one'}",
            "--device",
            "cpu",
            *flags,
            code=2,
        )


def test_a_page_of_parts(run, tmp_path):
    text = faithful("parts", run, "--out", tmp_path / "page", "--limit", "2", "--device", "cpu")
    first, *parts, page_line = text.splitlines()
    assert first.startswith("2 pictures of ") and first.endswith(", 2 parts")
    examples = example_parts(open_network(str(run)), data=None, limit=2)[1]
    answers = examples.output.logits.argmax(dim=1)
    for part, line in enumerate(parts):
        changed = int((examples.without[part].logits.argmax(dim=1) != answers).sum())
        held = sum(bool((maps.argmax(dim=0) == part).any()) for maps in examples.output.maps)
        assert line == f"part {part}: in {held} pictures; answers that change without it: {changed}"
    assert len(parts) == 2 and page_line == f"page: {tmp_path / 'page' / 'index.html'}"
    page = (tmp_path / "page" / "index.html").read_text()
    name = f"folder:{run.parent / 'pictures' / 'test'}"
    assert f"{run}, on {name}" in page and "1: left" in page and "2: right" in page
    manifest = json.loads((tmp_path / "page" / "manifest.json").read_text())
    told = {"command": "faithful parts", "network": str(run), "data": name}
    assert told.items() <= manifest.items()
    with Image.open(tmp_path / "page" / "parts.png") as sheet:
        assert sheet.size == (2 * 192, 2 * 192)  # two pictures, each above its parts
    assert (
        "with this mask, no dark pixel can change the answer" in page
        and "sees the whole picture when it chooses" in page
    )
    assert (
        page.count('<article class="card') == 2
        and page.count("without part") >= 2
        and "stage 2 sees" in page
    )


def test_export_is_a_model_like_any_other(run, tmp_path):
    text = faithful("export", run, tmp_path / "shipped")
    place = tmp_path / "shipped"
    assert text == f"{place / 'ifam.json'}: load it with sc.load('{place}')\n"
    assert sc.load(str(place)).classes == ("left", "right")
    assert "new or empty" in faithful("export", run, tmp_path / "shipped", code=2)


def test_a_network_that_is_no_run(run, tmp_path):
    """An exported folder tells its data; RUN/best, made by training, does not."""
    faithful("export", run, tmp_path / "shipped")
    assert "plain" in faithful(
        "evaluate", tmp_path / "shipped", "--device", "cpu", "--no-interventions"
    )
    assert not (tmp_path / "shipped" / "evaluation.json").exists()
    assert "what it was trained on, for its test pictures" in faithful(
        "parts", run / "best", "--out", tmp_path / "page", "--device", "cpu", code=2
    )
    assert "or no interventions" in faithful(
        "evaluate",
        run / "best",
        "--data",
        f"folder:{run.parent / 'pictures' / 'test'}",
        "--device",
        "cpu",
        code=2,
    )
    with pytest.raises(BadOption, match="what it was trained on, for its test pictures") as text:
        open_network(str(run / "best")).test_pictures()
    assert "--" not in str(text.value)  # flags are the command line's


def test_mistakes_are_one_line(tmp_path):
    assert "backbone" in faithful("train", "--data", "folder:x", "--out", tmp_path / "x", code=2)
    assert "'epoch' of TrainConfig=3" in faithful("train", "--option", "epoch=3", code=2)
    assert "no run (config.json) and no network there" in faithful("evaluate", tmp_path, code=2)
