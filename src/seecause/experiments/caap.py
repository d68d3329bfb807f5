"""CAAP (arXiv 2603.13652): all tables and figures with numbers, experiments that its reviews ask
for, and our own tables on Critters.

caap/table-1 .. 15     methods by insertion, deletion and localization, in percent as printed
caap/figure-4 .. 10    blanks, selections, attention (Eq. 6), last layer, curves, radar
caap/contexts          neutral contexts that the paper does not try: activations, other images
caap/confounding       what background patches are credited with because of the object elsewhere
critters/caap          every reading of CAAP on test images of `clean` (docs/results/caap.md)
critters/methods       every method on 256 of them (docs/results/methods-critters.md)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.attribute import attribute
from seecause.attribution.caap import make_plan, recorded, swept_logits
from seecause.attribution.registry import blanks
from seecause.background._export import export
from seecause.background.images import logits_of, read_images
from seecause.background.last_layer import fine_tune
from seecause.background.transplant import Versions
from seecause.data.batch import to_batch
from seecause.data.dataset import open_data, sample_labels
from seecause.engine.sweep import Sweep, selection, token_sets
from seecause.engine.trace import Trace, attention_probs, record
from seecause.errors import NotDefined
from seecause.experiments.base import Part, Row, base_of, opened_data, register_published
from seecause.files import atomic_folder, digest_json
from seecause.loading import load, wrap
from seecause.metrics import MetricInputs, measure
from seecause.metrics.faithfulness import insertion_deletion
from seecause.metrics.statistics import rank_correlation
from seecause.models.view import VisionModel
from seecause.options import Count, Positive, Whole

# ---------------------------------------------------------------- tables and figures of the paper

PRINTED_AS = {
    **{"deletion": "Del", "insertion": "Ins", "ins-del": "Ins-Del"},
    **{"aupr1": "AUPR_1", "aupr0": "AUPR_0", "pointing": "PG", "idsds": "IDSDS"},
}
LOW = ("ms", "Del", "Deletion", "background", "object erased", "carried over")  # lower is better
LEARNED = ("celeba", "cifar10", "cifar100", "critters", "food101", "tiny-imagenet", "waterbirds")
TRAINING = {"pets": "trainval", **dict.fromkeys(LEARNED, "train")}  # splits to learn from
Tails = Literal["source", "patched", "blank", "all"] | None
Steps = Literal["rise", "patch"] | Count
Order = Literal["pixel", "patch"]
Asked = Mapping[str, Any]  # a method and its options


def explained(
    part: Part,
    asked: Asked,
    *,
    images: Tensor | None = None,
    tail: Tails = None,
    first_layer: int = 0,
    approx: str = "e-caap",
    cut: float | None = None,
    candidates: int | None = None,
) -> Tensor:
    """Maps by one method, of the images of a part or of others of their classes; `cut` is the last
    patched layer of CAAP as a share of the depth, `candidates` those of MDA. What is asked of a
    cell goes before the options of the experiment."""
    view, asked = part.view, {**asked}
    method = asked.pop("method")
    if method == "mda":
        asked["candidates"] = candidates
    if method == "caap" and isinstance(view, VisionModel):
        stop = None if cut is None else math.ceil(round(cut * view.n_layers, 1))
        if "approx" in asked:
            given = asked["approx"]
            asked |= {"approx": approx if given == "e-caap" else given, "tail": "source"}
        asked = {"tail": tail, "layers": (first_layer, stop), **asked}
    images = part.batch.images if images is None else images
    found = attribute(view, images, part.batch.labels, method=method, **asked)
    return found.maps if found.native is None else found.native


def listed(part: Part, columns: Mapping[str, Tensor]) -> list[Row]:
    """A row for each image of columns [B]."""
    values = {name: column.tolist() for name, column in columns.items()}
    return [
        {"image": sample.id, **{name: values[name][i] for name in values}}
        for i, sample in enumerate(part.samples)
    ]


def measured(part: Part, maps: Tensor, *, idsds: bool = False, **curves: Any) -> dict[str, Tensor]:
    """Insertion, deletion and localization of maps, in percent; with `idsds`, single deletions."""
    batch = part.batch
    inputs = MetricInputs(part.view, batch.images, maps, batch.labels, batch.masks)
    columns = measure("insertion-deletion", inputs, **curves)
    if batch.masks is not None:
        columns |= measure("localization", inputs)
    columns |= measure("idsds", inputs) if idsds else {}
    return {PRINTED_AS[name]: 100 * values for name, values in columns.items()}


def scores(
    part: Part,
    *,
    asked: Asked,
    cut: float | None = None,
    tail: Tails = None,
    first_layer: Whole = 0,
    approx: Literal["e-caap", "e-caap-printed"] = "e-caap",
    candidates: Count | None = None,
    steps: Steps = "rise",
    order: Order = "pixel",
    idsds: bool = False,
    shows: Literal["numbers", "curves"] = "numbers",
) -> list[Row]:
    """The six metrics of the paper for one method, and milliseconds for a map, a row for each
    image. Of "curves" the class score along insertion and deletion, a row for each image and step.
    """
    layers: dict[str, Any] = {"tail": tail, "first_layer": first_layer, "cut": cut}
    batch, began = part.batch, time.perf_counter()
    maps = explained(part, asked, approx=approx, candidates=candidates, **layers)
    spent = torch.full((len(batch.images),), time.perf_counter() - began) / len(batch.images)
    if shows == "numbers":
        columns = measured(part, maps, idsds=idsds, steps=steps, order=order)
        return listed(part, columns | {"ms": 1000 * spent})
    found = insertion_deletion(
        part.view, batch.images, maps, batch.labels, steps=steps, order=order
    ).details
    rows = []
    for place, share in enumerate(found["shares"].tolist()):
        names = ("Insertion", "Deletion")
        drawn = {name: 100 * found[f"{name.lower()} curve"][:, place] for name in names}
        rows += [{**row, "share": share} for row in listed(part, drawn)]
    return rows


def attention_by_layer(part: Part) -> list[Row]:
    """E_i E_j of the attention from patch i of an object to patches j: of the same object, of
    another one, of the background (Eq. 6). A row for each image, pair of regions and layer."""
    view, images = part.view, part.batch.images
    layout, rows = view.check(images), list[Row]()
    objects = objects_of(part.batch.masks, layout.grid).to(images.device)  # [B, N]
    own, other = objects[:, :, None], objects[:, None, :]
    pairs = {
        "within object": (own == other) & (own > 0),
        "between objects": (own != other) & (own > 0) & (other > 0),
        "object to background": (own > 0) & (other == 0),
    }
    assert isinstance(view, VisionModel)
    for layer, probs in enumerate(attention_probs(view, images), start=1):
        weights = probs.mean(dim=1)[:, layout.patches, layout.patches].double()  # [B, N, N]
        for pair, chosen in pairs.items():
            of_patch = (weights * chosen).sum(dim=-1) / chosen.sum(dim=-1)  # [B, N]
            found = listed(part, {"attention": 100 * of_patch.nanmean(dim=-1)})
            rows += [{**row, "pair": pair, "layer": layer} for row in found]
    return rows


def objects_of(masks: Tensor | None, grid: tuple[int, int]) -> Tensor:
    """The number of the object that covers most of each patch, [B, N]; 0 is none. Objects are
    connected parts of masks [B, H, W]."""
    from scipy import ndimage

    label: Any = ndimage.label

    covered = F.adaptive_avg_pool2d((_masks(masks) == 1).double(), grid) > 0.5
    numbered = [label(cells.cpu().numpy(), structure=[[1] * 3] * 3)[0] for cells in covered]
    return torch.stack([torch.from_numpy(one).flatten() for one in numbered])


def _masks(masks: Tensor | None) -> Tensor:
    if masks is None:
        raise NotDefined("this experiment", "the data has no object masks", "Use imagenet-s")
    return masks


def fine_tuned(
    model: Mapping[str, Any],
    data: str,
    folder: Path,
    device: str,
    *,
    epochs: Count = 5,
    rate: Positive = 5e-5,
    train: Count = 4000,
) -> dict[str, Any]:
    """A classifier of the classes of `data`, which are not ImageNet's: the model with a new last
    layer, trained whole on the training split (AdamW, mirrored images; the best epoch on a tenth of
    them). Trained once, and kept in `folder`."""
    kind, base = base_of(data)
    if kind not in TRAINING:
        return dict(model)
    learned = f"{base}:{TRAINING[kind]}"
    place = folder / digest_json([dict(model), learned, epochs, rate, train])
    if not place.is_dir():
        base, split = load(**model, device=device), open_data(learned, limit=train)
        module: Any = base.module
        count = len(split.classes)
        if not hasattr(module, "reset_classifier"):
            raise NotDefined("a new last layer", f"{base.name} is no model of timm", "Use one")
        torch.manual_seed(0)
        module.reset_classifier(count)
        view = wrap(
            module.to(device), name=base.name, preprocess=base.preprocess, classes=split.classes
        )
        assert isinstance(view, VisionModel)
        sizes = "arguments" if "arguments" in base.origin else "options"
        view.origin = base.origin | {sizes: {**base.origin[sizes], "num_classes": count}}
        images = read_images(view, split)
        held = torch.arange(len(images)) % 10 == 9
        rows, judge = (~held).nonzero()[:, 0], images.take(held.nonzero()[:, 0])
        zeros = torch.zeros_like(rows)
        versions = Versions(images, rows, zeros, zeros, zeros.bool())

        def accuracy(now: VisionModel) -> float:
            right = logits_of(now, judge.images).argmax(dim=-1) == judge.need_labels()
            return float(right.double().mean())

        trained, _ = fine_tune(view, versions, accuracy, epochs=epochs, rate=rate)
        with atomic_folder(place) as draft:
            export(trained, [], draft)
    return {"spec": str(place)}


# ---------------------------------------------------------------- what the reviews ask


def contexts(
    part: Part,
    *,
    context: str,
    calibration: Count = 64,
    steps: Steps = "rise",
    order: Order = "pixel",
) -> list[Row]:
    """The six metrics of CAAP in one context, and the rank correlation with its map in white."""
    white = explained(part, {"method": "caap"})
    if context in ("white", "black", "mean"):
        maps = explained(part, {"method": "caap", "blank": context})
    else:
        others = other_images(part, calibration, one_class=context == "class mean")
        if context == "random image":
            blank = others[torch.arange(len(white)) % len(others)]
            maps = explained(part, {"method": "caap", "blank": blank})
        else:
            maps = in_activations(part, others, zero=context == "zero activations")
    columns = measured(part, maps, steps=steps, order=order)
    return listed(part, columns | {"rank correlation": rank_correlation(maps, white)})


def other_images(part: Part, count: int, *, one_class: bool) -> Tensor:
    """At most `count` images of the dataset, of classes that the part does not have; with
    `one_class` all of one class. They are drawn with seed 0."""
    data = opened_data(part.data, None)
    if not hasattr(data, "labels"):  # samples are made to know them
        data = opened_data(part.data, 16 * count)
    labels, taken = sample_labels(data), {sample.label for sample in part.samples}
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    free = [i for i in order if labels[i] not in taken]
    if not free:
        raise NotDefined(
            "a context of other classes", "a part has all classes", "Give more classes"
        )
    chosen = [i for i in free if not one_class or labels[i] == labels[free[0]]][:count]
    return to_batch(part.view, [data[i] for i in chosen]).images


def in_activations(part: Part, others: Tensor, *, zero: bool) -> Tensor:
    """CAAP's maps [B, gh, gw] in a context of activations: means over images `others` at every
    layer, or zeros in all patches, with the special tokens of the white blank."""
    model, images, labels = part.view, part.batch.images, part.batch.labels
    assert isinstance(model, VisionModel) and labels is not None
    layout = model.check(images)
    plan = make_plan(model, layout, tail=None, layers=None)
    of_context, of_source = recorded(plan, model)
    plain = blanks(model, images, "white") if zero else others
    run = record(model, plain, states=of_context["states"] | of_context["kv"])
    states = {layer: h.mean(dim=0, keepdim=True) for layer, h in run.states.items()}
    for h in states.values() if zero else ():
        h[:, layout.patches] = 0
    at = model.at(plain[:1])
    keys = {b: model.blocks[b].qkv(states[b], at)[1:] for b in of_context["kv"]}
    context, source = Trace(at, None, states, keys), record(model, images, **of_source)
    sets = token_sets(model, selection(layout.cells), layout, plan.live)
    logits = swept_logits(Sweep(model, context, source, plan), sets, 32)  # [B, N, C]
    each = torch.arange(len(logits), device=logits.device)
    return logits.softmax(dim=-1)[each, :, labels].unflatten(1, layout.grid)


def confounding(part: Part, *, asked: Asked, cut: float | None = None) -> list[Row]:
    """Scores of background patches with and without the object elsewhere in the image."""
    images, covered = part.batch.images, _masks(part.batch.masks) != 0
    erased = images.masked_fill(covered[:, None], 0.0)
    maps = [explained(part, asked, images=shown, cut=cut) for shown in (images, erased)]
    near = F.adaptive_max_pool2d(covered.float(), tuple(maps[0].shape[-2:]))
    free = F.max_pool2d(near[:, None], 3, stride=1, padding=1)[:, 0] == 0  # [B, gh, gw]
    before, after = (100 * (m.double() * free).sum(dim=(1, 2)) / free.sum(dim=(1, 2)) for m in maps)
    values = {"background": before, "object erased": after, "carried over": before - after}
    return listed(part, values)


register_published(__name__, globals(), LOW)
