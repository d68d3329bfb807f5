"""CAAP's settings: targets, classes, the cheaper E-CAAP, and what is refused."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

import seecause as sc
from seecause.engine.trace import blank_image
from seecause.errors import BadOption, NotDefined
from tests.helpers import near, ready, view
from tests.tiny import pictures, tiny


def test_e_caap_without_a_selection_gives_the_blank_answer_and_the_printed_formula_does_not():
    native, model, images = ready("timm_registers", check=True)
    nothing = torch.zeros(24, 24, dtype=torch.bool)
    expected = model(blank_image(model, native.size))[:, 3].expand(2, 24).unflatten(1, (4, 6))
    corrected = sc.attribute(
        model, images, target=3, approx="e-caap", select=nothing, score="logit"
    ).maps
    printed = sc.attribute(
        model, images, target=3, approx="e-caap-printed", select=nothing, score="logit"
    ).maps
    near(corrected, expected)
    assert (printed - expected).abs().min() > 1e-3


def test_e_caap_ranks_nearly_like_caap():
    _, model, images = ready("timm_registers", 4, check=True)
    exact = sc.attribute(model, images, target=3, score="logit").maps.flatten(1)
    rank = {}
    for approx in ("e-caap", "e-caap-printed"):
        close = sc.attribute(model, images, target=3, approx=approx, score="logit").maps.flatten(1)
        assert (close - exact).abs().max() > 1e-6  # it is an approximation
        rank[approx] = sum(spearmanr(a, b).statistic for a, b in zip(exact, close, strict=True)) / 4
    assert rank["e-caap"] > 0.9 and rank["e-caap"] > rank["e-caap-printed"]


def test_e_caap_is_refused_where_it_has_no_meaning():
    model = view(tiny("timm_mean"))
    with pytest.raises(BadOption, match="E-CAAP"):
        sc.attribute(model, torch.zeros(1, 3, 32, 48), target=0, approx="e-caap")


def test_targets_select_scores():
    _, model, images = ready("timm_deit3", check=True)
    every = sc.attribute(model, images, target=0, classes="all", score="logit").class_maps
    assert every.shape == (2, 4, 6, 7)
    predicted = model(images).argmax(dim=1)
    assert_close(
        sc.attribute(model, images, score="logit").maps,
        torch.stack([every[i, ..., c] for i, c in enumerate(predicted)]),
    )
    assert_close(
        sc.attribute(model, images, target=[1, 5], score="logit").maps,
        torch.stack([every[0, ..., 1], every[1, ..., 5]]),
    )
    assert_close(sc.attribute(model, images, target=(2, 4)).maps, every[..., 2] - every[..., 4])
    assert_close(
        sc.attribute(model, images, target=lambda logits: logits[:, 3] ** 2).maps,
        every[..., 3] ** 2,
    )
    assert_close(
        sc.attribute(model, images, target=0, classes=[6, 2], score="logit").class_maps,
        every[..., [6, 2]],
    )


def test_scores_are_probabilities_of_the_readout():
    _, model, images = ready("timm_deit3", check=True)
    logits = sc.attribute(model, images, target=0, classes="all", score="logit").class_maps
    assert_close(sc.attribute(model, images, target=3).maps, logits.softmax(dim=-1)[..., 3])
    assert_close(
        sc.attribute(model, images, target=3, score="logprob").maps,
        logits.log_softmax(dim=-1)[..., 3],
    )
    model.sigmoid = True
    assert_close(sc.attribute(model, images, target=3).maps, logits.sigmoid()[..., 3])


def test_defaults_depend_on_the_readout():
    for family, tail in (
        ("timm_deit3", "source"),
        ("timm_mean", "patched"),
        ("timm_map", "patched"),
        ("hf_dinov2", "source"),
    ):
        native = tiny(family)
        assert (
            sc.attribute(view(native), pictures(native), target=0).manifest["used"]["tail"] == tail
        )
    with pytest.raises(NotDefined, match="constant"):
        sc.attribute(view(tiny("timm_mean")), torch.zeros(1, 3, 32, 48), target=0, tail="blank")


def test_targets_come_in_many_types():

    _, model, images = ready("timm_deit3", check=True)
    expected = sc.attribute(model, images, target=3).maps
    for target in (
        np.int64(3),
        np.array([3, 3]),
        torch.tensor(3),
        torch.tensor([3, 3]),
        [3, np.int64(3)],
    ):
        assert torch.equal(sc.attribute(model, images, target=target).maps, expected)
    for target in (torch.tensor([1.5, 2.0]), [None, 1], 99, [1, 2, 3]):
        with pytest.raises(sc.SeecauseError):
            sc.attribute(model, images, target=target)


@pytest.mark.parametrize(
    "function", [lambda logits: logits[:, :1], lambda logits: logits.sum(), lambda logits: 3.0]
)
@pytest.mark.parametrize("method", ["caap", "integrated-gradients"])
def test_a_function_that_gives_no_number_for_each_row_is_refused(method, function):
    native = tiny("timm_deit3")
    with pytest.raises(BadOption, match="one number for each row"):
        sc.attribute(view(native), pictures(native), target=function, method=method)
