"""What `evidence_shortcut.py` trains and measures, one job at a time, each to one JSON file.

erm      the vision transformer, fine-tuned whole
repair   what can be done to a fine-tuned one: a new last layer (DFR), heads removed (CIGMA), random
heads removed
pdisco   PDiscoFormer: parts vote, from features that have seen the whole picture (one stage)
ifam     iFAM: a second transformer answers from the patches of the parts alone
mask     the same second transformer with the true mask instead of parts: a bound that no method can
be expected to pass
centre   the same with patches around the centre: a control that knows nothing of the animal
scatter  the same with patches drawn for each photo by lot: another
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import seecause as sc
from scripts.kept_pieces import write_whole
from scripts.shortcut.data import (
    GROUPS,
    SPECIES,
    Cutouts,
    Pictures,
    both_ways,
    read_cutouts,
    train_pictures,
)
from scripts.shortcut.measure import Row, fast, measure
from scripts.shortcut.repair import repairs
from seecause.critters.train.common import pace
from seecause.engine.chunks import budget
from seecause.engine.machine import machine
from seecause.faithful import IFAM, LossWeights, calibrate, intervene, parameter_groups
from seecause.faithful.config import set_pace
from seecause.faithful.images import mask_pixels
from seecause.faithful.interventions import best_of, packing, try_interventions
from seecause.faithful.losses import TrainingLosses
from seecause.metrics.segmentation import Overlap, overlap
from seecause.models.preprocess import Preprocess
from seecause.models.view import VisionModel

Method = Literal["erm", "repair", "pdisco", "ifam", "mask", "centre", "scatter"]
Loss = Callable[
    [Pictures, Tensor, int], Tensor
]  # pictures, normalised images, step -> what is to be small
BACKBONE, FILE = "vit_tiny_patch16_224", "vit_tiny_patch16_224.safetensors"
HALF = Preprocess(size=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3)
PROTOTYPE_RATE, HEADS_RATE = 3e-2, 1e-2  # of iFAM, whatever the rate of its backbones
QUANTILES = (0.97, 0.99)
DECAY, CLIP, WARM_UP = 0.05, 2.0, 0.1
SHOWN = 2  # test photos of each group whose parts are kept, for the figure
_ROWS = 256  # pictures tested at once
_ROOM = 8 << 30  # bytes of activations of one job on a GPU, which it shares with others


@dataclass(frozen=True)
class Setup:
    """What all jobs of a study share. `architecture`: arguments of timm's VisionTransformer instead
    of the real one, with random weights (for tests)."""

    real: Path
    folder: Path  # for JSON files and weights
    device: str = "cuda"
    limit: int | None = None
    epochs: int = 15
    batch: int = 64
    mask_steps: int = 250  # of CIGMA's mask search
    scored: int = 128  # pictures that heads are scored on
    draws: int = 20  # random sets of heads for each K
    architecture: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def size(self) -> int:
        return 224 if self.architecture is None else self.architecture["img_size"]

    @property
    def frame(self) -> Preprocess:
        return dataclasses.replace(HALF, size=(self.size, self.size))


@dataclass(frozen=True)
class Job:
    """One training, or the repairs of one."""

    method: Method
    seed: int
    rate: float  # of backbones
    background: float = 2.0  # weight of the background loss
    variation: float = 1.0  # weight of the total variation
    whole: bool = False  # stage 1 is trained whole, not its special tokens and positions only
    parts: int = 4
    length: float = 1.0  # of training, as a share of the study's epochs
    kept: float | None = None  # share of patches that a control mask shows

    @property
    def file(self) -> str:
        """The name of its results. Repairs have a version: the first had other random controls."""
        more = (
            f"_bg{self.background:g}_tv{self.variation:g}_{'whole' if self.whole else 'tokens'}_k{self.parts}"
            if self.method in ("pdisco", "ifam")
            else ""
        )
        more += f"_x{self.length:.2g}" * (self.length != 1) + (
            f"_kept{self.kept:g}" if self.kept is not None else ""
        )
        return (
            f"{self.method}{'-v2' * (self.method == 'repair')}_{self.seed}_{self.rate:g}{more}.json"
        )


def run(setup: Setup, job: Job) -> Row:
    """Do a job and keep what it found. The file is there whole or not at all."""
    began, pictures = time.perf_counter(), open_pictures(setup, job.seed)
    do = {"erm": _erm, "repair": _repair, "pdisco": _parts, "ifam": _parts}.get(job.method, _mask)
    with budget(_ROOM if setup.device.startswith("cuda") else None):
        found: Row = {**dataclasses.asdict(job), **do(setup, job, *pictures)}
    found |= {
        "seconds": time.perf_counter() - began,
        "machine": machine(setup.device),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
    found["data"] = open_cutouts(setup).fingerprint
    write_whole(setup.folder / job.file, json.dumps(found))
    return found


@lru_cache(maxsize=1)
def open_cutouts(setup: Setup) -> Cutouts:
    return read_cutouts(setup.real / "pets_small", size=setup.size, limit=setup.limit)


@lru_cache(maxsize=3)
def open_pictures(setup: Setup, seed: int) -> tuple[Pictures, Pictures, Pictures]:
    """Train, validation and test, on the device, made once in a process."""
    cutouts, device = open_cutouts(setup), torch.device(setup.device)
    return (train_pictures(cutouts, seed=seed, size=setup.size, device=device), *_held_out(setup))


@lru_cache(maxsize=1)
def _held_out(setup: Setup) -> tuple[Pictures, Pictures]:
    cutouts, device = open_cutouts(setup), torch.device(setup.device)
    val, test = (
        both_ways(cutouts, split, size=setup.size, device=device) for split in ("val", "test")
    )
    return val, test


def new_backbone(setup: Setup) -> Any:
    """The pretrained transformer, on the CPU."""
    return copy.deepcopy(_pretrained(setup))


@lru_cache(maxsize=1)
def _pretrained(setup: Setup) -> Any:
    if setup.architecture is not None:
        return _seeded(0, lambda: timm.models.VisionTransformer(**setup.architecture))
    return sc.load(f"timm:{BACKBONE}", weights=setup.real / FILE).module


def _erm(setup: Setup, job: Job, train: Pictures, val: Pictures, test: Pictures) -> Row:
    """Every weight of the transformer, its new head ten times as fast."""
    model = (
        _seeded(job.seed, lambda: _with_head(new_backbone(setup)))
        .to(setup.device)
        .train()
        .requires_grad_(True)
    )
    head = set(model.head.parameters())
    groups = [
        {"params": [p for p in model.parameters() if p not in head], "lr": job.rate},
        {"params": list(head), "lr": 10 * job.rate},
    ]
    fit(
        setup,
        job,
        groups,
        train,
        lambda pictures, images, step: F.cross_entropy(model(images).float(), pictures.labels),
    )
    model.eval()
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()},
        weights_of(setup, job),
    )
    return {
        "val": measure(_answers(setup, val, model), val),
        "test": measure(_answers(setup, test, model), test),
        "train": _right(setup, train, model),
    }


def _mask(setup: Setup, job: Job, train: Pictures, val: Pictures, test: Pictures) -> Row:
    """Stage 2 alone, which sees some patches: those that the animal covers by half or more, or
    those of a control."""
    net = _new_net(setup, job)
    net.stage1.requires_grad_(False)
    shows = _shows(setup, job, _grid(net, setup))

    def answer(images: Tensor, pictures: Pictures) -> Tensor:
        return net.classify(images, shows(pictures), packed=False)

    fit(
        setup,
        job,
        _groups(net, job),
        train,
        lambda pictures, images, step: F.cross_entropy(
            answer(images, pictures).float(), pictures.labels
        ),
    )
    net.eval()
    found = {}
    for name, some in (("val", val), ("test", test)):
        found[name] = measure(_over(setup, some, answer), some)
        shown = shows(some)
        found[name] |= {
            "kept": float(shown.float().mean()),
            "iou": overlap(mask_pixels(shown, setup.frame.size), some.masks).iou,
        }
    return found


def _shows(setup: Setup, job: Job, grid: int) -> Callable[[Pictures], Tensor]:
    """From pictures to the patches [N, grid, grid] that stage 2 sees."""
    if job.kept is None:
        return lambda pictures: pictures.patches(grid)
    photos = len(open_cutouts(setup).names)
    shown = control_masks(photos, grid, job.kept, by_lot=job.method == "scatter", seed=job.seed).to(
        setup.device
    )
    return lambda pictures: shown[pictures.photos]


def control_masks(photos: int, grid: int, kept: float, *, by_lot: bool, seed: int) -> Tensor:
    """[photos, grid, grid] bool: a share `kept` of the patches, those nearest to the centre, or for
    each photo some `by_lot`."""
    line = torch.arange(grid) - (grid - 1) / 2
    far = (line[:, None].square() + line.square()).flatten()  # [grid * grid]
    rank = (
        torch.rand(photos, len(far), generator=torch.Generator().manual_seed(seed))
        if by_lot
        else far.expand(photos, -1)
    )
    order = rank.argsort(dim=1, stable=True)[:, : max(1, round(kept * len(far)))]
    return (
        torch.zeros(photos, len(far), dtype=torch.bool)
        .scatter(1, order, value=True)
        .unflatten(1, (grid, grid))
    )


def _parts(setup: Setup, job: Job, train: Pictures, val: Pictures, test: Pictures) -> Row:
    """PDiscoFormer or iFAM, as it is and with the intervention that has the best worst group on
    validation pictures."""
    net = _new_net(setup, job)
    lesson = TrainingLosses(
        net, LossWeights(background=job.background, total_variation=job.variation)
    )
    fit(
        setup,
        job,
        _groups(net, job),
        train,
        lambda pictures, images, step: lesson(
            images, pictures.labels, pictures.photos, job.seed, step
        )[0],
    )
    net.eval()
    found: Row = {"val": _measure_net(setup, net, val), "test": _measure_net(setup, net, test)}
    with fast(setup.device):
        calibrate(net, (images for images, _ in _slices(setup, train)), list(QUANTILES))
        tried = try_interventions(
            net,
            lambda: ((images, part.labels, part.groups) for images, part in _slices(setup, val)),
            QUANTILES,
        )
    best = best_of(tried)
    with intervene(net, drop_parts=best.drop, quantile=best.quantile):
        found["changed"] = _measure_net(setup, net, test)
    found |= {
        "chosen": dataclasses.asdict(best),
        "tried": [dataclasses.asdict(one) for one in tried],
    }
    with torch.no_grad():
        maps = net(
            setup.frame.normalise(
                test.take(shown_places(test.labels, test.places)).images.float() / 255
            ),
            packed=packing(net),
        ).maps
    return {**found, "shown": maps.argmax(dim=1).tolist()}


def _repair(setup: Setup, job: Job, train: Pictures, val: Pictures, test: Pictures) -> Row:
    trained = dataclasses.replace(job, method="erm")
    if not weights_of(setup, trained).is_file():  # results were kept without them
        _erm(setup, trained, train, val, test)
    module = _with_head(new_backbone(setup))
    module.load_state_dict(load_file(weights_of(setup, trained)))
    model = sc.wrap(
        module.to(setup.device),
        name=f"fine-tuned, seed {job.seed}",
        classes=SPECIES,
        preprocess=setup.frame,
    )
    assert isinstance(model, VisionModel)
    return repairs(
        model,
        job.seed,
        train,
        val,
        test,
        mask_steps=setup.mask_steps,
        scored=setup.scored,
        draws=setup.draws,
    )


def fit(setup: Setup, job: Job, groups: list[dict[str, Any]], train: Pictures, loss: Loss) -> None:
    """AdamW, a tenth of the steps up and half a cosine down, mirrored pictures, bfloat16 on a GPU.
    The order of pictures is drawn by the job's seed."""
    device = torch.device(setup.device)
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY, fused=device.type == "cuda")
    draw, batch = torch.Generator().manual_seed(job.seed), min(setup.batch, len(train))
    each, epochs = len(train) // batch, max(1, round(setup.epochs * job.length))
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=draw)
        for number in range(each):
            step = epoch * each + number
            set_pace(optimizer.param_groups, pace(step, epochs * each, WARM_UP))
            rows = order[number * batch : (number + 1) * batch].to(device)
            pictures = train.take(rows).mirrored(
                (torch.rand(batch, generator=draw) < 0.5).to(device)
            )
            images = setup.frame.normalise(pictures.images.float() / 255)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                total = loss(pictures, images, step)
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], CLIP
            )
            optimizer.step()


