"""`seecause faithful` from the outside: train, evaluate, intervene, parts, export."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image
from typer.testing import CliRunner

import seecause as sc
from seecause.bench.plan import Store
from seecause.bench.tables import values
from seecause.cli import app
from seecause.critters import CLASSES
from seecause.data.batch import to_batch
from seecause.data.registry import open_data
from seecause.errors import BadOption
from seecause.faithful import calibrate, open_network
from seecause.faithful.data import match_classes
from seecause.faithful.examine import examine, key_points
from tests.faithful.birds import bird_net, tiny_cub
from tests.faithful.nets import tiny_net
from tests.faithful.runs import tiny_config


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["faithful", *map(str, words)], env={"COLUMNS": "120"})
    assert done.exit_code == code, done.output
    return done.output


def number(text: str, name: str) -> list[str]:
    """What a table says about the plain network, and about the changed one where there is one."""
    return next(
        line.removeprefix(name).split()
        for line in map(str.strip, text.splitlines())
        if line.startswith(f"{name} ")
    )


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
    text = call(
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
    text = call("evaluate", run, "--device", "cpu", "--quantiles", "0.9")
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
    card = json.loads((run / "best" / "ifam.json").read_text())
    assert (
        card["thresholds"][0]["quantile"] == 0.9
        and card["thresholds"][0]["pictures"] == 16
        and card["epoch"] == 0
    )


def test_an_evaluation_on_other_pictures_stands_beside_the_first(run):
    flags = ("--device", "cpu", "--no-interventions")
    other = f"folder:{run.parent / 'pictures' / 'val'}"
    call("evaluate", run, *flags)
    before = json.loads((run / "evaluation.json").read_text())
    call("evaluate", run, "--data", other, *flags)
    after = json.loads((run / "evaluation.json").read_text())
    assert len(after) == 2 and after[other]["data"] == other and before.items() <= after.items()
    call("evaluate", run, "--limit", 2, *flags)
    assert after.items() < json.loads((run / "evaluation.json").read_text()).items()


def test_tokens_are_trusted_by_dot_product_where_that_is_asked(run):
    text = call("intervene", run, "--quantile", "0.7", "--by", "dot", "--device", "cpu")
    assert "tokens beyond 0.7 by dot product" in text
    call(
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
    assert "'distance', 'dot'" in call(
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
        call("intervene", run, "--quantile", "0.8", "--device", "cpu", "--limit", "1", *flags)
    assert asked_for == [4, 16, 4]  # the third finds what the second kept


def test_intervening_shows_before_and_after(run):
    text = call("intervene", run, "--drop", "0,1", "--quantile", "0.95", "--device", "cpu")
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
        in (text := call("intervene", run, "--drop", "5", "--device", "cpu", code=2))
        and "parts 0-1 of" in text
    )
    for drop in ("two", "0.7"):
        assert "--drop" in call("intervene", run, "--drop", drop, "--device", "cpu", code=2)
    assert "nothing would be changed" in call("intervene", run, "--device", "cpu", code=2)
    assert "quantile='1.5'" in call(
        "intervene", run, "--quantile", "1.5", "--device", "cpu", code=2
    )
    for quantiles in ("0,0.9", "most", ""):
        assert "quantile" in call(
            "evaluate", run, "--quantiles", quantiles, "--device", "cpu", code=2
        )


def test_auc_of_many_classes_is_refused_before_any_picture_is_read(monkeypatch):
    monkeypatch.setattr(
        "seecause.faithful.evaluation.examine",
        lambda *_, **__: pytest.fail("pictures were examined"),
    )
    text = call("evaluate", "builtin:critters-ifam", "--choose", "auc", "--device", "cpu", code=2)
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
        assert "'sinister' is none of them" in call(
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
    call("parts", run, "--out", tmp_path / "page", "--limit", "2", "--device", "cpu")
    page = (tmp_path / "page" / "index.html").read_text()
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
    call("export", run, tmp_path / "shipped")
    assert sc.load(str(tmp_path / "shipped")).classes == ("left", "right")
    assert "new or empty" in call("export", run, tmp_path / "shipped", code=2)


def test_a_network_that_is_no_run(run, tmp_path):
    """An exported folder tells its data; RUN/best, made by training, does not."""
    call("export", run, tmp_path / "shipped")
    assert "plain" in call(
        "evaluate", tmp_path / "shipped", "--device", "cpu", "--no-interventions"
    )
    assert not (tmp_path / "shipped" / "evaluation.json").exists()
    assert "what it was trained on, for its test pictures" in call(
        "parts", run / "best", "--out", tmp_path / "page", "--device", "cpu", code=2
    )
    assert "or no interventions" in call(
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


def test_a_shipped_network_goes_through_the_other_commands(tmp_path):
    """The benchmark runner and the audit of heads take its folder; maps of the run are those of
    sc.attribute."""
    tiny_net(classes=CLASSES).float().save(tmp_path / "shipped")
    flags = (
        "--model",
        str(tmp_path / "shipped"),
        "--data",
        "critters:balanced:test",
        "--limit",
        "8",
        "--device",
        "cpu",
        "--quiet",
        "--out",
    )
    small = (
        "--method",
        "caap,gae,random",
        "--metric",
        "insertion,aupr1",
        "--metric-option",
        "order=patch",
        "--metric-option",
        "steps=2",
    )
    cut = (
        "heads",
        "prune",
        "--share",
        "1",
        "--test-limit",
        "8",
        "--draws",
        "1",
        "--by",
        "weight-norm",
        "--top",
        "2",
    )
    for command in (
        ("bench", "run", *small),
        ("heads", "score", "--share", "1"),
        ("heads", "audit", "--steps", "2", "--count", "all"),
        cut,
    ):
        done = CliRunner().invoke(app, [*command, *flags, str(tmp_path / command[1])])
        assert done.exit_code == 0, done.output
    store = Store(tmp_path / "run")
    table = values(store.rows(store.plan()), store.plan())
    model = sc.load(str(tmp_path / "shipped"))
    batch = to_batch(model, list(open_data("critters:balanced:test", limit=8)))
    for method in ("caap", "gae"):
        maps = sc.attribute(model, batch.images, target=batch.labels, method=method).maps
        insertion = sc.metrics.insertion_deletion(
            model, batch.images, maps, batch.labels, order="patch", steps=2
        ).insertion_area
        assert table[method]["insertion"].tolist() == pytest.approx(insertion.tolist(), abs=1e-5)
    assert (
        len((tmp_path / "score" / "scores.csv").read_text().splitlines()) == 1 + 3 * 3
    )  # heads of stage 2
    assert len((tmp_path / "audit" / "audit.csv").read_text().splitlines()) == 1 + 8
    assert "plain" in call(
        "evaluate", tmp_path / "prune" / "model", "--no-interventions", *flags[2:-1]
    )


def test_key_points_of_birds_are_found_from_parts(tmp_path):
    birds = tiny_cub(tmp_path / "CUB_200_2011")
    net = bird_net(birds).float()
    net.save(tmp_path / "shipped", data=f"cub:{birds}")
    text = call("evaluate", tmp_path / "shipped", "--device", "cpu", "--quantiles", "0.9")
    test = open_data(f"cub:{birds}")
    result = key_points(net, open_data(f"cub:{birds}:trainval"), test)
    assert (
        number(text, "Kp")[0] == f"{result['keypoints']:.2f}"
        and number(text, "NMI")[0] == f"{result['nmi']:.4f}"
        and "lower is better" in text
    )
    for flags in (("--data", f"waterbird200:{birds}"), ()):
        flags = (*flags, "--device", "cpu", "--no-interventions", "--calibration", "10")
        assert "Kp" in call("evaluate", tmp_path / "shipped", *flags) and "Kp" not in call(
            "evaluate", tmp_path / "shipped", "--no-keypoints", *flags
        )


def test_the_embedded_network_is_tested_on_every_group(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "seecause.faithful.evaluation.calibrate",
        lambda *_, **__: pytest.fail("it brings its own thresholds"),
    )
    text = call(
        "intervene",
        "builtin:critters-ifam",
        "--drop",
        "0",
        "--quantile",
        "0.97",
        "--limit",
        "4",
        "--device",
        "cpu",
    )
    assert (
        "critters:balanced:test, 4 pictures" in text
        and "without part 0 and tokens beyond 0.97" in text
    )
    call("export", "builtin:critters-ifam", tmp_path / "shipped")
    copy, opened = open_network(str(tmp_path / "shipped")), open_network("builtin:critters-ifam")
    assert copy.card_fields() == opened.card_fields() and copy.data == "critters:simplicity"
    assert (
        copy.test_pictures(4).fingerprint == opened.test_pictures(4).fingerprint
        and copy.val_pictures().name == opened.val_pictures().name
    )
    assert (
        opened.val_pictures().name == "critters:balanced:val"
        and opened.train_pictures(2).name == "critters:simplicity:train"
    )
    assert "VisionTransformer" in call(
        "evaluate", "builtin:critters-vit", "--device", "cpu", code=2
    )
    assert "critters-ifam" in call("evaluate", "builtin:critters-ifum", "--device", "cpu", code=2)


def test_miou_on_random_cuts_stands_beside_ours():
    flags = ("builtin:critters-ifam", "--limit", "4", "--device", "cpu", "--no-interventions")
    text = call("evaluate", *flags, "--random-cuts")
    assert (
        "mIoU*" in text
        and "random cuts that hold some of the object" in text
        and "mask IoU" in text
    )
    assert "mIoU*" not in call("evaluate", *flags)


def test_mistakes_are_one_line(tmp_path):
    assert "backbone" in call("train", "--data", "folder:x", "--out", tmp_path / "x", code=2)
    assert "'epoch' of TrainConfig=3" in call("train", "--option", "epoch=3", code=2)
    assert "no run (config.json) and no network there" in call("evaluate", tmp_path, code=2)
