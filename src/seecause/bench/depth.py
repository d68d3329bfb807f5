"""Where the class token looks, block by block: its attention to a patch of the object and to a
patch of the background.

    a_l(p)        attention of the class token to patch p in block l, mean over heads
    object_l      sum_p a_l(p) w(p) / sum_p w(p),   w(p) the share of patch p that the object
    covers; likewise for the background
A model that looks at the object has the first above the second; 1 / tokens is where both would be
if it looked everywhere alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

from seecause._files import write_atomic
from seecause.bench.plan import Store
from seecause.bench.work import Worker, read_samples
from seecause.data.batch import to_batch
from seecause.data.dataset import IGNORE, capabilities
from seecause.engine.attention import attention_probs
from seecause.engine.chunks import budget, fit, in_chunks
from seecause.models.view import VisionModel

FILE = "depth.safetensors"


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
    wanted = torch.stack(
        [(masks != 0) & counted, (masks == 0) & counted], dim=1
    ).double()  # [B, 2, H, W]
    share = F.adaptive_avg_pool2d(wanted, layout.grid).flatten(2).to(images.device)  # [B, 2, N]
    share = share / share.sum(dim=2, keepdim=True)

    def some(a: int, b: int) -> Tensor:
        rows = [
            probs[:, :, layout.class_index, layout.patches].mean(dim=1).double()
            for probs in attention_probs(model, images[a:b])
        ]
        return torch.stack(
            [(share[a:b] * row[:, None]).sum(dim=2) for row in rows[: model.n_layers]], dim=2
        )  # [b, 2, L]

    block = model.blocks[0]
    each = model.forward_bytes(layout) + 3 * block.heads * layout.tokens**2 * 4
    found = torch.cat(
        list(in_chunks(some, len(images), fit(len(images), each, images.device), what="images"))
    ).cpu()
    return Depth(found[:, 0], found[:, 1], 1 / layout.tokens)


def why_not(worker: Worker) -> str:
    """Why there can be no curve, or nothing."""
    if "masks" not in capabilities(worker.data):
        return f"{worker.data.name} has no masks"
    if not isinstance(worker.model, VisionModel) or worker.model.layout.class_index is None:
        return f"{worker.model.name} has no class token"
    if not worker.model.readout.read_prefix(worker.model.layout):
        return f"{worker.model.name} does not read its class token ({worker.model.readout_name})"
    return ""


def save_depth(store: Store, worker: Worker) -> None:
    """The curve of all pictures of a run, for its report; one forward each. Nothing is written
    where there can be none."""
    (store.folder / FILE).unlink(missing_ok=True)
    if why_not(worker):
        return
    assert isinstance(worker.model, VisionModel)
    found: list[Depth] = []
    bounds = sorted({(shard.start, shard.stop) for shard in worker.plan.shards})
    with budget(worker.plan.request.memory):
        for start, stop in bounds:
            samples, _ = read_samples(worker.data, start, stop)
            batch = to_batch(worker.model, list(samples.values())) if samples else None
            if batch is not None and batch.masks is not None:
                found.append(attention_by_depth(worker.model, batch.images, batch.masks))
    if found:
        joined = {
            name: torch.cat([getattr(part, name) for part in found])
            for name in ("on_object", "on_background")
        }
        write_atomic(
            store.folder / FILE,
            save({**joined, "uniform": torch.tensor(found[0].uniform, dtype=torch.float64)}),
        )


def read_depth(store: Store) -> Depth | None:
    """What `save_depth` wrote, if it did."""
    if not (store.folder / FILE).is_file():
        return None
    tensors = load_file(store.folder / FILE)
    return Depth(tensors["on_object"], tensors["on_background"], float(tensors["uniform"]))