@torch.no_grad()
def _measure_net(setup: Setup, net: IFAM, pictures: Pictures) -> Row:
    logits, shared, kept, empty = list[Tensor](), Overlap(), 0.0, 0
    with fast(setup.device):
        for images, part in _slices(setup, pictures):
            out = net(images, packed=packing(net))
            logits.append(out.logits)
            shared = shared + overlap(mask_pixels(out.mask, setup.frame.size), part.masks)
            kept, empty = (
                kept + float(out.mask.double().mean(dim=(1, 2)).sum()),
                empty + int(out.empty.sum()),
            )
    return {
        **measure(torch.cat(logits), pictures),
        "iou": shared.iou,
        "kept": kept / len(pictures),
        "empty": empty,
    }


def shown_places(labels: Tensor, places: Tensor) -> Tensor:
    """Some pictures of each group, spread over it; where there are enough, no photo twice."""
    found = []
    for species, place in GROUPS:
        rows = ((labels == species) & (places == place)).nonzero()[:, 0]
        found += [rows[(2 * number + place) * len(rows) // (2 * SHOWN)] for number in range(SHOWN)]
    return torch.stack(found)


def weights_of(setup: Setup, job: Job) -> Path:
    return (setup.folder / job.file).with_suffix(".safetensors")


def _new_net(setup: Setup, job: Job) -> IFAM:
    def make() -> IFAM:
        options: dict[str, Any] = {
            "stages": 1 if job.method == "pdisco" else 2,
            "freeze": "none" if job.whole else "stage1",
        }
        return IFAM(
            new_backbone(setup).requires_grad_(True),
            job.parts,
            SPECIES,
            preprocess=setup.frame,
            **options,
        )

    return _seeded(job.seed, make).to(setup.device).train()


def _groups(net: IFAM, job: Job) -> list[dict[str, Any]]:
    found = parameter_groups(
        net,
        job.rate,
        DECAY,
        prototype_factor=PROTOTYPE_RATE / job.rate,
        head_factor=HEADS_RATE / job.rate,
    )
    kept = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in found]
    return [group for group in kept if group["params"]]


def _with_head(module: Any) -> Any:
    module.reset_classifier(len(SPECIES))
    return module


def _seeded(seed: int, make: Callable[[], Any]) -> Any:
    """What `make` gives when chance starts from `seed`; the global random state is left as it
    was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _slices(setup: Setup, pictures: Pictures) -> Iterator[tuple[Tensor, Pictures]]:
    """Normalised images with what is known of them."""
    for start in range(0, len(pictures), _ROWS):
        part = pictures.take(slice(start, start + _ROWS))
        yield setup.frame.normalise(part.images.float() / 255), part


@torch.no_grad()
def _over(setup: Setup, pictures: Pictures, answer: Callable[[Tensor, Pictures], Tensor]) -> Tensor:
    """Logits [N, C] of all pictures."""
    with fast(setup.device):
        return torch.cat([answer(images, part) for images, part in _slices(setup, pictures)])


def _answers(setup: Setup, pictures: Pictures, model: nn.Module) -> Tensor:
    return _over(setup, pictures, lambda images, _: model(images))


def _right(setup: Setup, pictures: Pictures, model: nn.Module) -> float:
    return float(
        (_answers(setup, pictures, model).argmax(dim=1) == pictures.labels).double().mean()
    )


def _grid(net: IFAM, setup: Setup) -> int:
    return net.stage1.tower.parts.layout_at(setup.size, setup.size).grid[0]
