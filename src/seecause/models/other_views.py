"""Views whose tokens are no patches of a picture alone. Of transformers' classes, whose blocks are
those of a vision transformer:

    AST        overlapping patches of a spectrogram, read by class and distillation token
    VideoMAE   tubelets of a film, averaged
    YOLOS      boxes are tokens: box k is read from its own detection token, which is the class
               token of a view that is aimed at it. The other detection tokens and the class token,
               which nothing reads, are its registers

Native sequences may have another order: AST's patches are by frequency first, here by time first,
as its input is; YOLOS ends with its detection tokens, here they come before the patches. Attention
does not know order, and positions are added before.

Bags of instances, as slides are read: attention pooling (ABMIL, Ilse et al. 2018) as a readout.

    a = softmax(w (tanh(V h) * sigmoid(U h))),    z = sum_i a_i h_i,    answer = classifier(z)

A bag is a picture of N rows whose pixels are instances, and its pool a latent one whose query is
constant: keys hold the scores, values the instances. So each instance is a patch, and every method
that a latent pool takes works. There is no block; one that does nothing stands in its place. What
the answer would be without an instance needs no run: z without i is (z - a_i h_i) / (1 - a_i).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.engine.walk import walk
from seecause.errors import BadImage, BadOption, UnsupportedModel
from seecause.models.block import Block, Fn, chain, same, silent
from seecause.models.heads import class_names, is_multi_label
from seecause.models.hf_view import blocks_of
from seecause.models.layout import At, TokenLayout, pair
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess
from seecause.models.readings import BoxReading, corners_of
from seecause.models.rows import Aim
from seecause.models.signals import BagSteps, Film, Spectrogram
from seecause.models.view import LatentPool, VisionModel

CERTAIN = 1e-3  # the others' share of attention from which on the quotient is exact enough


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
            every = encoder.interpolation(encoder.mid_position_embeddings, size)
            at.memo["mid", index] = ordered(every[index])[0]
        return at.memo["mid", index][at.index]

    return replace(block, behind=behind)


FAMILIES = {
    "ASTForAudioClassification": _sound,
    "VideoMAEForVideoClassification": _film,
    "YolosForObjectDetection": _boxes,
}


@dataclass(eq=False, kw_only=True, repr=False)
class BagModel(VisionModel):
    """A view of a module that pools a bag by attention."""

    @torch.no_grad()
    def without(self, features: Tensor) -> Tensor:
        """Logits [B, N, C] of bags [B, N, D] (or one, [N, D]) without each instance in turn:
        exact, at the price of one run."""
        images = self.prepare(features)
        with self.settled():
            self.check(images)
            if images.shape[-2] < 2:
                raise BadImage("a bag of one instance", "without it nothing is left", "give more")
            pool = self.readout.latent
            assert pool is not None
            k, v = pool.kv(self.embed(images))  # [B, K, N, M]
            share = torch.softmax(k[..., 0], dim=-1)[..., None]
            whole = (share * v).sum(dim=2, keepdim=True)
            left = (whole - share * v) / (1 - share)  # [B, K, N, M]
            for b, branch, place in (share[..., 0] > 1 - CERTAIN).nonzero().tolist():
                scores = k[b, branch, :, 0].clone()
                scores[place] = -torch.inf
                left[b, branch, place] = torch.softmax(scores, dim=0) @ v[b, branch]
            rows = left.permute(0, 2, 1, 3).flatten(0, 1)  # [B * N, K, M]
            return self.readout.head(pool.finish(rows[:, None])).unflatten(0, (len(images), -1))


def bag_parts(
    module: nn.Module,
    *,
    value: nn.Module,
    weight: nn.Module,
    classifier: nn.Module,
    gate: nn.Module | None,
    encoder: nn.Module | None,
    width: int | None,
    blank: Tensor | None,
) -> Parts:
    """The parts of a module that pools by attention."""
    width = width or _width(encoder or value)
    if blank is not None and blank.numel() != width:
        raise BadOption("blank", f"{blank.numel()} features", f"one instance of {width}")
    steps = BagSteps.of_width(width, () if blank is None else blank.flatten().tolist())
    through = nn.Identity()  # what the verified wrap listens to in place of a block

    def features(images: Tensor) -> Tensor:
        return steps.raw(images)[..., 0].transpose(1, 2)  # [B, N, D]

    def embed(images: Tensor) -> Tensor:
        return features(images) if encoder is None else encoder(features(images))

    def native_logits(images: Tensor) -> Tensor:
        through(embed(images))
        return _answers(module, features(images))

    opens = None if gate is None else _activated(gate, torch.sigmoid)
    like = next(module.parameters())
    with torch.no_grad():
        row = embed(torch.zeros(1, width, 1, 1, device=like.device, dtype=like.dtype))
        pool = _pool(_activated(value, torch.tanh), opens, weight, row)

    return Parts(
        family=f"{type(module).__module__}.{type(module).__name__}",
        embed=embed,
        layout_at=TokenLayout.of_cells((1, 1)),
        blocks=[_idle(through)],
        norm=same,
        patch=(1, 1),
        native_tokens=embed,
        preprocess=steps,
        pool="latent",
        latent=pool,
        head=classifier,
        native_logits=native_logits,
        fixed_size=False,
        view=BagModel,
    )


def _pool(value: Fn, gate: Fn | None, weight: nn.Module, rows: Tensor) -> LatentPool:
    """Scores lie in the first lane of keys, which the query reads. `rows` [1, 1, M] are like those
    that come."""

    def kv(rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = value(rows) if gate is None else value(rows) * gate(rows)
        scores = weight(hidden).transpose(1, 2)[..., None]  # [B, K, N, 1]
        values = rows[:, None].expand(-1, scores.shape[1], -1, -1)
        return F.pad(scores, (0, rows.shape[-1] - 1)), values

    first = F.one_hot(torch.tensor(0), rows.shape[-1])
    branches = kv(rows)[0].shape[1]

    def query() -> Tensor:
        like = next(weight.parameters())
        return first.to(like).expand(1, branches, 1, -1)

    return LatentPool(scale=1.0, query=query, kv=kv, finish=lambda o: o[:, 0].flatten(1))


def _activated(layer: nn.Module, activation: Fn) -> Fn:
    """A bare linear layer with what follows it; anything else has it already."""
    return chain(layer, activation) if isinstance(layer, nn.Linear) else layer


def _idle(through: nn.Module) -> Block:
    """A block that adds nothing to its rows."""
    attention = silent(lambda heads: heads.new_zeros(*heads.shape[:-1], 1))
    return Block(name="blocks.0", native=through, **attention, feed=lambda x: 0 * x)


def _width(layer: nn.Module) -> int:
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            return part.in_features
    raise BadOption("width", None, "how many features an instance has: no layer tells")


def _answers(module: nn.Module, bags: Tensor) -> Tensor:
    """Logits [B, C] of bags [B, N, D], one after the other where the module takes one alone."""
    return torch.cat([_answer(module, bag) for bag in bags.split(1)])


def _answer(module: nn.Module, bag: Tensor) -> Tensor:
    """Of one bag [1, N, D], which many modules take as [N, D]."""
    for features in (bag[0], bag):
        try:
            logits: Any = module(features)
        except (RuntimeError, ValueError, IndexError):
            continue
        logits = logits[0] if isinstance(logits, tuple | list) else logits
        logits = getattr(logits, "logits", logits)
        if isinstance(logits, Tensor) and (logits.ndim == 1 or logits.shape[:-1] == (1,)):
            return logits.reshape(1, -1)
    raise BadOption(
        "module", type(module).__name__, "one that takes features [N, D] and gives logits, or first"
    )
