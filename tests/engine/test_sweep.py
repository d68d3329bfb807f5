"""Sweeps where special tokens are pooled, too, or live in another order than theirs (no family of
ours does it by default), and token sets: what follows from a selection is worked out once."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

from seecause.engine.sweep import Mixture, Sweep, SweepPlan, selection, token_sets
from seecause.engine.trace import record
from seecause.errors import BadOption
from tests.families.native import HALF, SIZE, Native
from tests.helpers import view
from tests.reference import caap as reference
from tests.tiny import pictures, scramble, tiny

SETS = [[0, 1, 7], [], [23], [5, 6, 11, 12, 13]]


@pytest.fixture(scope="module", params=["avg", "map", "token"])
def pooled(request):
    """A class token and two registers, read together with the patches or (class token) alone."""
    module = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=7,
        reg_tokens=2, global_pool=request.param, pool_include_prefix=request.param != "token",
    )  # fmt: skip
    scramble(module).double().requires_grad_(False)
    native = Native(module, module.blocks, module, HALF)
    model, images = view(native), pictures(native, batch=4)
    assert model.readout.over_prefix == (request.param != "token") and model.layout.prefix == 3
    states = range(model.n_layers + 1)
    runs = [record(model, part, states=states, kv=states[:-1]) for part in images.split(2)]
    chosen = torch.zeros(len(SETS), 24, dtype=torch.bool)
    for row, patches in zip(chosen, SETS, strict=True):
        row[patches] = True
    return native, model, images.split(2), runs, chosen


@pytest.mark.parametrize("tail", ["patched", "source", "blank", "all"])
@pytest.mark.parametrize(("live", "stop"), [((0,), 1), ((2, 0), 1), ((0,), 3)])
@torch.no_grad()
def test_a_sweep_equals_the_slow_twin_where_special_tokens_are_pooled(pooled, tail, live, stop):
    native, model, (contexts, donors), runs, chosen = pooled
    fast = Sweep(model, *runs, SweepPlan(tail, 1, stop, live)).logits(chosen)
    slow = [
        reference.caap(
            native.forward, native.blocks, context[None], donor[None], SETS,
            tail=tail, first=1, last=stop, prefix=3, live=live, together=4,
        )
        for context, donor in zip(contexts, donors, strict=True)
    ]  # fmt: skip
    assert_close(fast, torch.stack(slow), atol=1e-10, rtol=0)
    assert (fast[:, 0] - fast[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("start", [0, 1])
@torch.no_grad()
def test_masks_of_zeros_and_ones_are_token_sets_from_any_layer_on(pooled, start):
    _, model, _, (blank, picture), chosen = pooled
    sweep = Sweep(model, blank, picture, SweepPlan("source", start, start, (0, 1, 2)))
    masks = chosen.double().expand(2, -1, -1)
    mixed = Mixture(model, blank, picture, start).logits(masks)
    assert_close(mixed, sweep.logits(chosen), atol=1e-10, rtol=0)


def test_sets_of_a_selection_are_known_until_it_changes():
    model, chosen = view(tiny("timm_deit3"), check=False), torch.zeros(2, 24, dtype=torch.bool)
    first = token_sets(model, chosen, model.layout, (0,))
    assert token_sets(model, chosen, model.layout, (0,)) is first
    assert token_sets(model, chosen, model.layout, ()) is not first
    assert token_sets(model, chosen.clone(), model.layout, (0,)) is not first
    chosen[0, 3] = True
    again = token_sets(model, chosen, model.layout, (0,))
    assert again is not first and again.sets[0].nonzero().tolist() == [[4]]
    others = [chosen.clone() for _ in range(7)]
    for other in others:
        token_sets(model, other, model.layout, (0,))
    assert token_sets(model, chosen, model.layout, (0,)) is again  # eight are kept
    assert len(model.memo["token sets"]) == 8


def test_neighbours_are_those_within_the_border():
    def chosen(select: str, patch: int) -> list[int]:
        assert selection((3, 4), select) is selection((3, 4), select)  # so that rows are known
        return selection((3, 4), select)[patch].nonzero()[:, 0].tolist()

    assert chosen("none", 5) == [5]
    assert chosen("manhattan1", 5) == [1, 4, 5, 6, 9] and chosen("manhattan1", 3) == [2, 3, 7]
    assert chosen("box1", 5) == [0, 1, 2, 4, 5, 6, 8, 9, 10] and chosen("box1", 11) == [
        6,
        7,
        10,
        11,
    ]
    assert chosen("box2", 8) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    film = selection((2, 2, 2), "manhattan1")
    assert film[0].nonzero()[:, 0].tolist() == [0, 1, 2, 4]


def test_any_matrix_may_be_a_selection_and_nothing_else_is():
    mine = torch.zeros(12, 12)
    mine[8, 3], mine[2, 0] = 0.25, -1
    assert selection((3, 4), mine).nonzero().tolist() == [[2, 0], [8, 3]]
    with pytest.raises(BadOption, match=r"\[12, 12\] for a 3 x 4 grid"):
        selection((3, 4), mine[:3])
