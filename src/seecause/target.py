"""What is explained: a class, a contrast of two classes, any function of the logits; or a row of a
detector or a segmentation model.

A target may select one output. Pixels are those of the model's frame, the size of `preprocess`:

    Box(3)                          query 3 and its best class                  box:3
    Box(3, label="cat")             query 3 and the class cat                   box:3:cat
    Box(label="cat")                the box with the highest score for cat      box:cat
    Region((10, 20, 60, 80))        x from 10 to 60, y from 20 to 80, and       region:10,20,60,80
                                    the class of most of these pixels
    Region((30, 40), label="sky")   one pixel and a class                       region:30,40:sky
    Region(mask)                    any pixels [H, W]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel
from seecause.models.block import Fn, Named, Size, wide
from seecause.models.preprocess import Preprocess

Score = Literal["prob", "logprob", "logit"]
# None, int, str, a tensor, array or list [B], a pair, or a callable on logits [M, C] -> [M]
Spec = Any


@dataclass(frozen=True)
class Answer:
    """A class and its probability."""

    name: str
    probability: float
    explained: bool = False  # whether maps are of this class


@dataclass(frozen=True, eq=False)
class Target:
    """What is explained: one class per image [B], the difference of the logits of two classes
    (`classes` and `against`), or a function of logits [M, C] -> [M]. If nothing is set, the
    predicted class."""

    classes: Tensor | None = None
    against: Tensor | None = None
    function: Fn | None = None
    logits: Tensor | None = None  # [B, C] of the plain run that `bind` used
    sigmoid: bool = False  # whether each class has a probability of its own

    @property
    def open(self) -> bool:
        """Whether the predicted class is still to be filled in."""
        return self.classes is None and self.function is None

    def bind(self, logits: Tensor) -> Target:
        """Fill in the predicted class from the plain run's logits [B, C], which are kept."""
        classes = logits.argmax(dim=-1) if self.open else self.classes
        return replace(self, classes=classes, logits=logits)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of a target with one row for each image."""
        return [t for t in (self.classes, self.against) if t is not None]

    def given(self, *tensors: Tensor) -> Target:
        """This target with other `tensors`."""
        return Target(*tensors, function=self.function, sigmoid=self.sigmoid) if tensors else self

    def take(self, rows: Tensor | slice) -> Target:
        """This target for other rows: images of the batch in any order, with repeats."""
        taken = [None if t is None else t[rows] for t in (self.classes, self.against)]
        return Target(*taken, function=self.function, sigmoid=self.sigmoid)

    def score(self, logits: Tensor, kind: Score = "prob") -> Tensor:
        """Logits [B, ..., C] -> scores [B, ...] in float32 or better."""
        if kind not in get_args(Score):
            raise BadOption("score", kind, f"one of {', '.join(get_args(Score))}")
        logits = wide(logits)
        if self.function is not None:
            rows = logits.flatten(0, -2)
            scores: Any = self.function(rows)
            if getattr(scores, "shape", None) != (len(rows),):
                expected = "a function of logits [M, C] that gives one number for each row, [M]"
                raise BadOption("target", self.function, expected)
            return scores.unflatten(0, logits.shape[:-1])
        assert self.classes is not None
        if self.against is not None:
            return pick(logits, self.classes) - pick(logits, self.against)
        return pick(spread(logits, kind, sigmoid=self.sigmoid), self.classes)

    def record(self, model: ImageModel) -> Named:
        """The target for manifests."""
        if self.function is not None:
            return {"function": getattr(self.function, "__name__", "callable")}
        names = {
            k: None if t is None else t.tolist()
            for k, t in (("class", self.classes), ("against", self.against))
        }
        return {**names, "name": self.labels(model)}

    def labels(self, model: ImageModel) -> list[str]:
        """What is explained, in words; a contrast names both classes."""
        if self.classes is None:
            return []
        labels = [model.class_name(c) for c in self.classes.tolist()]
        if self.against is None:
            return labels
        others = [model.class_name(c) for c in self.against.tolist()]
        return [f"{label} against {other}" for label, other in zip(labels, others, strict=True)]


def parse(model: ImageModel, spec: Spec, batch: int) -> Target:
    """A user's target -> `Target`. A tuple of two is a contrast; a list or tensor has one class per
    image."""
    need_aimed(model)
    need_class(model, spec)
    made = partial(Target, sigmoid=model.sigmoid)
    if spec is None:
        return made()
    if callable(spec) and not isinstance(spec, Tensor):
        return made(function=cast(Fn, spec))
    if isinstance(spec, tuple) and len(spec) == 2:
        first, second = (_indices(model, [part] * batch) for part in spec)
        return made(first, second)
    value: Any = spec
    if hasattr(value, "tolist"):  # tensors and arrays; one without axes is one class for all
        value = value.tolist()
    names = list(value) if isinstance(value, list | tuple) else [value] * batch
    if len(names) != batch:
        raise BadOption(
            "target", f"{len(names)} classes", f"one class, or one for each of the {batch} images"
        )
    return made(_indices(model, names))


def need_aimed(model: ImageModel) -> None:
    """Raises for detectors and segmentation models until a box or region is selected: otherwise
    the selected output could differ between the prediction and each step of the attribution."""
    if not model.aimed:
        raise NotDefined(
            "one prediction for an image",
            f"{model.name} predicts many rows",
            "Aim first: model.aim(image, row).model, where a row is sc.Box(3) or sc.Region((x, y))",
        )


def need_class(model: ImageModel, spec: Spec) -> None:
    """Raises for a box or a region if the model gives one prediction for an image."""
    if parse_row(spec) is not None:
        raise NotDefined(
            "a box or a region", f"{model.name} gives one prediction for an image", "Name a class"
        )


@torch.no_grad()
def best_answers(
    model: ImageModel, probabilities: Tensor, target: Target | None = None, *, count: int = 3
) -> list[list[Answer]]:
    """The `count` most probable classes of each image [B, C], then the explained ones that are
    not among them. Without a target the first is the explained one."""
    best = probabilities.topk(min(count, probabilities.shape[-1])).indices
    # a contrast explains two classes, a function of logits none
    columns = [best[:, 0]] if target is None else [t.to(best) for t in target.tensors]
    explained = torch.stack(columns, dim=1) if columns else best[:, :0]
    both = torch.cat([best, explained], dim=1)
    values = probabilities.gather(1, both).tolist()
    answers = []
    for row, numbers, marked in zip(both.tolist(), values, explained.tolist(), strict=True):
        by_class = dict(zip(row, numbers, strict=True))
        answers.append([Answer(model.class_name(c), p, c in marked) for c, p in by_class.items()])
    return answers


def _indices(model: ImageModel, names: Sequence[Any]) -> Tensor:
    classes = torch.tensor([model.class_index(n) for n in names])
    return classes.to(model.device, non_blocking=True)  # else it waits for the GPU


def spread(logits: Tensor, kind: Score, *, sigmoid: bool = False) -> Tensor:
    """Scores of all classes at once, [..., C]."""
    if kind == "logit":
        return logits
    log = torch.nn.functional.logsigmoid(logits) if sigmoid else torch.log_softmax(logits, dim=-1)
    return log if kind == "logprob" else log.exp()


def pick(values: Tensor, classes: Tensor) -> Tensor:
    """values [B, ..., C] at one class per image -> [B, ...]."""
    index = (
        classes.to(values.device).view(-1, *[1] * (values.ndim - 1)).expand(*values.shape[:-1], 1)
    )
    return values.gather(-1, index)[..., 0]


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Box:
    """One box of a detector, as the target of `sc.attribute`.

    Args:
        index: The number of the query; None for the one with the highest score.
        label: The class whose score is explained; None for the best class of the box.

    Example:
        >>> Box.parse("box:3:cat")
        Box(index=3, label='cat')
    """

    index: int | None = None
    label: str | int | None = None

    @classmethod
    def parse(cls, text: str) -> Box:
        """`box:INDEX`, `box:INDEX:CLASS`, `box:CLASS`."""
        _, first, *rest = text.split(":", 2)
        if not first.isdigit():
            return cls(label=":".join([first, *rest]))
        return cls(int(first), label=rest[0] if rest else None)


@dataclass(frozen=True, eq=False)
class Region:
    """Pixels of the image, as the target of `sc.attribute`.

    Args:
        where: Corners (x0, y0, x1, y1), one point (x, y), a mask [H, W], or None for the pixels of
            the largest class.
        label: The class whose score is explained; None for the class of most of these pixels.

    Example:
        >>> Region.parse("region:10,20,60,80:sky").where
        (10.0, 20.0, 60.0, 80.0)
    """

    where: Sequence[float] | Tensor | None = None
    label: str | int | None = None

    def __post_init__(self) -> None:
        where: Any = self.where
        if where is None:
            return
        if getattr(where, "ndim", 1) == 2:  # a mask, of torch or numpy
            object.__setattr__(self, "where", torch.as_tensor(where))
            return
        numbers = tuple(float(number) for number in where)
        if len(numbers) not in (2, 4) or not all(map(math.isfinite, numbers)):
            raise BadOption("region", where, "(x, y), (x0, y0, x1, y1) or a mask [H, W]")
        object.__setattr__(self, "where", numbers)

    @classmethod
    def parse(cls, text: str) -> Region:
        """`region:X,Y`, `region:X0,Y0,X1,Y1`, each with `:CLASS` or without."""
        _, corners, *rest = text.split(":", 2)
        try:
            where = tuple(float(number) for number in corners.split(","))
        except ValueError:
            raise BadOption("region", corners, "X,Y or X0,Y0,X1,Y1 in pixels") from None
        return cls(where, rest[0] if rest else None)

    def framed(self, steps: Preprocess, height: int, width: int) -> Region:
        """The region of an image of height x width, in the frame of a model's preprocessing
        `steps`."""
        if self.where is None:
            return self
        if isinstance(self.where, Tensor):
            return Region(steps.mask(self.where.numpy(force=True)), self.label)
        points = steps.points(torch.tensor(self.where).view(-1, 2), height, width)
        if len(points) == 2:
            points = torch.stack([points[0].floor(), points[1].ceil()])
        return Region(points.flatten().tolist(), self.label)

    def mask(self, size: Size) -> Tensor:
        """Its pixels [H, W] in a frame of `size`; what lies outside of the frame is cut off."""
        where: Any = self.where
        if isinstance(where, Tensor):
            mask = where.detach().cpu() > 0
        else:
            x0, y0, *end = map(math.floor, where)
            mask = rectangle((x0, y0, *(end or (x0 + 1, y0 + 1))), size)
        if tuple(mask.shape) != tuple(size) or not mask.any():
            expected = f"at least one pixel of the {size[0]} x {size[1]} that the model sees"
            raise BadOption("region", where, expected)
        return mask


def rectangle(corners: Sequence[int], size: Size) -> Tensor:
    """The pixels [H, W] of a box x0, y0, x1, y1, cut to the frame; a box outside of it has none."""
    x0, y0, x1, y1 = (max(0, corner) for corner in corners)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[y0:y1, x0:x1] = True
    return mask


def parse_row(spec: Any) -> Box | Region | None:
    """The row that a target names; None where it names none."""
    for kind, start in ((Box, "box:"), (Region, "region:")):
        if isinstance(spec, str) and spec.startswith(start):
            return kind.parse(spec)
    return spec if isinstance(spec, Box | Region) else None
