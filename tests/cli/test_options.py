"""What all commands share: words into values, where to compute, the folder written, JSON."""

from __future__ import annotations

import gc
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from markupsafe import Markup

from seecause.cli.lvlm_options import open_lvlm
from seecause.cli.options import (
    Device,
    Dtype,
    ModelOptions,
    Output,
    RunOptions,
    named_option,
    only_downloads_have_bars,
    pick_device,
    tell_outside,
    value_of,
    whole_numbers,
)
from seecause.cli.progress import Incomplete, dressed, starting, training
from seecause.data.dataset import Hole
from seecause.errors import BadOption
from seecause.report.pages import Section


def test_devices(monkeypatch):
    for there, rank, devices in (
        (False, None, {"auto": "cpu", "cpu": "cpu"}),
        (True, None, {"auto": "cuda", "cpu": "cpu", "cuda": "cuda"}),
        (True, "3", {"auto": "cuda:3", "cpu": "cpu", "cuda": "cuda:3"}),
        (False, "3", {"auto": "cpu"}),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        assert {name: pick_device(Device(name)) for name in devices} == devices
    with pytest.raises(BadOption, match="--device cpu"):
        pick_device(Device.cuda)


def test_words_of_options():
    values = {"3": 3, "0.5": 0.5, "1,8": (1, 8), "true": True, "false": False, "none": "none"}
    assert {text: value_of(text) for text in values} == values
    assert named_option("--option", "a.b.key=x=y") == ("a.b", "key", "x=y")
    assert named_option("--option", "key=") == ("", "key", "")
    for wrong in ("key", "=3", "a.=3"):
        with pytest.raises(BadOption, match="--option"):
            named_option("--option", wrong)
    assert whole_numbers("--drop", "2, 5,2") == [2, 5]
    for wrong in ("", "2,x", "0.5", "-1"):
        with pytest.raises(BadOption, match="--drop"):
            whole_numbers("--drop", wrong)


def test_half_precision_is_kept_where_it_is_quick(monkeypatch):
    monkeypatch.setattr("seecause.lvlm.load", lambda name, **options: (name, options))
    for there, dtype, expected in (
        (False, None, {"device": "cpu", "dtype": "float32"}),
        (True, None, {"device": "cuda", "dtype": None}),
        (True, Dtype.bfloat16, {"device": "cuda", "dtype": "bfloat16"}),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert open_lvlm("hf:x", Device.auto, dtype) == ("hf:x", expected)


def test_downloads_keep_their_bars_unless_somebody_turned_them_off(monkeypatch):
    from huggingface_hub import utils
    from transformers.utils import logging

    for silent in (True, False):
        calls = []
        monkeypatch.setattr(utils, "are_progress_bars_disabled", lambda silent=silent: silent)
        monkeypatch.setattr(utils, "enable_progress_bars", lambda c=calls: c.append("on"))
        monkeypatch.setattr(logging, "disable_progress_bar", lambda c=calls: c.append("off"))
        only_downloads_have_bars()
        assert calls == ["off", *["on"] * (not silent)]


def test_only_models_that_transformers_loads_lose_their_bars(opened, monkeypatch):
    calls = []
    monkeypatch.setattr("seecause.cli.options.only_downloads_have_bars", lambda: calls.append(1))
    for name, loses in (
        ("hf:x", 1), ("folder", 1), ("timm:x", 0), ("builtin:x", 0), ("torchvision:x", 0),
    ):  # fmt: skip
        ModelOptions(model=name).open(RunOptions(device=Device.cpu))
        assert len(calls) == loses, name
        calls.clear()


def test_a_training_says_its_losses(capsys, monkeypatch):
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    with training(quiet=False) as on_step:
        on_step(1, 3, "loss 2")
        on_step(2, 3, "")
    with training(quiet=True) as on_step:
        on_step(3, 3, "loss 1")
    monkeypatch.setattr("seecause.cli.progress.EVERY", float("inf"))
    with training(quiet=False) as on_step:
        on_step(2, 3, "loss 2")
        on_step(3, 3, "loss 1")  # the last is always told
    assert capsys.readouterr().err == "step 1 of 3, loss 2\nstep 3 of 3, loss 1\n"


def test_json_of_what_is_incomplete_is_that_of_its_manifest(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text('{"share": NaN, "page": "index.html"}')

    def command(*, out: Path, facts: bool = False) -> None:
        typer.echo("an answer")
        raise Incomplete({"own": 1} if facts else None)

    for options, expected in (
        ({}, {"out": str(tmp_path), "share": None, "page": "index.html"}),
        ({"facts": True}, {"own": 1}),
    ):
        with pytest.raises(Incomplete):
            dressed(command)(as_json=True, out=tmp_path, **options)
        assert capsys.readouterr().out == json.dumps(expected, indent=2) + "\n"
    with pytest.raises(Incomplete):
        dressed(command)(out=tmp_path)
    assert capsys.readouterr().out == "an answer\n"
    for place in (tmp_path / "new", None):  # nothing was written yet, or nothing is to be
        with pytest.raises(Incomplete):
            dressed(command)(as_json=True, out=place)
        shown = None if place is None else str(place)
        assert json.loads(capsys.readouterr().out) == {"out": shown}


def test_warnings_are_silent_while_a_quiet_command_runs_and_no_longer():
    log, levels = logging.getLogger("seecause"), []
    before = log.level

    def command(*, quiet: bool = False) -> None:
        levels.append(log.level)
        raise KeyError

    for quiet in (True, False):
        with pytest.raises(KeyError):
            dressed(command)(quiet=quiet)
    assert levels == [logging.ERROR, before] and log.level == before


def test_pictures_that_a_model_does_not_know_are_counted(capsys):
    tell_outside("m", ["a.png", "critters:clean#1", "b.png", "c.png"], suggest="timm:x")
    told = capsys.readouterr().err
    assert "m knows only Critters" in told and "a.png and 2 more means nothing" in told
    assert "such as timm:x" in told
    for pictures, others in ((["a.png"], ""), (["a.png", "b.png"], " and 1 more")):
        tell_outside("m", pictures, suggest="timm:x")
        assert f"about a.png{others} means nothing" in capsys.readouterr().err
    tell_outside("m", ["critters:clean#1"], suggest="timm:x")
    assert capsys.readouterr().err == ""


def test_an_output_is_checked_written_and_told(tmp_path, capsys, monkeypatch):
    output = Output(out=tmp_path / "out")
    assert not output.check()
    sections = [Section("Title of it", Markup("body"))]
    output.write(
        {"command": "toy"}, "A page", sections, lead="The lead.", tables={"a.csv": "x\n1\n"},
        more=lambda folder: (folder / "more").write_text("more"),
    )  # fmt: skip
    manifest = json.loads((output.out / "manifest.json").read_text())
    assert manifest == {
        "page": "index.html", "command": "toy",
        "files": ["a.csv", "index.html", "more", "manifest.json"],
    }  # fmt: skip
    page = (output.out / "index.html").read_text()
    assert all(words in page for words in ("A page", "The lead.", "Title of it"))
    assert (output.out / "a.csv").read_text() == "x\n1\n" and output.check()
    output.say(["one", "two"], replaced=True)
    told = f"one\ntwo\nreplaced the earlier result in {output.out}\npage: {output.out}/index.html\n"
    assert capsys.readouterr().out == told
    quiet = replace(output, quiet=True)
    with pytest.raises(Incomplete):
        quiet.say(["one"], replaced=True, holes=["hole"])
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    for each in (output, quiet):
        with each.counting("things", 2) as advance:
            advance(1)
    assert capsys.readouterr() == ("", "things: 1 of 2\n")
    (output.out / "mine.txt").write_text("mine")
    with pytest.raises(BadOption, match="--overwrite"):
        output.check()
    beside = replace(output, overwrite=True)
    assert not beside.check()
    beside.write({"command": "toy"}, "Another page", sections, holes=[Hole("a.png", "cut short")])
    assert (output.out / "mine.txt").read_text() == "mine"
    manifest = json.loads((output.out / "manifest.json").read_text())
    assert manifest["left out"] == [{"name": "a.png", "reason": "cut short"}]


def test_the_collector_waits_while_libraries_are_loaded_and_works_again(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with pytest.raises(KeyError), starting("loading", quiet=True):
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    monkeypatch.undo()
    with starting("loading", quiet=True):
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
