"""What can be changed at test time, because the mask decides what stage 2 sees (arXiv 2506.08915,
section 3.4).

    parts      tokens of a part that misleads become background (found by leaving each part out in
    turn)
    tokens     a token further from its prototype than the fraction q of training tokens is not
    trusted, and becomes background

For PDiscoFormer (`stages=1`) a part taken out has no vote, and an untrusted token is background in
its maps. `by="dot"` reproduces the released code, which compares dot products and may move a token
to another part instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.faithful.masks import select_without
from seecause.faithful.net import IFAM
from seecause.faithful.output import By, Intervention, Thresholds, as_parts
from seecause.faithful.packed import has_kernel
from seecause.faithful.parts import mean_vote
from seecause.metrics.calibration import auroc
from seecause.metrics.groups import GroupAccuracy, group_accuracy
from seecause.models.base import ImageModel


@torch.no_grad()
def calibrate(
    net: IFAM | ImageModel,
    images: Tensor | Iterable[Tensor],
    quantiles: float | Sequence[float],
    *,
    by: By = "distance",
) -> list[Thresholds]:
    """Thresholds per part such that the fraction q of its tokens passes, from normalised training
    images (a batch, or batches of them).

    They are kept in `net.thresholds` and saved with it. All values of all tokens are held on the
    CPU: 4 bytes a token.
    """
    net = network(net)
    wanted = [quantiles] if isinstance(quantiles, float | int) else list(quantiles)
    if by not in get_args(By) or not wanted or not all(0 < q <= 1 for q in wanted):
        raise BadOption(
            "quantiles", (wanted, by), f"fractions in (0, 1], by {' or '.join(get_args(By))}"
        )
    values: list[list[Tensor]] = [[] for _ in range(net.parts)]
    pictures = 0
    with evaluating(net), _set(net, Intervention()):
        for batch in [images] if isinstance(images, Tensor) else images:
            batch = batch.to(net.stage1.prototypes)
            features, noise = net.stage1.tower.features(batch), net._noise(batch, None)
            with torch.autocast(
                batch.device.type, enabled=False
            ):  # as the network does: thresholds are compared with these
                assigned, maps = net.assign(features, noise)
            winner, pictures = maps.argmax(dim=1), pictures + len(batch)
            for part, found in enumerate(values):
                found.append(
                    (assigned.distances if by == "distance" else assigned.dots)[:, part][
                        winner == part
                    ].cpu()
                )
    known = [torch.cat(found).numpy() if found else np.empty(0) for found in values]
    made = [_thresholds(q, by, known, pictures) for q in wanted]
    net.thresholds.update({(found.quantile, by): found for found in made})
    return made


def _thresholds(q: float, by: By, known: list[np.ndarray], pictures: int) -> Thresholds:
    level, unseen = (q, np.inf) if by == "distance" else (1 - q, -np.inf)
    values = tuple(
        float(np.quantile(found, level)) if len(found) else float(unseen) for found in known
    )
    return Thresholds(float(q), by, values, tuple(len(found) for found in known), pictures)


@contextmanager
def intervene(
    net: IFAM | ImageModel,
    *,
    drop_parts: Sequence[int] = (),
    quantile: float | None = None,
    by: By = "distance",
) -> Iterator[IFAM]:
    """Inside the block, parts are dropped and tokens beyond the calibrated quantile rejected: in
    the network and in any view of it."""
    net = network(net)
    wanted = Intervention(as_parts(drop_parts), quantile, by)
    if wanted.drop_parts and not 0 <= wanted.drop_parts[0] <= wanted.drop_parts[-1] < net.parts:
        raise BadOption("drop_parts", list(drop_parts), f"parts 0-{net.parts - 1}")
    if quantile is not None and (quantile, by) not in net.thresholds:
        known = ", ".join(f"{q} by {what}" for q, what in sorted(net.thresholds)) or "none"
        raise BadOption(
            "quantile",
            quantile,
            f"one that is calibrated by {by} (known: {known}); call calibrate(net, training_images,"
            f" {quantile}, by={by!r})",
        )
    with _set(net, wanted):
        yield net


@contextmanager
def _set(net: IFAM, wanted: Intervention) -> Iterator[None]:
    before = net.intervention
    _apply(net, wanted)
    try:
        yield
    finally:
        _apply(net, before)


@torch.no_grad()
def _apply(net: IFAM, wanted: Intervention) -> None:
    """Buffers are written in place, also with the same values: views see by their versions that
    kept runs are stale."""
    net.intervention = wanted
    net.removed.copy_(torch.tensor([part in wanted.drop_parts for part in range(net.parts)]))
    limits = (
        (0.0,) * net.parts
        if wanted.quantile is None
        else net.thresholds[wanted.quantile, wanted.by].values
    )
    net.limits.copy_(torch.tensor(limits, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The answers with everything in place, and without each part in turn."""

    logits: Tensor  # [n, C]
    without: Tensor  # [K, n, C]
    labels: Tensor  # [n]
    groups: Tensor  # [n] or [n, g]

    def before(self) -> GroupAccuracy:
        return self._accuracy(self.logits)

    def after(self, part: int) -> GroupAccuracy:
        return self._accuracy(self.without[part])

    def table(self) -> list[dict[str, float]]:
        """One row per part: accuracy, worst-group accuracy and AUC (of two classes) without it, and
        what that changes."""
        base, each = self.numbers(self.logits), [self.numbers(logits) for logits in self.without]
        return [
            {
                "part": part,
                **row,
                **{f"{name}_gain": value - base[name] for name, value in row.items()},
            }
            for part, row in enumerate(each)
        ]

    def numbers(self, logits: Tensor) -> dict[str, float]:
        """`average` and `worst` of answers [n, C]; `auc` where there are two classes, and pictures
        of both."""
        found = self._accuracy(logits)
        numbers = {"average": found.average, "worst": found.worst}
        return (
            numbers
            if logits.shape[1] != 2 or len(self.labels.unique()) != 2
            else {**numbers, "auc": auroc(logits, self.labels)}
        )

    def _accuracy(self, logits: Tensor) -> GroupAccuracy:
        return group_accuracy(logits.argmax(dim=-1) == self.labels, self.groups)


