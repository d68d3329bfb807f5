"""Masks, the elastic net, and what they find where the truth is known."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.linear_model import ElasticNet
from sklearn.metrics import r2_score
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption, DataMissing
from seecause.lvlm import (
    HeadAttribution,
    attribute_heads,
    attribute_tokens,
    draw_masks,
    elastic_net,
)
from seecause.lvlm.fit import Moments, Penalty, _agreement, estimate, regress
from seecause.lvlm.masks import MASKS, MaskSampling
from seecause.options import keyword_options
from tests.helpers import noise
from tests.lvlm.scenes import GRID, scene


@pytest.mark.parametrize(
    ("count", "size"), [(1500, 120), (90, 120)]
)  # more masks than heads, and fewer
@pytest.mark.parametrize(
    "penalty", [Penalty(), Penalty(alpha=0.01, l1_ratio=0.9)], ids=["paper", "strong"]
)
def test_coefficients_are_those_of_scikit_learn(count, size, penalty):
    x = draw_masks(count, size, seed=1)
    y = x.double() @ (noise(size) * 0.05) + 0.1 * noise(count, seed=2) + 3
    theirs = ElasticNet(alpha=penalty.alpha, l1_ratio=penalty.l1_ratio, max_iter=1000).fit(
        x.double().numpy(), y.numpy()
    )
    ours = elastic_net(x, y, penalty)
    assert_close(ours.coefficients, torch.from_numpy(theirs.coef_), atol=1e-10, rtol=0)
    assert_close(ours.intercept, float(theirs.intercept_), atol=1e-10, rtol=0)
    assert ours.sweeps == theirs.n_iter_ and ours.converged
    assert not elastic_net(x, y, Penalty(alpha=1e-6, max_iter=1)).converged


def test_what_all_masks_share_leaves_the_coefficients_as_they_are():
    x = draw_masks(150, 120, seed=1)  # few, so that the net needs many sweeps
    y = x.double() @ (noise(120) * 0.05) + 0.1 * noise(150, seed=2)
    near, far = elastic_net(x, y), elastic_net(x, y + 1000)
    assert_close(far.coefficients, near.coefficients, atol=1e-7, rtol=0)
    assert far.intercept - near.intercept == pytest.approx(1000)


def test_mask_laws():
    loose, exact = (draw_masks(3000, 40, p=0.75, law=law) for law in ("bernoulli", "fixed"))
    assert (exact.sum(dim=1) == 10).all() and loose.sum(dim=1).unique().numel() > 5
    for masks in (loose, exact):
        assert_close(
            masks.double().mean(dim=0),
            torch.full((40,), 0.25, dtype=torch.float64),
            atol=0.04,
            rtol=0,
        )
    assert torch.equal(
        draw_masks(1500, 40, start=700),
        torch.cat([draw_masks(1000, 40), draw_masks(1200, 40, start=1000)])[700:],
    )
    assert not torch.equal(loose, draw_masks(3000, 40, seed=1))
    with pytest.raises(BadOption):
        draw_masks(10, 5, p=1.0)
    for wrong in ({"law": "nonsense"}, {"seed": -1}, {"seed": 1 << 43}):
        with pytest.raises(BadOption):
            draw_masks(10, 5, **wrong)


def test_masks_of_two_seeds_share_no_block():
    """Another seed must not bring the masks that come later with this one."""
    first, second = (draw_masks(3000, 40, seed=seed) for seed in (0, 1))
    for a in first.split(1000):
        assert not any(torch.equal(a, b) for b in second.split(1000))


def test_an_additive_response_is_found_exactly():
    truth = noise(30) * (torch.arange(30) % 3 == 0)
    result = regress(lambda x: x.double() @ truth + 0.5, 30, MaskSampling(masks=400, alpha=1e-9))
    assert_close(
        result.coefficients, truth, atol=1e-3, rtol=0
    )  # as far as scikit-learn goes before it stops
    assert_close(result.intercept, 0.5, atol=1e-3, rtol=0)
    assert (
        result.r2 > 0.999999
        and result.pearson > 0.999999
        and result.agreement > 0.999999
        and result.masks == 400
    )


def test_r2_is_that_of_masks_the_fit_has_not_seen():
    truth, asked = noise(20), []

    def respond(x: torch.Tensor) -> torch.Tensor:
        rough = torch.randn(len(x), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        asked.append((x, x.double() @ truth + 3 * rough))
        return asked[-1][1]

    fit = regress(respond, 20, MaskSampling(masks=60, seed=4))
    ((masks, responses),) = asked
    unseen = torch.randperm(60, generator=torch.Generator().manual_seed(4))[48:]
    predicted = masks[unseen].double() @ fit.coefficients + fit.intercept
    assert fit.r2 == pytest.approx(r2_score(responses[unseen], predicted), abs=1e-9)
    assert fit.pearson == pytest.approx(np.corrcoef(responses[unseen], predicted)[0, 1], abs=1e-9)


def test_the_standard_error_of_a_fit_is_that_of_least_squares():
    x, truth = draw_masks(50, 6, p=0.4, seed=2).double(), noise(6)
    moments = Moments(6).add(x, x @ truth)
    centred = (x - x.mean(dim=0)).numpy()
    expected = np.sqrt(0.3 * np.diag(np.linalg.inv(centred.T @ centred)))
    assert_close(moments.standard_error(0.3), torch.from_numpy(expected), atol=1e-10, rtol=0)
    fit = regress(lambda x: x.double() @ truth + noise(len(x)), 6, MaskSampling(masks=50, seed=2))
    rows = draw_masks(50, 6, seed=2).double()
    rows = rows[torch.randperm(50, generator=torch.Generator().manual_seed(2))[:40]]
    centred = rows - rows.mean(dim=0)
    error = (fit.unseen[:, 0] - fit.unseen[:, 1]).square().mean()
    expected = (error * torch.linalg.inv(centred.T @ centred).diagonal()).sqrt()
    assert_close(fit.standard_error, expected, atol=1e-10, rtol=0)
    with pytest.raises(BadOption, match="at least one"):
        Moments(6).fit()


@pytest.mark.parametrize("penalty", [{"alpha": 0.05}, {"alpha": 0.05, "l1_ratio": 0.9}])
def test_the_penalty_is_the_one_asked_for(penalty):
    truth, asked = noise(20), []

    def respond(x: torch.Tensor) -> torch.Tensor:
        asked.append((x, x.double() @ truth + noise(len(x), seed=2)))
        return asked[-1][1]

    fit = regress(respond, 20, MaskSampling(masks=200, seed=4, **penalty))
    ((masks, responses),) = asked
    rows = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:160]
    theirs = ElasticNet(**penalty).fit(masks[rows].double().numpy(), responses[rows].numpy())
    assert_close(fit.coefficients, torch.from_numpy(theirs.coef_), atol=1e-3, rtol=0)


def test_defaults_are_the_papers():
    paper = {"masks": 10_000, "p": 0.75, "law": "bernoulli", "split": 0.8, "alpha": 5e-4}
    assert {name: getattr(MaskSampling(), name) for name in paper} == paper
    assert MASKS["fit"] == paper["masks"]
    for function in (attribute_heads, attribute_tokens):
        options = keyword_options(function)
        defaults = asdict(MaskSampling()) | {"how": "derivative", "masks": None}
        assert options == {name: defaults[name] for name in options}


ASKED = {"how": "derivative", "masks": None, "p": 0.75, "seed": 0}
DEFAULTS = {
    "AnswerEngine": {"answer": None, "length": 24, "vocabulary": None, "block_size": None},
    "MaskEngine": {
        **{"answer": None, "position": 0, "floor": 1.0, "vocabulary": None, "block_size": None}
    },
    "blind_logits": {"answer_start": ()},
    "calibration_critters": {"size": 96},
    "classifier": {
        **{"question": "What is in the picture?", "by": "name_ll", "scope": "vision"},
        **dict.fromkeys(("length", "labels", "orders", "preprocess")),
        **{"prior": False, "check": True},
    },
    "compare_wordings": {"answer": None, **ASKED, "floor": 1.0},
    "draw_masks": {"p": 0.75, "law": "bernoulli", "seed": 0, "start": 0},
    "edited_heads": dict.fromkeys(("blind", "redirect", "boost", "size", "picture")),
    "embed": {"perplexity": 30, "seed": 0},
    "export": {"note": ""},
    "first_crossing": {"level": 0.8, "completeness": False, "chunk": 128},
    "group_heads": {"groups": 2, "threshold": 0.1},
    "grouping": {"neighbours": 5},
    "head_words": {"heads": 5, "words": 10, "row": -1, "image_only": False},
    "load": {"device": None, "dtype": None, "template": None, "check": True},
    "make_bank": {"mode": "shape", "size": None, "sizes": ()},
    "picture_map": {"picture": 0},
    "random_orders": {"seed": 0},
    "ratio_study": {"how": "fit", "masks": None, "seed": 0},
    "scan": {"points": None},
    "speak_blind": {"length": 12},
    "text_slopes": {"masks": 64, "p": 0.75, "seed": 0},
    "trace_answer": {**ASKED, "token_masks": 0, "adaptive": False},
    "trace_heads": {**ASKED, "adaptive": False, "level": 0.8},
    "trace_tokens": {"text": None, **ASKED},
    "trace_words": ASKED,
    "wrap": {"name": None, "template": None, "inputs": None, "check": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_done_where_nothing_is_asked_for(name):
    own = keyword_options(getattr(sc.lvlm, name), leave_out=("advance",))
    assert own == DEFAULTS[name]


def test_asking_stops_when_two_halves_agree():
    truth = noise(60)
    rough = torch.Generator().manual_seed(0)

    def respond(x: torch.Tensor) -> torch.Tensor:
        return x.double() @ truth + 4 * torch.randn(len(x), generator=rough, dtype=torch.float64)

    result = regress(
        respond, 60, MaskSampling(masks=20_000, adaptive=True, agreement=0.8, step=200)
    )
    assert 200 < result.masks < 5000 and result.agreement >= 0.8
    assert [step["masks"] for step in result.history] == list(range(200, result.masks + 1, 200))
    assert all(step["agreement"] < 0.8 for step in result.history[:-1])
    assert all(
        step["top"] == 15 and 0 <= step["in both"] <= 15 for step in result.history
    )  # a quarter: of all 60, the largest 50 say little
    strict = regress(respond, 60, MaskSampling(masks=600, adaptive=True, agreement=0.99, step=200))
    assert strict.masks == 600  # it never agreed, and says so
    assert strict.agreement < 0.99


def test_slopes_that_are_no_numbers_are_refused():
    few = MaskSampling(masks=8, how="derivative")
    with pytest.raises(BadOption, match="finite"):
        estimate(lambda x: x.double().sum(dim=1), lambda x: x * torch.nan, 4, few)


@pytest.mark.parametrize(("split", "unseen"), [(0.8, 20), (0.6, 40)])
def test_so_many_masks_are_fitted_and_the_others_are_foretold(split, unseen):
    result = regress(lambda x: x.double() @ noise(9), 9, MaskSampling(masks=100, split=split))
    assert result.masks == 100 and result.unseen.shape == (unseen, 2)


def test_halves_are_compared_as_soon_as_both_together_outnumber_the_coefficients():
    truth = noise(30)
    result = regress(
        lambda x: x.double() @ truth, 30, MaskSampling(masks=400, adaptive=True, step=20)
    )
    assert result.history[0]["masks"] == 40  # of which 32 are fitted
    few = MaskSampling(masks=44, adaptive=True, agreement=0.999, step=11)
    result = regress(lambda x: x.double() @ truth[:9], 9, few)
    assert result.history[0]["masks"] == 22  # the first 11 have 9, as many as coefficients


def test_halves_have_at_most_fifty_of_their_largest_coefficients_in_common():
    first = torch.arange(240.0)
    halves = [
        SimpleNamespace(fit=lambda _, x=x: SimpleNamespace(coefficients=x))
        for x in (first, first.roll(10))
    ]
    assert _agreement(halves, MaskSampling(8))[1:] == (50, 40)


def test_heads_of_a_model(tmp_path):
    engine = scene("llava").engine
    result = attribute_heads(engine, how="fit", masks=300, seed=3)
    assert result.coefficients.shape == GRID and result.r2 > 0.5 and result.masks == 300
    again = attribute_heads(engine, how="fit", masks=300, seed=3)
    assert torch.equal(result.coefficients, again.coefficients)
    assert not torch.equal(
        result.coefficients, attribute_heads(engine, how="fit", masks=300, seed=4).coefficients
    )
    masks = draw_masks(300, 16, seed=3)
    on, off = (
        engine.evaluate(torch.where(torch.arange(16) == 5, value, masks)).mean()
        for value in (True, False)
    )
    assert (
        abs(float(result.coefficients.flatten()[5] - (on - off))) < 0.1
    )  # a coefficient is the mean effect of its head
    assert result.top(2)[0] == divmod(int(result.coefficients.argmax()), 4)
    assert result.mask(3).sum() == 3 and result.protocol["sampling"]["seed"] == 3
    read = HeadAttribution.load(result.save(tmp_path / "new" / "heads"))
    for name, value in vars(result).items():
        own = getattr(read, name)
        assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value, name
    assert len(result.unseen) == 60 and result.mask(0).sum() == 0
    assert result.top(16) == [divmod(place, 4) for place in result.order().tolist()]
    for wrong in (-1, 17):
        with pytest.raises(BadOption, match="a count up to 16"):
            result.top(wrong)


def test_equal_coefficients_are_ordered_by_layer_and_head():
    even = torch.tensor([[0.5, 0.2, 0.5], [0.2, 0.9, 0.5]])
    heads = HeadAttribution(even, 0.0, 1.0, 1.0, 8, 1.0, even)
    assert heads.top(4) == [(1, 1), (0, 0), (0, 2), (1, 2)]
    assert heads.mask(2).tolist() == [True, False, False, False, True, False]
    for k in (-1, 7):  # -1 would be all but the last
        with pytest.raises(BadOption, match="a count up to 6"):
            heads.mask(k)


def test_every_option_reaches_what_is_fitted():
    engine = scene("llava").engine
    own = {"masks": 60, "p": 0.6, "alpha": 1e-3, "l1_ratio": 0.9, "seed": 3}
    own |= {"adaptive": True, "agreement": 0.01, "step": 30, "how": "fit"}
    more = {"law": "fixed", "split": 0.7}
    for attribution, options in (
        (attribute_heads(engine, **own, **more), own | more),
        (attribute_tokens(engine, **own), own),
    ):
        sampling = attribution.protocol["sampling"]
        assert sampling == asdict(MaskSampling()) | options
        assert attribution.masks == attribution.protocol["history"][-1]["masks"] == 30
    soft = attribute_heads(engine, masks=8).protocol["sampling"]["soften"]
    assert soft == 0.1 and attribute_tokens(engine, masks=8).protocol["sampling"]["soften"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"masks": "many"},
        {"protocol": []},
        {"r2": "good"},
        {"agreement": None},
        {"intercept": [1.0]},
        {"pearson": "high"},
        {"unseen": torch.zeros(3)},
        {"coefficients": torch.zeros(3)},
        {"coefficients": torch.zeros(2, 2, dtype=torch.int64)},
        {"standard_error": torch.zeros(2, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_with_other_types_is_damaged(change, tmp_path):
    fine = HeadAttribution(noise(2, 2), 0.1, 0.9, 0.9, 100, 0.8, noise(2, 2), {"model": "m"})
    assert HeadAttribution.load(fine.save(tmp_path / "fine")).masks == 100
    with pytest.raises(DataMissing, match=r"attribution\.json is damaged"):
        HeadAttribution.load(replace(fine, **change).save(tmp_path / "other"))
    (tmp_path / "fine" / "attribution.json").unlink()
    with pytest.raises(DataMissing, match=r"attribution\.json there"):
        HeadAttribution.load(tmp_path / "fine")


def test_a_file_from_before_there_were_errors_has_none(tmp_path):
    own = HeadAttribution(noise(2, 2), 0.1, 0.9, 0.9, 100, 0.8, noise(2, 2), {"model": "m"})
    own.save(tmp_path)
    save_file({"coefficients": own.coefficients}, tmp_path / "coefficients.safetensors")
    read = HeadAttribution.load(tmp_path)
    assert torch.equal(read.coefficients, own.coefficients) and read.standard_error.isnan().all()


def test_how_many_masks_are_differentiated():
    cases = {("derivative", 64): 64, ("corrected", 1000): 64, ("corrected", 20): 20, ("fit", 9): 0}
    for (how, masks), count in cases.items():
        sampling = MaskSampling(masks, how=how)
        assert (sampling.differentiated, sampling.runs) == (count, masks + count)
        few = MaskSampling(masks, how=how, slopes=5)
        assert how == "fit" or few.runs == masks + 5
    assert MASKS == {"derivative": 64, "corrected": 1000, "fit": 10_000}


@pytest.mark.parametrize(
    "wrong",
    [
        {"masks": 15},
        {"split": 1.0},
        {"p": 0.0},
        {"adaptive": True, "step": 1},
        {"seed": 99999999999999999},
        {"seed": -1},
    ],
)
def test_too_few_masks_and_other_slips(wrong):
    with pytest.raises(BadOption):
        attribute_heads(scene("llava").engine, how="fit", **{"masks": 200, **wrong})
    with pytest.raises(BadOption, match="outnumber the 16"):
        attribute_heads(scene("llava").engine, how="fit", masks=20)
