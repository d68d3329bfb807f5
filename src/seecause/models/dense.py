"""Models of many rows: detectors, and models of pixels (segmentation, depth, Segment Anything).

    image -> places -> rows -> predictions

Any row that reads the image is a class row: a query of a decoder, a pixel of a head. What it reads
are places, the encoder's tokens or feature maps, perhaps of several levels; `run_to` returns them,
and `run_from` continues from them (from those of another run, or from a mixture), as stages do.

Nothing of the native forward is written again. It runs in a copy of the module that shares every
weight (`spliced`), in which the module at the `Seam` returns the places that are put in, and the
modules before it return stand-ins that nobody reads. A detector that chooses its queries by what
the encoder saw (RT-DETR) keeps those of the explained image: modules that are `held` return what
they returned there, so query k stays the same question whatever is put in.

    DETR, Conditional DETR           the encoder's tokens; queries are learnt
    Deformable DETR, RT-DETR, D-FINE its places on several levels, which a query samples at a few
                                     points each; all but plain Deformable DETR choose their queries
    Grounding-DINO                   the input of its encoder, where image and sentence read each
                                     other: all of that runs again
    SegFormer                        the maps of its four stages
    DPT, Depth Anything              tokens of four blocks of the backbone
    MaskFormer, Mask2Former          the maps of its pixel decoder (and of its backbone's end)
    Segment Anything 1 and 2         the maps of its image encoder; the region is the prompt

The places of an encoder have already read each other, and feature maps have seen their
surroundings: a high value says where the row read, and mostly, not only, what lies there.

A view predicts one row at a time: `aim` chooses it in an image. Before that, a detector predicts
its surest box, a model of pixels the mean over all of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from seecause.errors import BadOption, NotDefined, UnknownName, UnsupportedModel
from seecause.models.base import Architecture, ImageModel
from seecause.models.layout import TokenLayout, pair
from seecause.models.parts import TextInput, WrapOptions, as_inputs, class_names, require_text
from seecause.models.preprocess import Preprocess
from seecause.models.rows import SIDES, Aim, Box, FoundBox, Region, parse_row, rectangle

SURE, MOST_BOXES = 0.5, 30  # probability of boxes that are listed, and how many at most


@dataclass(frozen=True, eq=False)
class RowQuestion:
    """One row of the outputs: how it is read from native outputs, which entry of it is explained,
    and the pixels that it is about."""

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
        """All outputs, for the verified wrap."""
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
        """Inputs that the module needs to predict this row."""
        return {}

    def ask(self, model: ImageModel, outputs: Any, spec: Any, size: tuple[int, int]) -> RowQuestion:
        """The row that a target names in one image, whose native outputs these are."""
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
        """Boxes of the first image that are objects more likely than not, the surest first."""
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
    """Centre, width and height [.., 4] in shares of the image -> left, top, right, bottom, width,
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
        """The pixels of a class, or of the one that has most; all where there is one output only,
        or where the class has none."""
        whole = torch.ones(size, dtype=torch.bool)
        if answers.shape[1] == 1:
            return whole, "the image"
        best = F.interpolate(answers, size=size, mode="bilinear").argmax(dim=1)[0].cpu()
        label = int(best.flatten().mode().values) if label is None else label
        mine = best == label
        return (mine, "its pixels") if mine.any() else (whole, "the image")


def shares_of(pixels: Tensor, answers: Tensor) -> Tensor:
    """Weights of outputs [.., h, w] in the mean over pixels [H, W]; they sum to 1."""
    size = (answers.shape[-2], answers.shape[-1])
    shares = F.adaptive_avg_pool2d(pixels[None, None].to(answers), size)[0, 0]
    return shares / shares.sum()


@dataclass(frozen=True)
class PromptReading(PixelReading):
    """Segment Anything: a place or a rectangle is the prompt, and the region is the mask that it
    gives on the image; of several masks, the one whose score is highest there."""

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


