"""Images, what is measured on them, and what a removed head carries instead: what every estimator
of head scores shares.

    big, fig            JS between the answers with and without the background, or the foreground
                        (need masks)
    prob, logit, nll    of the target class
    callable            any function of logits [M, C] -> [M]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from seecause.engine.chunks import batched, fit, in_chunks
from seecause.engine.forks import gated_logits, mean_carried, zeros
from seecause.errors import BadOption
from seecause.heads.erase import Baseline, ErasedView, ErasedViews, Masks, Swapped
from seecause.heads.gains import entropy, jensen_shannon, log_probs, need_distribution
from seecause.heads.scores import all_heads, need_heads
from seecause.models.base import protocol
from seecause.models.view import VisionModel
from seecause.target import Spec, Target, parse
from seecause.types import wide

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]
Response = Literal["big", "fig", "prob", "logit", "nll"]
OF_MASKS = ("big", "fig")
View = Literal["plain"] | ErasedView


@dataclass(frozen=True, eq=False)
class Measure:
    """How logits become numbers. `erased` are the versions of each image that run beside it."""

    response: Response | Callable[[Tensor], Tensor]
    erased: tuple[ErasedView, ...]
    target: Target
    labels: Tensor  # [B], for accuracy
    temperature: float | Tensor
    sigmoid: bool

    @property
    def views(self) -> tuple[View, ...]:
        return "plain", *self.erased

    def split(self, logits: Tensor) -> dict[View, Tensor]:
        """Logits [..., V * b, C] by version."""
        parts = logits.unflatten(-2, (len(self.views), -1)).unbind(-3)
        return dict(zip(self.views, parts, strict=True))

    def take(self, rows: slice) -> Measure:
        return replace(self, target=self.target.take(rows), labels=self.labels[rows])

    def __call__(self, logits: Mapping[View, Tensor]) -> dict[str, Tensor]:
        """Logits [..., B, C] of each view -> [..., B] of everything that is measured; the response
        under `response`."""
        plain = logits["plain"]
        by_image = plain.movedim(-2, 0)  # [B, ..., C]

        def of_target(kind: Literal["prob", "logprob", "logit"]) -> Tensor:
            return self.target.score(by_image, kind, sigmoid=self.sigmoid).movedim(0, -1)

        values = {
            "accuracy": (plain.argmax(dim=-1) == self.labels).to(wide(plain).dtype),
            "nll": -self._label_score(by_image).movedim(0, -1),
        }
        if not self.sigmoid:
            answers = {view: log_probs(value, self.temperature) for view, value in logits.items()}
            values["entropy"] = entropy(answers["plain"])
            for name, view in (("big", "no_background"), ("fig", "no_foreground")):
                if view in answers:
                    values[name] = jensen_shannon(answers["plain"], answers[view])  # type: ignore[index]
        if callable(self.response):
            values["response"] = self.response(wide(plain).flatten(0, -2)).unflatten(
                0, plain.shape[:-1]
            )
        elif self.response in OF_MASKS:
            values["response"] = values[self.response]
        else:
            nll = self.response == "nll"
            values["response"] = -of_target("logprob") if nll else of_target(self.response)  # type: ignore[arg-type]
        return values

    def _label_score(self, by_image: Tensor) -> Tensor:
        return Target(classes=self.labels).score(by_image, "logprob", sigmoid=self.sigmoid)


def erased_for(
    response: Response | Callable[[Tensor], Tensor], *, masked: bool, guard: bool
) -> tuple[ErasedView, ...]:
    """The erased versions of each image that a response, and the guard, need."""
    if not callable(response) and response not in get_args(Response):
        raise BadOption(
            "response", response, f"one of {', '.join(get_args(Response))}, or a function of logits"
        )
    both, erased = masked and guard, list[ErasedView]()
    if response == "big" or both:
        erased.append("no_background")
    if response == "fig" or both:
        erased.append("no_foreground")
    return tuple(erased)


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


class HeadExperiment:
    """Images with their erased versions, what is measured on them, and what a removed head carries
    instead."""

    def __init__(
        self,
        model: VisionModel,
        images: Tensor,
        masks: Masks | Tensor | None,
        *,
        response: Response | Callable[[Tensor], Tensor] = "big",
        target: Spec = None,
        operator: Operator = "zero",
        baseline: Baseline = "grey",
        guard: bool = True,
        temperature: float = 1.0,
        seed: int = 0,
    ):
        need_heads(model, "head scores")
        if operator not in get_args(Operator):
            raise BadOption("operator", operator, f"one of {', '.join(get_args(Operator))}")
        self.model = model
        self.operator: Operator = operator
        self.images = images.to(model.device, model.dtype)
        self.layout = model.check(self.images)
        self.heads = all_heads(model)
        masked = response in OF_MASKS or masks is not None or isinstance(baseline, Swapped)
        if masked and (response in OF_MASKS or guard):
            need_distribution(
                model, f"response={response!r} with masks" if response in OF_MASKS else "the guard"
            )
        erased = erased_for(response, masked=masked, guard=guard)
        self.erased = ErasedViews(model, self.images, masks, baseline) if erased else None
        bound = parse(model, target, len(images))
        labels = bound.classes if bound.against is None else None
        if labels is None:  # the model's own answers
            plain = batched(
                model,
                self.images,
                fit(len(images), model.forward_bytes(self.layout), self.images.device),
                what="images",
            )
            bound, labels = bound.bind(plain), plain.argmax(dim=-1)
        self.measure = Measure(response, erased, bound, labels, temperature, model.sigmoid)
        self.donors = (
            derangement(len(images), seed).to(model.device) if operator == "resample" else None
        )
        self.means = mean_carried(model, self.images) if operator == "mean" else []

    @property
    def copies(self) -> int:
        """Versions of each image that run."""
        return len(self.measure.views)

    def rows(self, part: slice) -> Tensor:
        """All versions of some images, [V * b, 3, H, W], and behind them the donors of those
        images."""
        pictures = [self.images[part]]
        if self.erased is not None:
            pictures += self.erased.erased(part, self.measure.erased)
        if self.donors is not None:
            pictures.append(self.images[self.donors[part]])
        return torch.cat(pictures)

    def content(self, layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
        """What a removed head carries instead."""
        return instead_of(self.operator, self.means, self.copies, layer, carried, tokens)

    def gated(self, part: slice, gates: Tensor) -> dict[str, Tensor]:
        """Everything that is measured on some images whose heads have gates [b, L, H]: [b] each.
        Differentiable in the gates."""
        logits = gated_logits(
            self.model, self.rows(part), gates.repeat(self.copies, 1, 1), content=self.content
        )
        return self.measure.take(part)(self.measure.split(logits))

    def over_images(self, run: Callable[[slice], T], *, depth: float = 1.0) -> list[T]:
        """`run` on as many images at a time as fit, if each row holds `depth` times a plain run."""
        rows, count = self.copies + (self.donors is not None), len(self.images)
        each = int(rows * self.model.forward_bytes(self.layout) * depth)
        size = fit(count, each, self.images.device)
        return list(in_chunks(lambda a, b: run(slice(a, b)), count, size, what="images"))

    def record(self) -> dict[str, Any]:
        name = self.measure.response
        erased = {} if self.erased is None else self.erased.record()
        return {
            "response": name if isinstance(name, str) else getattr(name, "__name__", "callable"),
            "target": self.measure.target.record(self.model),
            **erased,
            **protocol(self.model, self.images),
        }


def instead_of(
    operator: Operator,
    means: list[Tensor],
    copies: int,
    layer: int,
    carried: Tensor,
    tokens: Tensor,
) -> Tensor:
    """What a removed head carries instead, where `copies` versions of each image run."""
    if operator == "mean":
        return means[layer][tokens]
    if operator == "resample":
        donors = len(carried) // (copies + 1)
        return carried[-donors:].repeat(copies, 1, 1, 1)
    return zeros(layer, carried, tokens)


def derangement(count: int, seed: int) -> Tensor:
    """For each of `count` images another one: the next in a random circle."""
    if count < 2:
        raise BadOption(
            "operator",
            "resample",
            "'zero' or 'mean': with one image there is no other to take from",
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    donors = torch.empty_like(order)
    donors[order] = order.roll(-1)
    return donors
