"""Test-time interventions on the mask, which decides what stage 2 reads (arXiv 2506.08915, section
3.4).

    parts      tokens of a misleading part become background; such a part is found by leaving out
               each in turn
    tokens     a token that is further from its prototype than the fraction q of training tokens is
               not trusted, and becomes background

With PDiscoFormer (`stages=1`) a dropped part has no vote, and an untrusted token is
background in the maps. `by="dot"` reproduces the released code, which compares dot products and may
move a token to another part instead.

Before a network is viewed, changed or evaluated for the first time, it proves that stage 2 reads
nothing of hidden patches, and that a dropped part is one whose patches are hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seecause.engine.canary import Proof, as_computed, once, same_bits, used_versions
from seecause.errors import BadOption, EditLost
from seecause.faithful.net import IFAM, By, Intervention, Thresholds
from seecause.faithful.parts import mean_vote, select_without
from seecause.metrics.statistics import auroc, group_accuracy
from seecause.models.base import Contents, ImageModel, eval_mode
from seecause.options import Share, checked

log = logging.getLogger(__name__)
# (images, labels, groups); groups may be None or missing, further items are ignored
Batches = Iterable[Sequence[Any]]


@checked
@torch.no_grad()
def calibrate(
    net: IFAM | ImageModel,
    images: Tensor | Iterable[Tensor],
    quantiles: Share | Sequence[Share],
    *,
    by: By = "distance",
) -> list[Thresholds]:
    """Find thresholds of each part such that a fraction of its training tokens passes.

    Thresholds are kept in `net.thresholds` and saved with the network. The values of all tokens are
    held on the CPU: 12 bytes a token.

    Args:
        net: An iFAM network, or a view of one.
        images: Normalised training images, as one batch or several.
        quantiles: The fractions of tokens that pass, such as 0.99.
        by: What is compared: the distance to the prototype (the paper), or the dot product with it
            (the released code).

    Returns:
        The thresholds of each quantile.

    Example:
        >>> import torch, seecause as sc
        >>> model = sc.load("builtin:critters-ifam")
        >>> thresholds = sc.faithful.calibrate(model, torch.zeros(2, 3, 96, 96), 0.9)
        >>> thresholds[0].quantile, thresholds[0].images
        (0.9, 2)
    """
    net = network(net)
    shares = [quantiles] if isinstance(quantiles, float | int) else list(quantiles)
    values, winners, count = list[Tensor](), list[Tensor](), 0
    with evaluating(net), _applied(net, Intervention()):
        for batch in [images] if isinstance(images, Tensor) else images:
            assigned, maps, _ = net.assign_images(batch.to(net.stage1.prototypes))
            scores = assigned.distances if by == "distance" else assigned.dots
            winner = maps.argmax(dim=1, keepdim=True)
            values.append(scores.gather(1, winner).flatten().cpu())
            winners.append(winner.flatten().cpu())
            count += len(batch)
    if not count:  # infinite thresholds would reject nothing
        raise BadOption("images", None, "at least one batch of training images")
    every, part_of = torch.cat(values).numpy(), torch.cat(winners).numpy()
    tokens = [every[part_of == part] for part in range(net.parts)]
    for share in shares:
        limits = tuple(_threshold(share, by, scores) for scores in tokens)
        net.thresholds[share, by] = Thresholds(float(share), by, limits, count)
    return [net.thresholds[share, by] for share in shares]


def _threshold(q: float, by: By, scores: np.ndarray) -> float:
    """The threshold from the values of a part's tokens; one that rejects nothing if there are
    none."""
    level, unseen = (q, np.inf) if by == "distance" else (1 - q, -np.inf)
    return float(np.quantile(scores, level)) if len(scores) else unseen


@contextmanager
def intervene(
    net: IFAM | ImageModel,
    *,
    drop_parts: Sequence[int] = (),
    quantile: float | None = None,
    by: By = "distance",
) -> Iterator[IFAM]:
    """Take parts out of the mask, or reject untrusted tokens, inside the block.

    The intervention holds in the network and in all views of it, in eval mode.

    Args:
        net: An iFAM network, or a view of one.
        drop_parts: Numbers of the parts to take out.
        quantile: Reject tokens beyond this calibrated quantile.
        by: What `calibrate` compared.

    Returns:
        A context manager that gives the network.

    Example:
        >>> import torch, seecause as sc
        >>> model = sc.load("builtin:critters-ifam")
        >>> with sc.faithful.intervene(model, drop_parts=[1], quantile=0.97) as net:
        ...     print(net(torch.zeros(1, 3, 96, 96)).logits.shape)
        torch.Size([1, 8])
    """
    net = network(net)
    if net.training:
        log.warning("this network is in training mode, where interventions have no effect")
    dropped = tuple(sorted({int(part) for part in drop_parts}))
    if (dropped or quantile is not None) and net.options.selects != "parts":
        raise BadOption("net", f"selects={net.options.selects!r}", "a network with parts")
    if dropped and not 0 <= dropped[0] <= dropped[-1] < net.parts:
        raise BadOption("drop_parts", list(drop_parts), f"parts 0-{net.parts - 1}")
    if quantile is not None and (quantile, by) not in net.thresholds:
        known = ", ".join(f"{q} by {what}" for q, what in sorted(net.thresholds)) or "none"
        call = f"call calibrate(net, training_images, {quantile}, by={by!r})"
        raise BadOption("quantile", quantile, f"a calibrated quantile (known: {known}); {call}")
    prove(net)
    with _applied(net, Intervention(dropped, quantile, by)):
        yield net


@contextmanager
def _applied(net: IFAM, intervention: Intervention) -> Iterator[None]:
    before = net.intervention
    _apply(net, intervention)
    try:
        yield
    finally:
        _apply(net, before)


@torch.no_grad()
def _apply(net: IFAM, intervention: Intervention) -> None:
    """Buffers are written in place, also with equal values, because views detect stale caches by
    tensor versions."""
    net.intervention = intervention
    limits = (0.0,) * net.parts
    if intervention.quantile is not None:
        limits = net.thresholds[intervention.quantile, intervention.by].values
    dropped = [part in intervention.drop_parts for part in range(net.parts)]
    net.removed.copy_(torch.tensor(dropped))
    net.limits.copy_(torch.tensor(limits, dtype=torch.float64))


def prove(net: IFAM) -> list[Proof]:
    """The proofs that what is dropped, or hidden from stage 2, has no effect. The soft mask of an
    ablation hides nothing."""
    if net.options.gradient == "soft" or net.options.selects != "parts":
        return []
    found = [once(net.graphs, "dropped parts", partial(_prove, net, _dropped))]
    if net.stage2 is not None:
        found.append(once(net.graphs, "hidden patches", partial(_prove, net, _hidden)))
    return found


@torch.no_grad()
def _prove(net: IFAM, check: Callable[[IFAM, str, Tensor], Proof]) -> Proof:
    parts, generator = net.stage1.tower.parts, torch.Generator().manual_seed(0)
    size = parts.size or [4 * side for side in parts.patch]
    noise = torch.randn(2, 3, *size, generator=generator).to(net.stage1.prototypes)
    with eval_mode(Contents([net]), net.device), _applied(net, Intervention()):
        return check(net, f"iFAM on {parts.family}", noise)


def _dropped(net: IFAM, name: str, noise: Tensor) -> Proof:
    """The largest part dropped, against a mask without its patches, or a mean without its vote."""
    noise = noise[:1]
    out = net(noise)
    winner = out.maps.argmax(dim=1)  # [1, gh, gw]
    part = int(winner.flatten().bincount(minlength=net.parts + 1)[:-1].argmax())
    one = torch.arange(net.parts, device=net.device) == part
    plain, expected = out.logits, mean_vote(out.part_logits, one)
    if net.stage2 is not None:
        plain, expected = (
            net(noise, mask=mask & (winner < net.parts)).logits
            for mask in (winner == winner, winner != part)
        )
    with _applied(net, Intervention((part,))):
        edited = net(noise).logits
    compared = f"part {part} dropped, against a run without it"
    return as_computed("dropped parts", name, plain, edited, expected, compared)


def _hidden(net: IFAM, name: str, noise: Tensor) -> Proof:
    """Other pixels in every second column of patches, which is hidden, and in the rest."""
    here, there = noise.split(1)
    rows, columns = net.stage1.tower.layout(here).grid
    mask = (torch.arange(columns, device=here.device) % 2 == 0).expand(1, rows, columns)
    pixels = mask[0, 0].repeat_interleave(net.stage1.tower.parts.patch[1])
    images = here, here.where(pixels, there), there.where(pixels, here)
    for packed in (False, None):
        plain, hidden, shown = (net(each, mask=mask, packed=packed).logits for each in images)
        same_bits("hidden patches", name, hidden, plain)
    if torch.equal(shown, plain):
        reason = "patches that are not hidden have no effect either"
        raise EditLost("hidden patches", name, reason, used_versions())
    compared = f"other pixels in {int((~mask).sum())} hidden patches, and in the others"
    expected = net(images[2], mask=mask, packed=False).logits
    return as_computed("hidden patches", name, plain, shown, expected, compared)


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Logits with all parts, and without each part in turn."""

    logits: Tensor  # [n, C]
    without: Tensor  # [K, n, C]
    labels: Tensor  # [n]
    groups: Tensor  # [n] or [n, g]

    def numbers(self, logits: Tensor) -> dict[str, float]:
        """`average` and `worst` accuracy of logits [n, C], and `auc` where there are two classes
        and images of both."""
        accuracy = group_accuracy(logits.argmax(dim=-1) == self.labels, self.groups)
        numbers = {"average": accuracy.average, "worst": accuracy.worst}
        if logits.shape[1] == 2 and len(self.labels.unique()) == 2:
            numbers["auc"] = auroc(logits, self.labels)
        return numbers


