"""Enough and needed: what bisection returns was run and is what it says; a scan of every length
agrees."""

import pytest
import torch
from PIL import ImageColor
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.evidence import bisect
from seecause.engine.chunks import budget
from seecause.engine.trace import blank_image
from seecause.errors import BadOption, UnknownName
from seecause.report.explain import OUTLINES, evidence_image, evidence_sentences
from tests.families.conv import CONV_FAMILIES, tiny_conv
from tests.helpers import ready, view
from tests.reference import evidence as reference
from tests.tiny import FAMILIES, pictures, tiny

EVERY = [(name, tiny) for name in FAMILIES] + [(name, tiny_conv) for name in CONV_FAMILIES]


def scanned(native, model, image, values, answer):
    """The slow twin for one image of a model."""
    grid, (height, width) = values.shape, native.size
    order = values.flatten().argsort(descending=True, stable=True).tolist()
    cells = [divmod(place, grid[1]) for place in order]
    blank = blank_image(model, native.size, "mean")[0]
    cell = (height // grid[0], width // grid[1])
    return reference.scan(native.forward, image, blank, cells, cell, answer)


@pytest.mark.parametrize(("family", "make"), EVERY, ids=[name for name, _ in EVERY])
@torch.no_grad()
def test_looking_at_every_length_equals_the_slow_scan(family, make):
    native = make(family)
    model, images = view(native, check=False), pictures(native)
    maps = torch.randn(2, *model.check(images).grid, generator=torch.Generator().manual_seed(2))
    result = sc.evidence(model, images, maps=maps, points=maps[0].numel())
    answers = native.forward(images).argmax(dim=-1).tolist()
    for index, answer in enumerate(answers):
        alone, without = scanned(native, model, images[index], maps[index], answer)
        for part, passes in ((result.enough, alone), (result.needed, [not k for k in without])):
            assert bool(part.exists[index]) == any(passes)
            if any(passes):
                assert int(part.count[index]) == passes.index(True)


@pytest.mark.parametrize("points", [1, 3, 7])
@torch.no_grad()
def test_bisection_returns_a_set_that_does_it_and_one_patch_less_does_not(points):
    native, model, images = ready("timm_registers", 6)
    maps = sc.attribute(model, images, method="sobel").maps
    result = sc.evidence(model, images, maps=maps, points=points)
    answers, between = native.forward(images).argmax(dim=-1).tolist(), 0
    for index, answer in enumerate(answers):
        alone, without = scanned(native, model, images[index], maps[index], answer)
        for part, passes in ((result.enough, alone), (result.needed, [not k for k in without])):
            count = int(part.count[index])
            if not part.exists[index]:
                assert not passes[0] and not passes[-1] and count == 0  # the ends were run
                continue
            assert passes[count] and (count == 0 or not passes[count - 1])
            between += count > 0
    assert between >= 6  # something was looked for


def test_bisection_finds_the_only_crossing_and_the_first_that_it_sees():
    truth, rows, last = torch.tensor([1, 5, 17, 64]), torch.arange(4), torch.ones(4).bool()
    for points in (1, 2, 7, 100):
        lengths = bisect(lambda rows, k: k >= truth[rows], rows, 64, last, points=points)
        assert lengths.tolist() == truth.tolist()
    passes = torch.zeros(65, dtype=torch.bool)  # comes and goes
    passes[[8, 9, *range(40, 65)]] = True

    def length(points, last):
        one = torch.tensor([last])
        return int(bisect(lambda rows, k: passes[k], one.long() * 0, 64, one, points=points))

    assert length(1, True) == 40 and length(7, True) == 8
    passes[10:] = False
    assert length(1, False) == -1 and length(7, False) == 8 and length(64, False) == 8


@torch.no_grad()
def test_the_numbers_are_those_of_the_pictures_that_were_run():
    native, model, images = ready("timm_registers", 4)
    result = sc.evidence(model, images, method="rollout", blank="black")
    for part, shown in ((result.enough, True), (result.needed, False)):
        pixels = part.patches.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
        keep = (pixels == shown)[:, None]
        run = torch.where(keep, images, blank_image(model, native.size, "black"))
        run = torch.where(part.exists[:, None, None, None], run, images if not shown else run)
        logits = native.forward(run)
        classes = native.forward(images).argmax(dim=-1)
        expected = logits.softmax(dim=-1)[torch.arange(4), classes]
        there = part.exists
        assert_close(part.probability[there], expected[there].double())
        assert [label for label, ok in zip(part.labels, there, strict=True) if ok] == [
            model.class_name(c) for c in logits.argmax(dim=-1)[there].tolist()
        ]
    assert_close(result.probability, native.forward(images).softmax(dim=-1).amax(dim=-1).double())


def test_an_answer_that_is_not_given_has_no_evidence_and_a_blank_that_gives_it_needs_none():
    native, model, images = ready("timm_registers", 3)
    answer = int(native.forward(images[:1]).argmax())
    other = (answer + 1) % 5
    result = sc.evidence(model, images[:1], other, method="sobel")
    assert not result.answered[0] and "does not predict" in evidence_sentences(result, 0)[0]
    assert bool(result.needed.exists[0]) and int(result.needed.count[0]) == 0
    constant = sc.evidence(model, images, lambda logits: logits[:, 0] * 0 + 1, method="sobel")
    assert constant.enough.count.tolist() == [0] * 3 and constant.enough.exists.all()
    assert not constant.needed.exists.any() and "blank alone" in evidence_sentences(constant, 0)[1]


def test_pairs_functions_and_batches():
    _, model, images = ready("timm_registers", 3)
    maps = sc.attribute(model, images, method="sobel").maps
    pair = sc.evidence(model, images, (1, 2), maps=maps)
    same = sc.evidence(model, images, lambda logits: logits[:, 1] - logits[:, 2], maps=maps)
    assert pair.enough.count.tolist() == same.enough.count.tolist()
    singles = [sc.evidence(model, images[i : i + 1], maps=maps[i : i + 1]) for i in range(3)]
    with budget(1):
        whole = sc.evidence(model, images, maps=maps)
    assert whole.enough.count.tolist() == [int(one.enough.count) for one in singles]
    assert whole.needed.count.tolist() == [int(one.needed.count) for one in singles]
    assert "of 24 patches" in evidence_sentences(whole, 1)[0]
    for part in ("enough", "needed"):
        drawn = {colour for _, colour in evidence_image(whole, 1, part).getcolors(1 << 20)}
        assert (ImageColor.getrgb(OUTLINES[part]) in drawn) == bool(getattr(whole, part).count[1])


@pytest.mark.parametrize(
    ("family", "order"),
    [("timm_registers", "mosaic"), ("timm_mean", "libra-ixg+"), ("timm_map", "libra-ixg+")],
)
def test_the_order_is_that_of_the_smallest_sets_on_such_models(family, order):
    _, model, images = ready(family)
    sets = sc.evidence(model, images)
    assert sets.manifest["options"]["order"] == order
    assert_close(sets.maps, sc.attribute(model, images, method=order).maps)


def test_what_cannot_be_done_is_said():
    _, model, images = ready("timm_registers")
    for options, message in (
        ({"points": 0}, "at least 1"),
        ({"maps": torch.zeros(2, 3, 3)}, r"\[2, 4, 6\]"),
        ({"maps": torch.full((2, 4, 6), torch.nan)}, "finite"),
        ({"blank": "pink"}, "white"),
        ({"options": 3}, "a table"),
    ):
        with pytest.raises(BadOption, match=message):
            sc.evidence(model, images, **{"method": "sobel", **options})
    with pytest.raises(UnknownName, match="method"):
        sc.evidence(model, images, method="tea-leaves")
