"""Repairs: chosen without labels, resumed after a kill, exported to plain libraries."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import seecause as sc
from seecause.background import _remedies, repair as _repair
from seecause.background.baselines import features, last_layer, with_last_layer
from seecause.background.result import Candidate
from seecause.errors import BadOption
from tests.background.repair_toys import (
    PATCH,
    SIDE,
    biased_clip,
    fitted,
    plain_vit,
    scenes,
    wrapped,
)
from tests.families.native import tokenize


@pytest.fixture(scope="module")
def biased():
    return fitted(scenes(64))


@pytest.fixture(scope="module")
def mended(biased):
    return sc.repair(biased, scenes(80, usual=0.9, seed=1), per_picture=4)


def test_a_shortcut_is_mended_and_reported_on_other_pictures(mended):
    assert mended.remedy != "nothing" and mended.verdict == "yes"
    assert mended.after.flips < mended.before.flips - 0.3
    assert mended.after.transplant_worst > mended.before.transplant_worst + 0.3
    record = mended.record
    assert record["learn"] + record["choose"] + record["report"] == 80
    assert "mended by" in mended.sentence


def test_nothing_wins_where_there_is_nothing_to_repair_and_a_forced_repair_is_counted():
    fair, cases = fitted(scenes(256, usual=0.5, seed=3)), scenes(80, usual=0.5, seed=5)
    left = sc.repair(fair, cases, per_picture=3)
    assert left.remedy == "nothing" and left.model is fair
    forced = sc.repair(fair, cases, per_picture=3, force=True)
    assert forced.remedy != "nothing" and forced.before.accuracy == left.before.accuracy


def test_what_is_written_answers_alike_in_plain_timm(mended, tmp_path):
    folder = mended.export(tmp_path / "model")
    native = timm.models.VisionTransformer(
        img_size=SIDE, patch_size=PATCH, embed_dim=32, depth=2, num_heads=4, num_classes=2
    ).eval()
    native.load_state_dict(load_file(folder / "model.safetensors"))
    images = mended.before.pictures.images
    with torch.no_grad():
        assert_close(native(images), mended.model(images), atol=1e-5, rtol=1e-5)
    card = (folder / "README.md").read_text()
    for title in ("What was done", "On which data", "What it cost", "What was not tested", "Load"):
        assert title in card
    assert "unchanged. Layers and heads count" not in card  # of an export, how to load it alone
    page = (folder / "index.html").read_text()
    assert page.index("The same pictures, before and after") < page.index("What changed?")
    facts = json.loads((folder / "repair.json").read_text())
    assert facts["remedy"] == mended.remedy and facts["after"]["flips"] < facts["before"]["flips"]


def test_what_is_written_answers_alike_in_plain_transformers(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIDE, patch_size=PATCH, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, num_labels=2,
    )  # fmt: skip
    model = fitted(scenes(64), module=ViTForImageClassification(config).eval())
    cases = scenes(60, usual=0.9, seed=1)
    result = sc.repair(model, cases, per_picture=3, force=True, remedies=("last-layer",))
    folder = result.export(tmp_path / "model")
    assert json.loads((folder / "preprocessor_config.json").read_text())["image_std"] == [0.5] * 3
    native = ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        assert_close(native(cases.images).logits, result.model(cases.images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"anchor": True, "strength": 1.0}])
def test_a_zero_shot_model_gets_a_new_head_or_text_weights(tmp_path, options):
    model, cases = biased_clip(scenes(64)), scenes(80, usual=0.9, seed=1)
    before = sc.audit(model, cases)
    assert before.verdict == "yes" and before.flips > 0.8
    result = sc.repair(
        model, cases, per_picture=4, remedies=("last-layer",), options={"last-layer": options}
    )
    assert result.remedy == "last-layer"
    assert result.after.flips < 0.2 and result.after.accuracy > 0.9
    folder = result.export(tmp_path / "model")
    again = sc.load(str(folder), tokenizer=tokenize)
    assert again.classes == model.classes
    assert_close(again(cases.images), result.model(cases.images), atol=1e-4, rtol=1e-4)


def test_the_old_layer_of_a_zero_shot_model_is_its_texts():
    model, cases = biased_clip(scenes(32)), scenes(16, seed=1)
    layer = last_layer(model)
    angles = features(model, cases.images)
    assert_close(angles.norm(dim=1), torch.ones(16, dtype=torch.float64))
    assert_close(layer(angles).float(), model(cases.images), atol=1e-4, rtol=1e-4)
    same = with_last_layer(model, layer)
    assert_close(same(cases.images), model(cases.images), atol=1e-4, rtol=1e-4)


def test_a_killed_repair_goes_on_where_it_stopped(biased, tmp_path, monkeypatch):
    cases, options = scenes(60, usual=0.9, seed=1), {"per_picture": 3}
    whole = sc.repair(biased, cases, **options)
    fits, entry = [], _remedies.remedies()["directions-refit"]

    def killed(*_, **__):
        raise KeyboardInterrupt

    broken = _remedies.Remedy("directions-refit", killed, entry.cost, entry.needs, entry.summary)
    monkeypatch.setitem(_remedies._REMEDIES, "directions-refit", broken)
    with pytest.raises(KeyboardInterrupt):
        sc.repair(biased, cases, work=tmp_path, **options)
    monkeypatch.setitem(_remedies._REMEDIES, "directions-refit", entry)
    first = _remedies._REMEDIES["last-layer"]
    watched = _remedies.Remedy(
        "last-layer", lambda *_, **__: fits.append(1), first.cost, first.needs, first.summary
    )
    monkeypatch.setitem(_remedies._REMEDIES, "last-layer", watched)
    resumed = sc.repair(biased, cases, work=tmp_path, **options)
    assert not fits and resumed.remedy == whole.remedy
    assert resumed.after.numbers() == pytest.approx(whole.after.numbers(), abs=1e-6)


@pytest.mark.parametrize("kept", [slice(-7), slice(0)])  # a file that was cut, or emptied
@pytest.mark.parametrize("more", [b"", b"another"])
def test_a_damaged_remedy_is_named_and_made_again(biased, tmp_path, caplog, kept, more):
    cases = scenes(60, usual=0.9, seed=1)
    options = {"per_picture": 2, "remedies": ("last-layer",), "work": tmp_path}
    first = sc.repair(biased, cases, **options)
    (file,) = tmp_path.rglob("done.sealed")
    whole = file.read_bytes()
    file.write_bytes(whole[kept] + more)
    again = sc.repair(biased, cases, **options)
    assert f"{file} is damaged" in caplog.text
    assert again.after.numbers() == first.after.numbers()
    assert _remedies.read_remedy(biased, file.parent) is not None  # written anew


def test_a_remedy_that_cannot_be_done_is_a_hole_with_its_reason():
    model = wrapped(plain_vit(), head=torch.nn.Sequential(torch.nn.Linear(32, 2)), pool="cls")
    result = sc.repair(model, scenes(60, seed=1), per_picture=2, remedies=("directions",))
    assert "linear layer" in result.candidates["directions"].failed
    assert result.remedy == "nothing"


def test_group_labels_choose_only_where_they_are_allowed(biased):
    cases = scenes(80, usual=0.8, seed=1)
    with pytest.raises(BadOption, match="groups=True"):
        sc.repair(biased, cases, remedies=("dfr",))
    result = sc.repair(biased, cases, remedies=("dfr", "last-layer"), groups=True, per_picture=3)
    assert result.chosen_by == "worst group" and not result.candidates["dfr"].failed
    numbers = {name: tried.choose for name, tried in result.candidates.items()}
    assert all(0 <= tried["worst group"] <= 1 for tried in numbers.values())
    best = max(
        ("dfr", "last-layer"),
        key=lambda name: (numbers[name]["worst group"], numbers[name]["transplants"]),
    )
    assert result.remedy == best


def test_classes_without_pictures_are_warned_of():
    head, names = torch.nn.Linear(32, 5), ("dark", "light", "red", "green", "blue")
    model = wrapped(plain_vit(), head=head, pool="cls", classes=names)
    result = sc.repair(
        model, scenes(60, seed=1), per_picture=2, remedies=("last-layer",), force=True
    )
    assert any("2 of the model's 5 classes" in note for note in result.record["notes"])
    new, old = result.model.extra.weight, model.extra.weight
    assert_close(new[2:], old[2:])
    assert not torch.allclose(new[:2], old[:2])


def test_too_few_pictures_are_refused(biased):
    with pytest.raises(BadOption, match="five of each class"):
        sc.repair(biased, scenes(6))
    with pytest.raises(BadOption, match="remedies that are tried"):
        sc.repair(biased, scenes(60), options={"fine-tune": {"epochs": 1}})


def test_an_option_that_cannot_be_used_is_an_error_before_any_work(biased, monkeypatch):
    monkeypatch.setattr(_repair, "material_of", lambda *_: pytest.fail("pictures were read"))
    wrong = {"fine-tune": {"epochs": 0}, "heads": {"counts": []}, "last-layer": {"strength": 0.0}}
    for name, options in wrong.items():
        with pytest.raises(BadOption, match=f"{name}.{next(iter(options))}"):
            sc.repair(biased, scenes(60), remedies=(name,), options={name: options})


def test_an_option_that_the_model_cannot_have_is_an_error_and_no_hole(biased):
    options = {"directions": {"rank": 10_000}}
    with pytest.raises(BadOption, match="rank"):
        sc.repair(biased, scenes(60), remedies=("directions",), options=options, per_picture=2)


def test_a_model_with_few_right_answers_is_repaired_by_what_held_out_versions_gain():
    cases = scenes(60, usual=0.1, seed=1)  # answered from the background: nearly all wrong
    result = sc.repair(fitted(scenes(64)), cases, per_picture=3)
    assert result.verdict == "too few" and result.remedy != "nothing"
    assert result.after.accuracy > 0.9 and result.before.accuracy < 0.4


def test_a_work_folder_must_be_one(biased, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadOption, match="a folder"):
        _repair.repair(biased, scenes(60), work=tmp_path / "file")


def test_a_resumed_remedy_has_the_head_that_was_trained_with_it(tmp_path):
    model = wrapped(plain_vit(), head=torch.nn.Linear(32, 2), pool="cls")
    cases = scenes(60, seed=1)
    options = {
        "per_picture": 2, "remedies": ("fine-tune",), "force": True, "work": tmp_path,
        "options": {"fine-tune": {"epochs": 1, "rate": 1e-2}},
    }  # fmt: skip
    first, again = (sc.repair(model, cases, **options) for _ in range(2))
    assert not torch.allclose(first.model.extra.weight, model.extra.weight)
    assert_close(again.model.extra.state_dict(), first.model.extra.state_dict(), atol=0, rtol=0)
    assert again.candidates["fine-tune"].seconds == first.candidates["fine-tune"].seconds


def test_given_masks_stay_with_their_own_pictures(biased):
    cases, test = scenes(60, usual=0.9, seed=1), scenes(40, usual=0.5, seed=2)
    look = sc.eye(cases.truth, model=biased)
    result = sc.repair(biased, cases, eye=look, test=test, per_picture=2, remedies=("last-layer",))
    assert result.record["report"] == 40
    assert torch.equal(result.before.masks.fine, test.truth)


def test_groups_are_refused_where_a_picture_has_none_and_decide_what_is_reused(biased):
    cases = scenes(60, seed=1)
    for groups in ((), (None, *cases.groups[1:])):
        with pytest.raises(BadOption, match="group for every picture"):
            sc.repair(biased, replace(cases, groups=groups), groups=True)
    turned = replace(cases, groups=cases.groups[::-1])
    plain, other = (_repair.Material(pictures, None) for pictures in (cases, turned))
    assert _repair.content_key(plain, groups=False) == _repair.content_key(other, groups=False)
    assert _repair.content_key(plain, groups=True) != _repair.content_key(other, groups=True)


def test_of_remedies_that_are_as_good_the_one_with_fewer_flips_is_kept():
    equal = {"transplant-worst": 0.8, "transplants": 0.9}
    flips = {"nothing": 0.5, "last-layer": 0.2, "directions": 0.1, "fine-tune": 0.3}
    tried = {
        name: Candidate(name, "done", choose={**equal, "flips": share})
        for name, share in flips.items()
    }
    done = dict.fromkeys(tried)  # who is forced looks at no answers again
    assert _repair._choice(tried, done, None, "transplant-worst", "yes", True) == "directions"


def test_one_remedy_may_stand_without_a_list():
    pictures = scenes(60)
    result = sc.repair(fitted(pictures), pictures, per_picture=2, remedies="last-layer")
    assert list(result.candidates) == ["nothing", "last-layer"]


@pytest.mark.parametrize("options", [{"seed": 1.5}, {"per_picture": 1.5}, {"seed": -1}])
def test_draws_are_counted_in_whole_numbers(options):
    with pytest.raises(BadOption, match=next(iter(options))):
        sc.audit(fitted(scenes(24)), scenes(24), **options)
