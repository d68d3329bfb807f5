"""Images, what is measured on them, and what a removed head carries instead: what every estimator
of head scores shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from seecause.attribution.attribute import protocol
from seecause.engine.chunks import batched, fit, in_chunks
from seecause.engine.forks import HELD, fork, gated_logits, mean_carried, zeros
from seecause.errors import BadOption, NotDefined
from seecause.heads.erase import Baseline, Swapped
from seecause.heads.gains import Views, need_distribution
from seecause.heads.masks import Masks
from seecause.heads.responses import (
    OF_MASKS,
    Measure,
    Response,
    View,
    matched_temperature,
    views_for,
)
from seecause.heads.result import Head, HeadScores
from seecause.metrics import standard_error
from seecause.models.base import ImageModel
from seecause.models.constant import is_silent
from seecause.models.view import VisionModel
from seecause.target import Spec, parse

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]


class Table:
    """Everything that was measured: [B] of the whole model, and [B, L, H] without each head, NaN
    where there is none."""

    def __init__(self, images: int, model: VisionModel):
        self.shape = (images, model.n_layers, model.n_heads)
        self.plain: dict[str, Tensor] = {}
        self.without: dict[str, Tensor] = {}

    def put_plain(self, rows: slice, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._room(self.plain, name, value, self.shape[:1])[rows] = value

    def put(self, rows: slice, layer: int, heads: list[int], values: Mapping[str, Tensor]) -> None:
        """values [k, b]."""
        for name, value in values.items():
            self._room(self.without, name, value, self.shape)[rows, layer, heads] = value.T

    def copy_plain(self, head: Head) -> None:
        """Without a head that cannot matter, everything is as it was."""
        for name, value in self.plain.items():
            self._room(self.without, name, value, self.shape)[:, head[0], head[1]] = value

    def _room(
        self, table: dict[str, Tensor], name: str, like: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        if name not in table:
            table[name] = like.new_full(shape, torch.nan)
        return table[name]

    def scores(self, *, total: int, per_image: bool, protocol: dict[str, Any]) -> HeadScores:
        effects = (
            (self.plain["response"][:, None, None] - self.without["response"]).double().cpu()
        )  # [B, L, H]
        after = {name: value.double().mean(dim=0).cpu() for name, value in self.without.items()}
        before = {name: float(value.double().mean()) for name, value in self.plain.items()}
        if "fig" in after:
            after["fig_drop"] = before["fig"] - after["fig"]
        return HeadScores(
            value=effects.mean(dim=0),
            error=standard_error(effects),
            after=after,
            before=before,
            protocol=protocol,
            total=total,
            effects=effects if per_image else None,
            fig_drops=(
                (self.plain["fig"][:, None, None] - self.without["fig"]).double().cpu()
                if per_image and "fig" in self.without
                else None
            ),
        )


class Study:
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
        if temperature <= 0:
            raise BadOption("temperature", temperature, "a number above 0")
        self.model, self.operator = model, operator
        self.images = images.to(model.device, model.dtype)
        self.layout = model.check(self.images)
        self.heads = all_heads(model)
        masked = response in OF_MASKS or masks is not None or isinstance(baseline, Swapped)
        if masked and (response in OF_MASKS or guard):
            need_distribution(
                model, f"response={response!r} with masks" if response in OF_MASKS else "the guard"
            )
        views = views_for(response, masked=masked, guard=guard)
        self.erased = Views(model, self.images, masks, baseline) if len(views) > 1 else None
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
        self.measure = Measure(response, views, bound, labels, temperature, model.sigmoid)
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
            erased = self.erased.erased(part, foreground="no_foreground" in self.measure.views)
            made = {"no_background": erased.no_background, "no_foreground": erased.no_foreground}
            pictures += [made[view] for view in self.measure.views[1:]]  # type: ignore[misc]
        return torch.cat(
            pictures if self.donors is None else [*pictures, self.images[self.donors[part]]]
        )

    def content(self, layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
        """What a removed head carries instead."""
        if self.operator == "mean":
            return self.means[layer][tokens]
        if self.operator == "resample":
            donors = len(carried) // (self.copies + 1)
            return carried[-donors:].repeat(self.copies, 1, 1, 1)
        return zeros(layer, carried, tokens)

    def split(self, logits: Tensor) -> dict[View, Tensor]:
        """Logits [..., V * b, C] by version."""
        parts = logits.unflatten(-2, (self.copies, -1)).unbind(-3)
        return dict(zip(self.measure.views, parts, strict=True))

    def gated(self, part: slice, gates: Tensor) -> dict[str, Tensor]:
        """Everything that is measured on some images whose heads have gates [b, L, H]: [b] each.
        Differentiable in the gates."""
        logits = gated_logits(
            self.model, self.rows(part), gates.repeat(self.copies, 1, 1), content=self.content
        )
        return self.measure.take(part)(self.split(logits))

    def over_images(self, run: Callable[[slice], T], *, depth: float = 1.0) -> list[T]:
        """`run` on as many images at a time as fit, if each row holds `depth` times a plain run."""
        each = (
            (self.copies + (self.donors is not None))
            * self.model.forward_bytes(self.layout)
            * depth
        )

        def some(a: int, b: int) -> T:
            return run(slice(a, b))

        return list(
            in_chunks(
                some,
                len(self.images),
                fit(len(self.images), int(each), self.images.device),
                what="images",
            )
        )

    def run(
        self,
        heads: Sequence[Head],
        *,
        progress: Callable[[int], None] | None = None,
        entropy_match: bool = False,
    ) -> Table:
        """Measure without each of `heads`."""
        table = Table(len(self.images), self.model)
        kept: dict[Head, dict[int, dict[View, Tensor]]] = {}  # by head and first image

        def some(part: slice) -> None:
            measure, count = self.measure.take(part), part.stop - part.start

            def each(layer: int, some_heads: list[int], logits: Tensor) -> None:
                by_view = self.split(logits)
                if entropy_match:
                    for place, head in enumerate(some_heads):
                        kept.setdefault((layer, head), {})[part.start] = {
                            view: value[place].cpu() for view, value in by_view.items()
                        }
                else:
                    table.put(part, layer, some_heads, measure(by_view))
                if progress is not None:
                    progress(len(some_heads) * count)

            plain = fork(
                self.model,
                self.rows(part),
                heads,
                each,
                content=self.content,
                forking=self.copies * count,
            )
            table.put_plain(part, measure(self.split(plain[: self.copies * count])))

        self.over_images(some, depth=1 / HELD)
        for (layer, head), parts in kept.items():
            whole = {
                view: (
                    torch.cat([parts[first][view] for first in sorted(parts)]).to(
                        self.images.device
                    )[None]
                )
                for view in self.measure.views
            }
            matched = matched_temperature(whole["plain"], table.plain["entropy"].double().mean())
            values = replace(self.measure, temperature=matched[:, None, None])(whole)
            table.put(
                slice(None),
                layer,
                [head],
                {
                    **values,
                    "temperature": matched[:, None].expand_as(values["nll"]).to(values["nll"]),
                },
            )
        return table

    def record(self) -> dict[str, Any]:
        name = self.measure.response
        said = {
            "response": name if isinstance(name, str) else getattr(name, "__name__", "callable"),
            "target": self.measure.target.record(self.model),
        }
        return {
            **said,
            **({} if self.erased is None else self.erased.record()),
            **protocol(self.model, self.images),
        }


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


def need_heads(model: ImageModel, what: str) -> None:
    if not isinstance(model, VisionModel):
        raise NotDefined(what, f"{model.family} has no attention heads", "Use a vision transformer")


def all_heads(model: VisionModel) -> list[Head]:
    """Every head there is; a block that lost all of its own has none."""
    return [
        (layer, head)
        for layer, block in enumerate(model.blocks)
        if not is_silent(block)
        for head in range(block.heads)
    ]


def check_heads(model: VisionModel, heads: Sequence[Head]) -> list[Head]:
    """The same heads, if there are any and the model has them all."""
    if not heads:
        raise BadOption("heads", [], "at least one (layer, head)")
    for layer, head in heads:
        if not (0 <= layer < model.n_layers and 0 <= head < model.blocks[layer].heads):
            raise BadOption(
                "heads", (layer, head), f"pairs (layer 0-{model.n_layers - 1}, head of that layer)"
            )
    return [(int(layer), int(head)) for layer, head in heads]
