"""`seecause gate` as a build runs it."""

from __future__ import annotations

import csv
import hashlib
import json
import shlex
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from seecause.cli import app
from seecause.cli.audit import FAILED, audited
from seecause.data.dataset import Hole
from tests.cli.spies import MODEL

BIASED = ["--model", "builtin:critters-biased", "--data", "critters:certified:test"]
FAST = [*BIASED, "--limit", "40", "--per-picture", "1", "--device", "cpu"]
FILES = {"index.html", "gate.json", "audit.csv", "pictures.csv", "junit.xml", "SHA256SUMS"}


def gate(*more):
    return CliRunner().invoke(app, ["gate", *FAST, *map(str, more)])


def with_hole(*words, **options):
    """An audit of which a picture could not be read."""
    model, audit = audited(*words, **options)
    versioned = audit.judged.versioned
    pictures = replace(versioned.pictures, holes=(Hole("broken.png", "cut short"),))
    judged = replace(audit.judged, versioned=replace(versioned, pictures=pictures))
    return model, replace(audit, judged=judged)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    root = tmp_path_factory.mktemp("gate")
    limits = ("--max-flips", 0.1, "--min-accuracy", 0.01)
    more = ("--junit", root / "reports" / "of" / "gate.xml", "--out", root / "pack", "--workers", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seecause.cli.audit.audited", with_hole)
        return root, gate(*limits, *more)


def test_a_missed_limit_fails_the_build_with_its_own_code_whatever_could_not_be_read(failed):
    root, done = failed
    assert done.exit_code == FAILED == 3, done.output
    assert "Fail: missed: flips." in done.output and "the whole 95 % interval" in done.output
    report = ElementTree.parse(root / "reports" / "of" / "gate.xml").getroot()
    assert report.get("failures") == "1" and report.get("tests") == "2"


def test_the_pack_holds_page_numbers_digests_and_the_command(failed):
    root, _ = failed
    pack = root / "pack"
    assert {path.name for path in pack.iterdir()} == FILES | {"manifest.json"}
    record = json.loads((pack / "gate.json").read_text())
    assert not record["passed"] and record["checks"][0]["judged by"].startswith("the upper end")
    assert len(record["digests"]["weights"]) == 64 and record["versions"]["torch"]
    words = shlex.split(record["command"])
    assert "--workers" not in words and not (root / "pack.work").exists()
    assert words[:2] == ["seecause", "gate"] and words[words.index("--max-flips") + 1] == "0.1"
    page = (pack / "index.html").read_text()
    for shown in (
        "May it ship?",
        "What was tested?",
        record["digests"]["weights"],
        "Where does it",
    ):
        assert shown in page


def test_every_file_of_the_pack_is_what_its_sum_says(failed):
    root, _ = failed
    lines = (root / "pack" / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    assert set(sums) == FILES - {"SHA256SUMS"}
    for name, value in sums.items():
        assert hashlib.sha256((root / "pack" / name).read_bytes()).hexdigest() == value
    record = json.loads((root / "pack" / "gate.json").read_text())
    assert record["digests"]["pictures.csv"] == sums["pictures.csv"]
    rows = list(csv.DictReader((root / "pack" / "pictures.csv").read_text().splitlines()))
    assert len(rows) == 40 and len({row["sha256"] for row in rows}) == 40


def test_limits_that_are_met_pass(tmp_path):
    done = gate("--max-flips", 1, "--out", tmp_path / "pack", "--quiet")
    assert done.exit_code == 0 and done.output == ""
    assert json.loads((tmp_path / "pack" / "gate.json").read_text())["passed"]


def test_pictures_that_could_not_be_read_leave_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr("seecause.cli.audit.audited", with_hole)
    done = gate("--max-flips", 1, "--out", tmp_path / "pack", "--quiet")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert json.loads((tmp_path / "pack" / "gate.json").read_text())["passed"]


@pytest.mark.parametrize(
    ("more", "line"),
    [((), "one at least"), (("--max-flips", "0.1", "--eye-method", "mosaic"), "--eye NAME")],
)
def test_mistakes_are_one_line_and_code_2(tmp_path, more, line):
    done = gate(*more, "--out", tmp_path / "pack")
    assert done.exit_code == 2 and line in done.output and not (tmp_path / "pack").exists()


def test_no_limit_at_all_names_the_flags():
    result = gate()
    assert result.exit_code == 2 and "--max-flips, --max-bir" in result.output


def test_a_gate_reads_more_pictures_than_an_audit(opened, called):
    """Its limits are judged by the ends of intervals, which are narrower with more."""
    for command, limit in (("audit", 160), ("gate --max-flips 1", 400)):
        reached = called(f"{command} --data d", "seecause.background.audit.audit")
        assert reached.words == (MODEL, f"d, {limit}")


def test_gate_limits(monkeypatch, called):
    limits = "--max-flips 0.1 --max-bir 0.2 --min-accuracy 0.3 --min-worst-group 0.4"
    values = {"max_flips": 0.1, "max_bir": 0.2, "min_accuracy": 0.3, "min_worst_group": 0.4}
    monkeypatch.setattr("seecause.cli.audit.AskedModel.ask", lambda *_: MODEL)
    monkeypatch.setattr("seecause.cli.audit.audited", lambda *_, **__: (MODEL, "audit"))
    reached = called(f"gate {limits}", "seecause.background._gate.gate")
    assert reached.words == ("audit",) and reached.options == values
