"""What do head scores cost, and does the cheap way find the same heads?

    python benchmarks/heads.py --device cuda                     # ViT-B/16 in bf16 and float32, 256
    pictures; under two minutes on one H200
    python benchmarks/heads.py --device cpu                      # critters-biased, float32
    python benchmarks/heads.py --real PATH                       # also a real ViT-Ti/16
    (vit_tiny_patch16_224.safetensors) on pet photos (pets_small/)

speed   exact suffix scores and screen + verify against naive ones: two native forwards for each
picture and head, columns of the output projection zeroed.
        Every head costs the same there, so it runs the whole model and one head of each block, and
        the time is scaled. Exact runs have equally large batches; a screen, whose gradients hold
        every block, has 16 GiB. Weights of ViT-B are random: the arithmetic is the same. Masks
        are timed on a few steps and scaled to 250.
        `screen in half` runs the model in bfloat16.
recall  of the exact top 4 among the first 12 of a guess, beside what 12 random heads would find: on
all pictures, and the mean over random halves of them (guess and exact scores of the same half).
        What chose the estimator: photos of pets/, pictures of seed 0 (and 1, one fill). Reported:
        other photos (pets_small/, trainval, of which none is in pets/) and pictures of seed 2.
gains   FIG, BIG and BIR of critters-biased by baseline.
sliced  (--sliced) a forward pass without 16 random heads: zeros in the output projections, or rows
and columns gone. CIGMA's appendix (E.5) expects K / (L H) of the attention.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import sys
from functools import partial
from pathlib import Path

import cyclopts
import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from benchmarks.timing import heading, race, row, title
from seecause import critters
from seecause.background import (
    HeadScores,
    LabelledImages,
    discover_masks,
    information_gains,
    score,
    screen,
)
from seecause.background._export import prune_heads, zero
from seecause.background.gains import erase, jensen_shannon, log_probs
from seecause.background.heads import random_sets
from seecause.background.images import critter_images
from seecause.background.scoring import guessed
from seecause.data import open_data
from seecause.data.batch import to_batch
from seecause.engine.chunks import budget
from seecause.engine.forks import HELD
from seecause.loading import rewrap
from seecause.metrics.statistics import rank_correlation
from seecause.models.view import VisionModel

TOP, VERIFIED, HALVES = 4, 12, 50
FILLS = ("mean", "grey", "blur", "noise", "swap")
MASKS, MASK_STEPS = 64, 20  # what masks are timed on
SCREENED = 16 << 30  # bytes for a screen, whose gradients hold every block


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    pictures: int = 0,
    batch: int = 0,
    real: Path | None = None,
    speed: bool = True,
    recall: bool = True,
    recall_pictures: int = 0,
    small: bool = True,
    dtypes: str = "bfloat16,float32",
    contenders: str = "naive,exact suffix,screen,screen in half,masks",
    sliced: bool = False,
) -> None:
    """Print the tables."""
    where = torch.device(device)
    cuda = where.type == "cuda"
    title(where)
    if sliced:
        forwards(where, pictures or (64 if cuda else 4))
    if speed:
        heading("model", "contender", "seconds", "x faster than naive", "peak GiB", "")
        count, chosen = pictures or (256 if cuda else 16), [d for d in dtypes.split(",") if d]
        models = _small_models(where, count, real) if small else []
        for model, images, masks, repeats in models + _large_models(where, count, chosen):
            speeds(model, images, masks, batch or (256 if cuda else 32), repeats, contenders)
        print()
    if recall:
        ranks = "rank correlation"
        half = "measured in half: top 4 in common, off by (of a standard error)"
        orders = ("all pictures", "halves")
        heading("model", "baseline", f"random {VERIFIED}", *orders, ranks, half)
        biased = sc.load("builtin:critters-biased", device=device)
        count = recall_pictures or (256 if cuda else 24)
        data = critter_views(biased, count)
        about = f"critters-biased, {len(data)} pictures"
        for fill in FILLS:
            compare(about, biased, data, fill)
        if real is not None:
            photos = real_views(real, where, recall_pictures or (500 if cuda else 16))
            for fill in ("mean", "grey"):
                compare(*photos, fill)
        print()
        heading(
            f"{about}, true masks", "FIG", "BIG", "BIR (mean of ratios)", "BIR (ratio of means)"
        )
        for name in FILLS:
            gains = information_gains(biased, data, fill=name)
            both = (f"{gains.bir_mean_of_ratios:.3f}", f"{gains.bir_ratio_of_means:.3f}")
            row(name, f"{gains.fig.mean():.4f}", f"{gains.big.mean():.4f}", *both)


def forwards(where: torch.device, count: int) -> None:
    """Milliseconds of a whole ViT-B/16 (random weights), zeroed and sliced, in turn."""
    module = timm.create_model("vit_base_patch16_224" if count > 1 else "test_vit")
    view = sc.wrap(module.eval().to(where))
    assert isinstance(view, VisionModel)
    (heads,) = random_sets(view, 16 if count > 1 else 2, draws=1)
    images = torch.randn(count, 3, *view.preprocess.size, device=where)
    models = {"whole": view, "zeroed": zero(view, heads), "sliced": prune_heads(view, heads)}
    with torch.inference_mode():
        timed = race({name: partial(each, images) for name, each in models.items()}, where)
    heading("model", "form", "ms", "of the whole", "spread")
    for name, found in timed.items():
        share = found.seconds / timed["whole"].seconds
        row(view.name, name, f"{1000 * found.seconds:.2f}", f"{share:.3f}", f"{found.spread:.0%}")
    print()


Raced = tuple[VisionModel, Tensor, Tensor, int]  # a view, pictures, masks, how often to repeat


def _small_models(where: torch.device, count: int, real: Path | None) -> list[Raced]:
    """critters-biased and, where there are photos, the real ViT-Ti."""
    model = sc.load("builtin:critters-biased", device=where)
    data = critter_views(model, count)
    raced: list[Raced] = [(model, data.images, data.masks.hard, 3)]
    if real is not None:
        _, model, images, oracle = real_views(real, where, count)
        raced.append((model, images, oracle.hard, 3))
    return raced


def _large_models(where: torch.device, count: int, dtypes: list[str]) -> list[Raced]:
    """ViT-B with random weights on noise, on a GPU."""
    raced: list[Raced] = []
    if where.type != "cuda":
        return raced
    for dtype, repeats in (
        (getattr(torch, name), 3 if name == "bfloat16" else 1) for name in dtypes
    ):
        model = sc.wrap(
            timm.create_model("vit_base_patch16_224").to(where, dtype).eval(),
            name=f"ViT-B/16 {str(dtype).removeprefix('torch.')}",
        )
        draw = torch.Generator(where).manual_seed(0)
        images = torch.randn(count, 3, 224, 224, device=where, dtype=dtype, generator=draw)
        masks = torch.zeros(count, 224, 224, dtype=torch.bool, device=where)
        masks[:, 56:168, 56:168] = True
        raced.append((model, images, masks, repeats))
    return raced


def speeds(
    model: VisionModel, images: Tensor, masks: Tensor, batch: int, repeats: int, contenders: str
) -> None:
    """Naive, exact and screened scores, then masks. Budgets make exact runs as large as the naive
    ones."""
    labels = torch.cat([model(part).argmax(dim=-1) for part in images.split(batch)])
    each = model.forward_bytes(model.check(images))
    heads = [(layer, layer % block.heads) for layer, block in enumerate(model.blocks)]
    total = sum(block.heads for block in model.blocks)
    slow: dict[str, Tensor] = {}
    # its weights change all the time: what the others keep must not be thrown away
    edited = rewrap(model, copy.deepcopy(model.module))

    def naive(n: int) -> None:
        slow["effects"] = naive_effects(edited, images[:n], masks[:n], heads, batch)

    def exact(n: int) -> None:
        with budget(int(batch * each / (1 - HELD))):
            slow["exact"] = score(
                model, LabelledImages(images[:n], labels[:n], masks[:n]), fill="mean", guard=False
            ).effects  # type: ignore[assignment]

    halved = rewrap(model, copy.deepcopy(model.module).to(torch.bfloat16))

    def screened(n: int, view: VisionModel = model) -> None:
        data = LabelledImages(images[:n], labels[:n], masks[:n])
        with budget(SCREENED):
            screen(view, data, top=TOP, fill="mean", guard=False)

    def masked(n: int) -> None:
        discover_masks(model, images[: min(n, MASKS)], steps=MASK_STEPS)

    runs = {
        "naive": naive,
        "exact suffix": exact,
        "screen": screened,
        "screen in half": partial(screened, view=halved),
        "masks": masked,
    }
    runs = {name: run for name, run in runs.items() if name in contenders.split(",")}
    whole = {name: partial(run, len(images)) for name, run in runs.items()}
    timed = race(whole, model.device, warm_ups=1, repeats=repeats)
    difference = max(
        float("nan")
        if "exact" not in slow
        else float((slow["exact"][:, layer, head] - slow["effects"][:, i].cpu()).abs().max())
        for i, (layer, head) in enumerate(heads)
    )
    # the whole model runs once, however many heads there are
    slowest = timed["naive"].seconds * (1 + total) / (1 + len(heads))
    for name, timing in timed.items():
        seconds, peak = timing.seconds, f"{timing.peak_bytes / 2**30:.1f}"
        note = f"largest difference from naive {difference:.1e}" if name == "exact suffix" else ""
        if name == "masks":
            rate = min(MASKS, len(images)) / (seconds * 250 / MASK_STEPS)
            cells = ["masks, 250 steps", f"{1 / rate:.3f} a mask ({rate:.2f} masks/s)", ""]
        else:
            scaled = slowest if name == "naive" else seconds
            cells = [name, f"{scaled:.3f}", f"{slowest / scaled:.2f}"]
        about = f"{model.name}, {len(images)} pictures, batch {batch}"
        row(about, *cells, peak, note)


@torch.no_grad()
def naive_effects(
    model: VisionModel, images: Tensor, masks: Tensor, heads: list[tuple[int, int]], batch: int
) -> Tensor:
    """BIG - BIG^(-h) [B, heads] by native forwards."""
    rows = torch.cat([images, erase(model, images, masks, "mean")[0]])

    def big() -> Tensor:
        logits = torch.cat([model.native(part) for part in rows.split(batch)])
        return jensen_shannon(*log_probs(logits).chunk(2))

    whole, effects = big(), []
    for layer, head in heads:
        weight, width = model.blocks[layer].native.attn.proj.weight, model.blocks[layer].head_dim  # type: ignore[union-attr]
        columns = slice(head * width, (head + 1) * width)
        kept = weight[:, columns].clone()
        weight[:, columns] = 0
        effects.append(whole - big())
        weight[:, columns] = kept
    return torch.stack(effects, dim=1)


def critter_views(model: VisionModel, count: int) -> LabelledImages:
    """Training images of `certified` with true masks and exact counterfactuals."""
    latents = critters.draw("certified", "train", count, seed=2)
    data = critter_images(model, latents.to(model.device))
    return dataclasses.replace(data, labels=None, masks=data.truth)


def real_views(
    folder: Path, where: torch.device, count: int
) -> tuple[str, VisionModel, LabelledImages]:
    """A real ViT-Ti/16 on pet photos with their trimaps."""
    model = sc.load(
        "timm:vit_tiny_patch16_224",
        weights=folder / "vit_tiny_patch16_224.safetensors",
        device=where,
    )
    images, _, masks = to_batch(
        model, list(open_data(f"pets:{folder / 'pets_small'}:trainval", limit=count))
    )
    assert masks is not None
    return f"ViT-Ti/16, {len(images)} pet photos", model, LabelledImages(images, masks=masks)


def compare(
    name: str,
    model: VisionModel,
    data: LabelledImages,
    fill: str,
) -> None:
    """Does a guess put first what exact scores put first?"""
    exact = score(model, data, guard=False, fill=fill)
    cells = [name, fill, f"{VERIFIED / exact.value.numel():.2f}"]
    ranks = []
    halved = rewrap(model, copy.deepcopy(model.module).to(torch.bfloat16))
    options = {"top": TOP, "verify": VERIFIED, "guard": False, "fill": fill}
    screened = screen(halved, data, **options)
    guess = guessed(model, data, fill=fill)
    chance, halves = torch.Generator().manual_seed(0), []
    for _ in range(HALVES):
        half = torch.randperm(len(data), generator=chance)[: len(data) // 2]
        halves.append(recalled(exact, guess, half))
    whole = recalled(exact, guess, torch.arange(len(data)))
    cells += [f"{whole:.2f}", f"{statistics.mean(halves):.2f}"]
    pair = torch.stack([guess.value.flatten(), exact.value.flatten()])
    ranks.append(f"{float(rank_correlation(pair[:1], pair[1:])[0]):.2f}")
    best, chosen = (
        set(scores.value.nan_to_num(-1).flatten().topk(TOP).indices.tolist())
        for scores in (exact, screened)
    )
    off = ((screened.value - exact.value).abs() / exact.error).nan_to_num(0).max()
    last = f"{len(best & chosen) / TOP:.2f}, {float(off):.2f}"
    row(*cells, ", ".join(ranks), last)


def recalled(exact: HeadScores, guess: HeadScores, rows: Tensor) -> float:
    """The share of the exact top 4 on some images that the first 12 of a guess on them hold."""
    assert exact.effects is not None and guess.effects is not None
    best, first = (
        set(scores.effects[rows].mean(dim=0).flatten().topk(count).indices.tolist())  # type: ignore[index]
        for scores, count in ((exact, TOP), (guess, VERIFIED))
    )
    return len(best & first) / TOP


if __name__ == "__main__":
    cyclopts.run(main)
