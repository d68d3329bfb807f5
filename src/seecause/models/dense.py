"""Models with many outputs: detectors and semantic segmentation.

    image -> places -> rows -> predictions

Any output row can be explained like a class: a query of a decoder, the pixels of a region. Rows
read *places*: the encoder's tokens or feature maps, perhaps of several levels. `run_to` returns
them, and `run_from` continues from them, from those of another run, or from a mixture, as with
networks of stages (staged.py).

The native forward is not written again. `spliced` makes a shallow copy of the module that shares
all weights. In the copy, the module `at` returns the given features, and the modules before it
return dummy values that are never read. A detector that selects its queries from the encoder's
output (RT-DETR) keeps the queries of the explained image: `held` modules return the values that
they returned for it, so query k stays the same for any input features.

    DETR, Table       the encoder's tokens; queries are learnt
    Transformer
    RT-DETR, D-FINE   maps of several levels, which a query samples at a few points each
    RF-DETR           the map of its projected backbone, sampled likewise
    SegFormer         the maps of its four stages
    Mask2Former       the maps of the pixel decoder

A high value shows which locations the query attended to. Features at a location also contain
information from its surroundings.

`aim` chooses the row in an image and returns a view that predicts it alone. Before that, a detector
predicts its most confident box, and a segmentation model the mean over all pixels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from seecause.errors import BadOption, NotDefined, UnknownName, UnsupportedModel
from seecause.models.base import Architecture, ImageModel
from seecause.models.block import Fn, Named, Size, TokenLayout, pair, same, spliced
from seecause.models.parts import WrapOptions, class_names
from seecause.models.preprocess import Preprocess
from seecause.target import Box, Region, parse_row, rectangle

SURE, MOST_BOXES = 0.5, 30  # minimum probability and maximum number of listed boxes
MOST_STRIDE = 32  # maximum number of pixels of a cell, if there are several levels


# ---------------------------------------------------------------- aims


@dataclass(frozen=True)
class FoundBox:
    """A confident box of a detector: its query, class, probability and corners in pixels."""

    index: int
    name: str
    probability: float
    place: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Aim:
    """One row for one image: how it is read from native outputs, the class that is explained, the
    pixels that it is about, and (from `aim`) a view that predicts this row alone."""

    read: Callable[[Any], Tensor]  # native outputs -> logits [B, C]
    target: int
    name: str
    pixels: Tensor  # [H, W] bool
    boxes: Sequence[FoundBox] = ()  # all confident boxes of a detector
    model: Any = None  # ImageModel
    value: float = 0.0  # logit of the target for the image itself

    @property
    def record(self) -> dict[str, list[Any]]:
        """For manifests: one entry for each image."""
        rows, columns = self.pixels.any(dim=1).nonzero(), self.pixels.any(dim=0).nonzero()
        ends = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1] if len(rows) else []
        place = [int(end) for end in ends]
        boxes = [asdict(box) for box in self.boxes]
        return {"row": [self.name], "place": [place], "value": [self.value], "boxes": [boxes]}


# ---------------------------------------------------------------- rows of native outputs


@dataclass(frozen=True)
class BoxReading:
    """Class logits [B, Q, C] and boxes of a detector's queries. With `sigmoid` classes are
    independent; otherwise a softmax runs over them, and the last class is "no object"."""

    sigmoid: bool

    def compared(self, outputs: Any) -> dict[str, Tensor]:
        """All outputs, for the verified wrap."""
        return {"classes": outputs.logits, "boxes": outputs.pred_boxes}

    def unaimed(self, outputs: Any) -> Tensor:
        """Logits [B, C] of the most confident box, used before a row is selected."""
        surest = self.objects(outputs).amax(dim=-1).argmax(dim=-1)  # [B]
        return outputs.logits[torch.arange(len(surest), device=surest.device), surest]

    def objects(self, outputs: Any) -> Tensor:
        """Probabilities of objects [B, Q, C]."""
        logits = outputs.logits
        return logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)[..., :-1]

    def ask(self, model: ImageModel, outputs: Any, spec: Any, size: Size) -> Aim:
        """The row that a target selects, from the native `outputs` for one image."""
        box = parse_row(spec)
        if isinstance(box, Region):
            raise NotDefined("a region", f"{model.name} predicts boxes", "Give sc.Box(index)")
        box = box or Box(label=spec)
        sure = self.objects(outputs)[0]  # [Q, C]
        label = None if box.label is None else model.class_index(box.label)
        if label is not None and label >= sure.shape[1]:
            raise BadOption("class index", label, f"0 to {sure.shape[1] - 1}")
        if box.index is None:
            index = int((sure if label is None else sure[:, label : label + 1]).amax(1).argmax())
        else:
            index = operator.index(box.index)
        if not 0 <= index < len(sure):
            raise BadOption("box", index, f"a query of {model.name}, 0 to {len(sure) - 1}")
        corners = corners_of(outputs.pred_boxes[0], size)  # [Q, 4]
        best = sure.max(dim=-1)
        order = best.values.argsort(descending=True)[:MOST_BOXES].tolist()
        boxes = [
            FoundBox(
                query,
                model.class_name(int(best.indices[query])),
                float(best.values[query]),
                tuple(corners[query].tolist()),
            )
            for query in order
            if best.values[query] > SURE
        ]
        return Aim(
            lambda given: given.logits[:, index],
            int(best.indices[index]) if label is None else label,
            f"box {index}",
            rectangle([int(corner) for corner in corners[index].round()], size),
            boxes,
        )


def corners_of(boxes: Tensor, size: Size) -> Tensor:
    """Centre, width and height [.., 4] in shares of the image -> x0, y0, x1, y1 in pixels."""
    from torchvision.ops import box_convert

    return box_convert(boxes, "cxcywh", "xyxy") * boxes.new_tensor([size[1], size[0]] * 2)


@dataclass(frozen=True)
class PixelReading:
    """Outputs [B, C, h, w], averaged over a region and then `finish`ed into logits [B, C]."""

    maps: Callable[[Any], Tensor]
    finish: Fn = same

    sigmoid: ClassVar[bool] = False

    def compared(self, outputs: Any) -> dict[str, Tensor]:
        """All outputs, for the verified wrap."""
        return {"pixels": self.maps(outputs)}

    def unaimed(self, outputs: Any) -> Tensor:
        """Mean logits [B, C] of all pixels, used before a region is selected."""
        return self.finish(self.maps(outputs).mean(dim=(2, 3)))

    def ask(self, model: ImageModel, outputs: Any, spec: Any, size: Size) -> Aim:
        """The region that a target selects, from the native `outputs` for one image."""
        row = parse_row(spec)
        if isinstance(row, Box):
            raise NotDefined("a box", f"{model.name} predicts pixels", "Give sc.Region(where)")
        row = row or Region(None, spec)
        maps = self.maps(outputs)  # [1, C, h, w]
        label = None if row.label is None else model.class_index(row.label)
        if row.where is None:  # the pixels of a class, or of the one that has most
            best = F.interpolate(maps, size=size, mode="bilinear").argmax(dim=1)[0].cpu()
            pixels = best == (best.flatten().mode().values if label is None else label)
            name = "its pixels" if pixels.any() else "the image"
            pixels = pixels if pixels.any() else ~pixels
        else:
            pixels, name = row.mask(size), "the region"
        shares = F.adaptive_avg_pool2d(
            pixels[None, None].to(maps), (maps.shape[-2], maps.shape[-1])
        )[0, 0]
        shares = shares / shares.sum()  # [h, w]: weights of outputs in the mean over pixels

        def read(given: Any) -> Tensor:
            return self.finish((self.maps(given) * shares).sum(dim=(2, 3)))

        target = int(read(outputs)[0].argmax()) if label is None else label
        return Aim(read, target, name, pixels)


# ---------------------------------------------------------------- places


@dataclass(frozen=True, eq=False)
class Places:
    """Features that rows read, for images of `size`: maps [B, C, h, w], one for each level."""

    maps: tuple[Tensor, ...]
    size: Size

    def __len__(self) -> int:
        return len(self.maps[0])

    def over(self, context: Places, mix: Callable[[Tensor, Tensor], Tensor]) -> Places:
        """Mixtures with the places of another run: `mix` makes n of every image's map and the
        context's, [B * n, C, h, w], for each level."""
        maps = tuple(mix(*both) for both in zip(self.maps, context.maps, strict=True))
        return Places(maps, self.size)