@torch.no_grad()
def leave_one_out(
    net: IFAM | ImageModel,
    batches: Batches,
) -> LeaveOneOut:
    """Predict without each part in turn, under the current intervention; stage 1 runs once.

    Choose parts on a validation set, never on the test set.

    Args:
        net: An iFAM network, or a view of one.
        batches: Batches of (images, labels) or (images, labels, groups). Where some batch has no
            groups, the classes are the groups.

    Returns:
        Logits with all other parts and without each, and their accuracies by `numbers`.

    Example:
        >>> import torch, seecause as sc
        >>> model = sc.load("builtin:critters-ifam")
        >>> batch = (torch.zeros(2, 3, 96, 96), torch.tensor([0, 1]))
        >>> sc.faithful.leave_one_out(model, [batch]).without.shape
        torch.Size([4, 2, 8])
    """
    net = network(net)
    logits, labels, groups = list[Tensor](), list[Tensor](), list[Tensor]()
    with evaluating(net):
        each_part = net.removed | torch.eye(net.parts, dtype=torch.bool, device=net.device)
        for images, truth, *group in batches:
            images = images.to(net.stage1.prototypes)
            features, noise = net.stage1.tower.features(images), net.noise_for(images)
            _, maps, _, votes = net.discover(features, noise)
            runs = [_without(net, images, maps, votes, gone) for gone in (net.removed, *each_part)]
            logits.append(torch.stack(runs).cpu())  # [1 + K, B, C]
            labels.append(truth.cpu())
            groups += [each.cpu() for each in group[:1] if each is not None]
    plain, *without = torch.cat(logits, dim=1)
    every = torch.cat(groups if len(groups) == len(labels) else labels)
    return LeaveOneOut(plain, torch.stack(without), torch.cat(labels), every)


