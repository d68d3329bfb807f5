"""`seecause faithful` and the other commands on networks that are there already."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import seecause as sc
from seecause.bench.tables import read_results
from seecause.cli import app
from seecause.critters import CLASSES
from seecause.data.batch import to_batch
from seecause.data.registry import open_data
from seecause.faithful import open_network
from seecause.faithful.evaluation import key_points
from tests.cli.calls import faithful, number
from tests.faithful.birds import bird_net, tiny_cub
from tests.faithful.nets import tiny_net


@pytest.mark.slow
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
    table = read_results(tmp_path / "run").values
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
    assert "plain" in faithful(
        "evaluate", tmp_path / "prune" / "model", "--no-interventions", *flags[2:-1]
    )


def test_key_points_of_birds_are_found_from_parts(tmp_path):
    birds = tiny_cub(tmp_path / "CUB_200_2011")
    net = bird_net(birds).float()
    net.save(tmp_path / "shipped", data=f"cub:{birds}")
    text = faithful("evaluate", tmp_path / "shipped", "--device", "cpu", "--quantiles", "0.9")
    test = open_data(f"cub:{birds}")
    result = key_points(net, open_data(f"cub:{birds}:trainval"), test)
    assert (
        number(text, "Kp")[0] == f"{result['keypoints']:.2f}"
        and number(text, "NMI")[0] == f"{result['nmi']:.4f}"
        and "lower is better" in text
    )
    for flags in (("--data", f"waterbird200:{birds}"), ()):
        flags = (*flags, "--device", "cpu", "--no-interventions", "--calibration", "10")
        assert "Kp" in faithful("evaluate", tmp_path / "shipped", *flags) and "Kp" not in faithful(
            "evaluate", tmp_path / "shipped", "--no-keypoints", *flags
        )


def test_the_embedded_network_is_tested_on_every_group(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "seecause.faithful.evaluation.calibrate",
        lambda *_, **__: pytest.fail("it brings its own thresholds"),
    )
    text = faithful(
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
    faithful("export", "builtin:critters-ifam", tmp_path / "shipped")
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
    assert "VisionTransformer" in faithful(
        "evaluate", "builtin:critters-vit", "--device", "cpu", code=2
    )
    assert "critters-ifam" in faithful(
        "evaluate", "builtin:critters-ifum", "--device", "cpu", code=2
    )


def test_miou_on_random_cuts_stands_beside_ours():
    flags = ("builtin:critters-ifam", "--limit", "4", "--device", "cpu", "--no-interventions")
    text = faithful("evaluate", *flags, "--random-cuts")
    assert (
        "mIoU*" in text
        and "random cuts that hold some of the object" in text
        and "mask IoU" in text
    )
    assert "mIoU*" not in faithful("evaluate", *flags)
