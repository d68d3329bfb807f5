"""Every other way to choose heads: its numbers are what its definition says, on one interface."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    AnswerSampling,
    HeadScores,
    Screening,
    Swapped,
    ablate,
    head_gates,
    prune_heads,
    random_sets,
    select,
    selectors,
)
from seecause.background.erase import erase
from seecause.background.heads import over_images
from seecause.background.masks import MaskSearch
from seecause.data.dataset import IGNORE
from seecause.errors import BadOption, SeecauseError
from seecause.options import keyword_options
from tests.helpers import view
from tests.tiny import pictures, tiny

NAMES = [
    "attention-mass",
    "cigma",
    "contrastive-gating",
    "gating",
    "greedy",
    "interchange",
    "loss-change",
    "loss-gain",
    "output-norm",
    "random",
    "regression",
    "taylor",
]
NAMES += ["weight-norm"]
QUICK = {
    "gating": {"fits": 2, "steps": 2},
    "contrastive-gating": {"fits": 2, "steps": 2},
    "greedy": {"top": 2},
    "regression": {"draws": 24},
}


def set_up(family="timm_registers", batch=3):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native, batch)
    masks = torch.zeros(batch, *native.size, dtype=torch.bool)
    masks[:, 8:24, 12:40] = True  # half a patch on either side
    return model, images, torch.tensor([1, 0, 3])[:batch], masks


def test_the_list_is_complete():
    assert sorted(selectors()) == NAMES
    assert all(entry.summary and entry.cost and entry.needs for entry in selectors().values())


def test_defaults_are_those_that_papers_and_docs_name():
    masks, guard = {"masks": None, "baseline": "grey", "operator": "zero"}, {"guard": "penalty"}
    fitting = {"fits": 10, "steps": 500, "strength": 0.1, "rate": 1.0, "batch": 32, "seed": 0}
    expected = {
        "cigma": {
            **masks, **guard, "temperature": 1.0, "screen": None, "mask_steps": 250, "seed": 0,
        },
        "greedy": {**masks, **guard, "top": 4, "mask_steps": 250},
        "regression": {
            **masks, "draws": 32, "rate": 0.1, "ridge": 0.0, "mask_steps": 250, "seed": 0,
        },
        "gating": {"suppress": None, **fitting},
        "contrastive-gating": {"masks": None, "baseline": "grey", **fitting},
        "interchange": {"masks": None, "baseline": None, "temperature": 1.0},
        "attention-mass": {"masks": None},
        "taylor": {"remove": "least"},
        "output-norm": {"remove": "most"},
        "weight-norm": {"remove": "most"},
        "random": {"seed": 0},
        "loss-gain": {},
        "loss-change": {},
    }  # fmt: skip
    assert {name: entry.options for name, entry in selectors().items()} == expected
    search = {"steps": 250, "grid": 32, "rate": 0.05, "weights": (1.0, 0.01, 0.1)}
    search |= {"param": "clamp", "init": 0.5, "rho": 0.35, "binarise": "topk"}
    search |= {"temperature": 1.0, "early_stop": None}
    assert keyword_options(MaskSearch) == search
    assert keyword_options(head_gates) == {"suppress": None, **fitting}
    assert asdict(AnswerSampling()) == {"share": 0.4, "cap": 512, "stratified": False}
    screening = {"verify": None, "audit": 0.02, "half": False}
    assert asdict(Screening(top=3)) == {"top": 3, **screening}
    assert keyword_options(sc.background.screen) == {"top": 4, **screening, "seed": 0}
    assert keyword_options(sc.background.regress) == {
        "draws": 32,
        "rate": 0.1,
        "ridge": 0.0,
        "seed": 0,
    }
    assert keyword_options(sc.background.greedy) == {"top": 4, "rule": None}


def test_defaults_of_jobs_and_measurements():
    job = {"sampling": None, "background": None, "seed": 0}
    chosen = {"selector": "cigma", "options": None, **job}
    measured = {"baseline": "grey", "temperature": 1.0}
    refit = {"refits": 20, "strengths": (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01), "seed": 0}
    expected = {
        "score_heads": chosen,
        "prune_and_test": {**chosen, "top": 0.1, "draws": 20, "same": None},
        "ablation_study": {"top": 4, **job, "guard": True, "draws": 20},
        "audit": {
            "masks": "both", "fills": ("mean", "grey"), "temperature": 1.0, "count": "right",
            "same": None,
        },
        "score": {
            **measured, "response": "big", "target": None, "operator": "zero", "guard": True,
            "heads": None, "seed": 0,
        },
        "information_gains": measured,
        "discover_masks": {"baseline": "mean", "inside": None, "cache": None},
        "interchange": {"temperature": 1.0},
        "mediated": {"temperature": 1.0},
        "curve": {"draws": 20, "seed": 0, "train": None},
        "outcomes": {"train": None},
        "random_sets": {"draws": 20, "seed": 0},
        "divprune": {"keep": 0.25, "after": 0},
        "retrain_last_layer": refit,
        "export": {"form": "zeroed", "note": ""},
        "penalised": {"alpha": 1.0},
        "protected": {"fig": 0.05, "accuracy": 0.01},
    }  # fmt: skip
    for name, options in expected.items():
        assert keyword_options(getattr(sc.heads, name), leave_out=("progress",)) == options, name
    assert asdict(sc.background.Background()) == {"masks": "auto", "fill": "grey", "search": {}}


def test_options_of_cigma_reach_the_score():
    model, images, labels, masks = set_up()
    common = {"operator": "resample", "temperature": 2.0, "seed": 3}
    chosen = select("cigma", model, images, labels, masks=masks, **common, guard="none")
    expected = sc.background.score(model, images, masks, target=labels, **common)
    assert_close(chosen.value, expected.value)
    assert_close(chosen.after["accuracy"], expected.after["accuracy"])
    assert chosen.protocol["masks"] == "given"
    searched = select("cigma", model, images, labels, mask_steps=2, guard="none")
    found = sc.background.discover_masks(model, images, steps=2)
    assert_close(searched.value, sc.background.score(model, images, found).value)
    assert searched.protocol["masks"] == "discovered"
    greedy = select("greedy", model, images, labels, masks=masks, operator="mean", baseline="mean")
    first = sc.background.score(
        model, images, masks, operator="mean", baseline="mean", target=labels
    )
    guarded = sc.background.penalised(first)
    best = guarded.order()[0]
    assert greedy.order()[0] == best and guarded.value[best] != first.value[best]
    assert greedy.after["score when chosen"][best] == guarded.value[best]
    assert greedy.before == first.before and greedy.protocol["guard"] == "penalty"
    assert greedy.protocol["top"] == 4
    swap = Swapped(images.flip(0))  # without other objects there is no guard
    bare = select("greedy", model, images, labels, baseline=swap, guard="none", top=1)
    first = sc.background.score(model, images, baseline=swap, guard=False, target=labels)
    assert bare.order() == first.order()[:1]


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_scores_every_head_there_is(name):
    model, images, labels, masks = set_up()
    model = prune_heads(model, [(0, 1), (2, 0), (2, 1), (2, 2)])
    options = {"masks": masks} if "masks" in selectors()[name].options else {}
    if selectors()[name].needs == "pairs":
        options["baseline"] = Swapped(images.flip(0))
    scores = select(name, model, images, labels, **options, **QUICK.get(name, {}))
    assert isinstance(scores, HeadScores) and scores.value.shape == (4, 3)
    assert scores.value.isnan()[0].tolist() == [False, False, True]
    assert (2, 0) not in scores.top(0.5)  # a layer without heads keeps one that says nothing
    assert scores.protocol["selector"] == name


def test_random_sets_are_20_draws_of_k_different_heads():
    model, *_ = set_up()
    sets = random_sets(model, 5)
    assert len(sets) == 20 and all(len(set(heads)) == 5 for heads in sets)
    assert len({tuple(heads) for heads in sets}) > 15 and sets == random_sets(model, 5)
    assert not {tuple(s) for s in random_sets(model, 5, seed=1)} & {tuple(s) for s in sets[:5]}
    assert select("random", *set_up()[:3]).value.dtype == torch.float64
    with pytest.raises(BadOption, match="draws"):
        random_sets(model, 5, draws=0)
    counts = torch.zeros(4, 3)
    for heads in random_sets(model, 0.5, draws=400):
        for layer, head in heads:
            counts[layer, head] += 1
    assert counts.min() / 400 > 0.35 and counts.max() / 400 < 0.65  # no head is favoured


@pytest.mark.parametrize("family", ["timm_registers", "hf_dinov2", "torchvision_vit", "timm_clip"])
def test_norms_are_those_of_the_output_projection(family):
    model, images, labels, _ = set_up(family)
    weight = select("weight-norm", model, images, labels).value
    written = select("output-norm", model, images, labels).value
    block, at = model.blocks[1], model.layout.at()
    h = model.blocks[0](model.embed(images), at)
    for head in range(3):
        gate = torch.zeros(3, dtype=torch.float64)
        gate[head] = 1
        alone, none = ({"gate": g} for g in (gate, torch.zeros_like(gate)))
        adds = _attention_branch(block, h, at, **alone) - _attention_branch(block, h, at, **none)
        assert_close(written[1, head], adds.norm(dim=-1).mean(), atol=1e-10, rtol=0)
    if family == "timm_registers":
        columns = model.module.blocks[2].attn.proj.weight.unflatten(1, (3, 8))
        assert_close(weight[2], columns.norm(dim=(0, 2)), atol=1e-10, rtol=0)


def test_a_head_that_is_gated_away_writes_nothing():
    model, images, labels, _ = set_up()
    whole = select("output-norm", model, images, labels).value
    with ablate(model, [(1, 2)]):
        cut = select("output-norm", model, images, labels).value
    assert cut[1, 2] == 0 and torch.equal(cut[0], whole[0]) and (cut[2] != whole[2]).all()
    least = select("output-norm", model, images, labels, remove="least").value
    assert_close(least, whole.max() - whole)


def _attention_branch(block, h, at, gate):
    """Rows before LayerScale and MLP, by way of the output projection alone."""
    from seecause.models.block import fused

    carried = block.carried(h, fused(*block.qkv(h, at), block.scale))
    return block.mix((carried * gate[:, None]).flatten(2))


def test_taylor_is_the_slope_of_the_loss_in_each_gate():
    model, images, labels, _ = set_up()
    scores = select("taylor", model, images, labels, remove="most")
    eps = 1e-5
    for layer, head in [(0, 2), (3, 1)]:
        losses = []
        for sign in (-1, 1):
            gates = torch.ones(4, 3, dtype=torch.float64)
            gates[layer, head] += sign * eps
            with model.gated(gates):
                losses.append(F.cross_entropy(model(images), labels, reduction="none"))
        slope = ((losses[1] - losses[0]) / (2 * eps)).abs()
        assert_close(scores.value[layer, head], slope.mean(), atol=1e-7, rtol=0)
        assert_close(scores.error[layer, head], slope.std() / 3**0.5, atol=1e-7, rtol=0)
    assert scores.protocol == {"selector": "taylor", "remove": "most", "images": 3}
    least = select("taylor", model, images, labels)
    assert least.order(positive=False) == scores.order(positive=False)[::-1]


def test_loss_differences_are_those_of_ablated_models():
    model, images, labels, _ = set_up()
    signed, size = (
        select(name, model, images, labels).value for name in ("loss-gain", "loss-change")
    )
    with ablate(model, [(1, 2)]):
        without = F.cross_entropy(model(images), labels)
    assert_close(signed[1, 2], F.cross_entropy(model(images), labels) - without, atol=1e-10, rtol=0)
    assert_close(size, signed.abs())
    assert select("loss-gain", model, images, labels).protocol["guard"] is False


def test_running_out_of_memory_halves_the_images_and_says_so():
    model, images, *_ = set_up()
    parts = []

    def run(start, stop):
        parts.append((start, stop))
        if stop - start > 1:
            raise torch.cuda.OutOfMemoryError("too large")
        return images[start:stop]

    with sc.budget() as held:
        assert torch.equal(over_images(run, model, images, holds=1), images)
    assert parts == [(0, 3), (0, 1), (1, 2), (2, 3)] and held.halvings == ["images: 1"]


def test_attention_mass_is_what_class_rows_send_to_the_background():
    model, images, labels, masks = set_up()
    value = select("attention-mass", model, images, labels, masks=masks).value
    _, cache = sc.run(model, images, cache=["blocks.2.probs"])
    share = F.avg_pool2d((~masks).double()[:, None], 8).flatten(1)  # [B, patches]
    row = cache["blocks.2.probs"][:, :, 0, model.layout.patches]
    assert_close(value[2], (row * share[:, None]).sum(-1).mean(0), atol=1e-10, rtol=0)
    assert 0.2 < share.mean() < 0.8
    edged = masks.int().masked_fill(
        torch.arange(masks.shape[-1]) < 8, IGNORE
    )  # neither object nor background
    share = F.avg_pool2d((edged == 0).double()[:, None], 8).flatten(1)
    result = select("attention-mass", model, images, labels, masks=edged).value
    assert_close(result[2], (row * share[:, None]).sum(-1).mean(0), atol=1e-10, rtol=0)


def test_images_come_to_the_model():
    model, images, labels, _ = set_up()
    assert_close(
        select("output-norm", model, images.float(), labels).value,
        select("output-norm", model, images.float().double(), labels).value,
    )
    native = tiny("timm_registers")
    single = sc.wrap(native.module.float(), **native.options, check=False)
    scores = select("output-norm", single, images, labels)
    assert scores.value.dtype == scores.error.dtype == torch.float64  # on every kind of model


@pytest.mark.parametrize(
    ("by", "options", "message"),
    [
        ("taylr", {}, "Did you mean taylor"),
        ("taylor", {"remove": "some"}, "most, least"),
        ("taylor", {"keep": 3}, "one of remove"),
        ("random", {"labels": torch.tensor([0, 1])}, "each of the 3 images"),
        ("random", {"labels": torch.tensor([0, 1, 7])}, "0-6"),
        ("random", {"labels": torch.tensor([0, -1, 3])}, "-1 to 3.* 0-6"),
        ("random", {"labels": torch.tensor([0.0, 1.0, 3.0])}, "whole numbers"),
        ("random", {"images": torch.zeros(3, 3, 16, 16)}, "32 x 48"),
        ("attention-mass", {}, "object masks"),
        ("gating", {"steps": 0}, "above 0"),
    ],
)
def test_what_cannot_be_used_is_named(by, options, message):
    model, images, labels, _ = set_up()
    options = dict(options)
    images, labels = options.pop("images", images), options.pop("labels", labels)
    with pytest.raises(SeecauseError, match=message):
        select(by, model, images, labels, **options)


def test_greedy_heads_come_in_the_order_of_their_removal():
    model, images, labels, masks = set_up()
    result = select("greedy", model, images, labels, masks=masks, top=3, guard="none")
    chosen = sc.background.greedy(model, images, masks, top=3, target=labels, guard=False)
    assert result.order() == chosen.heads and len(chosen.heads) == 3
    assert [float(result.after["score when chosen"][head]) for head in chosen.heads] == chosen.gains
    assert (result.value == 0).sum() == 12 - 3  # measured, and not chosen
    early = select("greedy", model, images, labels, masks=masks, top=12, guard="none")
    gone = len(early.order())
    assert 3 <= gone < 12 and early.order()[:3] == chosen.heads  # then none was worth removing
    assert [float(early.value[head]) for head in early.order()] == list(range(gone, 0, -1))


def test_regression_is_the_fit_to_random_removals():
    model, images, labels, masks = set_up()
    result = select(
        "regression", model, images, labels, masks=masks, draws=24, seed=3, baseline="mean"
    )
    assert_close(
        result.value,
        sc.background.regress(model, images, masks, draws=24, seed=3, baseline="mean").value,
    )
    with pytest.raises(SeecauseError, match="cannot tell all heads apart"):
        select("regression", model, images, labels, masks=masks, draws=8, seed=3)
    options = {"draws": 8, "seed": 3, "rate": 0.3, "ridge": 0.5, "operator": "mean"}
    shrunk = select("regression", model, images, labels, masks=masks, **options)
    expected = sc.background.regress(model, images, masks, target=labels, **options)
    assert_close(shrunk.value, expected.value)
    assert_close(shrunk.error, expected.error)
    assert shrunk.protocol == {**expected.protocol, "selector": "regression"}


def test_contrastive_gating_keeps_the_object_and_suppresses_the_background():
    model, images, labels, masks = set_up()
    result = select(
        "contrastive-gating", model, images, labels, masks=masks, fits=2, steps=3, batch=2
    )
    shown, hidden = (
        torch.where(keep[:, None], images, 0.0) for keep in (masks, ~masks)
    )  # grey is 0
    gates = sc.background.head_gates(
        model, (shown, labels), suppress=(hidden, labels), fits=2, steps=3, batch=2
    )
    assert_close(result.value, gates.scores().double())
    assert_close(result.after["interference"], gates.interference.double())
    assert_close(result.error, gates.opened.double().std(dim=0) / 2**0.5)
    assert result.protocol["contrastive"] and result.protocol["open"] == 0.5
    other = select(
        "contrastive-gating", model, images, labels, masks=masks, baseline="mean",
        fits=2, steps=2, batch=2, seed=4, strength=0.5, rate=0.3,
    )  # fmt: skip
    shown, hidden = (erase(model, images, masks, "mean")[place] for place in (0, 1))
    own = {"fits": 2, "steps": 2, "batch": 2, "seed": 4, "strength": 0.5, "rate": 0.3}
    gates = sc.background.head_gates(model, (shown, labels), suppress=(hidden, labels), **own)
    assert_close(other.value, gates.scores().double())
    assert {name: other.protocol[name] for name in own} == own
