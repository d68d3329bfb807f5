"""CAAP: the fast engine equals the slow definition, for every family and every reading of the
paper."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.caap import make_plan, sweep
from seecause.engine.chunks import budget
from seecause.engine.sweep import live_tokens, selection
from seecause.engine.trace import blank_image
from seecause.errors import BadImage, BadOption, NotDefined
from tests.helpers import near, ready, view
from tests.reference import caap as reference
from tests.tiny import FAMILIES, pictures, tiny

TAILS = ["patched", "source", "blank", "all"]


def slow_logits(native, model, contexts, donors, plan, sets):
    """The reference, image by image."""
    layout = model.check(contexts)
    return torch.stack([
        reference.caap(
            native.forward, native.blocks, context[None], donor[None], sets,
            tail=plan.tail, first=plan.start, last=plan.stop, prefix=layout.prefix, live=plan.live,
            together=8,
        )
        for context, donor in zip(contexts, donors, strict=True)
    ])  # fmt: skip


def plan_or_skip(model, layout, tail, layers):
    try:
        return make_plan(
            model, layout, tail=tail, layers=(layers[0], None) if tail == "source" else layers
        )
    except NotDefined:
        assert tail == "blank" and not model.readout.read_prefix(layout)
        pytest.skip("every map would be constant")


FEW = ("timm_registers", "timm_map", "timm_distilled", "hf_dinov2")
CASES = [(family, (1, 2), "insert", "white", "box1") for family in FAMILIES]
CASES += [
    (family, layers, "delete", "blur-noise", "manhattan1")
    for family in FEW
    for layers in ((0, 0), (0, 4), (2, 3))
]
CASES += [
    (family, (1, 2), direction, "of each image", "box1")
    for family in FEW
    for direction in ("insert", "delete")
]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("family", "layers", "direction", "kind", "select"), CASES)
@torch.no_grad()
def test_fast_caap_equals_the_slow_twin(family, tail, layers, direction, kind, select):
    native, model, images = ready(family)
    layout = model.check(images)
    plan = plan_or_skip(model, layout, tail, layers)
    own = kind == "of each image"
    blank = pictures(native, seed=7) if own else blank_image(model, native.size, kind)
    chosen = selection(layout.grid, select)
    fast = sweep(model, images, blank, chosen, plan, direction=direction)
    runs = [blank.expand_as(images), images]
    runs = runs if direction == "insert" else runs[::-1]
    sets = reference.box(layout.grid)
    if select != "box1":
        sets = [row.nonzero()[:, 0].tolist() for row in chosen]
    slow = slow_logits(native, model, *runs, plan, sets)
    near(fast.interventions, slow, 1e-10)
    near(fast.blank, model(blank), 1e-10)
    if kind == "white":  # the comparison means something
        assert (slow.amax(dim=1) - slow.amin(dim=1)).max() > 1e-3


def test_blanks_of_pictures_do_not_depend_on_chunks_and_must_fit():
    native, model, images = ready("timm_registers", 3, check=True)
    others = pictures(native, batch=3, seed=7)
    whole = sc.attribute(model, images, target=2, blank=others).maps
    with budget(1):
        part = sc.attribute(model, images, target=2, blank=others).maps
    near(part, whole)
    singles = [
        sc.attribute(model, one[None], target=2, blank=other[None]).maps
        for one, other in zip(images, others, strict=True)
    ]
    near(torch.cat(singles), whole)
    with pytest.raises(BadImage, match="or one for each image"):
        sc.attribute(model, images, blank=others[:2])
    with pytest.raises(BadOption, match="one blank for all images"):
        sc.attribute(model, images, blank=others, approx="e-caap")


@torch.no_grad()
def test_propagated_registers_equal_the_slow_twin():
    native, model, images = ready("timm_registers")
    plan = make_plan(model, model.layout, tail="patched", layers=(1, 2), propagate_registers=True)
    assert plan.live == live_tokens(model.layout, registers=True) == (0, 1, 2, 3)
    blank = blank_image(model, native.size)
    fast = sweep(model, images, blank, selection(model.layout.grid), plan).interventions
    slow = slow_logits(
        native, model, blank.expand_as(images), images, plan, reference.box(model.layout.grid)
    )
    near(fast, slow, 1e-10)


@pytest.mark.parametrize("tail", TAILS)
def test_chunks_and_batches_do_not_change_the_maps(tail):
    _, model, images = ready("timm_registers", 3, check=True)
    whole = sc.attribute(model, images, target=2, tail=tail).maps
    with budget(1):  # one patch of one image at a time
        near(sc.attribute(model, images, target=2, tail=tail).maps, whole)
    single = torch.cat([sc.attribute(model, one[None], target=2, tail=tail).maps for one in images])
    near(single, whole)


# Degenerate identities


@pytest.mark.parametrize(
    "family", ["timm_deit3", "timm_mean", "timm_map", "hf_dinov2", "torchvision_vit"]
)
@pytest.mark.parametrize(
    ("direction", "name"), [("insert", "simple-insertion"), ("delete", "simple-deletion")]
)
def test_pixels_moved_are_activations_moved_at_the_embedding(family, direction, name):
    _, model, images = ready(family, check=True)
    pixels = sc.attribute(model, images, target=1, method=name, score="logit").maps
    engine = sc.attribute(
        model, images, target=1, tail="all", layers=(0, 0), direction=direction, score="logit"
    ).maps
    near(engine, pixels, 1e-10)


# What must not be left behind


def test_inference_mode_works_and_leaves_nothing_that_breaks_later_calls():
    native = tiny("timm_deit3", dtype=torch.float32)
    model, images = view(native), pictures(native)
    with torch.inference_mode():
        inside = sc.attribute(model, images.clone(), target=1).maps
        sc.attribute(model, images.clone(), target=1, blank=torch.zeros(3, 32, 48))
    assert_close(sc.attribute(model, images, target=1).maps, inside.clone())
    sc.attribute(model, images, target=1, blank=torch.zeros(3, 32, 48))
