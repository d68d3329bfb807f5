"""The Explain panel's functions: what they answer is what the library answers."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.app.panels import OnPicture, explain
from seecause.app.panels.explain import Brush, Regions
from seecause.errors import BadImage, BadOption

ON = {"model": "critters-vit", "picture": "s1"}
EVERY = tuple(range(144))


def probabilities(answers):
    return {answer["class"]: answer["probability"] for answer in answers}


def plain(context, picture="s1"):
    with torch.no_grad():
        return context.model(context.image(picture))[0].softmax(dim=-1)


def test_look_gives_the_models_own_answer(context):
    answer = explain.look(context, OnPicture(**ON))
    whole = plain(context)
    assert answer["predicted"] == int(whole.argmax()) and answer["grid"] == [12, 12]
    for place, value in probabilities(answer["answers"]).items():
        assert value == pytest.approx(float(whole[place]), abs=1e-5)
    assert answer["picture"].startswith("data:image/png;base64,")


def test_a_map_is_the_librarys_map(context):
    drawn = explain.draw(context, Brush(**ON, target=2, blank="black"), "caap")
    maps = sc.attribute(context.model, context.image("s1"), target=2, blank="black").maps[0]
    assert_close(torch.tensor(drawn["values"]), maps.flatten(), rtol=1e-3, atol=1e-6)
    assert drawn["label"] == context.model.class_name(2)
    assert len(drawn["by_class"]) == 5 and len(drawn["by_class"][0]) == 144
    if drawn["classes"].count(drawn["label"]):
        row = drawn["by_class"][drawn["classes"].index(drawn["label"])]
        assert_close(torch.tensor(row), maps.flatten(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tail", [None, "patched", "all"])
def test_all_patches_are_the_picture_and_none_are_the_blank(context, tail):
    last = None if tail is None else 3
    answer = explain.brush(context, Brush(**ON, patches=EVERY, tail=tail, last=last))
    whole = plain(context)
    with torch.no_grad():
        white = context.model(context.model.preprocess.normalise(torch.ones(1, 3, 96, 96)))
    blank = white[0].softmax(dim=-1)
    for place, value in probabilities(answer["only"]).items():
        assert value == pytest.approx(float(whole[place]), abs=1e-4)
    for place, value in probabilities(answer["without"]).items():
        assert value == pytest.approx(float(blank[place]), abs=1e-4)


def test_brushed_patches_recomputed_from_the_embedding_are_pixels_on_the_blank(context):
    """With tail=all from layer 0, "only these" is the plain answer to their pixels on white."""
    patches = tuple(row * 12 + column for row in range(3, 9) for column in range(3, 9))
    answer = explain.brush(context, Brush(**ON, patches=patches, tail="all", first=0, last=0))
    image = context.image("s1")
    shown = context.model.preprocess.normalise(torch.ones_like(image))
    shown[:, :, 24:72, 24:72] = image[:, :, 24:72, 24:72]
    with torch.no_grad():
        pixels = context.model(shown)[0].softmax(dim=-1)
    for place, value in probabilities(answer["only"]).items():
        assert value == pytest.approx(float(pixels[place]), abs=1e-4)


def test_an_interaction_is_what_both_regions_cause_beyond_their_sum(context):
    one, other = (52, 53, 64, 65), (78, 79, 90, 91)
    answer = explain.pair(context, Regions(**ON, one=one, other=other, target=0))
    expected = answer["joint"] - answer["one"] - answer["other"]
    assert answer["interaction"] == pytest.approx(expected, abs=2e-4)
    with pytest.raises(BadOption, match="at least one patch"):
        explain.pair(context, Regions(**ON, one=one))


def test_copied_python_gives_the_numbers_of_the_page(context):
    request = {**ON, "patches": (52, 53, 64, 65, 66), "blank": "mean"}
    texts = explain.copy(context, Brush(**request, methods=("caap", "mosaic")))
    names: dict = {}
    exec(texts["python"], names)
    drawn = explain.draw(context, Brush(**ON, blank="mean"), "caap")
    assert_close(
        names["maps_caap"][0].flatten(), torch.tensor(drawn["values"]), rtol=1e-3, atol=1e-6
    )
    answer = explain.brush(context, Brush(**request))
    best = int(plain(context).argmax())
    assert float(names["only_these"]) == pytest.approx(
        probabilities(answer["only"])[best], abs=1e-4
    )
    drop = float(plain(context)[best]) - probabilities(answer["without"])[best]
    assert float(names["drop_without_these"]) == pytest.approx(drop, abs=1e-4)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Brush(**ON, patches=(144,)), BadOption),
        (Brush(**{**ON, "picture": "u00"}, patches=(1,)), BadImage),
        (Brush(**ON, patches=(1,), first=9), BadOption),
    ],
)
def test_what_cannot_be_is_refused_in_words(context, request_, error):
    with pytest.raises(error):
        explain.brush(context, request_)
