"""How the answers of many rows are read: boxes of a detector, pixels, masks of a prompt.

A reading turns native outputs and what is asked about (`rows.py`) into a `RowQuestion`: one row,
the entry of it that is explained, and the pixels that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.errors import BadOption, NotDefined
from seecause.models.base import ImageModel
from seecause.models.rows import SIDES, Box, FoundBox, Region, parse_row, rectangle

SURE, MOST_BOXES = 0.5, 30  # probability of boxes that are listed, and how many at most


@dataclass(frozen=True, eq=False)
class RowQuestion:
    """One row of an answer: how it is read off native outputs, which entry of it is explained, and
    the pixels that it is about."""

    read: Callable[[Any], Tensor]  # native outputs -> [B, C]
    target: int
    name: str
    pixels: Tensor  # [H, W] bool
    classes: tuple[str, ...]
    count: int  # of entries
    index: int = 0  # of a box
    boxes: Sequence[FoundBox] = ()
    values: bool = False  # numbers in units of their own, not logits


@dataclass(frozen=True)
class BoxReading:
    """Class scores and corners of a detector's queries: each class by itself (`sigmoid`), or all
    together, and then the last one is that there is no object. `spans`: logits are those of tokens,
    and a class has its highest."""

    sigmoid: bool
    values: bool = False
    spans: tuple[tuple[int, int], ...] = ()

    def scores(self, outputs: Any) -> Tensor:
        """Logits [B, Q, C]."""
        if not self.spans:
            return outputs.logits
        tokens = [outputs.logits[..., start:stop] for start, stop in self.spans]
        return torch.stack([logits.amax(dim=-1) for logits in tokens], dim=-1)

    def compared(self, outputs: Any) -> dict[str, Tensor]:
        """All that is answered, for the verified wrap."""
        return {"classes": self.scores(outputs), "boxes": outputs.pred_boxes}

    def unaimed(self, outputs: Any) -> Tensor:
        """[B, C], as long as no row is chosen."""
        surest = self.objects(outputs).amax(dim=-1).argmax(dim=-1)  # [B]
        return self.scores(outputs)[torch.arange(len(surest), device=surest.device), surest]

    def objects(self, outputs: Any) -> Tensor:
        """Probabilities of objects [B, Q, C]."""
        scores = self.scores(outputs)
        return scores.sigmoid() if self.sigmoid else scores.softmax(dim=-1)[..., :-1]

    def prompt(self, model: ImageModel, spec: Any) -> Mapping[str, Tensor]:
        """What the module must be given to answer for this row."""
        return {}

    def ask(self, model: ImageModel, outputs: Any, spec: Any, size: tuple[int, int]) -> RowQuestion:
        """The question that a target asks about one picture, whose native outputs these are."""
        box = self._box(model, spec)
        sure = self.objects(outputs)[0]  # [Q, C]
        label = None if box.label is None else model.class_index(box.label)
        if label is not None and label >= sure.shape[1]:
            raise BadOption("class index", label, f"0 to {sure.shape[1] - 1}")
        index = box.index
        if index is None:
            index = int((sure if label is None else sure[:, label : label + 1]).amax(1).argmax())
        if not 0 <= index < len(sure):
            raise BadOption("box", index, f"a query of {model.name}, 0 to {len(sure) - 1}")
        boxes = self._found(model, outputs, size)
        corners = corners_of(outputs.pred_boxes, size)[0, index, :4]
        pixels = rectangle(corners.cpu(), size)
        asked: dict[str, Any] = {
            "name": f"box {index}", "pixels": pixels, "index": index, "boxes": boxes,
        }  # fmt: skip
        if box.side is not None:
            return RowQuestion(
                lambda given: corners_of(given.pred_boxes, size)[:, index],
                SIDES.index(box.side),
                classes=SIDES,
                count=len(SIDES),
                values=True,
                **asked,
            )
        target = int(sure[index].argmax()) if label is None else label
        return RowQuestion(
            lambda given: self.scores(given)[:, index],
            target,
            classes=model.classes,
            count=self.scores(outputs).shape[-1],
            **asked,
        )

    def _found(self, model: ImageModel, outputs: Any, size: tuple[int, int]) -> list[FoundBox]:
        """Boxes of the first picture that are objects more likely than not, the surest first."""
        best = self.objects(outputs)[0].max(dim=-1)
        corners = corners_of(outputs.pred_boxes, size)[0, :, :4]
        order = best.values.argsort(descending=True)[:MOST_BOXES]
        return [
            FoundBox(k, model.class_name(c), p, tuple(place))
            for k, c, p, place in zip(
                order.tolist(),
                best.indices[order].tolist(),
                best.values[order].tolist(),
                corners[order].tolist(),
                strict=True,
            )
            if p > SURE
        ]

    @staticmethod
    def _box(model: ImageModel, spec: Any) -> Box:
        row = parse_row(spec)
        if isinstance(row, Region):
            raise NotDefined("a region", f"{model.name} answers for boxes", "Give sc.Box(index)")
        return row or Box(label=spec)


def corners_of(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Centre, width and height [.., 4] in shares of the picture -> left, top, right, bottom, width,
    height [.., 6] in pixels."""
    x, y, wide, high = (boxes * boxes.new_tensor([size[1], size[0]] * 2)).unbind(dim=-1)
    ends = (x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)
    return torch.stack([*ends, wide, high], dim=-1)


