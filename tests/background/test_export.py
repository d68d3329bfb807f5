"""Exported folders load in plain libraries and by `sc.load`, and answer like the ablated model."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save
from torch.testing import assert_close

import seecause as sc
from seecause.background import ablate, export, prune_heads
from seecause.errors import BadOption, DataMissing, EditLost, NotDefined
from seecause.models.block import zero_heads
from seecause.models.parts import CosineHead, UnitLinear
from tests.helpers import view
from tests.tiny import pictures, scramble, tiny

HEADS = [(0, 1), (1, 0), (1, 2), (3, 0), (3, 1), (3, 2)]


def ablated(model, images, heads=HEADS):
    with ablate(model, heads):
        return model(images)


def close(got, expected):
    assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def biased():
    return sc.load("builtin:critters-biased")


def test_an_embedded_model_comes_back_without_its_heads(biased, tmp_path):
    heads = [(0, 0), (2, 5), *((4, head) for head in range(8))]
    images = torch.randn(2, 3, 96, 96)
    expected = ablated(biased, images, heads)
    assert (expected - biased(images)).abs().max() > 0.1
    again = sc.load(str(export(biased, heads, tmp_path)))
    close(again(images), expected)
    assert again.classes == biased.classes and again.preprocess == biased.preprocess
    assert not again.random_weights
    page = (tmp_path / "README.md").read_text()
    assert "without 10 of 48 attention heads" in page and "(2, 5), (4, 0), (4, 1)" in page


@pytest.mark.parametrize(
    "change",
    [lambda *_, **__: None, lambda block, gone, of: zero_heads(block, gone[1:], of=of)],
)
def test_an_export_that_keeps_a_head_is_refused_when_it_is_written(
    biased, change, tmp_path, monkeypatch
):
    monkeypatch.setattr("seecause.background._export.zero_heads", change)
    with pytest.raises(EditLost, match=r"'export'.*a known edit should move.*torch"):
        export(biased, [(1, 0), (1, 1)], tmp_path)
    with pytest.raises(DataMissing):
        sc.load(str(tmp_path))


def test_weights_that_change_on_the_way_to_the_disk_are_refused(biased, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "seecause.background._export.save",
        lambda state: save({name: value.half().float() for name, value in state.items()}),
    )
    module = biased.module.state_dict()
    assert all(torch.equal(value, value.half().float()) for value in module.values())
    export(biased, [], tmp_path / "half")  # as the embedded weights are stored: no bit is lost
    monkeypatch.setattr(
        "seecause.background._export.save",
        lambda state: save({name: value.bfloat16().float() for name, value in state.items()}),
    )
    with pytest.raises(EditLost, match="weights changed, though no head"):
        export(biased, [], tmp_path / "less")
    with pytest.raises(DataMissing):
        sc.load(str(tmp_path / "less"))


def by_its_card(folder, monkeypatch):
    """What the README's own lines load."""
    monkeypatch.chdir(folder)
    code = re.search(r"```python\n(.+?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    space = {"FOLDER": str(folder)}
    exec(code.split("# or, with")[0], space)
    return space["model"]


def test_an_embedded_model_ships_in_plain_timm(biased, tmp_path, monkeypatch):
    export(biased, HEADS, tmp_path)
    images = torch.randn(2, 3, 96, 96)
    close(by_its_card(tmp_path, monkeypatch)(images), ablated(biased, images))


def test_timm_loads_what_it_knows_by_name(tmp_path, monkeypatch):
    model = sc.load("timm:test_vit", weights="random")
    scramble(model.module)
    heads, images = [(0, 0), (3, 1)], torch.randn(2, 3, 160, 160)
    expected = ablated(model, images, heads)
    export(model, heads, tmp_path / "zeroed")
    close(by_its_card(tmp_path / "zeroed", monkeypatch)(images), expected)
    page = (tmp_path / "zeroed" / "README.md").read_text()
    assert "timm.create_model('test_vit', num_classes=1000" in page and "were random" in page
    again = sc.load(str(tmp_path / "zeroed"))
    close(again(images), expected)
    assert again.preprocess == model.preprocess and again.preprocess.crop < 1


def test_a_head_of_its_own_and_rotary_attention_come_back(tmp_path):
    matrix = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    heads = [(0, 0), (3, 1), (3, 2), (5, 0), (5, 1), (5, 2)]
    model = sc.load("timm:eva02_tiny_patch14_224", weights="random", size=56, head=matrix)
    scramble(model.module)
    images = torch.randn(1, 3, 56, 56)
    again = sc.load(str(export(model, heads, tmp_path)))
    close(again(images), ablated(model, images, heads))


@pytest.mark.parametrize("kind", ["cosine", "unit-linear", "linear"])
def test_a_head_that_reads_angles_comes_back_as_what_it_is(kind, tmp_path):
    native = tiny("hf_dinov3", dtype=torch.float32)
    width = native.module.config.hidden_size
    matrix = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    layer = UnitLinear(width, 4) if kind == "unit-linear" else torch.nn.Linear(width, 4)
    head = CosineHead(matrix, scale=3.0) if kind == "cosine" else layer
    model = sc.wrap(native.module, **{**native.options, "head": head, "pool": "mean"})
    images = pictures(native)
    again = sc.load(str(export(model, HEADS, tmp_path)))
    close(again(images), ablated(model, images))
    assert json.loads((tmp_path / "seecause.json").read_text())["head"]["kind"] == kind


@pytest.mark.parametrize(
    "family", ["hf_vit", "hf_vit_other_size", "hf_dinov2", "hf_clip_tower", "hf_clip_classifier"]
)
def test_transformers_loads_what_it_saved(family, tmp_path, monkeypatch):
    native = tiny(family, dtype=torch.float32)
    model, images = view(native, check=False), pictures(native)
    expected = ablated(model, images)
    export(model, HEADS, tmp_path / "zeroed")
    plain = by_its_card(tmp_path / "zeroed", monkeypatch).eval()
    assert type(plain) is type(native.module)
    native.module.load_state_dict(plain.state_dict())
    close(native.forward(images), expected)
    close(sc.load(str(tmp_path / "zeroed"))(images), expected)


def test_a_pruned_model_is_pruned_again_but_not_exported(biased, tmp_path):
    images = torch.randn(1, 3, 96, 96)
    twice = prune_heads(prune_heads(biased, [(0, 0), (1, 3)]), [(0, 0)])
    close(twice(images), ablated(biased, images, [(0, 0), (0, 1), (1, 3)]))
    with pytest.raises(NotDefined, match="Export the whole model"):
        export(twice, [], tmp_path)
    assert not list(tmp_path.iterdir())  # nothing half written


def test_a_module_of_unknown_making_says_so(tmp_path):
    native = tiny("timm_registers", dtype=torch.float32)
    model, images = view(native, check=False), pictures(native)
    export(model, HEADS, tmp_path)
    with pytest.raises(DataMissing, match="Name the code, too"):
        sc.load(str(tmp_path))
    expected = ablated(model, images)
    native.module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    close(native.forward(images), expected)


def test_a_model_with_heads_switched_off_is_not_written(biased, tmp_path):
    with ablate(biased, [(0, 1)]), pytest.raises(NotDefined, match="Leave the `ablate` block"):
        export(biased, [(0, 2)], tmp_path)


def test_a_processor_says_what_the_model_was_told(tmp_path):
    from seecause.background._export import _save_processor
    from seecause.models.preprocess import Preprocess, preprocess_from_processor

    around = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "filter": "bilinear"}
    # a division loses this crop
    frame = Preprocess(size=(224, 224), crop=224 / 354, round_down=True, **around)
    _save_processor(frame, tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert preprocess_from_processor(written) == frame


def test_a_folder_with_other_things_is_left_alone(biased, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(BadOption, match="other files"):
        export(biased, [(0, 1)], tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name == "README.md" and file.read_text() == "mine"
    export(biased, [(0, 1)], tmp_path / "new")
    export(biased, [(0, 2)], tmp_path / "new")  # an earlier export is replaced
    assert "0: (0, 2)." in (tmp_path / "new" / "README.md").read_text()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "ifam.json").write_text("{}")  # what iFAM writes, which saves itself
    assert export(biased, [(0, 1)], tmp_path / "ours") == tmp_path / "ours"


def test_the_card_says_what_was_done_and_how_to_load_the_rest(biased, tmp_path):
    heads = [(0, 1), (2, 0), (2, 5)]
    export(biased, heads, tmp_path / "zeroed", note="Chosen by lot.")
    card = json.loads((tmp_path / "zeroed" / "seecause.json").read_text())
    assert card["removed"] == [[0, 1], [2, 0], [2, 5]]
    assert card["layers"] == [8] * 6 and card["head"] is None
    assert card["fingerprint"] != biased.fingerprint() and not card["random_weights"]
    assert tuple(card["classes"]) == biased.classes and card["pool"] == biased.readout.kind
    page = (tmp_path / "zeroed" / "README.md").read_text()
    assert "without 3 of 48 attention heads" in page and "Chosen by lot." in page
    assert "0: (0, 1), (2, 0), (2, 5)." in page and "were random" not in page
    assert card["fingerprint"] in page and "model = sc.load(FOLDER)" in page
    export(biased, [], tmp_path / "whole")
    assert "0: none." in (tmp_path / "whole" / "README.md").read_text()


def test_a_head_that_no_file_describes_is_refused(tmp_path):
    native = tiny("hf_vit", dtype=torch.float32)
    width = native.module.config.hidden_size
    model = sc.wrap(native.module, head=torch.nn.Sequential(torch.nn.Linear(width, 2)), pool="cls",
                    mean=(0.5,) * 3, std=(0.5,) * 3, check=False)  # fmt: skip
    with pytest.raises(NotDefined, match="a Sequential, which no file describes"):
        export(model, [], tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadOption, match="this is a file"):
        export(view(native, check=False), [], tmp_path / "file")
