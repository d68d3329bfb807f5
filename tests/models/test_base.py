"""What every view has: names of its classes, what it refuses, and what results say about it."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import seecause as sc
from seecause.errors import BadImage, BadOption, NotDefined, UnknownName
from seecause.models.base import library_versions, protocol
from tests.families.native import HALF
from tests.tiny import pictures, tiny

NAMES = ("tabby, tabby cat", "Tiger cat, tiger", "crane", "old crane, crane", "3", "tiger", "Frog")


@pytest.fixture
def model():
    return sc.wrap(tiny("timm_registers").module, name="mine", classes=NAMES, check=False, **HALF)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("tabby", 0), ("Tabby Cat", 0), ("tabby, tabby cat", 0), ("crane", 2), ("old crane", 3),
        ("TIGER CAT", 1), ("tiger", 5), ("frog", 6), ("3", 4), ("5", 5), (3, 3),
        (torch.tensor(6), 6), ("0", 0),
    ],
)  # fmt: skip
def test_a_class_has_names_and_a_number(model, name, index):
    assert model.class_index(name) == index


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (7, BadOption, "class index=7 .* 0 to 6"),
        ("-1", BadOption, "class index=-1"),
        ("7", BadOption, "class index=7"),
        ("--3", UnknownName, "class '--3' not found"),
        ("²", UnknownName, "class '²' not found"),
        ("tabby, tabby", UnknownName, "Did you mean tabby, tabby cat"),
    ],
)
def test_what_is_no_class_is_refused_in_words(model, name, error, words):
    with pytest.raises(error, match=words):
        model.class_index(name)


def test_several_classes_of_one_name_are_told_by_their_numbers(model):
    model.classes = ("a, b", "c, b", "d")
    with pytest.raises(BadOption, match="classes 0, 1 share this name"):
        model.class_index("b")
    assert model.class_name(2) == "d" and model.class_name(3) == "class 3"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 32, 48), r"images of shape \[3, 32, 48\]: expected \[B, 3, H, W\]"),
        ((0, 3, 32, 48), "at least one image"),
        ((1, 3, 48, 32), "takes 32 x 48 only"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(model, shape, words):
    with pytest.raises(BadImage, match=words):
        model.check(torch.zeros(shape))
    assert model.check(torch.zeros(2, 3, 32, 48, dtype=model.dtype)).grid == (4, 6)


def test_a_result_says_how_it_came_about(model):
    images = pictures(tiny("timm_registers"))
    record = protocol(model, images)
    assert len(record.pop("data_fingerprint")) == 16
    assert record == {
        "model": "mine",
        "family": "timm.VisionTransformer",
        "architecture": "transformer",
        "model_fingerprint": model.fingerprint(),
        "random_weights": False,
        "readout": "cls",
        "preprocessing": model.preprocess.record(),
        "grid": [4, 6],
        "prefix_tokens": 4,
        "images": [2, 3, 32, 48],
        "device": "cpu",
        "dtype": "float64",
        "versions": library_versions(),
    }


def test_a_fingerprint_is_of_the_name_all_weights_gates_and_merged_classes(model):
    prints = [model.fingerprint()]
    assert model.fingerprint() == replace(model, memo={}).fingerprint() == prints[0]
    assert len(prints[0]) == 16

    def changed(**fields) -> None:
        prints.append(replace(model, memo={}, **fields).fingerprint())

    changed(name="other")
    changed(gates=torch.ones(4, 3))
    changed(gates=torch.ones(4, 3) / 2)
    changed(merged=(0, 0, 1, 1, 2, 2, 2))
    changed(extra=nn.Linear(2, 2))
    with torch.no_grad():
        model.module.head.bias[3] += 1
    prints.append(model.fingerprint())
    model.module.register_buffer("unsaved", torch.zeros(2), persistent=False)
    prints.append(model.fingerprint())
    model.module.unsaved[1] = 1
    prints.append(model.fingerprint())
    assert len(set(prints)) == len(prints)
    assert all(text.startswith(prints[0] + "-") for text in prints[2:5])


def test_a_move_takes_along_a_head_of_the_callers_and_forgets_what_was_kept():
    native = tiny("timm_registers")
    native.module.reset_classifier(0)
    model = sc.wrap(native.module, head=torch.ones(5, 24), pool="cls", check=False, **HALF)
    assert model.n_classes == 5 and model.memo
    key = model.state_key()
    assert model.to(torch.float32) is model and not model.memo and model.state_key() != key
    assert {p.dtype for p in (*model.module.parameters(), *model.extra.parameters())} == {
        torch.float32
    }
    zeros = model.zeros((16, 24))
    assert zeros.shape == (1, 3, 16, 24) and zeros.dtype == torch.float32 and not zeros.any()
    key = model.state_key()
    with torch.no_grad():
        next(model.extra.parameters()).add_(1)
    assert model.state_key() != key


def test_gates_multiply_inside_each_other_follow_edits_and_come_back(model):
    half, without = torch.full((4, 3), 0.5), torch.ones(4, 3)
    without[1, 2] = 0
    plain = model.state_key()
    with model.gated(half):
        key = model.state_key()
        assert key != plain
        with pytest.raises(ZeroDivisionError), model.gated(without):
            assert model.gate(1).tolist() == [0.5, 0.5, 0.0] and model.gate(1).dtype == model.dtype
            raise ZeroDivisionError
        assert model.gate(1).tolist() == [0.5] * 3
        model.gates[0, 1] = 0.25
        assert model.gate(0).tolist() == [0.5, 0.25, 0.5]
        assert model.state_key() not in (key, plain)
        model.module.float()
        assert model.gate(0).dtype == torch.float32
        model.blocks = [replace(model.blocks[0], heads=2, kv_heads=2), *model.blocks[1:]]
        assert model.gate(0).tolist() == [0.5, 0.25] and model.n_heads == 3
    assert model.gates is None and model.gate(0) is None
    with model.gated(torch.ones(4, 3, requires_grad=True)):
        assert model.gate(2).requires_grad


@pytest.mark.parametrize(
    "edit",
    [
        lambda part: part.weight.requires_grad_(False).mul_(2),
        lambda part: setattr(part, "weight", nn.Parameter(part.weight.detach().clone())),
        lambda part: part.register_buffer("extra", torch.ones(1)),
        lambda part: part.register_parameter("bias", None),
        lambda part: part.float(),
    ],
    ids=["in place", "replaced", "added", "removed", "moved"],
)
def test_every_change_of_a_tensor_changes_the_key(edit):
    model = sc.wrap(tiny("timm_registers").module, **HALF)
    key = model.state_key()
    assert model.state_key() == key
    edit(model.module.blocks[1].norm1)
    assert model.state_key() != key
    held = [*model.module.parameters(), *model.module.buffers()]
    assert set(map(id, model.tensors())) == set(map(id, held))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "head", nn.Linear(32, 7, dtype=torch.float64)),
        lambda module: setattr(module.blocks[0], "mlp", nn.Identity()),
        lambda module: module.blocks.pop(1),
        lambda module: module.reset_classifier(3),
    ],
)
def test_a_view_whose_module_got_other_layers_is_refused_not_run_with_the_old_ones(change):
    module = tiny("timm_registers").module
    model = sc.wrap(module, **HALF)
    images = model.zeros(model.preprocess.size)
    model(images)
    change(module)
    for run in (model, lambda x: sc.attribute(model, x, target=1), lambda x: sc.run(model, x)):
        with pytest.raises(NotDefined, match="was replaced, added or removed after it was wrapped"):
            run(images)


def test_a_deep_copy_of_a_view_is_refused_since_it_would_share_layers(model):
    with pytest.raises(NotDefined, match=r"copy.deepcopy\(model.module\)"):
        copy.deepcopy(model)
    assert copy.copy(model)(model.zeros(model.preprocess.size)).shape == (1, 7)
