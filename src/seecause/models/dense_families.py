"""Where the native run of a model of many rows is cut: the places that its rows read, taken out of
what a module gave (`Seam`) and put into it again. The rest of the native forward runs in a copy of
the module that shares every weight (`spliced`), in which some modules answer with what is given to
them.

Of transformers' detectors and models of pixels:

    DETR, Conditional DETR           the encoder's tokens; queries are learnt
    Deformable DETR, RT-DETR, D-FINE its places on several levels, which a query samples at a few
                                     points each; where queries are chosen by what the encoder saw
                                     (all but plain Deformable DETR), the explained picture's stay
    Grounding-DINO                   what enters its encoder, where picture and sentence read each
                                     other: all of that runs again
    SegFormer                        the maps of its four stages
    DPT, Depth Anything              tokens of four blocks of the backbone
    MaskFormer, Mask2Former          the maps of its pixel decoder (and of its backbone's end)
    Segment Anything, and its second the maps of its image encoder; the region is the prompt

The places of an encoder have already read each other, and feature maps have seen their
surroundings: a bright place says where the row read, and mostly, not only, what lies there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import BadOption, UnsupportedModel
from seecause.models.heads import TextInput, as_inputs, class_names, require_text
from seecause.models.layout import pair
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
        """The places in what `at` gave for pictures of `size`."""
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


def answering(answer: Any) -> Callable[..., Any]:
    return lambda *args, **named: answer


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
    """What a tokenizer of transformers must be told."""
    from transformers import PreTrainedTokenizerBase

    return {"return_tensors": "pt"} if isinstance(tokenize, PreTrainedTokenizerBase) else {}


def _phrases(ids: list[int]) -> tuple[tuple[int, int], ...]:
    """Where each phrase of a sentence begins and ends: between tokens that nobody reads beyond."""
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
    """Asked about the middle of a picture, until it is aimed."""
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
