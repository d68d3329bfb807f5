"""A study over many samples: the same as one by one, resumed where it stopped, holes kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.bench import lvlm_study
from seecause.bench.lvlm_study import StudyOptions, run_lvlm_study, seed_of, study_store
from seecause.bench.lvlm_table import LVLMStudy, TracedSample, to_csv
from seecause.data import open_data
from seecause.data.images import to_pil
from seecause.errors import BadImage, BadOption
from seecause.lvlm import (
    MaskEngine,
    TextEffects,
    TokenAttribution,
    TokenTrace,
    attribute_heads,
    make_bank,
    trace_heads,
)
from seecause.lvlm.trace import rows_of
from seecause.models.image_tokens import Grid, ImageTokens
from tests.lvlm.toy import QUESTION, pictures, toy_engine

OPTIONS = StudyOptions(QUESTION, masks=100, token_masks=60, floor=None)
HEADS_ONLY = replace(OPTIONS, token_masks=0)


@pytest.fixture(scope="module")
def ready():
    lvlm = toy_engine().lvlm
    return lvlm, make_bank(lvlm, pictures(4, start=40)), open_data("critters:clean:test", limit=3)


def test_a_study_is_the_sum_of_its_samples(ready, tmp_path):
    lvlm, bank, data = ready
    study = run_lvlm_study(lvlm, bank, data, OPTIONS, tmp_path)
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
    assert torch.equal(study.text, rows_of(study.stacked("deltas").mean(dim=0)))
    assert not torch.equal(study.samples[0].tensors["coefficients"], sample.tensors["coefficients"])
    lines = to_csv(study).splitlines()
    assert len(lines) == 4 and lines[0].startswith("sample,label,answer,span,r2")


def test_another_mask_makes_the_image_tokens_anew_and_not_the_heads(ready):
    lvlm, bank, data = ready

    class Inverted:
        name, classes = data.name, data.classes

        def __getitem__(self, index):
            return replace(data[index], mask=~data[index].mask)

    traced, text = TracedSample(0, data[0].id, None), torch.ones(3, dtype=torch.bool)
    one, other = (lvlm_study._Tracer(lvlm, bank, each, OPTIONS) for each in (data, Inverted()))
    assert one.heads(0).key == other.heads(0).key
    assert one.tokens(traced, text).key != other.tokens(traced, text).key


def test_finished_samples_are_read_and_not_made_again(ready, tmp_path, monkeypatch):
    lvlm, bank, data = ready
    heard: list[int] = []
    first = run_lvlm_study(lvlm, bank, data, OPTIONS, tmp_path, advance=heard.append)
    assert sum(heard) == 6
    marks = sorted((tmp_path / "shards").glob("*.json"))
    heads = [
        mark for mark in marks if "pieces" in json.loads(mark.read_text())["metadata"]["numbers"]
    ]
    assert len(marks) == 6 and len(heads) == 3
    heads[0].unlink()
    made: list[int] = []
    honest = lvlm_study.trace_heads
    monkeypatch.setattr(
        lvlm_study,
        "trace_heads",
        lambda *words, **options: made.append(1) or honest(*words, **options),
    )
    monkeypatch.setattr(
        lvlm_study,
        "trace_tokens",
        lambda *words, **options: pytest.fail("image tokens were finished"),
    )
    again = run_lvlm_study(lvlm, bank, data, OPTIONS, tmp_path)
    assert len(made) == 1 and to_csv(again) == to_csv(first)
    run_lvlm_study(lvlm, bank, data, replace(HEADS_ONLY, masks=101), tmp_path)
    assert len(made) == 4  # another question is another piece


def test_wordings_are_compared_at_the_share_of_the_study(ready, tmp_path, monkeypatch):
    lvlm, bank, data = ready
    shares: list[float] = []

    def attribute(engine, **options):
        shares.append(options["p"])
        return attribute_heads(engine, **options)

    monkeypatch.setattr("seecause.lvlm.attribute.attribute_heads", attribute)
    options = replace(HEADS_ONLY, wordings=("What is this creature?",), p=0.5)
    run_lvlm_study(lvlm, bank, data, options, tmp_path)
    assert shares == [0.5] * 9


def test_a_study_says_how_many_samples_have_a_bad_fit():
    numbers = ({"r2": 0.9, "split_half": 0.9}, {"r2": 0.1, "split_half": float("nan")})
    samples = [TracedSample(i, str(i), None, dict(n)) for i, n in enumerate(numbers)]
    first, second = LVLMStudy(samples, None, ()).concerns()
    assert "in 1 of 2 samples" in first and "R2 below 0.5" in first and "agreement" in second
    assert not LVLMStudy(samples[:1], None, ()).concerns()


def test_a_wording_that_cannot_be_compared_is_a_hole(ready, tmp_path):
    lvlm, bank, data = ready
    study = run_lvlm_study(lvlm, bank, data, replace(HEADS_ONLY, wordings=("",)), tmp_path)
    assert len(study.traced) == 3 and to_csv(study).count("no other wordings or ratios: ") == 3


def test_the_seed_and_the_share_of_a_study_reach_heads_and_image_tokens(
    ready, tmp_path, monkeypatch
):
    lvlm, bank, data = ready
    seeds, shares = [], set()
    for name in ("trace_heads", "trace_tokens"):
        inner = getattr(lvlm_study, name)

        def heard(*words, inner=inner, **options):
            seeds.append(options["seed"])
            shares.add(options["p"])
            return inner(*words, **options)

        monkeypatch.setattr(lvlm_study, name, heard)
    run_lvlm_study(lvlm, bank, data, replace(OPTIONS, seed=5, p=0.6), tmp_path)
    assert seeds == [seed_of(data[index].id, 5) for index in (0, 1, 2)] * 2 and shares == {0.6}


def test_what_cannot_be_traced_stays_as_a_hole(ready, tmp_path):
    lvlm, bank, data = ready
    weak = run_lvlm_study(lvlm, bank, data, replace(OPTIONS, floor=1e6), tmp_path)
    assert not weak.traced and weak.text is None and to_csv(weak).count("floor=1e+06") == 3
    assert all("floor=1e+06" in (sample.skipped or "") for sample in weak.samples)
    with pytest.raises(BadOption, match="masks"):  # the user's mistake, not a sample's
        run_lvlm_study(lvlm, bank, data, replace(OPTIONS, masks=9, how="fit"), tmp_path)
    wrong = run_lvlm_study(
        lvlm,
        bank,
        data,
        replace(HEADS_ONLY, right_only=True),
        tmp_path,
    )
    assert (
        all(sample.skipped is None or "not '" in sample.skipped for sample in wrong.samples)
        and len(wrong.traced) < 3
    )


def test_shares_on_the_object_are_those_of_coefficients_and_of_attention():
    grid, mask = ImageTokens((Grid(1, 2),)), torch.tensor([[True, False]])
    gamma, weighted = (torch.tensor(pair, dtype=torch.float64) for pair in ((3, 1), (1, 4)))
    fit = TokenAttribution(gamma, 0.0, 0.9, 0.9, 10, 0.8, gamma / 10, grid)
    trace = TokenTrace(TextEffects(gamma, ("a", "b"), 1.0), gamma > 1, 0.7, fit, weighted)
    numbers = lvlm_study.token_numbers(trace, mask)
    assert (numbers["object_share"], numbers["weighted_object_share"]) == (0.75, 0.2)
    assert (numbers["object_area"], numbers["object_hit"]) == (0.5, 1.0)
    assert "object_share" not in lvlm_study.token_numbers(trace, None)


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


def test_too_few_masks_for_image_tokens_are_noticed_before_any_work(ready, tmp_path, monkeypatch):
    lvlm, bank, data = ready
    monkeypatch.setattr(
        lvlm_study, "trace_heads", lambda *words, **options: pytest.fail("heads were traced first")
    )
    with pytest.raises(BadOption, match=r"masks=9 .*16 coefficients"):
        run_lvlm_study(lvlm, bank, data, replace(OPTIONS, token_masks=9, how="fit"), tmp_path)


def test_the_folder_of_something_else_is_refused(tmp_path):
    study_store(tmp_path / "new").check()
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(BadOption, match="--out"):
            study_store(taken).check()
    study_store(tmp_path).write_manifest({"question": QUESTION})
    study_store(tmp_path).check()


def test_a_shard_is_named_by_libraries_and_threads(ready, monkeypatch):
    lvlm, bank, data = ready
    key = lvlm_study._Tracer(lvlm, bank, data, OPTIONS)._key
    names = {key(data[0], None, OPTIONS, "heads")}
    for what, value in (("versions", {"numpy": "other"}), ("arithmetic", [7, "highest", False])):
        with monkeypatch.context() as patch:
            patch.setattr(lvlm_study, what, lambda value=value: value)
            names.add(key(data[0], None, OPTIONS, "heads"))
    assert len(names) == 3