@dataclass(frozen=True)
class PixelReading:
    """Answers of pixels [B, C, h, w], averaged over a region, then `finish`ed into logits."""

    answers: Callable[[Any], Tensor]
    finish: Callable[[Tensor], Tensor] = lambda mean: mean
    sigmoid: bool = False
    values: bool = False

    def compared(self, outputs: Any) -> dict[str, Tensor]:
        return {"pixels": self.answers(outputs)}

    def unaimed(self, outputs: Any) -> Tensor:
        return self.finish(self.answers(outputs).mean(dim=(2, 3)))

    def prompt(self, model: ImageModel, spec: Any) -> Mapping[str, Tensor]:
        return {}

    def ask(self, model: ImageModel, outputs: Any, spec: Any, size: tuple[int, int]) -> RowQuestion:
        row = parse_row(spec)
        if isinstance(row, Box):
            raise NotDefined("a box", f"{model.name} answers for pixels", "Give sc.Region(where)")
        row = row or Region(None, spec)
        answers = self.answers(outputs)  # [1, C, h, w]
        label = None if row.label is None else model.class_index(row.label)
        if row.where is None:
            pixels, name = self._largest(answers, label, size)
        else:
            pixels, name = row.mask(size), "the region"
        shares = shares_of(pixels, answers)
        read = self._mean(shares)
        means = read(outputs)[0]
        target = int(means.argmax()) if label is None else label
        return RowQuestion(
            read, target, name, pixels, model.classes, len(means), values=self.values
        )

    def _mean(self, shares: Tensor) -> Callable[[Any], Tensor]:
        return lambda given: self.finish((self.answers(given) * shares).sum(dim=(2, 3)))

    def _largest(
        self, answers: Tensor, label: int | None, size: tuple[int, int]
    ) -> tuple[Tensor, str]:
        """The pixels of a class, or of the one that has most; all where there is but one answer, or
        where the class has none."""
        whole = torch.ones(size, dtype=torch.bool)
        if answers.shape[1] == 1:
            return whole, "the picture"
        best = F.interpolate(answers, size=size, mode="bilinear").argmax(dim=1)[0].cpu()
        label = int(best.flatten().mode().values) if label is None else label
        mine = best == label
        return (mine, "its pixels") if mine.any() else (whole, "the picture")


def shares_of(pixels: Tensor, answers: Tensor) -> Tensor:
    """How much each answer [.., h, w] counts in the mean over pixels [H, W]; they sum to 1."""
    size = (answers.shape[-2], answers.shape[-1])
    shares = F.adaptive_avg_pool2d(pixels[None, None].to(answers), size)[0, 0]
    return shares / shares.sum()


@dataclass(frozen=True)
class PromptReading(PixelReading):
    """Segment Anything: a place or a rectangle is the prompt, and the region is the mask that it
    gives on the picture; of several masks, the one whose score is highest there."""

    answers: Callable[[Any], Tensor] = lambda outputs: outputs.pred_masks[:, 0]  # [B, masks, h, w]
    sigmoid: bool = True

    def prompt(self, model: ImageModel, spec: Any) -> Mapping[str, Tensor]:
        row = parse_row(spec)
        corners = row.corners if isinstance(row, Region) else None
        if spec is None:
            return {}
        if not isinstance(row, Region) or corners is None:
            raise BadOption("target", spec, "a place or a rectangle: sc.Region((x, y)), the prompt")
        if row.label is not None:
            raise BadOption("label", row.label, f"None: {model.name} knows no classes")
        row.mask(model.preprocess.size)  # refuses what lies outside of the frame, or is reversed
        prompt = torch.tensor(corners, device=model.device, dtype=model.dtype)
        if len(corners) == 2:
            return {"input_points": prompt[None, None, None]}
        return {"input_boxes": prompt[None, None], "input_points": None}  # pyright: ignore

    def ask(self, model: ImageModel, outputs: Any, spec: Any, size: tuple[int, int]) -> RowQuestion:
        best = int(outputs.iou_scores[0, 0].argmax())
        answers = self.answers(outputs)[:, best : best + 1]
        mine = (F.interpolate(answers, size=size, mode="bilinear")[0, 0] > 0).cpu()
        pixels = mine if mine.any() else torch.ones(size, dtype=torch.bool)
        shares = shares_of(pixels, answers)

        def read(given: Any) -> Tensor:
            return (self.answers(given)[:, best : best + 1] * shares).sum(dim=(2, 3))

        return RowQuestion(read, 0, "the prompt", pixels, ("mask",), 1)


RowReading = BoxReading | PixelReading
