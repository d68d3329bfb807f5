"""The same of `seecause lvlm`: every option reaches the library."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner

from seecause.cli import app, lvlm_options
from seecause.cli.lvlm_options import AskedPicture, CalibratedModel, HeadEdit, read_heads, read_size
from seecause.cli.options import Device, Dtype
from seecause.errors import BadImage, BadOption
from tests.cli.spies import given
from tests.files import photo


@pytest.fixture
def speaking(monkeypatch):
    """A vision-language model that is not there."""
    opens = []
    engine = SimpleNamespace(answer="yes", progress=None)
    monkeypatch.setattr(
        "seecause.cli.lvlm_options.open_lvlm", lambda *words: opens.append(words) or "lvlm"
    )
    monkeypatch.setattr("seecause.lvlm.calibration_critters", lambda: "critters")
    monkeypatch.setattr("seecause.lvlm.make_bank", lambda lvlm, pictures: f"bank of {pictures}")
    return opens, engine


ASKED = "critters:clean:test#1 --question Q --device cpu --dtype bfloat16"


def test_lvlm_heads_and_tokens(called, monkeypatch, speaking):
    opens, engine = speaking
    for command in ("heads", "tokens", "answer"):
        word = "" if command == "answer" else " --position 2 --floor 3"
        place = "AnswerEngine" if command == "answer" else "MaskEngine"
        line = f"lvlm {command} {ASKED} --answer yes{word}"
        reached = called(line, f"seecause.lvlm.{place}")
        lvlm, picture, question, bank = reached.words
        assert (lvlm, question, bank) == ("lvlm", "Q", "bank of critters") and picture.size
        assert opens.pop() == ("builtin:critters-llava", "cpu", "bfloat16")
        more = {"length": 24} if command == "answer" else {"position": 2, "floor": 3}
        assert reached.options == {"answer": "yes", **more}
    monkeypatch.setattr("seecause.lvlm.MaskEngine", lambda *_, **__: engine)
    monkeypatch.setattr("seecause.lvlm.AnswerEngine", lambda *_, **__: engine)
    counted = []
    for place in ("trace", "words"):
        monkeypatch.setattr(
            f"seecause.lvlm.{place}.masked_runs", lambda _, **fit: counted.append(fit) or 7
        )
    totals = []
    monkeypatch.setattr(
        "seecause.cli.options.counting",
        lambda what, total, quiet: totals.append((what, total)) or nullcontext(),
    )
    fit = "--how fit --masks 44 --ablated 0.5 --seed 4"
    made = {"how": "fit", "masks": 44, "p": 0.5, "seed": 4}
    for command, more, options in (
        ("heads", "--adaptive", {"adaptive": True}),
        ("heads", "", {"adaptive": False}),
        ("tokens", "--token-masks 22", {"token_masks": 22}),
        ("tokens", "", {"token_masks": 44}),
    ):
        reached = called(f"lvlm {command} {ASKED} {fit} {more}", "seecause.lvlm.trace_answer")
        assert reached.words == (engine,) and reached.options == {**made, **options}
        masks = options.get("token_masks", 0)
        assert counted.pop() == {"how": "fit", "masks": 44, "token_masks": masks}
        assert totals.pop() == ("masked runs", 7)
    reached = called(f"lvlm tokens {ASKED} --how corrected", "seecause.lvlm.trace_answer")
    assert reached.options["token_masks"] is reached.options["masks"] is None  # the usual number
    assert counted.pop() == {"how": "corrected", "masks": None, "token_masks": None}
    reached = called(f"lvlm answer {ASKED} {fit}", "seecause.lvlm.trace_words")
    assert reached.words == (engine,) and reached.options == made
    assert counted.pop() == {"how": "fit", "masks": 44} and totals[-1] == ("masked runs", 7)
    reached = called(f"lvlm answer {ASKED} --length 7", "seecause.lvlm.AnswerEngine")
    given(reached, length=7)


def test_lvlm_study(called, monkeypatch, speaking, tmp_path):
    totals = []
    monkeypatch.setattr(
        "seecause.cli.lvlm.counting",
        lambda what, total, quiet: totals.append((what, total)) or nullcontext(),
    )
    monkeypatch.setattr("seecause.data.open_data", lambda name, limit: [name, limit])
    line = "lvlm study d --question Q --limit 5 --right-only --how fit --masks 44 --token-masks 22"
    line += " --ablated 0.5 --wording W --ratio 0.3 --floor 3 --seed 4 --device cpu --workers 1"
    reached = called(f"{line} --work {tmp_path}/w", "seecause.bench.lvlm_study.run_lvlm_study")
    lvlm, bank, pictures, options, store = reached.words
    assert (lvlm, bank, pictures) == ("lvlm", "bank of critters", ["d", 5])
    assert str(store) == f"{tmp_path}/w" and reached.options["workers"].count == 1
    assert (options.question, options.masks, options.token_masks) == ("Q", 44, 22)
    assert (options.p, options.floor, options.right_only) == (0.5, 3, True)
    assert (options.seed, options.how) == (4, "fit")
    assert (options.wordings, options.ratios) == (("W",), (0.3,))
    assert totals.pop() == ("parts of samples", 2 * 3)  # heads, image tokens, wordings
    assert speaking[0].pop() == ("builtin:critters-llava", "cpu", None)
    plain = called("lvlm study d --question Q", "seecause.bench.lvlm_study.run_lvlm_study")
    assert totals.pop() == ("parts of samples", 2 * 2)
    assert (plain.words[3].masks, plain.words[3].token_masks) == (64, 64)
    assert plain.words[4] == tmp_path / "out" and not plain.words[3].right_only
    line = "lvlm study d --question Q --token-masks 0"  # no image tokens
    heads = called(line, "seecause.bench.lvlm_study.run_lvlm_study")
    assert (heads.words[3].masks, heads.words[3].token_masks) == (64, 0)
    assert totals.pop() == ("parts of samples", 2 * 1)


def test_what_a_study_says_reaches_its_page(called, monkeypatch, speaking, tmp_path):
    monkeypatch.setattr("seecause.data.open_data", lambda name, limit: [name, limit])
    result = SimpleNamespace(samples=[], concerns=lambda: ["careful"])
    monkeypatch.setattr("seecause.bench.lvlm_study.run_lvlm_study", lambda *_, **__: result)
    monkeypatch.setattr("seecause.lvlm.trace.engine_concerns", lambda *words: [words])
    line = "lvlm study d --question Q --limit 5 --wording W --wording V"
    reached = called(line, "seecause.report.lvlm_study.write_study")
    assert reached.words == (tmp_path / "out", result)
    bank = "bank of critters"
    assert reached.options == {
        "lvlm": "lvlm", "question": "Q", "data": ["d", 5], "wordings": ("W", "V"),
        "notes": [("lvlm", "Q", len(bank)), "careful"],
    }  # fmt: skip


def test_holes_of_a_study_are_counted_by_their_reason(called, monkeypatch, speaking, tmp_path):
    monkeypatch.setattr("seecause.data.open_data", lambda name, limit: [name, limit])
    reasons = ["too dark", "", "too dark", "cut short", "too dark", ""]
    result = SimpleNamespace(
        samples=[SimpleNamespace(hole=reason) for reason in reasons], concerns=lambda: ["careful"]
    )
    monkeypatch.setattr("seecause.bench.lvlm_study.run_lvlm_study", lambda *_, **__: result)
    monkeypatch.setattr("seecause.lvlm.trace.engine_concerns", lambda *_: [])
    monkeypatch.setattr("seecause.report.lvlm_study.write_study", lambda *_, **__: ["page"])
    line = f"lvlm study d --question Q --out {tmp_path}/out"
    holes = "3 of 6 samples have holes: too dark\n1 of 6 samples have holes: cut short\n"
    for quiet in ([], ["--quiet"]):
        done = CliRunner().invoke(app, [*line.split(), *quiet])
        assert done.stderr == holes + "note: careful\n" * (not quiet), done.output
        assert done.stdout == "page\n" * (not quiet)


def test_a_model_of_critters_is_asked_about_photos_with_a_warning_unless_quiet(capsys):
    for model, image, quiet, warned in (
        ("builtin:critters-llava", "cat.jpg", False, True),
        ("builtin:critters-llava", "cat.jpg", True, False),
        ("builtin:critters-llava", "critters:clean:test#1", False, False),
        ("hf:other", "cat.jpg", False, False),
    ):
        AskedPicture(model=model, image=image, question="Q").warn(quiet=quiet)
        told = capsys.readouterr().err
        assert bool(told) == warned and ("about cat.jpg means nothing" in told) == warned


def test_calibration_pictures_are_averaged_instead_of_critters(called, monkeypatch, tmp_path):
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *_: "lvlm")
    sizes = [(8, 6), (4, 7)]
    (tmp_path / "cat").mkdir()  # a folder of class folders
    for name, size in zip(("cat/a", "cat/b"), sizes, strict=True):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    reached = called(f"lvlm heads {ASKED} --calibration {tmp_path}", "seecause.lvlm.make_bank")
    lvlm, pictures = reached.words
    assert lvlm == "lvlm" and [picture.size for picture in pictures] == sizes


def test_calibration_looks_into_class_folders_as_explain_does(tmp_path):
    photo(tmp_path / "cat" / "1.png")
    for calibration in ([str(tmp_path)], [str(tmp_path / "cat")]):
        CalibratedModel(model="hf:x", calibration=calibration).check("What?")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadImage, match="a folder without pictures"):
        CalibratedModel(model="hf:x", calibration=[str(tmp_path / "empty")]).check("What?")


def test_edit(called, monkeypatch, speaking, tmp_path):
    asked = []
    speech = SimpleNamespace(
        prompt=lambda picture, question: (picture.size, question),
        speak=lambda prompt, n: asked.append((prompt, n)) or [n],
    )
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *words: speech)
    sizes = (40, 30)
    bank = SimpleNamespace(resized=lambda picture: picture.resize(sizes))
    monkeypatch.setattr("seecause.lvlm.make_bank", lambda lvlm, pictures: bank)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    line = f"lvlm edit {ASKED} --heads 0.4,1.1 --out {tmp_path}/mine --overwrite"
    for change, options in (
        ("--blind", {"blind": bank, "redirect": None, "boost": None, "size": (30, 40)}),
        ("--boost 2", {"blind": None, "redirect": None, "boost": 2, "size": (96, 96)}),
    ):
        reached = called(f"{line} {change}", "seecause.lvlm.edited_heads")
        assert reached.words == (speech, [(0, 4), (1, 1)])
        given(reached, **options)
        assert reached.options["picture"].size == (96, 96)
    assert asked == [((sizes, "Q"), 24), (((96, 96), "Q"), 24)]  # as a bank has it, or as it is
    reached = called(f"{line} --redirect critters:clean:test#2", "seecause.lvlm.edited_heads")
    assert reached.options["redirect"].size == (96, 96) and reached.options["blind"] is None
    line = f"lvlm edit {ASKED} --heads 0.4 --model elsewhere --boost 0 --length 5"
    reached = called(line, "seecause.lvlm.edited_heads")  # no average, so no calibration pictures
    assert reached.options["boost"] == 0 and asked[-1][1] == 5
    kept = f"lvlm edit {ASKED} --heads 0.4,1.1 --out {tmp_path}/mine"
    done = CliRunner().invoke(app, [*kept.split(), "--boost", "2"])
    assert done.exit_code == 2 and "--overwrite" in done.output


def test_a_model_is_opened_in_float32_on_a_cpu_and_as_stored_elsewhere(monkeypatch):
    opens = []
    monkeypatch.setattr("seecause.lvlm.load", lambda name, **where: opens.append((name, where)))
    for picked, asked, dtype in (
        ("cpu", None, "float32"),
        ("cpu", Dtype.bfloat16, "bfloat16"),
        ("cuda", None, None),
        ("cuda", Dtype.float64, "float64"),
    ):
        monkeypatch.setattr(lvlm_options, "pick_device", lambda device, picked=picked: picked)
        lvlm_options.open_lvlm("mine", Device.auto, asked)
        assert opens.pop() == ("mine", {"device": picked, "dtype": dtype})


@pytest.mark.parametrize(
    ("options", "made", "line"),
    [
        ("", {"sizes": [(32, 40)]}, "shape"),
        ("--size 20x30 --size 30x20", {"sizes": [(20, 30), (30, 20)]}, "shape"),
        ("--mode fixed", {"size": (32, 40)}, "fixed"),
        ("--mode grid --size 20x30", {"size": (20, 30)}, "grid"),
        ("--mode mean", {}, "mean"),
    ],
)
def test_a_bank_is_made_as_asked_for(options, made, line, called, monkeypatch, tmp_path):
    for name, size in (("a", (32, 40)), ("b", (40, 32)), ("c", (40, 32))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    monkeypatch.setattr("seecause.cli.lvlm.open_lvlm", lambda *words: words)
    command = f"lvlm bank {tmp_path} --model M --device cpu --dtype float64 {options}"
    reached = called(command, "seecause.lvlm.make_bank")
    opened, pictures = reached.words
    assert opened == ("M", "cpu", "float64")
    assert [picture.size for picture in pictures] == [(32, 40), (40, 32), (40, 32)]
    assert reached.options == {"mode": line, **made}


@pytest.mark.parametrize("text", ["12", "0x32", "32x0", "32x", "x32", "-1x32", "1.5x2", "32X32"])
def test_a_size_is_two_counts(text):
    with pytest.raises(BadOption, match="HEIGHTxWIDTH"):
        read_size(text)


def test_heads_are_edited_in_one_way_and_named_in_two():
    for fine in ({"blind": True}, {"redirect": "a.png"}, {"boost": 0.0}):
        HeadEdit(**fine).check()
    for wrong in ({}, {"blind": True, "boost": 0.0}, {"redirect": "a.png", "boost": 1.0}):
        with pytest.raises(BadOption, match="one of --blind, --redirect and --boost"):
            HeadEdit(**wrong).check()
    pairs = [(0, 4), (11, 1)]
    for text in ("(0, 4), (11, 1)", "0.4,11.1", " 0.4 , (11,1)", "(0,4),(11,1)"):
        assert read_heads(text) == pairs
    for text in ("", "0", "0.4,", "(0, 4", "0.-1", "a.b"):
        with pytest.raises(BadOption, match="pairs of layer and head"):
            read_heads(text)
