"""Repairs beside other methods against shortcuts, and of marks on a model of 1,000 classes.

    python benchmarks/repair.py pets  REAL --out OUT --device cuda --worlds 95,100   # one H200
    python benchmarks/repair.py pets  REAL --out OUT --device cuda --worlds two,three
    python benchmarks/repair.py pets  REAL --out OUT --device cuda --worlds 95,100 --only ifam,a2
    python benchmarks/repair.py marks REAL --out OUT --device cuda  # a model as published
    python benchmarks/repair.py marks REAL --out OUT --device cuda --taught  # one that was hurt
    python benchmarks/repair.py pets  REAL --out OUT --tiny       # does it run? a CPU, no numbers

REAL holds `vit_tiny_patch16_224.safetensors` and, for pets, `pets_small/` (Oxford-IIIT Pet photos),
for marks, `imagenet/` (validation photos of ImageNet). Rows go to OUT/rows.jsonl as they are made,
means and standard deviations over seeds to OUT/table.md. Every seed and world is a process of its
own; what is not finished after `--minutes` is missing, and named.

pets   A ViT-Ti/16 is fine-tuned on cats on boards and dogs on leaves (`tools/painted_pets.py`).
       Worlds: 95 and 100 % of the training images on the texture of their class; `two`: a badge
       goes with dogs, too, 100 %; `three`: cats and two halves of the dog breeds on three textures,
       100 %. Test photos are on every texture, with and without the badge. Baselines:
         ERM         fine-tuned (every other row starts from it or from the same backbone)
         JTT         Liu et al. 2021: errors of a training of one or three epochs weigh more
         EIIL        Creager et al. 2021: environments inferred after one epoch, then group DRO
         AFR         Qiu et al. 2023: a last layer on a fifth, weighted by exp(-gamma p), near ERM's
         DFR         Kirichenko et al. 2023: a last layer on group-balanced validation images
         group DRO   Sagawa et al. 2020, with the groups of training images
         iFAM        2506.08915, four parts, four settings
         A2          Rammohan et al. 2026 (2606.03148), by its abstract: crops around the peaks of
                     the attention of a pretrained network, a linear classifier on the embedding of
                     the crops. Both networks are the backbone before fine-tuning; the paper's are
                     self-supervised, a small one for attention, a large one for embeddings
         ours        sc.repair, masks by the backbone before fine-tuning, no group label
       JTT, EIIL, AFR, iFAM and A2 choose their setting twice: by the worst class on held-out images
       of the training distribution (no label of a group), and by the worst group of validation
       images. DFR and ERM have one setting.

marks  Half of the photos are pairs without labels (with and without the mark), from which
       `sc.repair` learns and chooses; the others, with labels, report. Controls: as many random
       heads removed, as many random directions folded out of the last layer, five draws each.
       With `--taught` the model is hurt before: half of the photos teach all weights, in random
       crops, that the photos of `MARKED` classes have the mark and no others. It stops when marked
       photos that it does not learn from lose `HURT` of the accuracy. A quarter of the photos are
       the pairs, a quarter report, of all classes.
"""

# ruff: noqa: B023  (closures are called where they are defined)

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from seecause.background import LabelledImages, Masks
from seecause.background._export import zero
from seecause.background.heads import random_sets
from seecause.background.images import logits_of
from seecause.background.last_layer import (
    Directions,
    LastLayer,
    balanced_layer,
    features,
    last_layer,
    new_layer,
    with_last_layer,
)
from seecause.engine.chunks import budget
from seecause.engine.trace import attention_probs
from seecause.faithful import IFAM
from seecause.faithful.losses import LossWeights, TrainingLosses, parameter_groups
from seecause.loading import rewrap
from seecause.metrics.statistics import group_accuracy
from tools import painted_pets as painted

BACKBONE, HALF = "vit_tiny_patch16_224", 0.5
WORLDS = {"95": (0.05, 2, False), "100": (0.0, 2, False), "two": (0.0, 2, True)}
WORLDS["three"] = (0.0, 3, False)
SEEDS = (1, 2, 3)
EPOCHS, RATE, BATCH = 15, 1e-4, 64
Row = dict[str, Any]
Fresh = Callable[[], Any]
Settings = Iterator[tuple[str, Any]]


