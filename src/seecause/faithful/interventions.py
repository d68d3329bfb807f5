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

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from seecause.data.dataset import Dataset
from seecause.errors import BadOption
from seecause.faithful.net import IFAM, By, Intervention, Thresholds
from seecause.faithful.parts import mean_vote, select_without
from seecause.faithful.stages import has_kernel
from seecause.metrics.accuracy import GroupAccuracy, auroc, group_accuracy
from seecause.models.base import ImageModel

log = logging.getLogger(__name__)
Criterion = Literal["worst", "auc"]


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
    shares = [quantiles] if isinstance(quantiles, float | int) else list(quantiles)
    if by not in get_args(By) or not shares or not all(0 < q <= 1 for q in shares):
        expected = f"fractions in (0, 1], by {' or '.join(get_args(By))}"
        raise BadOption("quantiles", (shares, by), expected)
    values: list[list[Tensor]] = [[] for _ in range(net.parts)]
    pictures = 0
    with evaluating(net), _set(net, Intervention()):
        for batch in [images] if isinstance(images, Tensor) else images:
            assigned, maps, _ = net.assign_images(batch.to(net.stage1.prototypes))
            scores = assigned.distances if by == "distance" else assigned.dots
            winner, pictures = maps.argmax(dim=1), pictures + len(batch)
            for part, collected in enumerate(values):
                collected.append(scores[:, part][winner == part].cpu())
    if not pictures:
        raise BadOption("images", None, "at least one batch of training images")
    tokens = [torch.cat(collected).numpy() for collected in values]
    thresholds = [_thresholds(q, by, tokens, pictures) for q in shares]
    net.thresholds.update({(each.quantile, by): each for each in thresholds})
    return thresholds


def _thresholds(q: float, by: By, tokens: list[np.ndarray], pictures: int) -> Thresholds:
    """From the values of every part's tokens."""
    level, unseen = (q, np.inf) if by == "distance" else (1 - q, -np.inf)
    values = (np.quantile(scores, level) if len(scores) else unseen for scores in tokens)
    counts = tuple(len(scores) for scores in tokens)
    return Thresholds(float(q), by, tuple(map(float, values)), counts, pictures)


@contextmanager
def intervene(
    net: IFAM | ImageModel,
    *,
    drop_parts: Sequence[int] = (),
    quantile: float | None = None,
    by: By = "distance",
) -> Iterator[IFAM]:
    """Inside the block, parts are dropped and tokens beyond the calibrated quantile rejected: in
    the network and in any view of it, in eval mode (training is left alone)."""
    net = network(net)
    if net.training:
        log.warning("this network is in training, where interventions do nothing: net.eval()")
    dropped = tuple(sorted({int(part) for part in drop_parts}))
    if dropped and not 0 <= dropped[0] <= dropped[-1] < net.parts:
        raise BadOption("drop_parts", list(drop_parts), f"parts 0-{net.parts - 1}")
    if quantile is not None and (quantile, by) not in net.thresholds:
        listed = ", ".join(f"{q} by {what}" for q, what in sorted(net.thresholds)) or "none"
        remedy = f"call calibrate(net, training_images, {quantile}, by={by!r})"
        expected = f"one that is calibrated by {by} (known: {listed}); {remedy}"
        raise BadOption("quantile", quantile, expected)
    with _set(net, Intervention(dropped, quantile, by)):
        yield net


@contextmanager
def _set(net: IFAM, intervention: Intervention) -> Iterator[None]:
    before = net.intervention
    _apply(net, intervention)
    try:
        yield
    finally:
        _apply(net, before)


