"""Where the native run of a model of many rows is cut: the places that its rows read, taken out of
what a module gave (`Seam`) and put into it again. The rest of the native forward runs in a copy of
the module that shares every weight (`spliced`), in which some modules answer with what is given to
them.

Of transformers' detectors and models of pixels:

    DETR, Conditional DETR           the encoder's tokens; queries are learnt
    Deformable DETR, RT-DETR, D-FINE its places on several levels, which a query samples at a few
                                     points each; where queries are chosen by what the encoder saw
                                     (all but plain Deformable DETR), the explained picture's stay
    SegFormer                        the maps of its four stages
    DPT, Depth Anything              tokens of four blocks of the backbone
    Mask2Former                      the maps of its pixel decoder
    Segment Anything                 the map of its image encoder; the region is the prompt

The places of an encoder have already read each other, and feature maps have seen their
surroundings: a bright place says where the row read, and mostly, not only, what lies there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seecause.errors import BadOption, UnsupportedModel
from seecause.models.hub import class_names
from seecause.models.preprocess import Preprocess
from seecause.models.readings import BoxReading, PixelReading, PromptReading, RowReading


@dataclass(frozen=True, eq=False)
class Places:
    """What rows read of pictures of `size`: maps [B, C, h, w], one for each level. `others` [B, ..]
    lie at no place (a class token): in mixtures they stay the context's."""

    maps: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.maps[0])

    def repeated(self, count: int) -> Places:
        """Those of one picture, `count` times."""
        maps, others = (
            tuple(x.expand(count, *x.shape[1:]) for x in part) for part in (self.maps, self.others)
        )
        return Places(maps, others, self.size)

    def over(self, context: Places, mix: Callable[[Tensor, Tensor], Tensor]) -> Places:
        """Mixtures with the places of another run: `mix` makes n of every picture's map and the
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
    [B, C, h, w], tokens [B, prefix + places, D], or lists of these (only `entries` are read)."""

    at: str
    fields: tuple[str, ...]
    before: tuple[str, ...] = ()  # modules that only lead to it
    held: tuple[str, ...] = ()  # modules behind it that choose what is asked
    prefix: int = 0
    entries: tuple[int, ...] | None = None

    def take(self, call: Call, size: tuple[int, int]) -> Places:
        """The places in what `at` gave for pictures of `size`."""
        maps, others = [], []
        for tensor in self._tensors(call.output):
            if tensor.ndim == 4:
                maps.append(tensor)
                continue
            grids = call.named.get("spatial_shapes_list") or [self._grid(tensor, size)]
            others += [tensor[:, : self.prefix]] if self.prefix else []
            levels = tensor[:, self.prefix :].split([h * w for h, w in grids], dim=1)
            maps += [x.mT.unflatten(2, grid) for x, grid in zip(levels, grids, strict=True)]
        return Places(tuple(maps), tuple(others), size)

    def put(self, call: Call, places: Places) -> Any:
        """The same output with other places in it."""
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
        """Rows and columns of places that have the picture's shape."""
        count = tokens.shape[1] - self.prefix
        rows = max(1, round(math.sqrt(count * size[0] / size[1])))
        if count % rows:
            raise BadOption("size", size, f"pictures that {count} places of {self.at} can tile")
        return rows, count // rows


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
    """In it, `detach` cuts nothing. Detectors detach the boxes that one layer hands to the next,
    which steadies their training; the answer hangs on them all the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


def answering(answer: Any) -> Callable[..., Any]:
    return lambda *args, **named: answer


def copies_of(value: Any, count: int) -> Any:
    """What a module gave for one picture, as for `count` of them; nothing is copied."""
    if isinstance(value, Tensor):
        return value.expand(count, *value.shape[1:]) if value.ndim and len(value) == 1 else value
    if isinstance(value, Mapping):
        return type(value)(**{name: copies_of(part, count) for name, part in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(copies_of(part, count) for part in value)
    return value


@dataclass
class DenseParts:
    """What an adapter says of one native model of boxes or pixels."""

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


def _detector(module: Any, *before: str, held: str = "", sigmoid: bool = True) -> DenseParts:
    """Queries that read the encoder's tokens."""
    names = class_names(module.config)
    return DenseParts(
        Seam(
            "model.encoder",
            ("last_hidden_state",),
            ("model.backbone", *before),
            (held,) if held else (),
        ),
        BoxReading(sigmoid),
        names if sigmoid or not names else (*names, "no object"),
    )


def _detr(module: Any) -> DenseParts:
    return _detector(module, "model.input_projection", sigmoid=False)


def _conditional_detr(module: Any) -> DenseParts:
    return _detector(module, "model.input_projection")


def _deformable_detr(module: Any) -> DenseParts:
    levels = range(len(module.model.input_proj))
    held = ""
    if module.config.two_stage:
        held = f"model.decoder.class_embed.{len(module.model.decoder.class_embed) - 1}"
    return _detector(module, *(f"model.input_proj.{level}" for level in levels), held=held)


