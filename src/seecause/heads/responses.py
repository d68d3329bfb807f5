"""What is measured with and without a head: a response, and how the model does otherwise.

big, fig            JS between the answers with and without the background, or the foreground (need
masks)
prob, logit, nll    of the target class
callable            any function of logits [M, C] -> [M]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.heads.divergence import entropy, jensen_shannon, log_probs
from seecause.target import Target
from seecause.types import wide

Response = Literal["big", "fig", "prob", "logit", "nll"]
OF_MASKS = ("big", "fig")
View = Literal["plain", "no_background", "no_foreground"]


@dataclass(frozen=True, eq=False)
class Measure:
    """How logits become numbers. `views` are the versions of each image that must run."""

    response: Response | Callable[[Tensor], Tensor]
    views: tuple[View, ...]
    target: Target
    labels: Tensor  # [B], for accuracy
    temperature: float | Tensor = 1.0
    sigmoid: bool = False

    def take(self, rows: slice) -> Measure:
        return replace(self, target=self.target.take(rows), labels=self.labels[rows])

    def __call__(self, logits: Mapping[View, Tensor]) -> dict[str, Tensor]:
        """Logits [..., B, C] of each view -> [..., B] of everything that is measured; the response
        under `response`."""
        plain = logits["plain"]
        by_image = plain.movedim(-2, 0)  # [B, ..., C]

        def of_target(kind: Literal["prob", "logprob", "logit"]) -> Tensor:
            return self.target.score(by_image, kind, sigmoid=self.sigmoid).movedim(0, -1)

        found = {
            "accuracy": (plain.argmax(dim=-1) == self.labels).to(wide(plain).dtype),
            "nll": -self._label_score(by_image).movedim(0, -1),
        }
        if not self.sigmoid:
            answers = {view: log_probs(value, self.temperature) for view, value in logits.items()}
            found["entropy"] = entropy(answers["plain"])
            for name, view in (("big", "no_background"), ("fig", "no_foreground")):
                if view in answers:
                    found[name] = jensen_shannon(answers["plain"], answers[view])  # type: ignore[index]
        if callable(self.response):
            found["response"] = self.response(wide(plain).flatten(0, -2)).unflatten(
                0, plain.shape[:-1]
            )
        elif self.response in OF_MASKS:
            found["response"] = found[self.response]
        else:
            found["response"] = (
                -of_target("logprob") if self.response == "nll" else of_target(self.response)
            )  # type: ignore[arg-type]
        return found

    def _label_score(self, by_image: Tensor) -> Tensor:
        return Target(classes=self.labels).score(by_image, "logprob", sigmoid=self.sigmoid)


def views_for(
    response: Response | Callable[[Tensor], Tensor], *, masked: bool, guard: bool
) -> tuple[View, ...]:
    """The versions of each image that a response, and the guard, need."""
    if not callable(response) and response not in get_args(Response):
        raise BadOption(
            "response", response, f"one of {', '.join(get_args(Response))}, or a function of logits"
        )
    views: list[View] = ["plain"]
    if response == "big" or (masked and guard):
        views.append("no_background")
    if response == "fig" or (masked and guard):
        views.append("no_foreground")
    return tuple(views)


def matched_temperature(logits: Tensor, wanted: Tensor, *, rounds: int = 60) -> Tensor:
    """The temperature [...] at which the mean entropy of logits [..., B, C] is `wanted` (in nats):
    entropy grows with it, so by bisection."""
    low, high = (
        torch.full(logits.shape[:-2], t, dtype=torch.float64, device=logits.device)
        for t in (-7.0, 7.0)
    )  # logarithms
    for _ in range(rounds):
        middle = (low + high) / 2
        flat = (
            entropy(log_probs(logits.double(), middle.exp()[..., None, None])).mean(dim=-1) > wanted
        )
        low, high = torch.where(flat, low, middle), torch.where(flat, middle, high)
    return ((low + high) / 2).exp()