@dataclass(frozen=True)
class Seam:
    """Where a native run is cut: at the output of module `at`, whose `fields` hold the places: maps
    [B, C, h, w], tokens [B, places, D], or lists of these. No fields: the output is a map."""

    at: str
    fields: tuple[str, ...]
    before: tuple[str, ...] = ()  # modules that only lead to it
    held: tuple[str, ...] = ()  # modules behind it that choose the queries

    def take(self, output: Any, size: Size) -> Places:
        """The places in what `at` returned for images of `size`."""
        tensors = tree_leaves([getattr(output, name) for name in self.fields] or output)
        maps = (x if x.ndim == 4 else x.mT.unflatten(2, self._grid(x, size)) for x in tensors)
        return Places(tuple(maps), size)

    def put(self, output: Any, places: Places) -> Any:
        """The output of `at` with other places in it."""
        maps = iter(places.maps)

        def replaced(tensor: Tensor) -> Tensor:
            return next(maps) if tensor.ndim == 4 else next(maps).flatten(2).mT

        if not self.fields:
            return replaced(output)
        changed = {n: tree_map_only(Tensor, replaced, getattr(output, n)) for n in self.fields}
        return type(output)(**{**output, **changed})

    def _grid(self, tokens: Tensor, size: Size) -> Size:
        """Rows and columns of the grid of locations, in the aspect ratio of the image."""
        count = tokens.shape[1]
        rows = max(1, round(math.sqrt(count * size[0] / size[1])))
        if count % rows:
            raise BadOption("size", size, f"a size that {count} cells of {self.at} can tile")
        return rows, count // rows