@dataclass(frozen=True, eq=False)
class Places:
    """What rows read of images of `size`: maps [B, C, h, w], one for each level. `others` [B, ..]
    lie at no place (a class token): in mixtures they stay the context's."""

    maps: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.maps[0])

    def repeated(self, count: int) -> Places:
        """Those of one image, `count` times."""
        maps, others = (
            tuple(x.expand(count, *x.shape[1:]) for x in part) for part in (self.maps, self.others)
        )
        return Places(maps, others, self.size)

    def over(self, context: Places, mix: Callable[[Tensor, Tensor], Tensor]) -> Places:
        """Mixtures with the places of another run: `mix` makes n of every image's map and the
        context's, [B * n, C, h, w], for each level."""
        maps = tuple(mix(*both) for both in zip(self.maps, context.maps, strict=True))
        batch = max(len(self), len(context))
        count = len(maps[0]) // batch
        others = (x[:, None].expand(batch, count, *x.shape[1:]) for x in context.others)
        return Places(maps, tuple(x.flatten(0, 1) for x in others), self.size)


@dataclass(frozen=True, eq=False)
class Call:
    """What a native module was given by name, and what it gave."""

    output: Any
    named: Mapping[str, Any]


@dataclass(frozen=True)
class Seam:
    """Where a native run is cut: at the output of module `at`, whose `fields` hold the places: maps
    [B, C, h, w], tokens [B, prefix + places, D], or lists of these (only `entries` are read). With
    `entering`, the places are the tokens that it is given under this name, and it runs itself."""

    at: str
    fields: tuple[str, ...]
    before: tuple[str, ...] = ()  # modules that only lead to it
    held: tuple[str, ...] = ()  # modules behind it that choose what is asked
    prefix: int = 0
    entries: tuple[int, ...] | None = None
    entering: str = ""

    def take(self, call: Call, size: tuple[int, int]) -> Places:
        """The places in what `at` gave for images of `size`."""
        maps, others = [], []
        for tensor in [call.named[self.entering]] if self.entering else self._tensors(call.output):
            if tensor.ndim == 4:
                maps.append(tensor)
                continue
            grids = call.named.get("spatial_shapes_list") or [self._grid(tensor, size)]
            others += [tensor[:, : self.prefix]] if self.prefix else []
            levels = tensor[:, self.prefix :].split([h * w for h, w in grids], dim=1)
            maps += [x.mT.unflatten(2, grid) for x, grid in zip(levels, grids, strict=True)]
        return Places(tuple(maps), tuple(others), size)

    def forward(self, native: nn.Module, call: Call, places: Places) -> Callable[..., Any]:
        """What runs in place of module `at`, which gave what is in `call` for other places."""
        if not self.entering:
            return answering(self.put(call, places))
        tokens = torch.cat([level.flatten(2).mT for level in places.maps], dim=1)
        return lambda **named: native(**{**named, self.entering: tokens})

    def put(self, call: Call, places: Places) -> Any:
        """The output of `at` with other places in it."""
        maps, others = iter(places.maps), iter(places.others)

        def tensor_like(tensor: Tensor) -> Tensor:
            if tensor.ndim == 4:
                return next(maps)
            parts, rows = [next(others)] if self.prefix else [], tensor.shape[1] - self.prefix
            while rows:
                parts.append(next(maps).flatten(2).mT)
                rows -= parts[-1].shape[1]
            return torch.cat(parts, dim=1)

        changed = {}
        for name in self.fields:
            value = getattr(call.output, name)
            if isinstance(value, Tensor):
                changed[name] = tensor_like(value)
            else:
                read = self._entries(value)
                changed[name] = [
                    tensor_like(x) if index in read else None for index, x in enumerate(value)
                ]
        return type(call.output)(**{**call.output, **changed})

    def _tensors(self, output: Any) -> Iterator[Tensor]:
        for name in self.fields:
            value = getattr(output, name)
            if isinstance(value, Tensor):
                yield value
            else:
                yield from (value[index] for index in self._entries(value))

    def _entries(self, value: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(range(len(value))) if self.entries is None else self.entries

    def _grid(self, tokens: Tensor, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of places that have the image's shape."""
        count = tokens.shape[1] - self.prefix
        rows = max(1, round(math.sqrt(count * size[0] / size[1])))
        if count % rows:
            raise BadOption("size", size, f"images that {count} places of {self.at} can tile")
        return rows, count // rows


def answering(answer: Any) -> Callable[..., Any]:
    return lambda *args, **named: answer


@dataclass
class DenseParts:
    """What an adapter finds in a native model of boxes or pixels."""

    seam: Seam
    reading: RowReading
    classes: Sequence[str] = ()
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    size: tuple[int, int] | None = None
    fixed_size: bool = False
    family: str = ""
    classifies: bool = True
    extra: nn.Module | None = None

    @torch.no_grad()
    def assemble(self, module: nn.Module, options: WrapOptions) -> DenseModel:
        """A view of these parts, with the options of the caller."""
        for name in ("head", "pool", "sigmoid"):
            if getattr(options, name) is not None:
                reads = f"None: {type(module).__name__} reads its own rows"
                raise BadOption(name, getattr(options, name), reads)
        steps = options.preprocess_for(self, type(module).__name__)
        model = DenseModel(
            module=module,
            name=options.name,
            family=self.family,
            preprocess=steps,
            layout_at=TokenLayout.of_cells((1, 1)),
            patch=(1, 1),
            native=lambda images: model.reading.unaimed(model._native(images, {})),
            classes=options.class_names(self),
            sigmoid=self.reading.sigmoid,
            values=self.reading.values,
            fixed_size=self.fixed_size,
            seam=self.seam,
            reading=self.reading,
            inputs=self.inputs,
        )
        grids = [_size(level) for level in model._blank_places(steps.size).maps]
        model.patch = _cell(steps.size, grids)
        model.layout_at = TokenLayout.of_cells(model.patch)
        return model


MOST_STRIDE = 32  # pixels of a cell, where levels can be chosen from


@dataclass(eq=False, kw_only=True, repr=False)
class DenseModel(ImageModel):
    """A view of a native detector or model of pixels. `model(images)` returns the outputs of the
    row that it is aimed at, [B, C], through the native modules."""

    architecture: ClassVar[Architecture] = "dense"

    seam: Seam
    reading: RowReading
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # beside images, [1, ..] each
    question: RowQuestion | None = None
    held: Mapping[str, Any] = field(default_factory=dict)  # outputs in the explained image's run

    @property
    def aimed(self) -> bool:
        return self.question is not None

    @property
    def n_classes(self) -> int:
        """Of a row: a blank of the usual size cannot be asked, a region is one of its image."""
        return super().n_classes if self.question is None else self.question.count

    @property
    def cells(self) -> str:
        """The one stage that can be patched."""
        return self.seam.at

    @property
    def readout_name(self) -> str:
        return "a row" if self.question is None else self.question.name

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> outputs [B, C] of the row."""
        with self.eval_mode():
            self.check(images)
            if _alone(images):
                return self._read(self.outputs(images.expand(2, -1, -1, -1)))[:1]
            return self._read(self.outputs(images))

    def outputs(self, images: Tensor) -> Any:
        """Native outputs for images, with the outputs of held modules replaced."""
        held = {path: answering(copies_of(value, len(images))) for path, value in self.held.items()}
        return self._native(images, held)

    def run_to(self, stage: str, images: Tensor) -> Places:
        """Images -> places that rows read."""
        self.after(stage)
        return self.seam.take(self._record(images, (stage,))[1][stage], _size(images))

    def run_from(self, stage: str, places: Places) -> Tensor:
        """Places -> outputs of the row; only the part of the model that reads places runs."""
        self.after(stage)
        if _alone(places):
            return self._read(self.outputs_from(places.repeated(2)))[:1]
        return self._read(self.outputs_from(places))

    def outputs_from(self, places: Places) -> Any:
        """Native outputs of rows that read these places."""
        count, standing = len(places), self._stand_ins(places.size)
        like = places.maps[0]
        images = like.new_zeros(1, len(self.preprocess.mean), *places.size)
        answers = {path: copies_of(standing[path].output, count) for path in self.seam.before}
        answers |= {path: copies_of(value, count) for path, value in self.held.items()}
        forwards = {path: answering(answer) for path, answer in answers.items()}
        at = self.seam.at
        forwards[at] = self.seam.forward(self.module.get_submodule(at), standing[at], places)
        return self._native(images.expand(count, -1, -1, -1), forwards)

    def after(self, stage: str) -> int:
        """How many stages have run when `stage` is done."""
        if stage != self.seam.at:
            raise UnknownName("stage", stage, [self.seam.at])
        return 1

    def forward_bytes(self, layout: TokenLayout, after: str | None = None) -> int:
        """A working estimate: rows hold a few copies of the places that they read."""
        size = (layout.grid[0] * self.patch[0], layout.grid[1] * self.patch[1])
        read = 24 * sum(level.numel() for level in self._blank_places(size).maps)
        whole = 0 if after else 64 * size[0] * size[1]
        return (read + whole) * torch.finfo(self.dtype).bits // 8

    @torch.no_grad()
    def aim(self, image: Tensor, spec: Any = None) -> Aim:
        """The question that a target asks about one image [1, 3, H, W] (rows.py), as a view that
        answers it alone."""
        with self.eval_mode():
            self.check(image)
            inputs = {**self.inputs, **self.reading.prompt(self, spec)}
            asked = replace(self, inputs=inputs, memo={})
            outputs, calls = asked._record(image, self.seam.held)
            question = self.reading.ask(self, outputs, spec, _size(image))
        held = {path: call.output for path, call in calls.items()}
        aimed = replace(
            asked,
            question=question,
            held=held,
            classes=question.classes,
            values=question.values,
            sigmoid=self.sigmoid and not question.values,
            memo={},
        )
        value = float(question.read(outputs)[0, question.target])
        return Aim(aimed, question.target, question.name, question.pixels, value, question.boxes)

    def _read(self, outputs: Any) -> Tensor:
        return (self.reading.unaimed if self.question is None else self.question.read)(outputs)

    def _native(self, images: Tensor, forwards: Mapping[str, Callable[..., Any]]) -> Any:
        named = {name: copies_of(value, len(images)) for name, value in self.inputs.items()}
        attached = Attached() if torch.is_grad_enabled() else nullcontext()
        # Mask2Former draws a number for every layer that training might drop, in eval mode too
        with self.eval_mode(), torch.random.fork_rng(devices=[]), attached:
            module = spliced(self.module, forwards) if forwards else self.module
            return module(pixel_values=images, **named)

    def _record(self, images: Tensor, paths: Sequence[str]) -> tuple[Any, dict[str, Call]]:
        """Native outputs, and what modules were given and gave on the way."""
        calls: dict[str, Call] = {}

        def listening(path: str) -> Callable[..., Any]:
            native = self.module.get_submodule(path)

            def forward(*args: Any, **named: Any) -> Any:
                output = native(*args, **named)
                # others may put other things into the same output later (SAM 2)
                calls.setdefault(path, Call(copies_of(output, 1), named))
                return output

            return forward

        outputs = self._native(images, {path: listening(path) for path in paths})
        if absent := set(paths) - set(calls):
            raise UnsupportedModel(self.family, f"{', '.join(sorted(absent))} did not run in it")
        return outputs, calls

    def _blank_places(self, size: tuple[int, int]) -> Places:
        """What rows read of one empty image."""
        return self.seam.take(self._stand_ins(size)[self.seam.at], size)

    def _stand_ins(self, size: tuple[int, int]) -> dict[str, Call]:
        """What the modules up to the seam give for one empty image: shapes, masks and grids."""
        key = ("stand-ins", size)
        if key not in self.memo:
            with torch.no_grad(), torch.inference_mode(False):
                paths = (*self.seam.before, self.seam.at)
                self.memo[key] = self._record(self.zeros(size), paths)[1]
        return self.memo[key]


def _alone(batch: Sized) -> bool:
    """Whether a gradient would pass a batch of one. Then torch's batch norm gives a wrong one in
    eval mode, where what follows flattens and transposes its map (2.12, on a CPU): two are run."""
    return torch.is_grad_enabled() and len(batch) == 1


def _size(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def _cell(size: tuple[int, int], grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Pixels of one cell: of the coarsest level that tiles the image, up to 32 pixels."""
    tiling = [grid for grid in grids if not size[0] % grid[0] and not size[1] % grid[1]]
    cells = [(size[0] // h, size[1] // w) for h, w in tiling if size[0] // h == size[1] // w]
    if not cells:
        raise BadOption("size", size, f"one that square cells tile; rows read {grids[0]} places")
    return max([cell for cell in cells if max(cell) <= MOST_STRIDE] or [min(cells)])


def spliced(module: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """A copy of `module` that shares every weight, in which modules run other functions. The module
    itself stays as it is, so that threads may share it."""
    top = _shell(module)
    for path, forward in forwards.items():
        *way, last = path.split(".")
        here = top
        for name in way:
            inner = _shell(here._modules[name])
            here._modules[name] = inner
            here = inner
        leaf = _shell(here._modules[last])
        leaf.forward = forward
        here._modules[last] = leaf
    return top


def _shell(module: nn.Module | None) -> nn.Module:
    assert module is not None
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


class Attached(TorchFunctionMode):
    """A mode in which `detach` does nothing. Detectors detach the boxes that one layer passes to
    the next, which stabilises training; predictions depend on them nevertheless."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


def copies_of(value: Any, count: int) -> Any:
    """What a module gave for one image, as for `count` of them; nothing is copied."""

    def copies(x: Tensor) -> Tensor:
        return x.expand(count, *x.shape[1:]) if x.ndim and len(x) == 1 else x

    return tree_map_only(Tensor, copies, value)


def _detector(module: Any, projections: str, *, held: str = "", sigmoid: bool = True) -> DenseParts:
    """Queries that read the encoder's tokens; `projections` lead to those, one for each level."""
    names = class_names(module.config)
    seam = Seam(
        "model.encoder",
        ("last_hidden_state",),
        ("model.backbone", *_levels(module, projections)),
        (held,) if held else (),
    )
    return DenseParts(
        seam, BoxReading(sigmoid), names if sigmoid or not names else (*names, "no object")
    )


def _levels(module: Any, path: str) -> list[str]:
    """Where the layers of a list are; of a single layer, where it is."""
    part = module.get_submodule(path)
    listed = isinstance(part, nn.ModuleList)
    return [f"{path}.{level}" for level in range(len(part))] if listed else [path]


def _deformable_detr(module: Any) -> DenseParts:
    last = len(module.model.decoder.class_embed) - 1 if module.config.two_stage else None
    held = "" if last is None else f"model.decoder.class_embed.{last}"
    return _detector(module, "model.input_proj", held=held)


def _rt_detr(module: Any) -> DenseParts:
    parts = _detector(module, "model.encoder_input_proj", held="model.enc_score_head")
    fixed = getattr(module.config, "anchor_image_size", None)
    if fixed is not None:
        parts.size, parts.fixed_size = (fixed[0], fixed[1]), True
    return parts


def _grounding_dino(module: Any, text: TextInput | None) -> DenseParts:
    text = require_text(module, text)
    sentence = " ".join(f"{name.lower()}." for name in text.classes)
    tokens = text.tokenize([sentence], **_tensors_of(text.tokenize))
    inputs = as_inputs(tokens, next(module.parameters()).device)
    spans = _phrases(inputs["input_ids"][0].tolist())
    if len(spans) != len(text.classes) or spans[-1][1] > module.config.max_text_len:
        expected = f"names without . and ?, of {module.config.max_text_len} tokens in all at most"
        raise BadOption("classes", sentence[:80], expected)
    before = ("model.backbone", *_levels(module, "model.input_proj_vision"))
    held = ("model.encoder_output_class_embed",) if module.config.two_stage else ()
    seam = Seam("model.encoder", (), before, held, entering="vision_features")
    reading = BoxReading(sigmoid=True, spans=spans)
    return DenseParts(seam, reading, text.classes, inputs)


def _tensors_of(tokenize: Any) -> dict[str, Any]:
    """The options that a tokenizer of transformers needs to return tensors."""
    from transformers import PreTrainedTokenizerBase

    return {"return_tensors": "pt"} if isinstance(tokenize, PreTrainedTokenizerBase) else {}


def _phrases(ids: list[int]) -> tuple[tuple[int, int], ...]:
    """Where each phrase of a sentence begins and ends: at the tokens that attention does not
    cross."""
    from transformers.models.grounding_dino.modeling_grounding_dino import SPECIAL_TOKENS

    ends = [place for place, token in enumerate(ids) if token in (*SPECIAL_TOKENS, 0)]
    return tuple((a + 1, b) for a, b in pairwise(ends) if b > a + 1)


def _pixels(module: Any, reading: PixelReading, at: str, *fields: str) -> DenseParts:
    """Classes of pixels, which read the maps that module `at` gives."""
    return DenseParts(Seam(at, fields), reading, class_names(module.config))


def _dpt(module: Any) -> DenseParts:
    config = module.config
    if config.is_hybrid:
        raise UnsupportedModel("transformers DPT, hybrid", "it reads a convolutional stem besides")
    if getattr(module, "backbone", None) is not None:
        return _depth_anything(module)
    entries = tuple(index + 1 for index in config.backbone_out_indices)
    seam = Seam("dpt", ("hidden_states",), prefix=1, entries=entries)
    return DenseParts(seam, DEPTH, ("depth",), size=pair(config.image_size), fixed_size=True)


def _depth_anything(module: Any) -> DenseParts:
    return DenseParts(Seam("backbone", ("feature_maps",), prefix=1), DEPTH, ("depth",))


def _depth(outputs: Any) -> Tensor:
    return outputs.predicted_depth[:, None]


DEPTH = PixelReading(_depth, values=True)


def _semantic(outputs: Any) -> Tensor:
    """MaskFormer: how much of each class queries put on each pixel."""
    classes = outputs.class_queries_logits.softmax(dim=-1)[..., :-1]  # [B, Q, C]
    masks = outputs.masks_queries_logits.sigmoid()  # [B, Q, h, w]
    return torch.einsum("bqc,bqhw->bchw", classes, masks)


def _log(mean: Tensor) -> Tensor:
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()


def _prompted(module: Any, config: Any, places: str) -> DenseParts:
    """Asked about the middle of an image, until it is aimed."""
    size = pair(config.image_size)
    middle = torch.tensor([[[[size[1] / 2, size[0] / 2]]]]).to(next(module.parameters()))
    seam, inputs = Seam("vision_encoder", (places,)), {"input_points": middle}
    return DenseParts(seam, PromptReading(), inputs=inputs, size=size, fixed_size=True)


LOGITS = PixelReading(lambda outputs: outputs.logits)
MASKS, PIXEL_DECODER = PixelReading(_semantic, _log), "model.pixel_level_module"
DENSE_FAMILIES: dict[str, Callable[[Any], DenseParts]] = {
    "DetrForObjectDetection": lambda m: _detector(m, "model.input_projection", sigmoid=False),
    "ConditionalDetrForObjectDetection": lambda m: _detector(m, "model.input_projection"),
    "DeformableDetrForObjectDetection": _deformable_detr,
    "RTDetrForObjectDetection": _rt_detr,
    "RTDetrV2ForObjectDetection": _rt_detr,
    "DFineForObjectDetection": _rt_detr,
    "SegformerForSemanticSegmentation": lambda m: _pixels(m, LOGITS, "segformer", "hidden_states"),
    "DPTForDepthEstimation": _dpt,
    "DepthAnythingForDepthEstimation": _depth_anything,
    "MaskFormerForInstanceSegmentation": lambda m: _pixels(
        m, MASKS, PIXEL_DECODER, "encoder_last_hidden_state", "decoder_last_hidden_state"
    ),
    "Mask2FormerForUniversalSegmentation": lambda m: _pixels(
        m, MASKS, PIXEL_DECODER, "decoder_last_hidden_state", "decoder_hidden_states"
    ),
    "SamModel": lambda m: _prompted(m, m.config.vision_config, "last_hidden_state"),
    "Sam2Model": lambda m: _prompted(m, m.config.prompt_encoder_config, "fpn_hidden_states"),
}


SENTENCES = {"GroundingDinoForObjectDetection": _grounding_dino}  # that boxes are compared with
BARE = "it has no answers of its own; wrap the whole model (...ForObjectDetection, for one)"
REFUSED = {  # beginnings of class names, and why
    "DetrForSegmentation": "its masks are read off attention; DetrForObjectDetection works",
    "Detr": BARE,
    "ConditionalDetr": BARE,
    "DeformableDetr": BARE,
    "RTDetr": BARE,
    "DFine": BARE,
    "Yolos": BARE,
    "GroundingDino": BARE,
    "Owl": (
        "each of its boxes is read off one patch of its tower's end, so that no other place could"
        " be exchanged there"
    ),
    "MaskFormer": BARE,
    "OneFormer": "it is asked for a task in words; Mask2Former works",
    "Sam2Video": "it remembers other frames; Sam2Model works",
}


def dense_parts(module: Any, text: TextInput | None = None) -> DenseParts | None:
    """The parts of a detector or a model of pixels; None for any other module."""
    makers = DENSE_FAMILIES | {name: partial(make, text=text) for name, make in SENTENCES.items()}
    for kind in type(module).__mro__:
        if kind.__name__ in makers and kind.__module__.startswith("transformers."):
            parts = makers[kind.__name__](module)
            parts.family = f"transformers.{type(module).__name__}"
            return parts
    name = type(module).__name__
    for start, reason in REFUSED.items():
        if name.startswith(start):
            works = ", ".join(("YolosForObjectDetection", *makers))
            raise UnsupportedModel(f"transformers {name}", reason, f"classes that work: {works}")
    return None