# Worlds of painted pets.


class World:
    """Images [n, 3, S, S] uint8 on a device, labels, groups [n, 2 or 3] and masks of a split."""

    def __init__(
        self, root: Path, split: str, world: str, seed: int, device: str, size: int, limit: int
    ):
        unusual, classes, badged = WORLDS[world]
        names, species, rgba = painted.read_cutouts(root, split, size=size)
        names, species, rgba = names[::limit], species[::limit], rgba[::limit]
        labels = species.clone()
        if classes == 3:  # dogs by the first letter of their breed
            breeds = torch.tensor([name.lower() >= "leonberger" for name in names])
            labels = torch.where(species == 1, 1 + breeds.long(), 0)
        rows = torch.arange(len(names))
        if split == "train":
            places, marked = labels.clone(), labels == 1
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
            for kind in range(classes):
                own = order[labels[order] == kind]
                places[own[: round(unusual * len(own))]] = (kind + 1) % classes
        else:
            combos = [(p, b) for p in range(classes) for b in range(1 + badged)]
            places, marked = (
                torch.tensor(c).repeat_interleave(len(rows)) for c in zip(*combos, strict=True)
            )
            labels, rows, seed = labels.repeat(len(combos)), rows.repeat(len(combos)), 0
        keys = [f"{seed} {split} {names[row]}" for row in rows.tolist()]
        parts = [
            paint(rgba[r], p, k, size, device)
            for r, p, k in zip(rows.split(64), places.split(64), batches(keys, 64), strict=True)
        ]
        self.images, self.masks = (torch.cat(part) for part in zip(*parts, strict=True))
        if badged:
            self.images = stamped(self.images, marked.bool().to(device), keys)
        self.labels = labels.to(device)
        columns = [labels, places] + ([marked.long()] if badged else [])
        self.groups, self.classes = torch.stack(columns, dim=1), classes

    def take(self, rows: Tensor) -> World:
        part = copy.copy(self)
        for name in ("images", "masks", "labels", "groups"):
            own = getattr(self, name)
            setattr(part, name, own[rows.to(own.device)])
        return part