# ---------------------------------------------------------------- the view


@dataclass
class DenseParts:
    """The named parts of a native detector or segmentation model."""

    seam: Seam
    reading: BoxReading | PixelReading
    classes: Sequence[str] = ()
    preprocess: Preprocess | None = None
    size: Size | None = None
    fixed_size: bool = False
    family: str = ""

    @torch.no_grad()
    def assemble(self, module: nn.Module, options: WrapOptions) -> DenseModel:
        """A view of these parts, with the options of the caller."""
        for name in ("head", "pool", "sigmoid"):
            if getattr(options, name) is not None:
                reads = f"None: {type(module).__name__} has its own readout"
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
            fixed_size=self.fixed_size,
            seam=self.seam,
            reading=self.reading,
        )
        grids = [_size(level) for level in model._blank_places(steps.size).maps]
        model.patch = _cell(steps.size, grids)
        model.layout_at = TokenLayout.of_cells(model.patch)
        return model


@dataclass(eq=False, kw_only=True, repr=False)
class DenseModel(ImageModel):
    """A view of a native detector or segmentation model. `model(images)` returns the logits of the
    row that it is aimed at, [B, C], through the native modules."""

    architecture: ClassVar[Architecture] = "dense"

    seam: Seam
    reading: BoxReading | PixelReading
    row: Aim | None = None
    held: Mapping[str, Any] = field(default_factory=dict)  # outputs in the explained image's run

    @property
    def aimed(self) -> bool:
        return self.row is not None

    @property
    def cells(self) -> str:
        """The one stage that can be patched."""
        return self.seam.at

    @property
    def readout_name(self) -> str:
        return "a row" if self.row is None else self.row.name

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> logits [B, C] of the row."""
        with self.eval_mode():
            self.check(images)
            if _alone(images):
                return self._read(self.outputs(images.expand(2, -1, -1, -1)))[:1]
            return self._read(self.outputs(images))

    def outputs(self, images: Tensor) -> Any:
        """Native outputs for images, with the outputs of held modules replaced."""
        return self._native(images, _returning(self.held, len(images)))

    def run_to(self, stage: str, images: Tensor) -> Places:
        """Images -> places that rows read."""
        self.after(stage)
        return self.seam.take(self._record(images, (stage,))[1][stage], _size(images))

    def run_from(self, stage: str, places: Places) -> Tensor:
        """Places -> logits of the row; only the part of the model that reads places runs."""
        self.after(stage)
        if _alone(places):
            twice = Places(tuple(x.expand(2, -1, -1, -1) for x in places.maps), places.size)
            return self._read(self.outputs_from(twice))[:1]
        return self._read(self.outputs_from(places))

    def outputs_from(self, places: Places) -> Any:
        """Native outputs of rows that read these places."""
        count, standing = len(places), self._stand_ins(places.size)
        images = places.maps[0].new_zeros(1, len(self.preprocess.mean), *places.size)
        outputs = {path: standing[path] for path in self.seam.before} | {**self.held}
        forwards = _returning(outputs, count)
        put = self.seam.put(standing[self.seam.at], places)
        forwards[self.seam.at] = lambda *args, **named: put
        return self._native(images.expand(count, -1, -1, -1), forwards)

    def after(self, stage: str) -> int:
        """How many stages have run when `stage` is done."""
        if stage != self.seam.at:
            raise UnknownName("stage", stage, [self.seam.at])
        return 1

    def forward_bytes(self, layout: TokenLayout, after: str | None = None) -> int:
        """An estimate of the memory of a run: rows hold a few copies of the features that they
        read."""
        size = (layout.grid[0] * self.patch[0], layout.grid[1] * self.patch[1])
        read = 24 * sum(level.numel() for level in self._blank_places(size).maps)
        whole = 0 if after else 64 * size[0] * size[1]
        return (read + whole) * torch.finfo(self.dtype).bits // 8

    @torch.no_grad()
    def aim(self, image: Tensor, spec: Any = None) -> Aim:
        """The row that a target names in one image [1, 3, H, W], with a view that predicts it
        alone."""
        with self.eval_mode():
            self.check(image)
            unaimed = replace(self, row=None, held={}, memo={})
            outputs, held = unaimed._record(image, self.seam.held)
            row = self.reading.ask(self, outputs, spec, _size(image))
        logits = row.read(outputs)[0]
        aimed = replace(self, row=row, held=held, memo={"n_classes": len(logits)})
        return replace(row, model=aimed, value=float(logits[row.target]))

    def _read(self, outputs: Any) -> Tensor:
        return (self.reading.unaimed if self.row is None else self.row.read)(outputs)

    def _native(self, images: Tensor, forwards: Mapping[str, Callable[..., Any]]) -> Any:
        attached = Attached() if torch.is_grad_enabled() else nullcontext()
        # older releases of Mask2Former draw random numbers in eval mode, too
        with self.eval_mode(), torch.random.fork_rng(devices=[]), attached:
            module = spliced(self.module, forwards) if forwards else self.module
            return module(pixel_values=images)

    def _record(self, images: Tensor, paths: Sequence[str]) -> tuple[Any, Named]:
        """Native outputs, and the outputs of the modules at `paths`."""
        seen: Named = {}

        def listening(path: str) -> Callable[..., Any]:
            native = self.module.get_submodule(path)

            def forward(*args: Any, **named: Any) -> Any:
                seen[path] = native(*args, **named)
                return seen[path]

            return forward

        outputs = self._native(images, {path: listening(path) for path in paths})
        if absent := set(paths) - set(seen):
            raise UnsupportedModel(self.family, f"{', '.join(sorted(absent))} did not run in it")
        return outputs, seen

    def _blank_places(self, size: Size) -> Places:
        """The features of one image of zeros."""
        return self.seam.take(self._stand_ins(size)[self.seam.at], size)

    def _stand_ins(self, size: Size) -> Named:
        """Outputs of the modules before the seam for one image of zeros: shapes, masks and
        grids."""
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


def _size(images: Tensor) -> Size:
    return images.shape[-2], images.shape[-1]


def _cell(size: Size, grids: Sequence[Size]) -> Size:
    """Pixels of one cell: of the coarsest level that tiles the image, up to 32 pixels."""
    tiling = [grid for grid in grids if not size[0] % grid[0] and not size[1] % grid[1]]
    cells = [(size[0] // h, size[1] // w) for h, w in tiling if size[0] // h == size[1] // w]
    if not cells:
        raise BadOption("size", size, f"a size that square cells tile (grid: {grids[0]})")
    return max([cell for cell in cells if max(cell) <= MOST_STRIDE] or [min(cells)])


def _returning(outputs: Mapping[str, Any], count: int) -> dict[str, Callable[..., Any]]:
    """Forwards of modules that return an output for one image, as for `count` of them; nothing is
    copied."""

    def copies(x: Tensor) -> Tensor:
        return x.expand(count, *x.shape[1:]) if x.ndim and len(x) == 1 else x

    def forward(output: Any) -> Callable[..., Any]:
        repeated = tree_map_only(Tensor, copies, output)
        return lambda *args, **named: repeated

    return {path: forward(output) for path, output in outputs.items()}


class Attached(TorchFunctionMode):
    """A mode in which `detach` does nothing. Detectors detach the boxes that one layer passes to
    the next, which stabilises training; predictions depend on them nevertheless."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- families


