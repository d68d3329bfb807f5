"""Views of transformers' classes whose tokens are no patches of a picture alone; their blocks are
those of a vision transformer.

    AST        overlapping patches of a spectrogram, read by class and distillation token
    VideoMAE   tubelets of a film, averaged
    YOLOS      boxes are tokens: box k is read from its own detection token, which is the class
               token of a view that is aimed at it. The other detection tokens and the class token,
               which nothing reads, are its registers

Native sequences may have another order: AST's patches are by frequency first, here by time first,
as its input is; YOLOS ends with its detection tokens, here they come before the patches. Attention
does not know order, and positions are added before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from seecause.engine.walk import walk
from seecause.errors import BadOption, UnsupportedModel
from seecause.models.block import Block, chain, same
from seecause.models.heads import class_names, is_multi_label
from seecause.models.hf_view import blocks_of
from seecause.models.layout import At, TokenLayout, pair
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess
from seecause.models.readings import BoxReading, corners_of
from seecause.models.rows import Aim
from seecause.models.signals import Film, Spectrogram
from seecause.models.view import VisionModel


def _sound(module: Any) -> Parts:
    tower, config = module.audio_spectrogram_transformer, module.config
    size = (config.max_length, config.num_mel_bins)
    bands, times = tower.embeddings.get_shape(config)
    stride = (config.time_stride, config.frequency_stride)
    layout = TokenLayout((times, bands), prefix=2, class_index=0, distill_index=1)

    def ordered(tokens: Tensor) -> Tensor:
        """Patches by time, then by frequency."""
        patches = tokens[:, 2:].unflatten(1, (bands, times)).transpose(1, 2).flatten(1, 2)
        return torch.cat([tokens[:, :2], patches], dim=1)

    def need_spectrogram(steps: Preprocess) -> Preprocess:
        if not isinstance(steps, Spectrogram):
            raise BadOption("preprocess", steps, "a Spectrogram: this model listens to sound")
        return steps

    def averaged(pooled: Tensor) -> Tensor:
        return pooled.unflatten(-1, (2, -1)).mean(dim=-2)

    return Parts(
        family="transformers.ASTForAudioClassification",
        embed=lambda sounds: ordered(tower.embeddings(sounds[:, 0])),
        layout_at=lambda height, width: layout,
        blocks=blocks_of(tower),
        norm=tower.layernorm,
        patch=stride,
        native_tokens=lambda sounds: ordered(tower(sounds[:, 0]).last_hidden_state),
        native_order=ordered,
        preprocess=Spectrogram.of_extractor({"max_length": size[0], "num_mel_bins": size[1]}),
        adapt_preprocess=need_spectrogram,
        pool="cls+dist",
        after_pool=averaged,
        head=chain(averaged, module.classifier),
        native_logits=lambda sounds: module(sounds[:, 0]).logits,
        classes=class_names(config),
        sigmoid=is_multi_label(config),
        size=size,
    )


def _film(module: Any) -> Parts:
    tower, config = module.videomae, module.config
    if module.fc_norm is None:
        raise UnsupportedModel(
            "transformers VideoMAEForVideoClassification",
            "it reads its first tubelet alone (use_mean_pooling=False)",
            "use one that averages its tubelets",
        )
    (high, wide), (down, across) = pair(config.image_size), pair(config.patch_size)
    times = config.num_frames // config.tubelet_size
    as_film = partial(
        Film.of_frame, high=high, frames=config.num_frames, tubelet=config.tubelet_size
    )
    size = (times * high, wide)
    channels = config.num_channels
    film = as_film(Preprocess((high, wide), (0.0,) * channels, (1.0,) * channels))
    layout = TokenLayout((times * (high // down), wide // across), prefix=0, times=times)

    return Parts(
        family="transformers.VideoMAEForVideoClassification",
        embed=lambda strips: tower.embeddings(film.unfolded(strips), None),
        layout_at=lambda height, width: layout,
        blocks=blocks_of(tower),
        norm=same,
        patch=(down, across),
        native_tokens=lambda strips: tower(film.unfolded(strips)).last_hidden_state,
        adapt_preprocess=as_film,
        pool="mean",
        after_pool=module.fc_norm,
        head=chain(module.fc_norm, module.classifier),
        native_logits=lambda strips: module(film.unfolded(strips)).logits,
        classes=class_names(config),
        sigmoid=is_multi_label(config),
        size=size,
    )


@dataclass(eq=False, kw_only=True, repr=False)
class TokenBoxes(VisionModel):
    """A view of a vision transformer with detection tokens, aimed at one of them; until then it
    reads the first."""

    box: int | None = None

    @property
    def aimed(self) -> bool:
        return self.box is not None

    @torch.no_grad()
    def aim(self, image: Tensor, spec: Any = None) -> Aim:
        """The question that a target asks about one picture [1, 3, H, W] (rows.py), as a view whose
        class token is the detection token of its box."""
        with self.settled():
            self.check(image)
            outputs = self._outputs(image)
            size = (image.shape[-2], image.shape[-1])
            question = BoxReading(sigmoid=False).ask(self, outputs, spec, size)
        readout = self.readout
        if question.values:
            module: Any = self.module
            head = chain(module.bbox_predictor, torch.sigmoid, partial(corners_of, size=size))
            readout = replace(readout, head=head)
        aimed = replace(
            self,
            box=question.index,
            readout=readout,
            layout_at=partial(_box_layout, self.module, question.index),
            classes=question.classes,
            values=question.values,
            memo={},
        )
        value = float(question.read(outputs)[0, question.target])
        return Aim(aimed, question.target, question.name, question.pixels, value, question.boxes)

    def _outputs(self, images: Tensor) -> SimpleNamespace:
        """Classes and boxes of all detection tokens, as the view runs: gates count."""
        module: Any = self.module
        last = walk(self, self.embed(images), self.at(images)).end()
        tokens = self.readout.norm(last[:, 1 : 1 + module.config.num_detection_tokens])
        boxes = module.bbox_predictor(tokens).sigmoid()
        return SimpleNamespace(logits=module.class_labels_classifier(tokens), pred_boxes=boxes)


def _boxes(module: Any) -> Parts:
    """The parts of a detector."""
    tower, count = module.vit, module.config.num_detection_tokens
    patch = module.config.patch_size
    names = class_names(module.config)

    def ordered(tokens: Tensor) -> Tensor:
        """Class token, patches, detection tokens -> class token, detection tokens, patches."""
        return torch.cat([tokens[:, :1], tokens[:, -count:], tokens[:, 1:-count]], dim=1)

    blocks = blocks_of(tower)
    if module.config.use_mid_position_embeddings:
        blocks = [_with_positions(tower.encoder, b, i, ordered) for i, b in enumerate(blocks)]
    return Parts(
        family=f"transformers.{type(module).__name__}",
        embed=lambda images: ordered(tower.embeddings(images)),
        layout_at=partial(_box_layout, module, 0),
        blocks=blocks,
        norm=tower.layernorm,
        patch=(patch, patch),
        native_tokens=lambda images: ordered(tower(images).last_hidden_state),
        native_order=ordered,
        pool="cls",
        head=module.class_labels_classifier,
        native_logits=lambda images: module(pixel_values=images).logits[:, 0],
        classes=(*names, "no object") if names else (),
        fixed_size=False,
        size=tuple(module.config.image_size),
        view=TokenBoxes,
    )


def _box_layout(module: Any, box: int, height: int, width: int) -> TokenLayout:
    config = module.config
    prefix = 1 + config.num_detection_tokens
    return TokenLayout(
        grid=(height // config.patch_size, width // config.patch_size),
        prefix=prefix,
        class_index=1 + box,
        registers=tuple(index for index in range(prefix) if index != 1 + box),
    )


def _with_positions(encoder: Any, block: Block, index: int, ordered: Any) -> Block:
    """Behind every block but the last, positions are added once more."""
    if index == len(encoder.layer) - 1:
        return block

    def behind(at: At) -> Tensor:  # [R, D], or [B, R, D]
        if ("mid", index) not in at.memo:
            patch = encoder.config.patch_size
            size = (at.layout.grid[0] * patch, at.layout.grid[1] * patch)
            # transformers up to 5.17 keeps the positions in the encoder itself
            own = getattr(encoder, "mid_position_embeddings", None)
            every = encoder.interpolation(*([] if own is None else [own]), size)
            at.memo["mid", index] = ordered(every[index])[0]
        return at.memo["mid", index][at.index]

    return replace(block, behind=behind)


FAMILIES = {
    "ASTForAudioClassification": _sound,
    "VideoMAEForVideoClassification": _film,
    "YolosForObjectDetection": _boxes,
}