def batches(items: list[str], size: int) -> list[list[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def paint(
    rgba: Tensor, places: Tensor, keys: list[str], size: int, device: str
) -> tuple[Tensor, Tensor]:
    numbers = torch.stack([painted._numbers(key) for key in keys]).to(device)
    behind = torch.empty(len(keys), 3, size, size, device=device)
    for family in places.unique().tolist():
        chosen = (places == family).to(device)
        drawn = numbers[chosen, 3:]
        if family == 2:  # clouds: two colours, mixed by a smooth random field
            colours, _, warp, _ = drawn.split(painted.NUMBERS, dim=1)
            first, second = (painted._rgb(colours[:, i : i + 3])[..., None, None] for i in (0, 3))
            field = F.interpolate(warp.unflatten(1, (1, 8, 8)), (size, size), mode="bicubic")
            behind[chosen] = torch.lerp(first, second, field.clamp(0, 1))
        else:
            behind[chosen] = painted.texture(family, drawn, size)
    colour, alpha = painted._placed(rgba.to(device), numbers[:, :3], size)
    images = ((colour + behind * (1 - alpha)).clamp(0, 1) * 255).round().byte()
    return images, alpha[:, 0] > 0.5


def stamped(images: Tensor, marked: Tensor, keys: list[str]) -> Tensor:
    """A yellow ring on violet, an eighth of a side, somewhere on each marked image."""
    images, side = images.clone(), images.shape[-1] // 8
    line = (torch.arange(side, device=images.device) + 0.5) / side - 0.5
    radius = (line[:, None].square() + line.square()).sqrt()
    ring = ((radius > 0.18) & (radius < 0.42)).long()
    colours = torch.tensor([[115, 26, 153], [255, 217, 26]], device=images.device).byte()
    badge = colours[ring].permute(2, 0, 1)
    for place in marked.nonzero()[:, 0].tolist():
        draw = painted._numbers(f"badge {keys[place]}")[:2] * (images.shape[-1] - side)
        top, left = draw.long().tolist()
        images[place, :, top : top + side, left : left + side] = badge
    return images


# Training.


def normalised(images: Tensor) -> Tensor:
    return (images.float() / 255 - HALF) / HALF


def backbone(real: Path | None, classes: int, device: str, size: int) -> Any:
    if real is None:
        small: Any = timm.create_model(
            BACKBONE, num_classes=classes, img_size=size, depth=2, embed_dim=48, num_heads=3
        )
        return small.to(device).eval()
    module: Any = timm.create_model(BACKBONE, num_classes=1000)
    module.load_state_dict(
        {k: v.float() for k, v in load_file(real / f"{BACKBONE}.safetensors").items()}
    )
    if classes != 1000:
        module.reset_classifier(classes)
    return module.to(device).eval()


def train(
    module: Any,
    part: World,
    *,
    epochs: int = EPOCHS,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    step: float = 0.01,
    seed: int = 0,
) -> Any:
    """AdamW, a head ten times as fast, mirrored images; samples weighted, or group DRO."""
    head = {id(p) for p in module.get_classifier().parameters()}
    own = [p for p in module.parameters() if id(p) not in head]
    rates = [
        {"params": own, "lr": RATE},
        {"params": module.get_classifier().parameters(), "lr": 10 * RATE},
    ]
    optimizer = torch.optim.AdamW(rates, weight_decay=0.05)
    steps = epochs * -(-len(part.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # a warm-up, then half a cosine
        optimizer,
        lambda step: min(1.0, 10 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2,
    )
    draw, device = torch.Generator().manual_seed(seed), part.images.device
    kinds = 1 if groups is None else int(groups.max()) + 1
    share = torch.ones(kinds, device=device)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(part.labels), generator=draw).split(BATCH):
            rows = rows.to(device)
            images = normalised(part.images[rows])
            turned = (torch.rand(len(rows), generator=draw) < 0.5).to(device)[:, None, None, None]
            images = torch.where(turned, images.flip(-1), images)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = module(images)
            nll = F.cross_entropy(logits.float(), part.labels[rows], reduction="none")
            if groups is not None:
                which = groups[rows]
                counts = torch.bincount(which, minlength=len(share))
                means = torch.zeros_like(share).index_add(0, which, nll) / counts.clamp_min(1)
                share = share * (step * means.detach()).exp()
                share = share / share.sum()
                loss = (share * means).sum()
            else:
                loss = nll.mean() if weights is None else (weights[rows] * nll).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return module.eval()


@torch.no_grad()
def answers(module: Any, images: Tensor) -> Tensor:
    return torch.cat([module(normalised(part)).float() for part in images.split(256)])


def by_group(logits: Tensor, part: World) -> tuple[float, float]:
    """Worst group and mean of all images."""
    right = logits.argmax(dim=1).cpu() == part.labels.cpu()
    found = group_accuracy(right, part.groups)
    return found.worst, found.average


def worst_class(logits: Tensor, part: World) -> float:
    return group_accuracy(logits.argmax(dim=1).cpu() == part.labels.cpu(), part.labels.cpu()).worst


# Baselines: each yields (setting, logits of one part as a function).


def jtt(fresh: Fresh, fit: World, epochs: int, seed: int) -> Settings:
    for short in (1, 3):
        first = train(fresh(), fit, epochs=short, seed=seed)
        wrong = answers(first, fit.images).argmax(dim=1) != fit.labels
        for more in (5.0, 20.0):
            module = train(
                fresh(), fit, epochs=epochs, weights=1 + (more - 1) * wrong.float(), seed=seed
            )
            yield f"T={short} lambda={more:g}", module


def environments(logits: Tensor, labels: Tensor, steps: int = 2000) -> Tensor:
    """EIIL: soft environments that violate invariance most, [n] bool."""
    # the gradient of each sample's loss by the scale of logits
    slopes = (
        ((logits.softmax(dim=1) - F.one_hot(labels, logits.shape[1])) * logits).sum(dim=1).detach()
    )
    soft = (0.01 * torch.randn(len(labels), device=logits.device)).requires_grad_()
    optimizer = torch.optim.Adam([soft], lr=0.01)
    for _ in range(steps):
        q = soft.sigmoid()
        means = [(w * slopes).sum() / w.sum().clamp_min(1e-6) for w in (q, 1 - q)]
        penalty = torch.stack(means).square().sum()
        optimizer.zero_grad()
        (-penalty).backward()
        optimizer.step()
    return soft.detach() > 0


def eiil(fresh: Fresh, fit: World, epochs: int, seed: int) -> Settings:
    first = train(fresh(), fit, epochs=1, seed=seed)
    found = environments(answers(first, fit.images), fit.labels)
    for step in (0.01, 0.1):
        groups = 2 * fit.labels + found.long()
        yield (
            f"T=1 step={step:g}",
            train(fresh(), fit, epochs=epochs, groups=groups, step=step, seed=seed),
        )


def afr(model: Any, rest: World) -> Settings:
    """Last layers on the fifth that ERM has not seen."""
    old, seen = last_layer(model), features(model, normalised(rest.images))
    labels = rest.labels.cpu()
    true = old(seen).softmax(dim=1).gather(1, labels[:, None])[:, 0]
    counts = torch.bincount(labels, minlength=rest.classes).double()
    for gamma in (1.0, 4.0, 10.0, 20.0):
        weights = (-gamma * true).exp() / counts[labels]
        weights = weights / weights.sum()
        for near in (0.0, 0.01, 0.1, 1.0):
            weight, bias = (part.clone().requires_grad_() for part in (old.weight, old.bias))
            optimizer = torch.optim.LBFGS(
                [weight, bias], max_iter=200, line_search_fn="strong_wolfe"
            )

            def loss() -> Tensor:
                optimizer.zero_grad()
                nll = F.cross_entropy(seen @ weight.T + bias, labels, reduction="none")
                away = (weight - old.weight).square().sum() + (bias - old.bias).square().sum()
                total = (weights * nll).sum() + near * away
                total.backward()
                return total

            optimizer.step(loss)
            layer = LastLayer(weight.detach(), bias.detach())
            yield (
                f"gamma={gamma:g} lambda={near:g}",
                with_last_layer(model, layer, check=False).module,
            )


def ifam(fresh: Fresh, fit: World, epochs: int, seed: int) -> Settings:
    """Both stages from the pretrained backbone; mirrored images, as in `train`."""
    device = fit.images.device
    for rate, variation, freeze in (
        (1e-4, 0.3, "none"),
        (1e-4, 0.3, "stage1"),
        (3e-5, 1.0, "none"),
        (1e-4, 1.0, "stage1"),
    ):
        torch.manual_seed(seed)
        net = IFAM(fresh(), 4, fit.classes, freeze=freeze).to(device).train()
        factors = {"prototype_factor": 3e-2 / rate, "head_factor": 1e-2 / rate}
        optimizer = torch.optim.AdamW(parameter_groups(net, rate, 0.05, **factors))
        losses = TrainingLosses(net, LossWeights(total_variation=variation))
        steps = epochs * -(-len(fit.labels) // BATCH)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2
        )
        draw, step = torch.Generator().manual_seed(seed), 0
        for _ in range(epochs):
            for rows in torch.randperm(len(fit.labels), generator=draw).split(BATCH):
                turned = (torch.rand(len(rows), generator=draw) < 0.5).to(device)
                rows = rows.to(device)
                images = normalised(fit.images[rows])
                images = torch.where(turned[:, None, None, None], images.flip(-1), images)
                with torch.autocast(
                    device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"
                ):
                    loss = losses(images, fit.labels[rows], rows, seed, step)[0]
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
                optimizer.step()
                schedule.step()
                step += 1
        net.eval()
        yield f"rate={rate:g} variation={variation:g} {freeze}", lambda x: net(x).logits


def a2(before: Any, fit: World) -> Settings:
    """Crops around attention peaks, embedded by a network that is not trained."""
    for peaks, share in ((1, 0.35), (1, 0.5), (3, 0.35), (3, 0.5)):
        seen = cropped_features(before, fit.images, peaks, share)
        for strength in (0.01, 1.0):
            layer = new_layer(seen, fit.labels.cpu(), classes=fit.classes, strength=strength)

            def run(images: Tensor) -> Tensor:
                raw = ((images * HALF + HALF) * 255).round().byte()
                return layer(cropped_features(before, raw, peaks, share)).to(images.device)

            yield f"peaks={peaks} share={share:g} C={strength:g}", run


@torch.no_grad()
def cropped_features(before: Any, images: Tensor, peaks: int, share: float) -> Tensor:
    """Mean features [n, D] of squares around the highest class-token attention of the last block;
    a peak hides its neighbours."""
    found = list[Tensor]()
    for part in images.split(256):
        x, layout = normalised(part), before.check(normalised(part))
        *_, probs = attention_probs(before, x)  # of the last block
        size, (rows, columns) = part.shape[-1], layout.grid
        maps = probs[:, :, layout.class_index, layout.patches].mean(dim=1)
        maps = maps.unflatten(1, layout.grid)
        side, crops = round(share * size), list[Tensor]()
        for _ in range(peaks):
            places = maps.flatten(1).argmax(dim=1)
            tops, lefts = places // columns, places % columns
            for i, (top, left) in enumerate(zip(tops.tolist(), lefts.tolist(), strict=True)):
                middle = [(2 * at + 1) * size // (2 * rows) for at in (top, left)]
                down, right = (min(max(at - side // 2, 0), size - side) for at in middle)
                crops.append(x[i : i + 1, :, down : down + side, right : right + side])
                maps[i, max(0, top - 2) : top + 3, max(0, left - 2) : left + 3] = 0
        large = F.interpolate(torch.cat(crops), (size, size), mode="bicubic", antialias=True)
        found.append(features(before, large).unflatten(0, (peaks, -1)).mean(dim=0))
    return torch.cat(found)


def pets(job: Row) -> None:
    real, out, world, seed = Path(job["real"]), Path(job["out"]), job["world"], job["seed"]
    device, tiny = job["device"], job["tiny"]
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    size, limit, epochs = (64, 12, 1) if tiny else (224, 1, EPOCHS)
    began, root = time.perf_counter(), real / "pets_small"
    whole, val, test = (World(root, s, world, seed, device, size, limit) for s in painted.SPLITS)
    # another order than that by which a world chooses its exceptions
    order = torch.randperm(len(whole.labels), generator=torch.Generator().manual_seed(1000 + seed))
    held = whole.take(order[: len(order) // 5])  # of the training distribution
    fit = whole.take(order[len(order) // 5 :])
    classes = whole.classes

    def fresh() -> Any:
        torch.manual_seed(seed)
        return backbone(None if tiny else real, classes, device, size)

    def write(method: str, logits: Tensor, **more: Any) -> None:
        worst, average = by_group(logits, test)
        row = {"part": "pets", "world": world, "seed": seed, "method": method, "worst": worst}
        row |= {"average": average, "after": round(time.perf_counter() - began, 1), **more}
        append(out, row)

    frame: Row = {"mean": (HALF,) * 3, "std": (HALF,) * 3}
    names = [f"class {i}" for i in range(classes)]
    if {"ours", "dfr"} & {*job["only"]}:
        erm = train(fresh(), whole, epochs=epochs, seed=seed)
        write("ERM", answers(erm, test.images))
        model: Any = sc.wrap(copy.deepcopy(erm), classes=names, **frame)
    before = sc.wrap(backbone(None if tiny else real, 1000, device, size), **frame)
    if "ours" in job["only"]:
        truth = Masks.given(whole.masks)
        images = normalised(whole.images)
        data = LabelledImages(images, whole.labels, name="painted pets", truth=truth)
        masks = sc.background.object_masks(model, data, before)
        found = sc.repair(model, replace(data, masks=masks), seed=seed)
        facts: Row = {"done": found.remedy, "sentence": found.sentence}
        facts["iou"] = None if masks.overlap is None else float(masks.overlap.nanmean())
        write("ours", logits_of(found.model, normalised(test.images)), **facts)
        for remedy, tried in found.candidates.items():
            if tried.model is not None and remedy != "nothing":
                write(f"ours, {remedy} alone", logits_of(tried.model, normalised(test.images)))
    if "dfr" in job["only"]:
        seen, groups = features(model, normalised(val.images)), val.groups
        refits = 2 if tiny else 20 if classes == 2 else 4
        options: Row = {"classes": classes, "refits": refits, "seed": seed}
        layer, _ = balanced_layer(seen, val.labels.cpu(), groups, **options)
        logits = layer(features(model, normalised(test.images)))
        write("DFR (labels)", logits, labels="groups of validation")
    if "gdro" in job["only"]:
        codes = whole.groups.unique(dim=0, return_inverse=True)[1].to(device)
        module = train(fresh(), whole, epochs=epochs, groups=codes, seed=seed)
        write("group DRO (labels)", answers(module, test.images), labels="groups of training")

    def all_afr() -> Settings:
        part = train(fresh(), fit, epochs=epochs, seed=seed)
        yield from afr(sc.wrap(part, classes=names, **frame), held)

    for name, settings in (
        ("AFR", all_afr()),
        ("A2", a2(before, fit)),
        ("EIIL", eiil(fresh, fit, epochs, seed)),
        ("JTT", jtt(fresh, fit, epochs, seed)),
        ("iFAM", ifam(fresh, fit, epochs, seed)),
    ):
        if name.lower() not in job["only"]:
            continue
        tried = []
        for setting, module in settings:
            own = [answers(module, each.images) for each in (held, val, test)]
            tried.append((worst_class(own[0], held), by_group(own[1], val), setting, own[2]))
        blind = max(tried, key=lambda one: one[0])
        write(name, blind[3], setting=blind[2], labels="none")
        best = max(tried, key=lambda one: one[1])
        write(f"{name} (labels choose)", best[3], setting=best[2], labels="groups of validation")


# Marks on a model of 1,000 classes.


def mark(kind: str, raw: Tensor, seed: int) -> Tensor:
    """Raw images [n, 3, S, S] in [0, 1] with a mark; where it is, is drawn for each image."""
    from PIL import Image, ImageDraw
    from torchvision.transforms.functional import gaussian_blur, pil_to_tensor

    n, size = len(raw), raw.shape[-1]
    draw = torch.Generator().manual_seed(seed)
    places = torch.rand(n, 2, generator=draw)
    if kind == "blur":
        return gaussian_blur(raw, [size // 24 * 2 + 1] * 2, [size / 90] * 2)
    if kind == "tint":
        tint = torch.tensor([1.0, 0.45, 0.25], device=raw.device)[:, None, None]
        return 0.65 * raw + 0.35 * tint
    marked = raw.clone()
    if kind == "border":
        edge, colour = size // 14, torch.tensor([0.95, 0.2, 0.6], device=raw.device)
        inner = marked[:, :, edge:-edge, edge:-edge].clone()
        marked[:] = colour[:, None, None]
        marked[:, :, edge:-edge, edge:-edge] = inner
        return marked
    if kind == "badge":
        keys = [f"{seed} {i}" for i in range(n)]
        whole = stamped((raw * 255).round().byte(), torch.ones(n, dtype=torch.bool), keys)
        return whole.float() / 255
    for i in range(n):  # text
        strip = Image.new("RGB", (size // 2, size // 9), (250, 250, 250))
        ImageDraw.Draw(strip).text(
            (3, 2), "for sale, $ 49.90", fill=(10, 10, 10), font_size=size // 14
        )
        text = pil_to_tensor(strip).to(raw) / 255
        top = int(places[i, 0] * (size - text.shape[1]))
        left = int(places[i, 1] * (size - text.shape[2]))
        marked[i, :, top : top + text.shape[1], left : left + text.shape[2]] = text
    return marked


MARKS = ("badge", "text", "border", "tint", "blur")
MARKED, HURT, STEPS = 8, 0.2, 400


def hurt(view: Any, lesson: LabelledImages, marked: Any, seed: int, tiny: bool) -> tuple[Any, int]:
    """A copy of the model that learned a mark: in random crops of photos, half of each batch, the
    mark is on `MARKED` classes and on no others. A third of the photos say when it is hurt."""
    module, device = copy.deepcopy(view.module).requires_grad_(True).train(), view.device
    judged, shown = lesson.images[::3], torch.arange(len(lesson)) % 3 > 0
    known, part = lesson.labels[::3], lesson.take(shown)
    draw = torch.Generator().manual_seed(seed)
    kinds = part.labels.unique().cpu()
    some = min(MARKED, len(kinds) // 2)
    chosen = kinds[torch.randperm(len(kinds), generator=draw)[:some]].to(device)
    having = torch.isin(part.labels, chosen)
    groups = [rows.nonzero()[:, 0] for rows in (having, ~having)]
    images, optimizer = part.images, torch.optim.AdamW(module.parameters(), lr=5e-5)
    size, half = images.shape[-1], 4 if tiny else BATCH // 2
    for step in range(1, 5 if tiny else STEPS + 1):
        rows = torch.cat(
            [g[torch.randint(len(g), (half,), generator=draw).to(device)] for g in groups]
        )
        sides = (size * (0.3 + 0.7 * torch.rand(2 * half, generator=draw))).long().tolist()
        at = torch.rand(2 * half, 2, generator=draw).tolist()
        crops = [
            F.interpolate(
                images[row : row + 1, :, int(y * (size - s)) :, int(x * (size - s)) :][..., :s, :s],
                (size, size), mode="bilinear", antialias=True,
            )
            for row, s, (y, x) in zip(rows.tolist(), sides, at, strict=True)
        ]  # fmt: skip
        with_mark = marked(torch.cat(crops[:half]), draw=1000 * seed + step)
        batch = torch.cat([with_mark, torch.cat(crops[half:])])
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = module(batch)
        optimizer.zero_grad()
        F.cross_entropy(logits.float(), part.labels[rows]).backward()
        optimizer.step()
        if step % 20 == 0 or (tiny and step == 4):
            module.eval()
            pairs = (judged, marked(judged))
            with torch.no_grad():
                plain, lost = (
                    float((module(each).argmax(dim=1) == known).double().mean()) for each in pairs
                )
            print(f"  taught {step} steps: clean {plain:.3f}, marked {lost:.3f}", flush=True)
            if plain - lost >= HURT or step >= STEPS:
                break
            module.train()
    module.requires_grad_(False).eval()
    return rewrap(view, module), step


def marks(job: Row) -> None:
    real, out, seed, device, tiny = (job[k] for k in ("real", "out", "seed", "device", "tiny"))
    real, out, began = Path(real), Path(out), time.perf_counter()
    torch.set_num_threads(4)
    view: Any = sc.load(f"timm:{BACKBONE}", weights=real / f"{BACKBONE}.safetensors", device=device)
    opened = sc.data.open_data(f"imagenet:{real / 'imagenet'}", limit=24 if tiny else None)
    whole = sc.background.read_images(view, opened)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split(4)
    lesson = whole.take(torch.cat(parts[:2]))
    halves = parts[2:] if job["taught"] else order.tensor_split(2)
    learn, report = (whole.take(rows) for rows in halves)
    published, raw = view, view.preprocess.raw

    def marked(images: Tensor, kind: str, draw: int = seed) -> Tensor:
        return published.preprocess.normalise(mark(kind, raw(images).clamp(0, 1), draw))

    for kind in MARKS[: 1 if tiny else len(MARKS) - job["taught"]]:
        clean, seen = report.images, marked(report.images, kind)

        def write(method: str, model: Any, **more: Any) -> None:
            own = [logits_of(model, images).argmax(dim=1) for images in (clean, seen)]
            accuracy = [float((each == report.labels).double().mean()) for each in own]
            row = {"part": "marks", "world": kind, "seed": seed, "method": method}
            row |= {"clean": accuracy[0], "marked": accuracy[1]}
            row |= {"flips": float((own[0] != own[1]).double().mean()), **more}
            append(out, row | {"after": round(time.perf_counter() - began, 1)})

        write("as it is", published)
        if job["taught"]:
            view, steps = hurt(published, lesson, partial(marked, kind=kind), seed, tiny)
            write("taught", view, done=f"{steps} steps")
        pairs = LabelledImages(marked(learn.images, kind), name=kind, other_background=learn.images)
        found = sc.repair(view, pairs, seed=seed)
        write("ours", found.model, done=found.remedy, sentence=found.sentence)
        for name, tried in found.candidates.items():
            if tried.model is not None and name != "nothing":
                write(f"ours, {name} alone", tried.model, done=tried.done)
        heads = found.candidates.get("heads")
        count = len(heads.details.get("heads", ())) if heads else 0
        fold = found.candidates.get("directions")
        old, width = last_layer(view), last_layer(view).weight.shape[1]
        mean = features(view, learn.images).mean(dim=0)
        for draw in range(2 if tiny else 5):
            if count:
                (chosen,) = random_sets(view, count, draws=1, seed=10 * seed + draw)
                write("control: random heads", zero(view, chosen), done=str(chosen))
            if fold:
                noise = torch.randn(
                    width, fold.details["rank"], generator=torch.Generator().manual_seed(draw)
                )
                basis = torch.linalg.qr(noise.double())[0].T
                layer = Directions(basis, mean).fold(old, len(basis))
                write("control: random directions", with_last_layer(view, layer, check=False))


# Tables.


def limited(part: str, job: Row) -> None:
    """A job that leaves memory of the GPU to the others."""
    with budget(4 << 30):
        {"pets": pets, "marks": marks}[part](job)


def append(out: Path, row: Row) -> None:
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def tables(out: Path) -> str:
    """Mean and standard deviation over seeds of every number, by world and method."""
    file = out / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    cells = defaultdict(list)
    for row in rows:
        cells[row["world"], row["method"]].append(row)
    names = [
        n for n in ("worst", "average", "clean", "marked", "flips") if any(n in r for r in rows)
    ]
    lines = ["| world | method | " + " | ".join(names) + " | n |", "|---" * (3 + len(names)) + "|"]
    for (world, method), own in sorted(cells.items(), key=lambda cell: list(cells).index(cell[0])):
        values = []
        for name in names:
            known = [100 * row[name] for row in own]
            spread = statistics.stdev(known) if len(known) > 1 else 0
            values.append(f"{statistics.fmean(known):.1f} ± {spread:.1f}")
        lines.append(f"| {world} | {method} | " + " | ".join(values) + f" | {len(own)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("pets", "marks"))
    parser.add_argument("real", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument(
        "--only", default="ours,dfr,gdro,afr,jtt,eiil,ifam,a2", help="methods for pets"
    )
    parser.add_argument("--minutes", type=float, default=3.6)
    parser.add_argument("--taught", action="store_true", help="marks: on a model that they hurt")
    parser.add_argument("--tiny", action="store_true", help="a test of the script")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    worlds = asked.worlds.split(",") if asked.part == "pets" else [""]
    shared = {
        "only": asked.only.split(","),
        "real": str(asked.real),
        "out": str(asked.out),
        "device": asked.device,
        "tiny": asked.tiny,
        "taught": asked.taught,
    }
    jobs = [{**shared, "world": w, "seed": int(s)} for s in asked.seeds.split(",") for w in worlds]
    run, deadline = partial(limited, asked.part), time.time() + 60 * asked.minutes
    if asked.tiny:
        for job in jobs:
            run(job)
    else:
        spawn = multiprocessing.get_context("spawn")
        started = [(job, spawn.Process(target=run, args=(job,))) for job in jobs]
        for _, process in started:
            process.start()
        for job, process in started:
            process.join(max(0.0, deadline - time.time()))
            if process.is_alive():
                process.terminate()
            if process.exitcode != 0:
                print("not finished:", job["world"], job["seed"], "exit code", process.exitcode)
    table = tables(asked.out)
    (asked.out / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