@torch.no_grad()
def _apply(net: IFAM, intervention: Intervention) -> None:
    """Buffers are written in place, also with the same values: views see by their versions that
    kept runs are stale."""
    net.intervention = intervention
    dropped, limits = intervention.drop_parts, (0.0,) * net.parts
    if intervention.quantile is not None:
        limits = net.thresholds[intervention.quantile, intervention.by].values
    net.removed.copy_(torch.tensor([part in dropped for part in range(net.parts)]))
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
        base, table = self.numbers(self.logits), []
        for part, logits in enumerate(self.without):
            row = self.numbers(logits)
            gains = {f"{name}_gain": value - base[name] for name, value in row.items()}
            table.append({"part": part, **row, **gains})
        return table

    def numbers(self, logits: Tensor) -> dict[str, float]:
        """`average` and `worst` of answers [n, C]; `auc` where there are two classes, and pictures
        of both."""
        accuracy = self._accuracy(logits)
        numbers = {"average": accuracy.average, "worst": accuracy.worst}
        if logits.shape[1] == 2 and len(self.labels.unique()) == 2:
            numbers["auc"] = auroc(logits, self.labels)
        return numbers

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

    Stage 1 runs once. Groups are the classes where some batch has none. Choose parts on a
    validation set, never on the test set.
    """
    net = network(net)
    rows, members = list[tuple[Tensor, Tensor, Tensor]](), list[Tensor]()
    with evaluating(net), intervene(net, drop_parts=drop_parts, quantile=quantile, by=by):
        fixed, parts = net.removed.clone(), torch.arange(net.parts, device=net.removed.device)
        for images, labels, *groups in batches:
            images = images.to(net.stage1.prototypes)
            features, noise = net.stage1.tower.features(images), net.noise_for(images)
            _, maps, _, votes = net.discover(features, noise)
            plain = _without(net, images, maps, votes, fixed)
            answers = [
                _without(net, images, maps, votes, fixed | (parts == part))
                for part in range(net.parts)
            ]
            rows.append((plain.cpu(), torch.stack(answers).cpu(), labels.cpu()))
            members += [group.cpu() for group in groups[:1]]
    if not rows:
        raise BadOption("batches", None, "at least one batch of images and labels")
    plain, without, truth = zip(*rows, strict=True)
    labels = torch.cat(truth)
    every = torch.cat(members) if len(members) == len(rows) else labels
    return LeaveOneOut(torch.cat(plain), torch.cat(without, dim=1), labels, every)


def _without(net: IFAM, images: Tensor, maps: Tensor, votes: Tensor, removed: Tensor) -> Tensor:
    """Answers [B, C] with parts removed [K] bool, from maps [B, K + 1, N] and votes that are
    known."""
    if net.stage2 is None:
        return mean_vote(votes, removed)
    return net.answer(images, select_without(maps, removed), packing(net))


@dataclass(frozen=True)
class Trial:
    """One intervention and what it does to validation pictures."""

    drop: tuple[int, ...]
    quantile: float | None
    average: float
    worst: float
    auc: float | None = None  # of two classes that both occur
    by: By = "distance"  # what tokens are rejected by


def try_interventions(
    net: IFAM,
    batches: Callable[[], Iterable[Sequence[Tensor]]],
    quantiles: Sequence[float] = (),
    *,
    by: By = "distance",
) -> list[Trial]:
    """Nothing, every part left out in turn, every calibrated quantile, and both together; `batches`
    as `leave_one_out` takes them."""
    trials = []
    for quantile in (None, *quantiles):
        answers = leave_one_out(net, batches(), quantile=quantile, by=by)
        trials.append(Trial((), quantile, **answers.numbers(answers.logits), by=by))
        for part, logits in enumerate(answers.without):
            trials.append(Trial((part,), quantile, **answers.numbers(logits), by=by))
    return trials


def sensible_criterion(trials: Sequence[Trial], data: Dataset) -> Criterion:
    """AUC for two classes without groups, such as SIIM's, where an accuracy depends on where the
    line is drawn; else the worst group."""
    has_auc = all(trial.auc is not None for trial in trials)
    return "auc" if has_auc and data[0].group is None else "worst"


def best_of(trials: Sequence[Trial], criterion: Criterion = "worst") -> Trial:
    """By worst-group accuracy or AUC, then by average; the first of equals, so that nothing is
    changed without a gain."""
    if criterion == "auc" and any(trial.auc is None for trial in trials):
        expected = "worst: AUC needs two classes, and validation pictures of both"
        raise BadOption("choose", criterion, expected)
    return max(trials, key=lambda trial: (getattr(trial, criterion), trial.average))


def packing(net: IFAM) -> bool | None:
    """`packed` for a run as it is now: False where a GPU has no kernel for packed rows and all
    tokens are faster, else the network's own choice."""
    device, dtype = net.stage1.prototypes.device, net.stage1.prototypes.dtype
    if device.type != "cuda":
        return None
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    return None if has_kernel(device, dtype) else False


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
