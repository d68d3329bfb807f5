"""Dropped tokens: the engine equals a native run on what is left."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.chunks import budget
from seecause.engine.trace import (
    kept_logits,
    kept_logits_each,
    read_rows,
    record,
    suffix,
)
from tests.helpers import ready, view
from tests.tiny import tiny


def some_patches(batch: int, patches: int, *, seed: int = 0) -> torch.Tensor:
    """Choices of different sizes, one for each image."""
    keep = torch.rand(batch, patches, generator=torch.Generator().manual_seed(seed)) < 0.5
    keep[:, 3] = True
    assert len(set(keep.sum(dim=1).tolist())) > 1
    return keep


FAMILIES = ["timm_registers", "timm_deit3", "timm_mean", "timm_mean_with_class", "timm_map"]
FAMILIES += ["timm_distilled", "timm_swiglu"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_dropped_tokens_equal_a_native_run_without_them(family):
    native, model, images = ready(family, 3)
    layout, module = model.check(images), native.module
    keep = some_patches(3, layout.n_patches)
    for start in (0, 2):
        entering, expected = [], []
        for image, chosen in zip(images, keep, strict=True):
            # timm's own modules, from there on with the tokens that are left
            tokens = module.norm_pre(module._pos_embed(module.patch_embed(image[None])))
            entering.append(module.blocks[:start](tokens))
            left = [*range(layout.prefix), *(layout.prefix + chosen.nonzero()[:, 0]).tolist()]
            rest = module.blocks[start:](entering[-1][:, left])
            expected.append(module.forward_head(module.norm(rest)))
        kept = kept_logits(model, torch.cat(entering), keep, layout.at(), start=start)
        assert_close(kept, torch.cat(expected), atol=1e-12, rtol=0)


@torch.no_grad()
def test_many_choices_run_together_or_in_chunks():
    _, model, images = ready("timm_eva_registers")
    layout = model.check(images)
    keep = torch.stack(
        [some_patches(2, layout.n_patches, seed=s) for s in (3, 4, 5)], dim=1
    )  # [2, 3, N]
    together = kept_logits_each(model, images, keep)
    assert_close(
        together[:, 1],
        kept_logits(model, model.embed(images), keep[:, 1], layout.at()),
        atol=1e-12,
        rtol=0,
    )
    with budget(1):
        assert_close(kept_logits_each(model, images, keep), together, atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_run_is_recorded_where_it_was_asked_for_and_can_begin_there():
    native, model, images = ready("timm_registers")
    whole = record(model, images, states=range(model.n_layers + 1), kv={2})
    assert_close(whole.logits, native.forward(images), atol=1e-12, rtol=0)
    assert set(whole.states) == set(range(model.n_layers + 1)) and set(whole.kv) == {2}
    for start in (0, 2, model.n_layers):
        logits = suffix(model, whole.states[start], whole.at, start)
        assert_close(logits, whole.logits, atol=1e-12, rtol=0)
    part = record(model, images, states={1, 2, 3}, kv={2, 3}, until=2)
    assert part.logits is None and set(part.states) == {1, 2} and set(part.kv) == {2}
    assert part.batch == whole.batch == record(model, images).batch == 2
    assert_close(part.states, {level: whole.states[level] for level in (1, 2)}, atol=0, rtol=0)
    assert_close(part.kv[2], whole.kv[2], atol=0, rtol=0)
    assert part.bank(2).k is part.kv[2][0] and part.bank(2).v is part.kv[2][1]


def test_a_token_that_is_read_twice_counts_twice():
    model = view(tiny("timm_deit3"), check=False)
    model.readout = replace(model.readout, kind="cls+mean", over_prefix=True)
    tokens = model.layout.tokens
    row = read_rows(model, model.layout, torch.eye(tokens, dtype=torch.float64))
    assert_close(row[1:], torch.full((tokens - 1,), 0.5 / tokens, dtype=torch.float64))
    assert float(row[0]) == pytest.approx(0.5 + 0.5 / tokens)
