"""iFAM as a remedy, where it is asked for: a second transformer answers from the patches of parts
that the first one discovers (see `faithful`). It starts from the model's own backbone, learns from
plain pictures, and needs no group label here: its setting is the one given, or the best of some by
transplant-worst."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from seecause.faithful.config import set_pace
from seecause.faithful.losses import LossWeights, TrainingLosses, parameter_groups
from seecause.faithful.net import IFAM
from seecause.loading import wrap
from seecause.models.view import VisionModel
from seecause.repair._remedies import Lesson, Mended, remedy
from seecause.repair.parts import Judged

DECAY, CLIP, PROTOTYPE_RATE, HEADS_RATE = 0.05, 2.0, 3e-2, 1e-2
Setting = tuple[float, float, bool]  # background, total variation, whether stage 1 learns whole


@remedy("ifam", cost="about 200 forwards of each picture and setting", needs="labels")
def train_ifam(
    model: VisionModel,
    lesson: Lesson,
    *,
    parts: int = 4,
    epochs: int = 15,
    rate: float = 1e-4,
    batch: int = 64,
    settings: tuple[Setting, ...] = ((2.0, 1.0, True), (2.0, 0.3, True), (5.0, 0.3, True)),
) -> Mended:
    """A classifier that answers from discovered parts alone, the setting by transplant-worst."""
    best: tuple[float, Setting, VisionModel] | None = None
    tried = {}
    with lesson.progress("training iFAM", len(settings) * epochs) as advance:
        for setting in settings:
            view = _trained(model, lesson, setting, parts, epochs, rate, batch, advance)
            worst = Judged(lesson.choose, lesson.choose.logits(view)).transplant_worst
            tried[str(setting)] = round(worst, 4)
            if best is None or worst > best[0]:
                best = worst, setting, view
    assert best is not None
    done = f"iFAM with {parts} parts, trained for {epochs} epochs from the model's backbone."
    details = {"setting": list(best[1]), "transplant-worst by setting": tried}
    return Mended(best[2], done, details)


def _trained(
    model: VisionModel,
    lesson: Lesson,
    setting: Setting,
    parts: int,
    epochs: int,
    rate: float,
    batch: int,
    advance: Callable[[int], None],
) -> VisionModel:
    """AdamW, half a cosine down, bfloat16 on a GPU; chance starts from the lesson's seed."""
    background, variation, whole = setting
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lesson.seed)
        net = IFAM(
            copy.deepcopy(model.module).requires_grad_(True),
            parts,
            model.classes or model.n_classes,
            preprocess=model.preprocess,
            freeze="none" if whole else "stage1",
        )
    net = net.to(model.device).train()
    losses = TrainingLosses(net, LossWeights(background=background, total_variation=variation))
    factors = {"prototype_factor": PROTOTYPE_RATE / rate, "head_factor": HEADS_RATE / rate}
    groups = parameter_groups(net, rate, DECAY, **factors)
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    images, labels = lesson.learn.pictures.images, lesson.learn.labels
    draw, device = torch.Generator().manual_seed(lesson.seed), model.device
    step, steps = 0, epochs * -(-len(images) // batch)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=draw).split(batch):
            set_pace(optimizer.param_groups, 0.5 * (1 + math.cos(math.pi * step / steps)))
            rows = rows.to(images.device)
            turned = (torch.rand(len(rows), generator=draw) < 0.5).to(images.device)
            shown = torch.where(turned[:, None, None, None], images[rows].flip(-1), images[rows])
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                total = losses(shown, labels[rows], rows, lesson.seed, step)[0]
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            step += 1
        advance(1)
    view = wrap(net.eval(), name=f"iFAM of {model.name}")
    assert isinstance(view, VisionModel)
    return view