@torch.no_grad()
def leave_one_out(
    net: IFAM | ImageModel,
    batches: Iterable[Sequence[Tensor]],
    *,
    drop_parts: Sequence[int] = (),
    quantile: float | None = None,
    by: By = "distance",
) -> LeaveOneOut:
    """Batches of (images, labels) or (images, labels, groups) of a validation set; parts in
    `drop_parts` are out throughout.

    Stage 1 runs once. Groups are the classes where none are given. Choose parts on a validation
    set, never on the test set.
    """
    net = network(net)
    rows: list[tuple[Tensor, ...]] = []
    with evaluating(net), intervene(net, drop_parts=drop_parts, quantile=quantile, by=by):
        fixed = net.removed.clone()
        for images, labels, *groups in batches:
            images = images.to(net.stage1.prototypes)
            _, maps, _, votes = net.first(
                net.stage1.tower.features(images), net._noise(images, None)
            )
            answers = [
                _without(
                    net,
                    images,
                    maps,
                    votes,
                    fixed | (torch.arange(net.parts, device=fixed.device) == k),
                )
                for k in range(net.parts)
            ]
            rows.append(
                (
                    _without(net, images, maps, votes, fixed).cpu(),
                    torch.stack(answers).cpu(),
                    labels.cpu(),
                    (groups or [labels])[0].cpu(),
                )
            )
    if not rows:
        raise BadOption("batches", "nothing", "at least one batch of images and labels")
    first, each, truth, member = zip(*rows, strict=True)
    return LeaveOneOut(
        torch.cat(first), torch.cat(each, dim=1), torch.cat(truth), torch.cat(member)
    )


def _without(net: IFAM, images: Tensor, maps: Tensor, votes: Tensor, removed: Tensor) -> Tensor:
    """Answers [B, C] with parts removed [K] bool, from maps [B, K + 1, N] and votes that are
    known."""
    return (
        mean_vote(votes, removed)
        if net.stage2 is None
        else net.answer(images, select_without(maps, removed), packing(net))
    )


def packing(net: IFAM) -> bool | None:
    """`packed` for a run as it is now: False where a GPU has no kernel for packed rows and all
    tokens are faster, else the network's own choice."""
    where = net.stage1.prototypes
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else where.dtype
    return None if where.device.type != "cuda" or has_kernel(where.device, dtype) else False


def network(model: IFAM | ImageModel) -> IFAM:
    """The network itself, or that of a view."""
    net = model.module if isinstance(model, ImageModel) else model
    if not isinstance(net, IFAM):
        raise BadOption("net", type(net).__name__, "an IFAM network, or a view of one")
    return net


@contextmanager
def evaluating(net: IFAM) -> Iterator[None]:
    """Eval mode inside the block."""
    before = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(before)
