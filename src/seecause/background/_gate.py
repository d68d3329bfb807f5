"""May this model ship? Limits on an audit, each judged by a 95 % interval.

    at most L     passes if the upper end of the interval is at most L, is missed if the lower end
                  is above it
    at least L    passes if the lower end is at least L, is missed if the upper end is below it
    between       it is not shown: the interval holds L, and more pictures would tell

A limit that is not shown is not met. What an audit cannot tell (too few right answers, masks of the
model's own, cuts that change most answers, random weights) is never shown, whatever the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from seecause.background.audit import ENOUGH, MOSTLY, BackgroundAudit
from seecause.errors import BadOption
from seecause.metrics.accuracy import clopper_pearson

CheckOutcome = Literal["pass", "not shown", "missed"]
NONE_SEEN = 3.0  # over n: what 95 % of samples of n would have shown (the rule of three)


@dataclass(frozen=True)
class Check:
    """One limit. `doubt` says why numbers do not count, if they do not."""

    name: str
    meaning: str
    bound: Literal["at most", "at least"]
    limit: float
    value: float
    interval: tuple[float, float]
    doubt: str = ""

    @property
    def end(self) -> Literal["upper", "lower"]:
        """The end of the interval that has to meet the limit."""
        return "upper" if self.bound == "at most" else "lower"

    @property
    def outcome(self) -> CheckOutcome:
        low, high = self.interval
        if self.bound == "at most":
            met, missed = high <= self.limit, low > self.limit
        else:
            met, missed = low >= self.limit, high < self.limit
        if missed and not self.doubt:
            return "missed"
        return "pass" if met and not self.doubt else "not shown"

    @property
    def sentence(self) -> str:
        """What was asked, what came out, by which end."""
        low, high = self.interval
        reason = {
            "pass": f"the {self.end} end of its 95 % interval meets it",
            "missed": "the whole 95 % interval misses it",
            "not shown": self.doubt
            or f"the {self.end} end of its 95 % interval does not meet it; more pictures may",
        }[self.outcome]
        return (
            f"{self.name} {self.value:.3f} ({low:.3f} to {high:.3f}), {self.bound}"
            f" {self.limit:g}: {self.outcome}, {reason}."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Gate:
    """All limits, and the audit that they were held against."""

    audit: BackgroundAudit
    checks: tuple[Check, ...]

    def __repr__(self) -> str:
        return f"Gate({self.sentence})"

    @property
    def passed(self) -> bool:
        return all(check.outcome == "pass" for check in self.checks)

    @property
    def sentence(self) -> str:
        missed = [c.name for c in self.checks if c.outcome == "missed"]
        unshown = [c.name for c in self.checks if c.outcome == "not shown"]
        if self.passed:
            return f"Pass: {len(self.checks)} of {len(self.checks)} limits are met."
        parts = [f"missed: {', '.join(missed)}"] if missed else []
        parts += [f"not shown: {', '.join(unshown)}"] if unshown else []
        return f"Fail: {'; '.join(parts)}."


def gate(
    audit: BackgroundAudit,
    *,
    max_flips: float | None = None,
    max_bir: float | None = None,
    min_accuracy: float | None = None,
    min_worst_group: float | None = None,
) -> Gate:
    """Hold an audit against limits. `max_flips`: right answers that another background changes,
    beyond those that cutting alone changes.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = sc.data.open_data("critters:certified:test", limit=40)
    >>> sc.background.gate(sc.audit(model, data, per_picture=1), max_flips=0.1).sentence
    'Fail: missed: flips.'
    """
    limits = {"max_flips": max_flips, "max_bir": max_bir}
    limits |= {"min_accuracy": min_accuracy, "min_worst_group": min_worst_group}
    checks = [_CHECKS[name](audit, limit) for name, limit in check_limits(limits).items()]
    return Gate(audit, tuple(checks))


def check_limits(limits: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are set: one at least, and all of them shares."""
    wanted = {name: limit for name, limit in limits.items() if limit is not None}
    if not wanted:
        raise BadOption("limits", None, f"one at least, of {', '.join(limits)}")
    for name, limit in wanted.items():
        if not 0 <= limit <= 1:
            raise BadOption(name, limit, "a share between 0 and 1")
    return wanted


def _flips(audit: BackgroundAudit, limit: float) -> Check:
    extra, (low, high) = audit.extra_flips, audit.interval
    value = float(extra.mean()) if len(extra) else float("nan")
    if len(extra) and bool((extra == extra[0]).all()):  # no spread looks certain, and is not
        high = min(1.0, value + NONE_SEEN / len(extra))
    meaning = "right answers that another background changes, less those that cutting alone does"
    return Check("flips", meaning, "at most", limit, value, (low, high), _doubt(audit))


def _bir(audit: BackgroundAudit, limit: float) -> Check:
    if audit.gains is None:
        reason = "BIR needs masks and a model whose classes exclude others"
        raise BadOption("max_bir", limit, f"no value: {reason}")
    meaning = "of what right answers lose without object or background, the background's share"
    interval, value = audit.gains.interval, audit.gains.bir_or_zero
    return Check("BIR", meaning, "at most", limit, value, interval, _doubt(audit))


def _accuracy(audit: BackgroundAudit, limit: float) -> Check:
    right = audit.judged.right
    total = torch.tensor([len(right)])
    low, high = clopper_pearson(right.sum().reshape(1), total)[0].tolist()
    meaning = "right answers on plain pictures"
    return Check(
        "accuracy", meaning, "at least", limit, audit.accuracy, (low, high), _random(audit)
    )


def _worst_group(audit: BackgroundAudit, limit: float) -> Check:
    groups = audit.groups
    if groups is None:
        raise BadOption("min_worst_group", limit, "no value: the data has no groups")
    low, high = groups.intervals().min(dim=0).values.tolist()
    meaning = "right answers in the worst group, by the lowest ends over groups"
    return Check(
        "worst group", meaning, "at least", limit, groups.worst, (low, high), _random(audit)
    )


_CHECKS = {
    "max_flips": _flips,
    "max_bir": _bir,
    "min_accuracy": _accuracy,
    "min_worst_group": _worst_group,
}


def _doubt(audit: BackgroundAudit) -> str:
    """Why numbers about the background do not count here, if they do not."""
    if len(audit.extra_flips) < ENOUGH:
        return f"fewer than {ENOUGH} right answers tell nothing"
    if audit.masks is not None and audit.masks.kind == "own":
        return "masks of the model's own show what it looks at, not the object; give another eye"
    if audit.control_flips > MOSTLY:
        return "cutting alone changes most answers; give better masks"
    return _random(audit)


def _random(audit: BackgroundAudit) -> str:
    random = audit.protocol.get("random_weights")
    return "the model has random weights" if random else ""
