"""`run` and `patch`: record anything, put anything from one run into another."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.chunks import budget
from seecause.errors import BadOption, NotDefined
from tests.helpers import ready, view
from tests.reference import caap as reference
from tests.tiny import FAMILIES, pictures, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_block_outputs_are_the_native_ones(family):
    native, model, images = ready(family)
    names = ["embed", *(f"blocks.2.{part}" for part in ("in", "out", "heads", "kv", "probs"))]
    logits, cache = sc.run(model, images, cache=names)
    expected = reference.states(native.forward, native.blocks, images)
    assert_close(logits, native.forward(images), atol=1e-10, rtol=0)
    for name, level in (("embed", 0), ("blocks.2.in", 2), ("blocks.2.out", 3)):
        assert_close(cache[name], expected[level], atol=1e-10, rtol=0)
    _, v = cache["blocks.2.kv"]
    weights = cache["blocks.2.probs"]
    assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
    assert_close((weights @ v).transpose(1, 2), cache["blocks.2.heads"], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["timm_registers", "timm_eva_registers"])
def test_moved_residual_rows_equal_overwriting_by_hooks(family):
    native = tiny(family)
    model, (base, source) = view(native), pictures(native, batch=4).split(2)
    donor = reference.states(native.forward, native.blocks, source)
    to, origin = [4, 7, 11], [9, 4, 5]

    def put(level, out):
        new = out.clone()
        if level in (1, 2):
            new[:, to] = donor[level][:, origin]
        return new

    with reference.overwritten(native.blocks, put):
        expected = native.forward(base)
    moved = [sc.Site(layer, tokens=to, source_tokens=origin) for layer in (1, 2)]
    got = sc.patch(model, base, source, [moved, [sc.Site(2, tokens=[4])], []])
    assert_close(got[0], expected, atol=1e-12, rtol=0)
    assert_close(got[2], native.forward(base), atol=1e-12, rtol=0)
    still = sc.patch(model, base, source, [[sc.Site(2, tokens=[4])]])
    assert_close(got[1], still[0], atol=1e-12, rtol=0)


def test_every_kind_of_a_block_is_put_at_its_own_tokens_and_heads():
    native = tiny("timm_deit3")
    model, (base, source) = view(native), pictures(native, batch=4).split(2)
    rows = {"resid": [20, 21], "kv": list(range(1, 13)), "heads": [0, 3, 15]}
    heads = {"resid": None, "kv": [1], "heads": [2, 0]}
    sites = [sc.Site(0, kind, tokens, heads[kind]) for kind, tokens in rows.items()]
    got = sc.patch(model, base, source, [*([site] for site in sites), sites])
    _, cache = sc.run(model, source, cache=["embed", "blocks.0.kv", "blocks.0.heads"])
    at = model.layout.at()
    for logits, kinds in zip(got, ({"resid"}, {"kv"}, {"heads"}, set(rows)), strict=True):
        moved = {kind: tokens if kind in kinds else [] for kind, tokens in rows.items()}
        h = model.embed(base).clone()
        h[:, moved["resid"]] = cache["embed"][:, moved["resid"]]
        q, k, v = (part.clone() for part in model.blocks[0].qkv(h, at))
        for mine, theirs in zip((k, v), cache["blocks.0.kv"], strict=True):
            mine[:, 1, moved["kv"]] = theirs[:, 1, moved["kv"]]
        weights = torch.softmax(q @ k.transpose(-1, -2) * model.blocks[0].scale, dim=-1)
        o = (weights @ v).transpose(1, 2)
        for head in heads["heads"]:
            o[:, moved["heads"], head] = cache["blocks.0.heads"][:, moved["heads"], head]
        h = model.blocks[0].finish(h, o)
        for block in model.blocks[1:]:
            h = block(h, at)
        assert_close(logits, model.readout(h, model.layout), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (sc.Site(4), "block 0-3"),
        (sc.Site(0, "sideways"), "resid"),
        (sc.Site(0, heads=[1]), "no heads"),
        (sc.Site(-1), "block 0-3"),
        (sc.Site(0, "heads", source_tokens=[1]), "kind resid"),
        (sc.Site(0, tokens=[1, 2], source_tokens=[3]), r"as many source tokens as tokens \(2\)"),
        (sc.Site(0, source_tokens=[3]), r"as many source tokens as tokens \(25\)"),
    ],
)
def test_impossible_sites_are_refused(site, said):
    native = tiny("timm_deit3")
    with pytest.raises(BadOption, match=said):
        sc.patch(view(native), pictures(native), pictures(native, seed=2), [[site]])


@torch.no_grad()
def test_tokens_may_be_a_tensor_an_array_or_a_range():
    native = tiny("timm_deit3")
    model, (base, source) = view(native, check=False), pictures(native).split(1)
    kinds = ([1, 2], torch.tensor([1, 2]), torch.tensor([1, 2]).numpy(), range(1, 3))
    moves = [(tokens, tokens[::-1] if isinstance(tokens, list) else [2, 1]) for tokens in kinds]
    logits = sc.patch(model, base, source, [[sc.Site(1, "resid", a, None, b)] for a, b in moves])
    assert (logits == logits[0]).all()
    swapped = sc.Site(1, tokens=torch.tensor([1, 2]), source_tokens=torch.tensor([2, 1]))
    assert_close(sc.patch(model, base, source, [[swapped]])[0], logits[0], atol=1e-12, rtol=0)


@torch.no_grad()
def test_recorded_heads_have_their_own_width_where_blocks_hide_keys():
    model = sc.load("builtin:critters-ifam")
    heads = sc.run(model, model.zeros(model.preprocess.size), cache=["blocks.1.heads"])[1]
    block = model.blocks[1]
    assert block.lanes is not None
    assert heads["blocks.1.heads"].shape[2:] == (block.heads, block.head_dim)


def test_sources_and_sets_that_do_not_fit_are_refused():
    native, model, images = ready("timm_deit3", check=True)
    for wrong in ([], [sc.Site(0)]):
        with pytest.raises(BadOption, match="sets of sites, at least one"):
            sc.patch(model, images, images, wrong)
    with pytest.raises(BadOption, match="one source for each image"):
        sc.patch(model, images, images[:1], [[sc.Site(0)]])
    with pytest.raises(NotDefined, match="no view with transformer blocks"):
        sc.run(native.module, images)


@torch.no_grad()
def test_sets_run_together_or_in_chunks():
    native = tiny("timm_deit3")
    model, (base, source) = view(native), pictures(native).split(1)
    sets = [[sc.Site(3, "kv", heads=[1])], [], [sc.Site(1, tokens=[2]), sc.Site(2, "heads")]]
    together = sc.patch(model, base, source, sets)
    with budget(1):
        assert_close(sc.patch(model, base, source, sets), together, atol=1e-12, rtol=0)
    each = torch.cat([sc.patch(model, base, source, [sites]) for sites in sets])
    assert_close(each, together, atol=1e-12, rtol=0)


def test_an_unknown_place_is_refused():
    native = tiny("timm_deit3")
    with pytest.raises(BadOption, match=r"blocks\.0-3"):
        sc.run(view(native), pictures(native), cache=["blocks.9.out"])


@pytest.mark.parametrize("site", [{"heads": [7]}, {"tokens": [99]}, {"tokens": [1.5]}])
def test_indices_that_are_not_there_are_refused(site):
    native = tiny("timm_deit3")
    with pytest.raises(IndexError):
        sc.patch(
            view(native),
            pictures(native),
            pictures(native, seed=2),
            [[sc.Site(0, "heads", **site)]],
        )