def _rt_detr(module: Any) -> DenseParts:
    levels = range(len(module.model.encoder_input_proj))
    before = (f"model.encoder_input_proj.{level}" for level in levels)
    parts = _detector(module, *before, held="model.enc_score_head")
    fixed = getattr(module.config, "anchor_image_size", None)
    if fixed is not None:
        parts.size, parts.fixed_size = (fixed[0], fixed[1]), True
    return parts


def _segformer(module: Any) -> DenseParts:
    reading = PixelReading(lambda outputs: outputs.logits)
    return DenseParts(Seam("segformer", ("hidden_states",)), reading, class_names(module.config))


def _dpt(module: Any) -> DenseParts:
    config = module.config
    if config.is_hybrid:
        raise UnsupportedModel("transformers DPT, hybrid", "it reads a convolutional stem besides")
    if getattr(module, "backbone", None) is not None:
        return _depth_anything(module)
    entries = tuple(index + 1 for index in config.backbone_out_indices)
    seam = Seam("dpt", ("hidden_states",), prefix=1, entries=entries)
    size = (config.image_size, config.image_size)
    return DenseParts(seam, DEPTH, ("depth",), size=size, fixed_size=True)


def _depth_anything(module: Any) -> DenseParts:
    return DenseParts(Seam("backbone", ("feature_maps",), prefix=1), DEPTH, ("depth",))


def _depth(outputs: Any) -> Tensor:
    return outputs.predicted_depth[:, None]


DEPTH = PixelReading(_depth, values=True)


def _mask2former(module: Any) -> DenseParts:
    fields = ("decoder_last_hidden_state", "decoder_hidden_states")
    seam = Seam("model.pixel_level_module", fields)
    return DenseParts(seam, PixelReading(_semantic, _log), class_names(module.config))


def _semantic(outputs: Any) -> Tensor:
    """Mask2Former: how much of each class queries put on each pixel."""
    classes = outputs.class_queries_logits.softmax(dim=-1)[..., :-1]  # [B, Q, C]
    masks = outputs.masks_queries_logits.sigmoid()  # [B, Q, h, w]
    return torch.einsum("bqc,bqhw->bchw", classes, masks)


def _log(mean: Tensor) -> Tensor:
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()


def _sam(module: Any) -> DenseParts:
    side = module.config.vision_config.image_size
    middle = torch.full((1, 1, 1, 2), side / 2).to(next(module.parameters()))
    seam, inputs = Seam("vision_encoder", ("last_hidden_state",)), {"input_points": middle}
    return DenseParts(seam, PromptReading(), inputs=inputs, size=(side, side), fixed_size=True)


DENSE_FAMILIES: dict[str, Callable[[Any], DenseParts]] = {
    "DetrForObjectDetection": _detr,
    "ConditionalDetrForObjectDetection": _conditional_detr,
    "DeformableDetrForObjectDetection": _deformable_detr,
    "RTDetrForObjectDetection": _rt_detr,
    "RTDetrV2ForObjectDetection": _rt_detr,
    "DFineForObjectDetection": _rt_detr,
    "SegformerForSemanticSegmentation": _segformer,
    "DPTForDepthEstimation": _dpt,
    "DepthAnythingForDepthEstimation": _depth_anything,
    "Mask2FormerForUniversalSegmentation": _mask2former,
    "SamModel": _sam,
}


_BARE = "it has no answers of its own; wrap the whole model, ...ForObjectDetection"
REFUSED = {  # beginnings of class names, and why
    "DetrForSegmentation": "its masks are read off attention; DetrForObjectDetection works",
    "Detr": _BARE,
    "ConditionalDetr": _BARE,
    "DeformableDetr": _BARE,
    "RTDetr": _BARE,
    "DFine": _BARE,
    "Yolos": _BARE,
    "GroundingDino": (
        "its sentence reads the picture inside the encoder, and queries read the sentence, so that"
        " places of pictures cannot be exchanged alone"
    ),
    "Owl": "its boxes are compared with sentences",
    "MaskFormer": "its pixels are read by another decoder; Mask2Former works",
    "OneFormer": "it is asked for a task in words; Mask2Former works",
    "Sam2": "it remembers other frames; SamModel works",
}


def dense_parts(module: Any) -> DenseParts | None:
    """The parts of a detector or a model of pixels; None for any other module."""
    for kind in type(module).__mro__:
        if kind.__name__ in DENSE_FAMILIES and kind.__module__.startswith("transformers."):
            parts = DENSE_FAMILIES[kind.__name__](module)
            parts.family = f"transformers.{type(module).__name__}"
            return parts
    name = type(module).__name__
    for start, reason in REFUSED.items():
        if name.startswith(start):
            works = ", ".join(("YolosForObjectDetection", *DENSE_FAMILIES))
            raise UnsupportedModel(f"transformers {name}", reason, f"classes that work: {works}")
    return None
