"""Only drawings are scaled; small images stay readable; maps and global state are never changed."""

import numpy as np
import pytest
import torch

from seecause.attribution.registry import is_signed
from seecause.errors import BadImage
from seecause.report.figures import (
    Line,
    chart,
    display_image,
    heat_layer,
    overlay,
    scale_of,
)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def heat() -> torch.Tensor:
    """Nothing but one strong corner."""
    values = torch.zeros(12, 12)
    values[:3, :3] = 1.0
    return values


def test_small_pictures_are_enlarged_by_a_whole_factor(image, heat):
    assert overlay(image, heat).size == (384, 384)
    assert display_image(torch.rand(3, 60, 100)).size == (400, 240)
    assert display_image(torch.rand(3, 500, 400)).size == (400, 500)


def test_the_picture_stays_visible_where_nothing_is_shown(image, heat):
    drawn = np.asarray(overlay(image, heat)).astype(int)
    calm = np.asarray(overlay(image, torch.zeros(12, 12))).astype(int)
    changed = np.abs(drawn - calm).sum(axis=-1)
    assert changed[200:, 200:].max() == 0
    assert changed[:64, :64].mean() > 60


def test_signed_maps_diverge_around_zero():
    scale = scale_of(torch.tensor([[-1.0, 0.0, 3.0]]))
    assert scale.signed and scale.low == -scale.high
    drawn = np.asarray(heat_layer(torch.tensor([[-3.0, 0.0, 3.0]]), scale)).astype(int)[0]
    against, nothing, favour = drawn
    assert against[2] > against[0] and favour[0] > favour[2] and nothing[3] == 0


# log probabilities: zero is not their neutral value
def test_maps_below_zero_throughout_use_their_own_range():
    scale = scale_of(torch.linspace(-9, -1, 100))
    assert not scale.signed and scale.low < -8.5 and scale.high > -1.5


def test_an_image_without_colours_is_refused(heat):
    with pytest.raises(BadImage, match="raw pixels"):
        overlay(torch.rand(4, 96, 96), heat)


def strength(values, scale) -> float:
    """The largest opacity of a map, before it is made less transparent for the eye."""
    return float((np.asarray(heat_layer(values[None], scale))[..., 3].max() / 255) ** (1 / 0.65))


@pytest.mark.parametrize(
    ("values", "strongest", "words"),
    [
        (torch.linspace(0.2, 0.9, 144), 1.0, ""),
        (torch.linspace(0.98, 1.0, 144), 0.2, "nearly the same everywhere"),
        (torch.full((144,), 0.7), 0.0, "no differences"),
        (torch.linspace(-1.0, 1.0, 144), 1.0, ""),
    ],
)
def test_a_map_that_is_nearly_the_same_everywhere_is_pale_and_says_so(values, strongest, words):
    scale = scale_of(values)
    assert strength(values, scale) == pytest.approx(strongest, abs=0.03)
    assert words in scale.remark and bool(scale.remark) is bool(words)


def test_a_method_for_and_against_keeps_its_colours_whatever_the_values():
    """All slopes of one picture may be positive: they are drawn like those of another."""
    values = torch.linspace(0.5, 3, 144)
    scale = scale_of(values, signed=True)
    assert scale.signed and scale.low == -scale.high and scale.colormap == "RdBu_r"
    assert is_signed("mosaic") and is_signed("mosaic", "staged") and is_signed("ixg")
    assert is_signed("gae") is None and is_signed("caap") is None and is_signed("no such") is None
    flat = scale_of(torch.full((144,), 0.7), signed=True)
    assert "no differences" in flat.remark and strength(values, flat) == 0


def test_a_chart_is_inline_svg_in_the_colours_of_the_page():
    lines = {
        "caap <i>": Line([0, 1, 2], [0.1, 0.5, 0.7], [0.01, float("nan"), 0.02]),
        "random": Line([0, 1, 2], [0.1, 0.2, 0.3], control=True),
    }
    drawn = chart(lines, title="deletion & more", x="share", y="score")
    assert drawn.startswith('<figure class="chart"><figcaption>deletion &amp; more')
    assert "caap &lt;i&gt;" in drawn and "currentColor" in drawn and "#d55e00" in drawn
    assert "nan" not in drawn.lower() and drawn == chart(
        lines, title="deletion & more", x="share", y="score"
    )
