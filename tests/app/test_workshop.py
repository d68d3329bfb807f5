"""Other models than the embedded ones: convolutional, without a class token, of another size."""

from __future__ import annotations

import pytest

from seecause.app.panels import explain, heads, swap
from seecause.app.panels.explain import Brush, Draw
from seecause.app.panels.requests import OnPicture
from seecause.app.sessions import Sessions
from seecause.app.workshop import Desk, Recent, open_workshop
from seecause.errors import BadOption, NotDefined
from tests.families.conv import CONV_FAMILIES, tiny_conv
from tests.helpers import view
from tests.tiny import tiny


def desk_of(model):
    shop = open_workshop(["mine:toy"], load=lambda spec: model, samples=["critters:clean:test#0"])
    return Desk(shop, Sessions().open(), shop.models["toy"], lambda share, words="": None)


@pytest.mark.parametrize(
    "family", ["timm_mean", "timm_map", "timm_distilled", "timm_mean_with_class"]
)
def test_transformers_of_other_kinds_are_explained_and_swapped(family):
    desk = desk_of(view(tiny(family), check=False))
    on = {"model": "toy", "picture": "s0"}
    every = tuple(range(desk.model.layout.n_patches))
    whole = explain.look(desk, OnPicture(**on))["answers"]
    only = explain.brush(desk, Brush(**on, patches=every))["only"]
    for one, other in zip(whole, only, strict=False):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)
    assert len(explain.draw(desk, Draw(**on))["values"]) == len(every)
    request = swap.Swap(model="toy", a="s0", b="s0", patches=(0, 1))
    assert swap.exchange(desk, request)["patches"] == 2
    assert heads.switch(desk, heads.Off(**on, off=(0,)))["heads"] == 1
    desk.shop.close()


def test_convolutional_networks_are_explained_and_other_panels_say_why_not():
    native = tiny_conv(next(iter(CONV_FAMILIES)))
    desk = desk_of(view(native, check=False))
    on = {"model": "toy", "picture": "s0"}
    answer = explain.brush(desk, Brush(**on, patches=(0, 1)))
    assert answer["only"] and explain.draw(desk, Draw(**on))["values"]
    with pytest.raises(NotDefined, match="no transformer blocks"):
        swap.exchange(desk, swap.Swap(model="toy", a="s0", b="s0"))
    with pytest.raises(NotDefined, match="no transformer blocks"):
        heads.switch(desk, heads.Off(**on))
    desk.shop.close()


def test_what_was_used_longest_ago_makes_room():
    recent = Recent(10, size=lambda value: value)
    for key, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4)):
        recent.get_or_make(key, lambda size=size: size)
    assert list(recent) == ["a", "c"] and recent.held == 8


def test_a_model_that_is_not_served_is_refused(shop):
    with pytest.raises(BadOption, match="one of critters-vit"):
        shop.served("timm:vit_base_patch16_224")