def _detr(module: Any) -> DenseParts:
    """Queries that read the encoder's tokens."""
    names = class_names(module.config)
    before = ("model.backbone", "model.input_projection")
    seam = Seam("model.encoder", ("last_hidden_state",), before)
    return DenseParts(seam, BoxReading(sigmoid=False), (*names, "no object") if names else ())


def _rt_detr(module: Any) -> DenseParts:
    levels = range(len(module.model.encoder_input_proj))
    before = ("model.backbone", *(f"model.encoder_input_proj.{level}" for level in levels))
    seam = Seam("model.encoder", ("last_hidden_state",), before, ("model.enc_score_head",))
    parts = DenseParts(seam, BoxReading(sigmoid=True), class_names(module.config))
    fixed = getattr(module.config, "anchor_image_size", None)
    if fixed is not None:
        parts.size, parts.fixed_size = (fixed[0], fixed[1]), True
    return parts


def _rf_detr(module: Any) -> DenseParts:
    """Queries that sample the one map of a projected backbone. They, and the boxes they start from,
    stay those of the explained image: its score head runs twice, so what it reads is held. Images
    are square: transformers swaps the height and the width of the windows that its tower reads."""
    held, side = ("model.enc_output_norm.0",), pair(module.config.backbone_config.image_size)
    seam = Seam("model.backbone.projector", (), ("model.backbone.backbone",), held)
    return DenseParts(seam, BoxReading(sigmoid=True), class_names(module.config), size=side)


