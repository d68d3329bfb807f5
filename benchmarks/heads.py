"""What do head scores cost, and does the cheap way find the same heads?

    python benchmarks/heads.py --device cuda                     # ViT-B/16 in bf16 and float32, 256
    pictures; under two minutes on one H200
    python benchmarks/heads.py --device cpu                      # critters-biased, float32
    python benchmarks/heads.py --real PATH                       # also a real ViT-Ti/16
    (vit_tiny_patch16_224.safetensors) on pet photos (pets/)

speed   exact suffix scores and screen + verify against naive ones: two native forwards for each
picture and head, columns of the output projection zeroed.
        Every head costs the same there, so it runs the whole model and one head of each block, and
        the time is scaled. Batches are equally large (gradients of the screen hold every block, so
        its memory budget is larger). Weights of ViT-B are random: the arithmetic is the same. Masks
        are timed on a few steps and scaled to 250.
recall  of the exact top 4, with 12 heads verified, beside what verifying 12 random heads finds. No
audit, so that nothing else can find them.
gains   FIG, BIG and BIR of critters-biased by baseline.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from benchmarks.timing import measured_on
from seecause import critters
from seecause.data import open_data
from seecause.data.batch import to_batch
from seecause.engine.chunks import budget
from seecause.engine.forks import HELD
from seecause.heads import Masks, Swapped, discover_masks, information_gains, score, screen
from seecause.heads.erase import erase
from seecause.heads.gains import jensen_shannon, log_probs
from seecause.loading import rewrap
from seecause.models.view import VisionModel

TOP, VERIFIED = 4, 12
MASKS, MASK_STEPS = 64, 20  # what masks are timed on
WARM_UP = 8  # pictures


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    pictures: int = 0,
    batch: int = 0,
    real: Path | None = None,
    speed: bool = True,
    recall: bool = True,
    recall_pictures: int = 0,
    dtypes: str = "bfloat16,float32",
) -> None:
    """Print the tables."""
    where = torch.device(device)
    cuda = where.type == "cuda"
    print(f"# {measured_on(where)}\n")
    if speed:
        print(
            "| model | contender | seconds | x faster than naive | peak GiB |"
            " |\n|---|---|---|---|---|---|"
        )
        for model, images, masks, repeats in _models(
            where, pictures or (256 if cuda else 16), dtypes.split(",")
        ):
            race(model, images, masks, batch or (256 if cuda else 32), repeats)
        print()
    if recall:
        print(
            "| model | baseline | recall of the exact top 4 | random screen | rank correlation of"
            " guess and exact |\n|---|---|---|---|---|"
        )
        found = critter_views(
            sc.load("builtin:critters-biased", device=device),
            recall_pictures or (256 if cuda else 24),
        )
        for name, baseline in found[3].items():
            compare(
                f"critters-biased, {len(found[1])} pictures",
                found[0],
                found[1],
                found[2],
                name,
                baseline,
            )
        if real is not None:
            photos = real_views(real, where, recall_pictures or (200 if cuda else 16))
            for fill in ("mean", "grey"):
                compare(*photos, fill, fill)
        print(
            f"\n| critters-biased, {len(found[1])} pictures, true masks | FIG | BIG | BIR (mean of"
            " ratios) | BIR (ratio of means) |\n|---|---|---|---|---|"
        )
        for name, baseline in found[3].items():
            gains = information_gains(found[0], found[1], found[2], baseline=baseline)
            print(
                f"| {name} | {gains.fig.mean():.4f} | {gains.big.mean():.4f} |"
                f" {gains.bir_mean_of_ratios:.3f} | {gains.bir_ratio_of_means:.3f} |"
            )


def _models(
    where: torch.device, count: int, dtypes: list[str]
) -> list[tuple[VisionModel, Tensor, Tensor, int]]:
    """A view, pictures, masks and how often to repeat, for every line of the speed table."""
    if where.type != "cuda":
        model, images, masks, _ = critter_views(
            sc.load("builtin:critters-biased", device=where), count
        )
        return [(model, images, masks, 3)]
    found = []
    for dtype, repeats in (
        (getattr(torch, name), 3 if name == "bfloat16" else 1) for name in dtypes
    ):
        model = sc.wrap(
            timm.create_model("vit_base_patch16_224").to(where, dtype),
            name=f"ViT-B/16 {str(dtype).removeprefix('torch.')}",
        )
        images = torch.randn(
            count,
            3,
            224,
            224,
            device=where,
            dtype=dtype,
            generator=torch.Generator(where).manual_seed(0),
        )
        masks = torch.zeros(count, 224, 224, dtype=torch.bool, device=where)
        masks[:, 56:168, 56:168] = True
        found.append((model, images, masks, repeats))
    return found  # type: ignore[return-value]


def race(model: VisionModel, images: Tensor, masks: Tensor, batch: int, repeats: int) -> None:
    """Naive, exact and screened scores, then masks. Budgets make exact runs as large as the naive
    ones."""
    labels = torch.cat([model(part).argmax(dim=-1) for part in images.split(batch)])
    each = model.forward_bytes(model.check(images))
    heads = [(layer, layer % block.heads) for layer, block in enumerate(model.blocks)]
    total = sum(block.heads for block in model.blocks)
    slow: dict[str, Tensor] = {}
    edited = rewrap(
        model, copy.deepcopy(model.module)
    )  # its weights change all the time: what the others keep must not be thrown away

    def naive(n: int) -> None:
        slow["effects"] = naive_effects(edited, images[:n], masks[:n], heads, batch)

    def exact(n: int) -> None:
        with budget(int(batch * each / (1 - HELD))):
            slow["exact"] = score(
                model, images[:n], masks[:n], target=labels[:n], baseline="mean", guard=False
            ).effects  # type: ignore[assignment]

    def screened(n: int) -> None:
        with budget(
            int(batch * each * model.n_layers)
        ):  # gradients hold every block of fewer pictures
            screen(
                model,
                images[:n],
                masks[:n],
                target=labels[:n],
                baseline="mean",
                guard=False,
                top=TOP,
                verify=VERIFIED,
            )

    def masked(n: int) -> None:
        discover_masks(model, images[: min(n, MASKS)], steps=MASK_STEPS)

    runs = {
        "naive": naive,
        "exact suffix": exact,
        f"screen, {VERIFIED} verified, 5 % audited": screened,
        "masks": masked,
    }
    timed = time_all(runs, len(images), model.device, repeats)
    difference = max(
        float((slow["exact"][:, layer, head] - slow["effects"][:, i].cpu()).abs().max())
        for i, (layer, head) in enumerate(heads)
    )
    slowest = (
        timed["naive"][0] * (1 + total) / (1 + len(heads))
    )  # the whole model runs once, however many heads there are
    for name, (seconds, peak) in timed.items():
        if name == "masks":
            rate = min(MASKS, len(images)) / (seconds * 250 / MASK_STEPS)
            print(
                f"| {model.name} | masks, 250 steps | {1 / rate:.3f} a mask ({rate:.2f} masks/s) |"
                f" | {peak / 2**30:.1f} | |"
            )
            continue
        scaled = slowest if name == "naive" else seconds
        note = f"largest difference from naive {difference:.1e}" if name == "exact suffix" else ""
        print(
            f"| {model.name}, {len(images)} pictures, batch {batch} | {name} | {scaled:.2f} |"
            f" {slowest / scaled:.2f} | {peak / 2**30:.1f} | {note} |"
        )


@torch.no_grad()
def naive_effects(
    model: VisionModel, images: Tensor, masks: Tensor, heads: list[tuple[int, int]], batch: int
) -> Tensor:
    """BIG - BIG^(-h) [B, heads] by native forwards."""
    rows = torch.cat([images, erase(model, images, masks, "mean", foreground=False).no_background])

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


def time_all(
    runs: dict[str, Callable[[int], object]], pictures: int, device: torch.device, repeats: int
) -> dict[str, tuple[float, int]]:
    """Median seconds and peak bytes of each, in turn; warmed up on a few pictures."""
    cuda = device.type == "cuda"
    taken: dict[str, list[float]] = {name: [] for name in runs}
    peaks = dict.fromkeys(runs, 0)
    for run in runs.values():
        run(min(WARM_UP, pictures))
    for _ in range(repeats):
        for name, run in runs.items():
            if cuda:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            run(pictures)
            if cuda:
                torch.cuda.synchronize(device)
                peaks[name] = torch.cuda.max_memory_allocated(device)
            taken[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times), peaks[name]) for name, times in taken.items()}


def critter_views(
    model: VisionModel, count: int
) -> tuple[VisionModel, Tensor, Tensor, dict[str, object]]:
    """Training pictures of `certified` with true masks, and every baseline."""
    latents = critters.draw("certified", "train", count)
    plain = critters.render(latents)
    elsewhere = critters.render(
        latents, do=critters.Do(background=(latents.background + 1) % len(critters.BACKGROUNDS))
    ).image
    others = critters.render(latents.show((latents.creature + 1) % len(critters.CLASSES))).image
    images, elsewhere, others = (
        model.preprocess.normalise(x).to(model.device) for x in (plain.image, elsewhere, others)
    )
    baselines: dict[str, object] = {name: name for name in ("mean", "grey", "blur", "noise")}
    return (
        model,
        images,
        plain.mask.to(model.device),
        {**baselines, "swapped": Swapped(elsewhere, others)},
    )


def real_views(
    folder: Path, where: torch.device, count: int
) -> tuple[str, VisionModel, Tensor, Masks]:
    """A real ViT-Ti/16 on pet photos with their trimaps."""
    model = sc.load(
        "timm:vit_tiny_patch16_224",
        weights=folder / "vit_tiny_patch16_224.safetensors",
        device=where,
    )
    images, _, masks = to_batch(model, list(open_data(f"pets:{folder / 'pets'}", limit=count)))
    assert masks is not None
    return f"ViT-Ti/16, {count} pet photos", model, images, Masks.oracle(masks)  # type: ignore[return-value]


def compare(
    name: str,
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor,
    said: str,
    baseline: object,
) -> None:
    """Does the screen find what exact scores find?"""
    exact = score(model, images, masks, guard=False, baseline=baseline)  # type: ignore[arg-type]
    found = screen(
        model, images, masks, guard=False, baseline=baseline, top=TOP, verify=VERIFIED, audit=0.0
    )  # type: ignore[arg-type]
    best = set(exact.order(positive=False)[:TOP])
    pair = torch.stack([found.guess.value.flatten(), exact.value.flatten()])
    rank = float(sc.metrics.rank_correlation(pair[:1], pair[1:])[0])
    print(
        f"| {name} | {said} | {len(best & set(found.verified)) / TOP:.2f} |"
        f" {VERIFIED / exact.value.numel():.2f} | {rank:.2f} |"
    )


if __name__ == "__main__":
    typer.run(main)
