"""Charts put every value where its axis says."""

from __future__ import annotations

import itertools
import re
from itertools import combinations

import pytest
import torch

from seecause.report.bench import _tell_nothing
from seecause.report.charts import (
    HEIGHT,
    LETTER,
    LINE,
    Difference,
    Series,
    chart,
    forest,
    mean_series,
    styled,
)


def dots(svg: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    ]


def test_a_logarithmic_axis_gives_equal_steps_to_equal_factors():
    svg = chart(
        [Series(str(x), [x], [0.5]) for x in (0.01, 0.1, 1.0)],
        title="cost",
        x_title="s",
        y_title="score",
        log=True,
    )
    (a, _), (b, _), (c, _) = dots(svg)
    assert abs((b - a) - (c - b)) < 0.2 and ">0.01</text>" in svg


def test_higher_values_stand_higher():
    svg = chart(
        [Series("low", [1.0], [0.2]), Series("high", [2.0], [0.9])],
        title="t",
        x_title="x",
        y_title="y",
    )
    (_, high), (_, low) = dots(svg)  # drawn from the top down
    assert 0 < high < low < HEIGHT


def test_names_of_neighbours_cover_neither_each_other_nor_a_dot():
    svg = chart(
        [Series(f"method {i}", [1.0 + i / 50], [0.5 + i / 1000], [0.01]) for i in range(8)],
        title="t",
        x_title="x",
        y_title="y",
    )
    names = re.findall(r'class="label" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)"', svg)
    assert len(names) == 8
    boxes = [
        (float(x) - (anchor == "end") * 8 * LETTER, float(y) - 4, 8 * LETTER, LINE)
        for x, y, anchor in names
    ]
    boxes += [(x, y, 0, 0) for x, y in dots(svg)]
    for a, b in combinations(boxes, 2):
        assert (
            a[0] + a[2] <= b[0]
            or b[0] + b[2] <= a[0]
            or abs(a[1] - b[1]) >= (a[3] + b[3]) / 2 - 0.1
        )


def test_charts_side_by_side_share_their_range():
    flat, steep = (
        Series("flat", [10.0, 20.0], [1.0, 1.0]),
        Series("steep", [10.0, 20.0], [0.0, 8.0]),
    )
    alone, beside = (
        chart([flat], title="t", x_title="x", y_title="y", beside=others)
        for others in ([], [steep])
    )
    assert ">8</text>" in beside and ">8</text>" not in alone


def test_a_name_cannot_break_the_page():
    assert "<b>" not in chart([Series("<b>", [1.0], [1.0])], title="<b>", x_title="x", y_title="y")


def test_many_methods_stay_apart_in_looks():
    looks = styled([str(i) for i in range(30)])
    assert len(set(looks.values())) == 30
    dashes = [dash for _, dash in looks.values()]
    assert all(a != b for a, b in itertools.pairwise(dashes))  # also without colours


def ticks(svg: str) -> list[float]:
    """Numbers at the axis of y."""
    return [float(tick) for tick in re.findall(r'text-anchor="end">([-\d.e]+)</text>', svg)]


@pytest.mark.parametrize(
    ("values", "top"),
    [([0.0, 0.0], 1.0), ([0.3, 0.3], 0.3), ([1.0, 0.25], 1.0), ([0.0, 1e-3], 1e-3)],
)
def test_a_share_is_drawn_from_zero_up_to_what_there_is(values, top):
    found = ticks(
        chart([Series("a", [0, 8], values)], title="t", x_title="x", y_title="y", share=True)
    )
    assert found[0] == 0 and top / 2 < found[-1] <= 1.05 * top


def test_a_value_that_never_changes_has_zero_on_its_axis_and_nothing_made_up():
    assert (
        min(ticks(chart([Series("a", [0, 8], [0.3, 0.3])], title="t", x_title="x", y_title="y")))
        == 0
    )
    svg = forest(
        [Difference("black", 0.0, 0.0), Difference("noise", 0.0, float("nan"))],
        title="t",
        x_title="x",
    )
    assert re.findall(r'text-anchor="middle">([-\d.]+)</text>', svg) == ["0"]
    assert "-0</text>" not in chart(
        [Series("a", [0, 8], [-0.1, 0.1])], title="t", x_title="x", y_title="y"
    )


def test_layers_are_whole_numbers():
    svg = chart(
        [Series("a", [0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])], title="t", x_title="layer", y_title="y"
    )
    assert re.findall(r'text-anchor="middle">([\d.]+)</text>', svg) == ["0", "1", "2", "3"]


def test_a_difference_that_may_be_none_is_hollow():
    svg = forest(
        [Difference("black", 0.1, 0.2), Difference("noise", -0.4, 0.1)], title="t", x_title="x"
    )
    assert re.findall(r'circle class="(\w+)"', svg) == ["open", "clear"]
    (zero,) = re.findall(r'class="zero" x1="([\d.]+)"', svg)
    black, noise = re.findall(r'cx="([\d.]+)"', svg)
    assert float(noise) < float(zero) < float(black)


def test_an_error_that_is_not_known_is_not_drawn():
    nan = float("nan")
    unknown, none = (
        chart(
            [Series("line", [1, 2], [0.1, 0.9], errors), Series("dot", [1.5], [0.5], errors[:1])],
            title="t",
            x_title="x",
            y_title="y",
        )
        for errors in ([nan, nan], [])
    )
    assert unknown == none and "nan" not in unknown
    rows = forest(
        [Difference("one picture", 0.3, nan), Difference("many", 0.3, 0.1)], title="t", x_title="x"
    )
    assert (
        "nan" not in rows
        and rows.count('class="open"') == rows.count('class="clear"') == 1
        and "one picture: +0.3<" in rows
    )


def test_a_curve_is_the_mean_of_the_pictures_with_its_standard_error():
    curves = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    series = mean_series("caap", curves, ("#000000", ""), x=[0.0, 0.5])
    assert (series.name, series.x, series.y, series.error) == ("caap", [0, 0.5], [0.5, 1], [0.5, 0])


def test_curves_that_tell_nothing_are_one_line_for_all_or_flat():
    places, falling = (0.0, 0.5, 1.0), (1.0, 0.4, 0.1)
    flat = Series("caap", places, (0.999, 1.0, 1.0))
    assert _tell_nothing([flat]) and not _tell_nothing([Series("caap", places, falling)])
    alike = [Series(name, places, falling) for name in ("caap", "gae")]
    assert _tell_nothing(alike) and not _tell_nothing([flat, *alike]) and not _tell_nothing([])