def _without(net: IFAM, images: Tensor, maps: Tensor, votes: Tensor, removed: Tensor) -> Tensor:
    """Logits [B, C] without the removed parts [K] (bool), from maps [B, K + 1, N] and votes."""
    if net.stage2 is None:
        return mean_vote(votes, removed)
    return net.predict(images, select_without(maps, removed), net._packs())


@dataclass(frozen=True)
class Trial:
    """An intervention and its accuracy on validation images."""

    intervention: Intervention
    average: float
    worst: float
    auc: float | None = None  # of two classes that both occur


def try_interventions(
    net: IFAM, batches: Callable[[], Batches], quantiles: Sequence[float] = (), *, by: By
) -> list[Trial]:
    """No intervention, each part dropped in turn, each calibrated quantile, and both together;
    `batches` as `leave_one_out` takes them."""
    trials = []
    for quantile in (None, *quantiles):
        with intervene(net, quantile=quantile, by=by):
            result = leave_one_out(net, batches())
        every = [((), result.logits), *(((k,), each) for k, each in enumerate(result.without))]
        for dropped, logits in every:
            change = Intervention(dropped, quantile, by)
            trials.append(Trial(change, **result.numbers(logits)))
    return trials


def best_of(trials: Sequence[Trial], *, by: str = "worst") -> Trial:
    """The best by worst-group accuracy ("worst") or by "auc", then by average accuracy; the first
    of equals, so that nothing is changed without a gain."""
    return max(trials, key=lambda trial: (getattr(trial, by), trial.average))


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
