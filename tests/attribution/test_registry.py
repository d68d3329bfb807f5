"""The list of methods is what files register, every option reaches the arithmetic, and batches join
to what they are parts of."""

from functools import cache

import pytest
import torch

import seecause as sc
from seecause.attribution import registry
from seecause.attribution.registry import Maps, find, methods
from seecause.errors import BadOption, NotDefined, UnknownName
from tests.families.conv import tiny_conv
from tests.helpers import view
from tests.tiny import pictures, tiny

# a value that is not the default, under which the map of a tiny model must change
OTHERS = {
    **{"start": 2, "stage": None, "steps": 3, "samples": 3, "masks": 6, "cells": 3, "p": 0.3},
    **{"select": "none", "blank": "noise", "baseline": "black", "tail": "all"},
    **{"layers": (2, None), "direction": "delete", "approx": "e-caap"},
    **{"propagate_registers": True, "eps": 0.2, "noise": 0.5, "keep": 0.3, "factor": 0.5},
    **{"kappa": 0.1, "threshold": 0.5, "guide": "sobel", "candidates": 2},
    **{"reach": 0.2, "faint": 0.0, "seed": 1},
}
# what must stand beside an option for it to matter, and what makes a run short
BESIDE = {
    "seed": {"blank": "noise", "baseline": "noise"},
    "reach": {"guide": "sobel", "candidates": 4},
    "faint": {"guide": "sobel", "candidates": 4},
}
SHORT = {"steps": 2, "samples": 2, "masks": 4, "candidates": 1}
UNSEEN = {("caap", "classes")}  # maps beside the map


@cache
def setting(family: str):
    conv = family == "timm_resnet"
    native = tiny_conv(family) if conv else tiny(family)
    return view(native, check=False), pictures(native, batch=1, seed=3)


def cases():
    for family, architecture in (("timm_registers", "transformer"), ("timm_resnet", "staged")):
        for name, entry in methods(architecture).items():
            for option in entry.options:
                if (name, option) not in UNSEEN and not _is_plugin(entry):
                    yield pytest.param(family, name, option, id=f"{name}-{option}-{architecture}")


def _is_plugin(entry) -> bool:
    return not entry.run.__module__.startswith("seecause.")


@pytest.mark.parametrize(("family", "name", "option"), list(cases()))
def test_every_option_reaches_the_arithmetic(family, name, option):
    model, images = setting(family)
    entry = find(name, model.architecture)
    value = OTHERS.get(option)
    if option == "score":
        value = "prob" if entry.options["score"] == "logit" else "logit"
    if option == "stage":
        value = model.stages[0].name
    beside = {k: v for k, v in {**SHORT, **BESIDE.get(option, {})}.items() if k in entry.options}
    beside.pop(option, None)
    plain = {option: SHORT[option]} if option in SHORT else {}
    maps = [
        sc.attribute(model, images, 3, name, **{**beside, **own}).maps
        for own in (plain, {option: value})
    ]
    assert maps[0].shape == maps[1].shape and not torch.equal(*maps)


SIGNED = {"atman", "attcat", "caap+mosaic", "integrated-gradients", "ixg", "ixg+", "libra-ixg+"}
SIGNED |= {"mosaic", "simple-deletion"}


@pytest.mark.parametrize("family", ["timm_registers", "timm_resnet"])
def test_methods_know_their_class_and_their_sign_as_they_say(family):
    model, images = setting(family)
    for name, entry in methods(model.architecture).items():
        if _is_plugin(entry):
            continue
        short = {key: value for key, value in SHORT.items() if key in entry.options}
        maps = [sc.attribute(model, images, target, name, **short).maps for target in (1, 3)]
        assert torch.equal(*maps) == (not entry.class_specific), name
        assert entry.signed == (name in SIGNED), name
        assert not entry.signed or torch.cat(maps).min() < 0, name


def test_files_register_what_the_list_says():
    for kind, files in registry.FILES.items():
        listed = {name: file for file, names in files.items() for name in names}
        entries = {n: e for n, e in methods(kind).items() if not _is_plugin(e)}
        assert {n: e.run.__module__.split(".")[-1] for n, e in entries.items()} == listed
    assert find("caap", "staged") is not find("caap")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rollout", {"start": 4}, "0-3"),
        ("tam", {"steps": 0}, "at least 1"),
        ("ixg+", {"start": 4}, "0-3"),
        ("mosaic", {"eps": 0.5}, "below 0.5"),
        ("mosaic", {"eps": float("nan")}, "above 0"),
        ("mosaic", {"blank": "grey"}, "white"),
        ("mosaic", {"mask": 3}, "masks"),
        ("mosaic", {"seed": 2**63}, "from 0"),
        ("rise", {"masks": 0}, "at least 1"),
        ("tis", {"keep": 0.0}, "a share above 0"),
        ("caap", {"tail": "none"}, "source"),
        ("caap", {"tail": "source", "layers": (1, 3)}, "no effect"),
        ("caap", {"layers": (3, 2), "tail": "blank"}, "first <= last"),
        ("caap", {"layers": (0, 9), "tail": "blank"}, "0 <= first"),
        ("caap", {"blank": torch.zeros(3, 9, 9)}, "expected"),
        ("caap", {"select": "box9"}, "box1"),
        ("caap", {"select": torch.zeros(3, 3)}, "4 x 6"),
        ("caap", {"score": "vibes"}, "prob"),
        ("caap", {"approx": "lots"}, "e-caap"),
        ("caap", {"direction": "up"}, "insert, delete"),
    ],
)
def test_bad_options_say_what_was_expected(name, options, words):
    native = tiny("timm_deit3")
    with pytest.raises(sc.SeecauseError, match=words):
        sc.attribute(view(native, check=False), pictures(native, batch=1), 0, name, **options)


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (lambda x, target: x.new_zeros(1, 24), BadOption, r"odd, which returned Tensor \[1, 24\]"),
        (lambda x, target: Maps(x.new_zeros(1, 7), target), BadOption, r"\[1, 7\].*\[1, 24\]"),
        (
            lambda x, target: Maps(x.new_full((1, 24), torch.nan), target),
            NotDefined,
            "its map has NaN",
        ),
    ],
)
def test_what_a_method_returns_is_checked_before_it_is_used(returned, error, words):
    entries = registry.METHODS["transformer"].entries
    registry.method("odd", forwards="0", needs="")(lambda model, x, target: returned(x, target))
    try:
        with pytest.raises(error, match=words):
            sc.attribute(*setting("timm_registers"), method="odd")
    finally:
        del entries["odd"]


def test_a_method_for_another_architecture_says_so():
    model, images = setting("timm_resnet")
    with pytest.raises(NotDefined, match=r"not for networks of stages.*caap, center"):
        sc.attribute(model, images, method="rollout")
    with pytest.raises(UnknownName, match="caap"):
        sc.attribute(model, images, method="capp")
