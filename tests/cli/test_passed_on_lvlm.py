"""The same of `seecause lvlm`: every option reaches the library."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner

from seecause.cli import app
from tests.cli.spies import given


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
    monkeypatch.setattr("seecause.lvlm.trace.masked_runs", lambda *_, **__: 1)
    monkeypatch.setattr("seecause.lvlm.words.masked_runs", lambda *_, **__: 1)
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
    reached = called(f"lvlm answer {ASKED} {fit}", "seecause.lvlm.trace_words")
    assert reached.words == (engine,) and reached.options == made
    reached = called(f"lvlm answer {ASKED} --length 7", "seecause.lvlm.AnswerEngine")
    given(reached, length=7)


def test_lvlm_study(called, monkeypatch, speaking, tmp_path):
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
    plain = called("lvlm study d --question Q", "seecause.bench.lvlm_study.run_lvlm_study")
    assert (plain.words[3].masks, plain.words[3].token_masks) == (64, 64)
    assert plain.words[4] == tmp_path / "out" and not plain.words[3].right_only
    line = "lvlm study d --question Q --token-masks 0"  # no image tokens
    heads = called(line, "seecause.bench.lvlm_study.run_lvlm_study")
    assert (heads.words[3].masks, heads.words[3].token_masks) == (64, 0)


def test_calibration_pictures_are_averaged_instead_of_critters(called, monkeypatch, tmp_path):
    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *_: "lvlm")
    sizes = [(8, 6), (4, 7)]
    for name, size in zip("ab", sizes, strict=True):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    reached = called(f"lvlm heads {ASKED} --calibration {tmp_path}", "seecause.lvlm.make_bank")
    lvlm, pictures = reached.words
    assert lvlm == "lvlm" and [picture.size for picture in pictures] == sizes


def test_edit(called, monkeypatch, speaking, tmp_path):
    speech = SimpleNamespace(
        prompt=lambda picture, question: (picture.size, question), speak=lambda prompt, n: [n]
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
    reached = called(f"{line} --redirect critters:clean:test#2", "seecause.lvlm.edited_heads")
    assert reached.options["redirect"].size == (96, 96) and reached.options["blind"] is None
    kept = line.replace(" --overwrite", "")
    done = CliRunner().invoke(app, [*kept.split(), "--boost", "2"])
    assert done.exit_code == 2 and "--overwrite" in done.output