def _pixels(module: Any, reading: PixelReading, at: str, *fields: str) -> DenseParts:
    """Classes of pixels, which read the maps that module `at` returns."""
    return DenseParts(Seam(at, fields), reading, class_names(module.config))


def _semantic(outputs: Any) -> Tensor:
    """Mask2Former: how much of each class queries put on each pixel."""
    classes = outputs.class_queries_logits.softmax(dim=-1)[..., :-1]  # [B, Q, C]
    masks = outputs.masks_queries_logits.sigmoid()  # [B, Q, h, w]
    return torch.einsum("bqc,bqhw->bchw", classes, masks)


def _log(mean: Tensor) -> Tensor:
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()


LOGITS = PixelReading(lambda outputs: outputs.logits)
MASKS = PixelReading(_semantic, _log)
DENSE_FAMILIES: dict[str, Callable[[Any], DenseParts]] = {
    "DetrForObjectDetection": _detr,
    "TableTransformerForObjectDetection": _detr,
    "RTDetrForObjectDetection": _rt_detr,
    "RTDetrV2ForObjectDetection": _rt_detr,
    "DFineForObjectDetection": _rt_detr,
    "RfDetrForObjectDetection": _rf_detr,
    "SegformerForSemanticSegmentation": lambda m: _pixels(m, LOGITS, "segformer", "hidden_states"),
    "Mask2FormerForUniversalSegmentation": lambda m: _pixels(
        m, MASKS, "model.pixel_level_module", "decoder_last_hidden_state", "decoder_hidden_states"
    ),
}


def dense_parts(module: Any) -> DenseParts | None:
    """The parts of a detector or a segmentation model; None for any other module."""
    for kind in type(module).__mro__:
        if kind.__name__ in DENSE_FAMILIES and kind.__module__.startswith("transformers."):
            parts = DENSE_FAMILIES[kind.__name__](module)
            parts.family = f"transformers.{type(module).__name__}"
            return parts
    return None
