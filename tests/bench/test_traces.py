"""A study over many samples: the same as one by one, resumed where it stopped, holes kept."""

from __future__ import annotations

import json

import pytest
import torch
from torch.testing import assert_close

from seecause.bench import traces
from seecause.bench.traces import Asked, check_folder, run_study, seed_of, to_csv
from seecause.data import open_data
from seecause.data.images import to_pil
from seecause.errors import BadImage, BadOption
from seecause.lvlm import MaskEngine, make_bank, trace_heads
from seecause.report.lvlm_study import text_section
from tests.lvlm.toy import QUESTION, pictures, toy_engine

ASKED = Asked(QUESTION, masks=100, token_masks=60, floor=None)


@pytest.fixture(scope="module")
def ready():
    lvlm = toy_engine().lvlm
    return lvlm, make_bank(lvlm, pictures(4, start=40)), open_data("critters:clean:test", limit=3)


def test_a_study_is_the_sum_of_its_samples(ready, tmp_path):
    lvlm, bank, data = ready
    study = run_study(lvlm, bank, data, ASKED, tmp_path)
    sample = study.samples[1]
    alone = trace_heads(
        MaskEngine(lvlm, to_pil(data[1].image), QUESTION, bank, floor=None),
        masks=100,
        seed=seed_of(data[1].id),
    )
    assert_close(sample.tensors["coefficients"], alone.heads.coefficients)
    assert (
        sample.numbers["enough_hear"] == alone.counts()["hear"][0]
        and sample.label == data.classes[data[1].label]
    )
    assert sample.numbers["object_area"] == pytest.approx(
        float(data[1].mask.double().mean()), abs=5e-3
    )  # drawn at 96 pixels, seen at 32
    assert study.stacked("gamma").shape == (3, 16) and study.column("r2").shape == (3,)
    assert study.text is not None and len(study.pieces) == len(study.text)
    assert not torch.equal(study.samples[0].tensors["coefficients"], sample.tensors["coefficients"])
    lines = to_csv(study).splitlines()
    assert len(lines) == 4 and lines[0].startswith("sample,label,answer,span,r2")


def test_finished_samples_are_read_and_not_made_again(ready, tmp_path, monkeypatch):
    lvlm, bank, data = ready
    heard: list[int] = []
    first = run_study(lvlm, bank, data, ASKED, tmp_path, advance=heard.append)
    assert sum(heard) == 6
    torn = next((tmp_path / "samples").glob("*.heads.json"))
    torn.unlink()
    made: list[int] = []
    honest = traces.trace_heads
    monkeypatch.setattr(
        traces, "trace_heads", lambda *given, **options: made.append(1) or honest(*given, **options)
    )
    monkeypatch.setattr(
        traces, "trace_tokens", lambda *given, **options: pytest.fail("image tokens were finished")
    )
    again = run_study(lvlm, bank, data, ASKED, tmp_path)
    assert len(made) == 1 and to_csv(again) == to_csv(first)
    run_study(lvlm, bank, data, Asked(QUESTION, masks=101, token_masks=0, floor=None), tmp_path)
    assert len(made) == 4  # another question is another piece


def test_what_cannot_be_traced_stays_as_a_hole(ready, tmp_path):
    lvlm, bank, data = ready
    weak = run_study(
        lvlm, bank, data, Asked(QUESTION, masks=100, token_masks=60, floor=1e6), tmp_path
    )
    assert not weak.known and weak.text is None and to_csv(weak).count("floor=1e+06") == 3
    assert all("floor=1e+06" in (sample.skipped or "") for sample in weak.samples)
    with pytest.raises(BadOption, match="masks"):  # the user's mistake, not a sample's
        run_study(lvlm, bank, data, Asked(QUESTION, masks=9, floor=None), tmp_path)
    wrong = run_study(
        lvlm,
        bank,
        data,
        Asked(QUESTION, masks=100, token_masks=0, floor=None, right_only=True),
        tmp_path,
    )
    assert (
        all(sample.skipped is None or "not '" in sample.skipped for sample in wrong.samples)
        and len(wrong.known) < 3
    )


class Torn:
    """A dataset whose second photo cannot be read."""

    def __init__(self, data):
        self.data, self.name, self.classes = data, data.name, data.classes

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index == 1:
            raise BadImage("second.png", "not an image that can be read")
        return self.data[index]


def test_an_unreadable_photo_is_a_hole(ready, tmp_path):
    lvlm, bank, data = ready
    found = run_study(
        lvlm, bank, Torn(data), Asked(QUESTION, masks=100, token_masks=0, floor=None), tmp_path
    )
    assert [sample.skipped is None for sample in found.samples] == [
        True,
        False,
        True,
    ] and "second.png" in to_csv(found)
    assert (
        "0 image tokens" not in text_section(found)[0].body
        and "no image tokens were asked for" in text_section(found)[0].note
    )


def test_too_few_masks_for_image_tokens_are_noticed_before_any_work(ready, tmp_path, monkeypatch):
    lvlm, bank, data = ready
    monkeypatch.setattr(
        traces, "trace_heads", lambda *given, **options: pytest.fail("heads were traced first")
    )
    with pytest.raises(BadOption, match=r"masks=9 .*16 coefficients"):
        run_study(lvlm, bank, data, Asked(QUESTION, masks=100, token_masks=9, floor=None), tmp_path)


def test_the_folder_of_something_else_is_refused(tmp_path):
    check_folder(tmp_path / "new")
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(BadOption, match="--out"):
            check_folder(taken)
    (tmp_path / "manifest.json").write_text(json.dumps({"command": "lvlm study"}))
    check_folder(tmp_path)
