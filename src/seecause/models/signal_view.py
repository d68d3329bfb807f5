"""Views of transformers' models of sound and film, whose blocks are those of a vision transformer.

    AST        overlapping patches of a spectrogram, read by class and distillation token
    VideoMAE   tubelets of a film, averaged

AST's own order of patches is by frequency first; here it is by time first, as its input is, since
attention does not know order and positions are added before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seecause.errors import BadOption, UnsupportedModel
from seecause.models.block import chain, same
from seecause.models.hf_view import blocks_of, class_names
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess
from seecause.models.signals import Film, Spectrogram


def find(module: Any) -> Parts:
    """The parts of a model of sound or film."""
    return CLASSES[next(c.__name__ for c in type(module).__mro__ if c.__name__ in CLASSES)](module)


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

    def prepares(steps: Preprocess) -> Preprocess:
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
        prepares=prepares,
        pool="cls+dist",
        after_pool=averaged,
        head=chain(averaged, module.classifier),
        native_logits=lambda sounds: module(sounds[:, 0]).logits,
        classes=class_names(config),
        sigmoid=config.problem_type == "multi_label_classification",
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
    (high, wide), (down, across) = (
        (side, side) if isinstance(side, int) else tuple(side)
        for side in (config.image_size, config.patch_size)
    )
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
        prepares=as_film,
        pool="mean",
        after_pool=module.fc_norm,
        head=chain(module.fc_norm, module.classifier),
        native_logits=lambda strips: module(film.unfolded(strips)).logits,
        classes=class_names(config),
        sigmoid=config.problem_type == "multi_label_classification",
        size=size,
    )


CLASSES = {"ASTForAudioClassification": _sound, "VideoMAEForVideoClassification": _film}
