"""Which of CAAP's settings decide the result? One of them is changed at a time; a setting is a
method of the run like any other.

    blank    what the patches are put into
    select   how many neighbours move with a patch
    layers   the range of layers that are patched, from its first and to its last (the paper's
             cumulative sweep); its first has no effect on a model without special tokens, and is
             not swept there
    tail     what the patched tokens do after the last of them
    score    what is read off the logits: probability, log-probability (the same order of patches)
             or logit

The first setting is the default; every other is compared with it image by image. With `layers`
comes where the class token looks, block by block:

    a_l(p)     attention of the class token to patch p in block l, mean over heads
    object_l   sum_p a_l(p) w(p) / sum_p w(p),   w(p) the share of patch p that the object covers;
               likewise for the background

A model that looks at the object has the first above the second; 1 / tokens is where both would be
if it looked everywhere alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from seecause.attribution.caap import make_plan
from seecause.attribution.registry import find
from seecause.bench.evaluate import PreparedRun, read_samples
from seecause.bench.plan import Request, Store
from seecause.data.batch import to_batch
from seecause.data.dataset import IGNORE, capabilities
from seecause.engine.attention import attention_probs
from seecause.engine.blanks import Blank
from seecause.engine.chunks import budget, run_in_chunks
from seecause.engine.sweep import SweepPlan, Tail
from seecause.engine.token_sets import Select
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.files import write_atomic
from seecause.metrics import rank_correlation, standard_error
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.target import Score

STUDIES = {
    "blank": "Does the blank picture decide?",
    "select": "Do the neighbours decide?",
    "layers": "Do the patched layers decide?",
    "tail": "Does the tail decide?",
    "score": "Does the score decide?",
}
CHOICES = {"blank": ("white", Blank), "select": ("box1", Select), "score": ("prob", Score)}
MOST = 12  # points of a sweep over layers
DEPTH_FILE = "depth.safetensors"
Settings = dict[str, dict[str, Any]]  # options by name, the default first


@dataclass(frozen=True, eq=False)
class Agreement:
    """Spearman's correlation between the maps of every two settings, mean over images and its
    standard error, [S, S]."""

    names: tuple[str, ...]
    mean: Tensor
    error: Tensor
    images: int


def with_settings(request: Request, model: ImageModel) -> Request:
    """The request with one method for each setting of its study; a request without a study stays as
    it is."""
    if not request.study:
        return request
    (method, fixed), *_ = request.methods.items()
    if request.study not in find(method, model.architecture).options:
        raise NotDefined(
            f"ablate {request.study}",
            f"{method} on a model of architecture {model.architecture!r} has no such option",
            "Use blank or select",
        )
    if request.study in fixed:
        raise BadOption(
            f"option {request.study!r}",
            fixed[request.study],
            f"another option: {request.study} is what this study changes",
        )
    options = settings(request.study, model, fixed)
    return replace(
        request,
        methods={name: {**fixed, **own} for name, own in options.items()},
        called=dict.fromkeys(options, method),
    )


def settings(study: str, model: ImageModel, fixed: Mapping[str, Any]) -> Settings:
    """What is compared, on this model, with `fixed` options kept."""
    if study in CHOICES:
        default, kind = CHOICES[study]
        return _first(default, {name: {study: name} for name in get_args(kind)})
    if study not in STUDIES:
        raise UnknownName("ablation", study, STUDIES)
    assert isinstance(model, VisionModel)  # what has layers and tails
    registers = bool(fixed.get("propagate_registers", False))
    default = make_plan(
        model, model.layout, tail=fixed.get("tail"), layers=None, propagate_registers=registers
    )
    if study == "tail":
        reads_class = bool(model.readout.read_prefix(model.layout))
        return _first(
            default.tail,
            {name: {"tail": name} for name in get_args(Tail) if name != "blank" or reads_class},
        )
    return sweep_layers(model.n_layers, default)


def sweep_layers(depth: int, default: SweepPlan) -> Settings:
    """`from l`: layers l to the default's last, with its tail; `to l`: the embedding to l, with the
    same tail, or `patched` where that is `source`, for which the last layer has no effect. Only
    special tokens are computed while layers are patched: without any, the first layer has no
    effect.
    """
    step, to_end = math.ceil(depth / MOST), default.tail == "source"
    starts = range(0, depth if to_end else default.stop + 1, step) if default.live else ()
    stops = sorted({*range(0, depth, step), depth, *(() if to_end else (default.stop,))})
    begun = {
        f"from {start}": {"tail": default.tail, "layers": (start, None if to_end else default.stop)}
        for start in starts
    }
    ended = {
        f"to {stop}": {"tail": "patched" if to_end else default.tail, "layers": (0, stop)}
        for stop in stops
    }
    return begun | ended if begun else _first(f"to {default.stop}", ended)


def agreement_of(maps: Mapping[str, Mapping[int, Tensor]]) -> Agreement:
    """How alike maps [gh, gw] by setting and sample are, over the images that all settings have."""
    names = tuple(maps)
    shared = sorted(set.intersection(*(set(by_sample) for by_sample in maps.values())))
    mean = torch.eye(len(names), dtype=torch.float64)
    error = torch.zeros_like(mean)
    if not shared:
        return Agreement(names, mean.fill_(torch.nan), error.fill_(torch.nan), 0)
    stacked = [torch.stack([maps[name][index] for index in shared]) for name in names]
    for i in range(len(names)):
        for j in range(i):
            alike = rank_correlation(stacked[i], stacked[j])
            alike = alike[~alike.isnan()]  # a flat map has no ranks
            mean[i, j] = mean[j, i] = alike.mean()
            error[i, j] = error[j, i] = standard_error(alike)
    return Agreement(names, mean, error, len(shared))


def _first(name: str, options: Settings) -> Settings:
    """The same with `name` in front."""
    return {name: options[name], **options}


@dataclass(frozen=True, eq=False)
class Depth:
    """Attention to one patch of the object and of the background, [B, L] float64; NaN for an image
    without one of them."""

    on_object: Tensor
    on_background: Tensor
    uniform: float  # 1 / tokens


@torch.no_grad()
def attention_by_depth(model: VisionModel, images: Tensor, masks: Tensor) -> Depth:
    """For a model with a class token; masks [B, H, W] as in `Batch`."""
    layout = model.check(images)
    assert layout.class_index is not None
    counted = masks != IGNORE
    wanted = torch.stack([(masks != 0) & counted, (masks == 0) & counted], dim=1)  # [B, 2, H, W]
    # [B, 2, N]
    share = F.adaptive_avg_pool2d(wanted.double(), layout.grid).flatten(2).to(images.device)
    share = share / share.sum(dim=2, keepdim=True)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = [
            probs[:, :, layout.class_index, layout.patches].mean(dim=1).double()
            for probs in attention_probs(model, images[a:b])
        ]
        return torch.stack(
            [(share[a:b] * row[:, None]).sum(dim=2) for row in rows[: model.n_layers]], dim=2
        )  # [b, 2, L]

    each = model.forward_bytes(layout) + 3 * model.n_heads * layout.tokens**2 * 4
    attention = run_in_chunks(run_chunk, len(images), each, images.device, what="images").cpu()
    return Depth(attention[:, 0], attention[:, 1], 1 / layout.tokens)


def why_no_depth(prepared: PreparedRun) -> str:
    """Why there can be no curve, or nothing."""
    if "masks" not in capabilities(prepared.data):
        return f"{prepared.data.name} has no masks"
    if not isinstance(prepared.model, VisionModel) or prepared.model.layout.class_index is None:
        return f"{prepared.model.name} has no class token"
    if not prepared.model.readout.read_prefix(prepared.model.layout):
        return (
            f"{prepared.model.name} does not read its class token ({prepared.model.readout_name})"
        )
    return ""


def save_depth(store: Store, prepared: PreparedRun) -> None:
    """The curve of all pictures of a run, for its report; one forward each. Nothing is written
    where there can be none."""
    (store.folder / DEPTH_FILE).unlink(missing_ok=True)
    if why_no_depth(prepared):
        return
    assert isinstance(prepared.model, VisionModel)
    depths: list[Depth] = []
    bounds = sorted({(shard.start, shard.stop) for shard in prepared.plan.shards})
    with budget(prepared.plan.request.memory):
        for start, stop in bounds:
            samples, _ = read_samples(prepared.data, start, stop, frame=prepared.model.preprocess)
            batch = to_batch(prepared.model, list(samples.values())) if samples else None
            if batch is not None and batch.masks is not None:
                depths.append(attention_by_depth(prepared.model, batch.images, batch.masks))
    if depths:
        names = ("on_object", "on_background")
        joined = {name: torch.cat([getattr(depth, name) for depth in depths]) for name in names}
        joined["uniform"] = torch.tensor(depths[0].uniform, dtype=torch.float64)
        write_atomic(store.folder / DEPTH_FILE, save(joined))


def read_depth(store: Store) -> Depth | None:
    """What `save_depth` wrote, if it did."""
    if not (store.folder / DEPTH_FILE).is_file():
        return None
    tensors = load((store.folder / DEPTH_FILE).read_bytes())
    return Depth(tensors["on_object"], tensors["on_background"], float(tensors["uniform"]))
