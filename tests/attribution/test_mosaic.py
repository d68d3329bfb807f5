"""Mosaic: value and slope are those of the definition, for every family; CAAP's sets are its
corners."""

import pytest
import torch

import seecause as sc
from seecause.attribution.caap import make_plan
from seecause.attribution.mosaic import MaskPlan, draw_masks
from seecause.engine.chunks import budget
from seecause.engine.sweep import Mixture, Sweep, slopes, token_sets
from seecause.engine.trace import blank_image, record
from tests.helpers import near, ready, view
from tests.reference import mosaic as reference
from tests.tiny import FAMILIES, pictures, tiny

AVERAGES = {  # the norm before the tokens that an average reads
    "hf_dinov2": lambda module: module.dinov2.layernorm,
    "hf_dinov2_swiglu": lambda module: module.dinov2.layernorm,
    "hf_dinov2_registers": lambda module: module.dinov2_with_registers.layernorm,
    "timm_mean": lambda module: module.norm,
}
LATENT = ("timm_map",)


def reads_class(family):
    model = view(tiny(family), check=False)
    return bool(model.readout.read_prefix(model.layout))


ROWS = [name for name in FAMILIES if reads_class(name)]


def mixture(native, start=0):
    model, images = view(native, check=False), pictures(native)
    blank = blank_image(model, native.size)
    every = range(model.n_layers + 1)
    with torch.no_grad():
        runs = [record(model, x, states=every, kv=every) for x in (blank, images)]
    return Mixture(model, *runs, start), blank, images


def masks_of(run, count=2):
    generator = torch.Generator().manual_seed(3)
    patches = run.source.layout.n_patches
    return 0.05 + 0.9 * torch.rand(count, patches, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("family", [*ROWS, "timm_mean", *LATENT])
def test_values_and_slopes_equal_the_slow_twin(family):
    native = tiny(family)
    run, blank, images = mixture(native)
    masks = masks_of(run)
    norm = AVERAGES[family](native.module) if family in AVERAGES else None
    slope = slopes(run, masks, lambda logits: logits.sin().sum(dim=-1), together=1)
    with torch.no_grad():
        values = run.logits(masks.expand(2, -1, -1)).sin().sum(dim=-1)
    for b, picture in enumerate(images):
        for n, mask in enumerate(masks):
            leaf = mask.clone().requires_grad_()
            logits = reference.mixed_logits(
                native.forward, leaf, blank, picture[None],
                prefix=run.source.layout.prefix, norm=norm,
            )  # fmt: skip
            value = logits.sin().sum()
            (expected,) = torch.autograd.grad(value, leaf)
            near(values[b, n], value.detach(), 1e-10)
            near(slope[b, n], expected, 1e-10)
            assert expected.abs().max() > 1e-3  # the comparison means something


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_binary_masks_are_the_token_sets_of_caap(family):
    run, *_ = mixture(tiny(family))
    layout = run.source.layout
    sets = masks_of(run, 5) > 0.5
    sets[0], sets[1] = False, True
    plan = make_plan(run.model, layout, tail="source", layers=None, propagate_registers=True)
    tokens = token_sets(run.model, sets, layout, plan.live)
    expected = Sweep(run.model, run.blank, run.source, plan).logits(tokens)
    near(run.logits(sets.double().expand(2, -1, -1)), expected, 1e-10)
    near(expected[:, 1], run.source.logits, 1e-10)  # m = 1: the plain answer
    near(expected[:, 0], run.blank.logits.expand(2, -1), 1e-10)


def test_maps_are_means_of_slopes_with_their_errors():
    native = tiny("timm_deit3")
    run, _, images = mixture(native)
    plan = MaskPlan(masks=6, cells=3, seed=4)
    slope = slopes(run, draw_masks(plan, (4, 6)), lambda x: x.softmax(dim=-1)[..., 3], together=6)
    maps = sc.attribute(run.model, images, 3, "mosaic", masks=6, cells=3, seed=4)
    near(maps.maps.flatten(1), slope.mean(dim=1))
    near(maps.errors.flatten(1), slope.std(dim=1) / 6**0.5)


def test_the_sum_with_caap_is_that_of_z_scores():
    native, model, images = ready("timm_registers", check=True)
    both = sc.attribute(model, images, 2, "caap+mosaic", masks=4).maps
    parts = [
        sc.attribute(model, images, 2, "caap", score="logit").maps.flatten(1),
        sc.attribute(model, images, 2, "mosaic", masks=4).maps.flatten(1),
    ]
    z = [(x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True) for x in parts]
    near(both.flatten(1), z[0] + z[1], 1e-10)
    blank = blank_image(model, native.size)
    flat = sc.attribute(model, blank, 2, "caap+mosaic", masks=4, score="logit").maps
    assert flat.isfinite().all()


def test_drawn_masks_hold_every_share_of_the_image():
    masks = draw_masks(MaskPlan(masks=400), (14, 14))
    assert sorted({round(x, 6) for x in masks.flatten().tolist()}) == [0.02, 0.98]
    share = (masks > 0.5).double().mean(dim=1)
    assert 0.04 < share.min() < 0.1 and 0.9 < share.max() < 0.96
    assert abs(share.mean() - 0.5) < 0.05
    near = (masks.view(-1, 14, 14)[:, :, 1:] - masks.view(-1, 14, 14)[:, :, :-1]).abs().mean()
    assert near < 0.22  # neighbours go together


@pytest.mark.parametrize("family", ["timm_registers", "timm_mean", "timm_map", "timm_distilled"])
@pytest.mark.parametrize("method", ["mosaic", "caap+mosaic"])
def test_a_batch_is_its_images_and_each_keeps_its_blank(family, method):
    native, model, images = ready(family, 3)
    others = pictures(native, batch=3, seed=7)

    def explain(rows=slice(None)):
        return sc.attribute(model, images[rows], 2, method, masks=4, blank=others[rows])

    whole, singles = explain(), [explain(slice(row, row + 1)) for row in range(3)]
    near(whole.maps, torch.cat([one.maps for one in singles]), 1e-10)
    if method == "mosaic":
        near(whole.errors, torch.cat([one.errors for one in singles]), 1e-10)
    with budget(1):  # one mask of one image at a time
        near(explain().maps, whole.maps, 1e-10)
