"""The one loop over blocks: reading gives what the block computes, setting changes what it uses."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.walk import walk
from seecause.models.block import fused
from tests.helpers import view
from tests.tiny import pictures, tiny


@pytest.fixture
def run():
    native = tiny("timm_eva_registers")  # rotary positions, norms inside attention
    model, images = view(native, check=False), pictures(native)
    layout = model.check(images)
    return model, images, model.embed(images), layout.at(images.device)


def counting(model, name):
    """The model with blocks that count calls of one of their parts."""
    calls = []

    def count(part):
        def run(*given):
            calls.append(name)
            return part(*given)

        return run

    blocks = [replace(b, **{name: count(getattr(b, name))}) for b in model.blocks]
    return replace(model, blocks=blocks), calls


def test_reading_changes_nothing_and_computes_once(run):
    model, _, h, at = run
    plain = walk(model, h, at).end()
    counted, calls = counting(model, "project")
    steps = walk(counted, h, at)
    for step in steps:
        q, k, v = step.block.qkv(step.h, at)
        calls.pop()
        assert_close((step.q, step.k, step.v), (q, k, v), rtol=0, atol=0)
        o = fused(q, k, v, step.block.scale, step.bias)
        assert_close(step.o, o, rtol=0, atol=0)
        assert_close(step.carried, step.block.carried(step.h, o), rtol=0, atol=0)
        assert step.out is step.out
    assert_close(steps.h, plain, rtol=0, atol=0)
    assert len(calls) == model.n_layers


def test_leaving_early_finishes_nothing(run):
    model, _, h, at = run
    counted, calls = counting(model, "feed")
    steps = walk(counted, h, at)
    for step in steps:
        if step.index == 1:
            break
    assert len(calls) == 1
    assert_close(steps.h, model.blocks[0](h, at), rtol=0, atol=0)


@pytest.mark.parametrize("what", ["h", "q", "k", "v", "o", "carried", "out", "gate", "bias"])
def test_what_is_set_is_used_and_what_follows_is_made_of_it(run, what):
    model, _, h, at = run
    block, plain = model.blocks[1], model.blocks[1](h, at)
    new = torch.randn(shape_of(what, model, h, at), dtype=h.dtype)
    for step in walk(model, h, at, start=1, stop=2):
        setattr(step, what, new)
        got = step.out
    h = new if what == "h" else h
    q, k, v = block.qkv(h, at)
    q, k, v = (new if what == name else x for name, x in (("q", q), ("k", k), ("v", v)))
    o = new if what == "o" else fused(q, k, v, block.scale, new if what == "bias" else None)
    carried = new if what == "carried" else block.carried(h, o)
    out = new if what == "out" else block.close(h, carried, new if what == "gate" else None)
    assert_close(got, out)
    assert not torch.allclose(got, plain)


def shape_of(what, model, h, at):
    (step,) = [(step.gate, getattr(step, what)) for step in walk(model, h, at, start=1, stop=2)]
    if what == "gate":
        return (model.blocks[1].heads,)
    return (1, 1, h.shape[1], h.shape[1]) if what == "bias" else step[1].shape


def test_rows_that_are_taken_see_all_keys(run):
    model, _, h, at = run
    rows = torch.tensor([2, 0])
    full = model.blocks[0](h, at)
    for order in ("before", "after"):  # attention
        steps = walk(model, h, at, stop=1)
        for step in steps:
            if order == "after":
                step.o = step.o
            step.take(rows)
        assert_close(steps.h, full[:, rows])
        assert steps.at.index.tolist() == [2, 0]
    last = walk(model, h, at, last=rows).end()
    assert_close(last, walk(model, h, at).end()[:, rows])
    before = walk(model, h, at, stop=2, last=rows).end()  # which is not the model's last
    assert_close(before, walk(model, h, at, stop=2).end())


def test_rows_that_are_taken_have_the_bias_of_their_places(run):
    model, _, h, at = run
    bias = torch.randn(at.layout.tokens, at.layout.tokens, dtype=h.dtype)
    added = {"additive": lambda rows, keys: bias[rows.index][:, keys.index][None, None]}
    model = replace(model, blocks=[replace(block, **added) for block in model.blocks])
    rows = torch.tensor([4, 0, 3])
    last = walk(model, h, at, last=rows)
    assert_close(last.end(), walk(model, h, at).end()[:, rows])
    assert last.at.index.tolist() == [4, 0, 3]
