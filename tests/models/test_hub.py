"""Weights that cannot be had are refused quickly, with everything that was said about it."""

from __future__ import annotations

import pytest

import seecause as sc
from seecause.errors import MissingWeights
from seecause.models.hub import fetched


def asked_in_vain(*_: object, **__: object) -> None:
    raise AssertionError("the library was asked, and would ask the hub again and again")


@pytest.mark.parametrize(
    ("model", "loader"),
    [
        ("timm:deit3_small_patch16_224", "timm.create_model"),
        ("hf:google/vit", "transformers.AutoConfig.from_pretrained"),
    ],
)
def test_an_unreachable_hub_is_noticed_before_a_library_asks_it(model, loader, monkeypatch):
    """The tests run with HF_HUB_OFFLINE."""
    monkeypatch.setattr(loader, asked_in_vain)
    with pytest.raises(
        MissingWeights,
        match=r"not on this machine, and https://\S+ cannot be reached .*--weights PATH",
    ):
        sc.load(model)


def test_a_file_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        MissingWeights,
        match=r"model\.safetensors is no folder.*Give a folder that transformers wrote",
    ):
        sc.load("hf:google/vit", weights="model.safetensors")


def test_what_a_library_says_is_not_cut_in_the_middle():
    def fail() -> None:
        raise OSError("one line of a long message, " * 10 + "\nand the second")

    with pytest.raises(
        MissingWeights, match=r"OSError: one line .* and the second\)\. Pass weights="
    ):
        fetched("timm:x", fail)
