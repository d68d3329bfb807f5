"""The Swap panel: its answers are those of `sc.patch`, and the path it finds does what it says."""

import pytest

import seecause as sc
from seecause.app.panels import swap
from seecause.app.panels.swap import Swap
from seecause.errors import BadOption

ON = {"model": "critters-vit", "a": "s0", "b": "s4"}
REGION = (65, 66, 67, 77, 78, 79)


def shown(answers):
    return {answer["class"]: answer["probability"] for answer in answers}


def patched(context, into, source, tokens, origin, layers):
    sites = [sc.Site(layer, tokens=tokens, source_tokens=origin) for layer in layers]
    logits = sc.patch(context.model, context.image(into), context.image(source), [sites])[0, 0]
    return logits.softmax(dim=-1)


@pytest.mark.parametrize(("down", "across"), [(0, 0), (-2, 1)])
@pytest.mark.parametrize(("first", "last"), [(0, None), (2, 3), (5, 5)])
def test_answers_are_those_of_patched_runs(context, down, across, first, last):
    request = Swap(**ON, patches=REGION, down=down, across=across, first=first, last=last)
    answer = swap.exchange(context, request)
    layers = range(first, 6 if last is None else last + 1)
    here = [5 + patch for patch in REGION]
    there = [5 + patch + 12 * down + across for patch in REGION]
    for name, expected in (
        ("b", patched(context, "s4", "s0", there, here, layers)),
        ("a", patched(context, "s0", "s4", here, there, layers)),
    ):
        for place, value in shown(answer[name]).items():
            assert value == pytest.approx(float(expected[place]), abs=1e-5)


def test_what_lands_outside_stays_behind(context):
    answer = swap.exchange(context, Swap(**ON, patches=(0, 143), down=-1))
    assert (answer["of"], answer["places"]) == ([143], [131])


def test_the_fewest_patches_flip_the_prediction_and_the_last_one_is_needed(context):
    answer = swap.path(context, Swap(**ON))
    a, b = context.image("s0"), context.image("s4")
    sets = sc.evidence(context.model, a, blank=b)
    assert answer["patches"] == sets.enough.patches[0].flatten().nonzero()[:, 0].tolist()
    pasted = swap.exchange(context, Swap(**ON, patches=tuple(answer["patches"]), first=0, last=0))
    leader = next(bar for bar in pasted["b"] if bar["leads"])
    assert leader["name"] == answer["to"] != answer["from"]
    assert leader["probability"] == pytest.approx(answer["probability"], abs=1e-5)


def test_two_pictures_with_one_answer_have_no_path(context):
    with pytest.raises(BadOption, match="two images with different predictions"):
        swap.path(context, Swap(**{**ON, "b": "s0"}))


def test_blocks_that_are_not_there_are_refused(context):
    for first, last in ((3, 2), (0, 6)):
        with pytest.raises(BadOption, match="blocks"):
            swap.exchange(context, Swap(**ON, first=first, last=last))


def test_copied_python_gives_the_numbers_of_the_page(context):
    request = Swap(**ON, patches=REGION, across=2, first=1, last=4)
    names: dict = {}
    exec(swap.copy(context, request)["python"].replace("print(", "_ = ("), names)
    copied = names["logits"].softmax(dim=-1)
    for place, value in shown(swap.exchange(context, request)["b"]).items():
        assert value == pytest.approx(float(copied[place]), abs=1e-5)
