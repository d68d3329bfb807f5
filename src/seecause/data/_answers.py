"""What a model answers to a dataset, and the photos it answers right."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.data.batch import to_batch
from seecause.data.dataset import Dataset
from seecause.engine.chunks import batched, fit
from seecause.errors import BadOption, NothingRight
from seecause.models._settled import settles
from seecause.models.base import ImageModel

log = logging.getLogger(__name__)

_READ = 64  # photos held at once

Group = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Answers:
    """Of every sample, in the order of the dataset, on the CPU."""

    logits: Tensor  # [N, C] float32, or float64 of such a model
    labels: Tensor  # [N] int64
    groups: tuple[Group | None, ...]
    ids: tuple[str, ...]

    @property
    def right(self) -> Tensor:
        """[N] bool."""
        return self.logits.argmax(dim=1) == self.labels


@settles
@torch.no_grad()
def answers(model: ImageModel, data: Dataset) -> Answers:
    """Run the model over a dataset with labels."""
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    groups: list[Group | None] = []
    ids: list[str] = []
    for start in range(0, len(data), _READ):
        samples = [data[place] for place in range(start, min(start + _READ, len(data)))]
        batch = to_batch(model, samples)
        if batch.labels is None:
            raise BadOption("data", data.name, "a dataset with labels")
        chunk = fit(
            len(samples), model.forward_bytes(model.check(batch.images)), batch.images.device
        )
        logits.append(batched(model, batch.images, chunk).cpu())
        labels.append(batch.labels.cpu())
        groups += [sample.group for sample in samples]
        ids += [sample.id for sample in samples]
    return Answers(_wide(torch.cat(logits)), torch.cat(labels), tuple(groups), tuple(ids))


def true_positives(
    right: Tensor,
    labels: Tensor,
    *,
    share: float = 0.4,
    cap: int | None = 512,
    stratified: bool = False,
    seed: int = 0,
    classes: Sequence[str] = (),
) -> Tensor:
    """Places of `share` of the right answers, at most `cap`, drawn without replacement and in
    ascending order (CIGMA, section 1.1).

    `right` [N] bool, `labels` [N]. `stratified` draws from every class the same share of `cap` (and
    `share` of its right answers at most), so that a large class does not crowd out the others;
    every class with a sample must then have a right answer.
    """
    if not 0 < share <= 1:
        raise BadOption("share", share, "more than 0, at most 1")
    if cap is not None and cap < 1:
        raise BadOption("cap", cap, "at least one photo, or None for no limit")
    if len(right) == 0 or right.shape != labels.shape:
        raise BadOption(
            "labels",
            list(labels.shape),
            f"one for each of the {len(right)} answers, and at least one",
        )
    right, labels = right.cpu(), labels.cpu()
    if not right.any():
        raise NothingRight(f"none of the {len(right)} photos")
    pools = [right.nonzero()[:, 0]]
    if stratified:
        names = labels.unique().tolist()
        pools = [(right & (labels == name)).nonzero()[:, 0] for name in names]
        lost = [name for name, pool in zip(names, pools, strict=True) if len(pool) == 0]
        if lost:
            raise NothingRight(
                f"no photo of class {classes[lost[0]] if lost[0] < len(classes) else lost[0]}"
                f" ({len(lost)} such classes)"
            )
    generator = torch.Generator().manual_seed(seed)
    wanted = [max(1, round(share * len(pool))) for pool in pools]
    counts = wanted if cap is None else _share_out(cap, wanted)
    return (
        torch.cat(
            [
                pool[torch.randperm(len(pool), generator=generator)[:count]]
                for pool, count in zip(pools, counts, strict=True)
            ]
        )
        .sort()
        .values
    )


def select_true_positives(
    model: ImageModel,
    data: Dataset,
    *,
    share: float = 0.4,
    cap: int | None = 512,
    stratified: bool = False,
    seed: int = 0,
) -> Tensor:
    """Places in `data` of photos that the model answers right, as `true_positives` draws them.
    Shares of groups are logged, never used."""
    answered = answers(model, data)
    chosen = true_positives(
        answered.right,
        answered.labels,
        share=share,
        cap=cap,
        stratified=stratified,
        seed=seed,
        classes=data.classes,
    )
    shares = group_shares([answered.groups[place] for place in chosen.tolist()])
    log.info(
        "%d of %d right answers among %d photos; groups: %s",
        len(chosen),
        int(answered.right.sum()),
        len(answered.labels),
        shares or "not known",
    )
    return chosen


def group_shares(groups: Sequence[Group | None]) -> dict[Group, float]:
    """How large a part of the samples each group is; samples without a group are left out."""
    counts = Counter(group for group in groups if group is not None)
    return {group: count / counts.total() for group, count in sorted(counts.items())}


def _share_out(cap: int, wanted: Sequence[int]) -> list[int]:
    """At most `cap` in all, as even as what is wanted allows; the first ones get what cannot be
    divided."""
    if cap < len(wanted):
        raise BadOption("cap", cap, f"at least one photo for each of the {len(wanted)} classes")
    counts = [0] * len(wanted)
    left = min(cap, sum(wanted))
    while left:
        for place, most in enumerate(wanted):
            if left and counts[place] < most:
                counts[place] += 1
                left -= 1
    return counts


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
