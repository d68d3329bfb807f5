"""iFAM: a classifier that cannot look elsewhere (arXiv 2506.08915).

Stage 1 discovers parts; their union is a hard mask; stage 2 answers from the selected patches
alone, so the mask is the explanation, and a guarantee (but for the ablation `gradient="soft"`,
which reads every patch a little and promises nothing). With `stages=1` this is PDiscoFormer, its
baseline: the parts' own votes, from features that have seen the whole picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seecause.engine.graphs import ModuleOwner, captured
from seecause.errors import BadOption
from seecause.faithful.parts import (
    Assignment,
    IFAMOutput,
    Noise,
    Purpose,
    Selection,
    mean_vote,
    part_embeddings,
    part_logits,
    part_maps,
    reject_far,
    reject_unlike,
    select,
    select_without,
    selection_of,
)
from seecause.faithful.stages import (
    Gradient,
    MaskedStage,
    PartStage,
    packed_places,
    reads_only,
    reads_softly,
    reads_straight_through,
    view_parts,
    visible_tokens,
)
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess
from seecause.options import check_options

By = Literal["distance", "dot"]


@dataclass(frozen=True, kw_only=True)
class IFAMOptions:
    """Where paper and released code differ, there is an option for each (docs/faithful.md has the
    table). The default is the paper's rule in `gradient`, `presence` and `eval_noise`; the code's
    are `"none"`, `"local"` and `True`. The paper writes otherwise in three: `mask_noise="maps"`,
    `modulation="per_part"` and `orthogonality="prototypes"` (iFAM's code: `"ifam_code"`)."""

    stages: Literal[1, 2] = 2
    gradient: Gradient = "ste"
    modulation: Literal["joint", "per_part"] = "joint"
    orthogonality: Literal["parts", "ifam_code", "prototypes"] = "parts"
    presence: Literal["global", "local"] = "global"
    eval_noise: bool = False
    # where there is noise, the mask is decided by a draw of its own, or by that of the maps
    mask_noise: Literal["own", "maps"] = "own"
    part_dropout: float = 0.3  # of votes, in training
    part_dropout2: float = 0.3  # of the mask, in training
    # `stage1` trains its special tokens and positions only, `both` does the same to stage 2
    freeze: Literal["stage1", "both", "none"] = "stage1"

    def __post_init__(self) -> None:
        check_options("IFAM", IFAMOptions, asdict(self))
        if not 0 <= self.part_dropout < 1:
            raise BadOption("part_dropout", self.part_dropout, "a share in [0, 1)")
        if not 0 <= self.part_dropout2 <= 1:
            raise BadOption("part_dropout2", self.part_dropout2, "a share in [0, 1]")


@dataclass(frozen=True)
class Intervention:
    """Parts taken out of the mask, and the quantile of tokens that are trusted (None: all)."""

    drop_parts: tuple[int, ...] = ()
    quantile: float | None = None
    by: By = "distance"

    def __bool__(self) -> bool:
        return bool(self.drop_parts) or self.quantile is not None


@dataclass(frozen=True)
class Thresholds:
    """Per part, how far from its prototype (or how little like it) a token may be; and how many
    tokens of how many pictures decided it."""

    quantile: float
    by: By
    values: tuple[float, ...]  # K of them; infinite where no token was seen
    tokens: tuple[int, ...] = field(default=())
    pictures: int = 0


class IFAM(nn.Module):
    """A classifier of two copies of `backbone`, a native vision transformer: the first finds
    `parts` parts, the second answers from their patches alone. `sc.wrap(net)` is a model for every
    method here; `sc.faithful.train` trains one.

    `classes`: a count, or their names. `options`: the fields of `IFAMOptions`. `preprocess` and
    `architecture`: how pictures are prepared and the backbone is built, for wrapping and saving,
    where the backbone does not tell.

    >>> import timm, torch, seecause as sc
    >>> small = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    >>> net = sc.faithful.IFAM(timm.models.VisionTransformer(**small), parts=3, classes=5).eval()
    >>> out = net(torch.zeros(1, 3, 32, 32))
    >>> out.logits.shape, out.maps.shape, out.mask.shape
    (torch.Size([1, 5]), torch.Size([1, 4, 4, 4]), torch.Size([1, 4, 4]))
    """

    removed: Tensor
    limit_bits: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        parts: int,
        classes: int | Sequence[str],
        *,
        preprocess: Preprocess | None = None,
        architecture: dict[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__()
        check_options("IFAM", IFAMOptions, options)
        self.options = IFAMOptions(**options)
        self.class_names = () if isinstance(classes, int) else tuple(classes)
        self.classes = classes if isinstance(classes, int) else len(self.class_names)
        self.parts = parts  # K, without the background
        for name, count in (("parts", parts), ("classes", self.classes)):
            if not isinstance(count, int) or count < 1:
                raise BadOption(name, count, "a whole number of at least 1")
        joint = self.options.modulation == "joint"
        self.stage1 = PartStage(backbone, parts=parts, classes=self.classes, joint=joint)
        self.stage2 = None
        if self.options.stages == 2:
            self.stage2 = MaskedStage(backbone, classes=self.classes)
        if self.options.freeze != "none":
            self.stage1.tower.freeze()
        if self.options.freeze == "both" and self.stage2 is not None:
            self.stage2.tower.freeze()
        view = self.stage1.tower.parts
        if view.size is not None:
            self._check_layout(view.layout_at(*view.size))
        self.preprocess = preprocess or view.preprocess
        if self.preprocess is not None and view.fixed_size and view.size is not None:
            self.preprocess = replace(self.preprocess, size=view.size)
        self.architecture = architecture
        self.thresholds: dict[tuple[float, By], Thresholds] = {}
        self.intervention = Intervention()
        self.graphs = ModuleOwner(self)
        # buffers, so that kept runs notice them
        self.register_buffer("removed", torch.zeros(parts, dtype=torch.bool), persistent=False)
        self.register_buffer("limit_bits", torch.zeros(parts, dtype=torch.int64), persistent=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """What builds this network again, on the same backbone."""
        return {"parts": self.parts, "classes": self.classes, **asdict(self.options)}

    @property
    def limits(self) -> Tensor:
        """[K] float64, kept as bits: a threshold must not be rounded when the network is moved to
        half precision."""
        return self.limit_bits.view(torch.float64)

    def forward(
        self,
        images: Tensor,
        *,
        noise: Noise | None = None,
        warped: Tensor | None = None,
        mask: Tensor | None = None,
        packed: bool | None = None,
    ) -> IFAMOutput:
        """Normalised images [B, 3, H, W] -> answers, maps and mask, in one pass.

        `noise` keys what training draws; without, torch's generator does. `warped` images bring
        `warped_maps` for the equivariance loss. `mask` [B, gh, gw] replaces the selection. `packed`
        runs stage 2 on selected tokens only (default: in eval mode).
        """
        layout = self.stage1.tower.layout(images)
        self._check_layout(layout)
        noise = self.noise_for(images, noise)
        warped_maps, logits = None, None
        rows: tuple[Tensor, ...] = ()  # where stage 2 finds the patches, if that is known
        if noise is None and warped is None:  # nothing is drawn: what repeats can be replayed
            tensors = (images,) if mask is None else (images, mask.to(images.device))
            stage2 = self.stage2 if self._packs(packed, hard=mask is not None) else None
            at_once = stage2 is not None and stage2.at_once(images)
            look = partial(self._look, answer=at_once)
            key = ("both stages" if at_once else "stage 1", self.intervention)
            seen = captured(self.graphs, key, lambda: look, *tensors)
            assigned, (maps, embeddings, votes) = Assignment(*seen[:2]), seen[2:5]
            selection, rows = Selection(*seen[5:8]), seen[8:11]
            logits = seen[11] if at_once else None
        else:
            both = images if warped is None else torch.cat([images, warped])
            features, *moved = self.stage1.tower.features(both).split(len(images))  # [B, N, D]
            assigned, maps, embeddings, votes = self.discover(features, noise)
            with torch.autocast(images.device.type, enabled=False):
                selection = self._select(assigned, maps, noise)
                if moved:
                    warped_maps = self.assign(moved[0], noise, Purpose.WARPED)[1]
                    warped_maps = warped_maps.unflatten(2, layout.grid)
            if mask is not None:
                selection = selection_of(mask, maps)
        if self.stage2 is None:
            logits = self.mean_vote(votes)
        elif logits is None:
            logits = self.answer(images, selection, packed, hard=mask is not None, rows=rows)
        return IFAMOutput(
            logits=logits,
            maps=maps.unflatten(-1, layout.grid),
            mask=selection.hard.unflatten(-1, layout.grid),
            pair=selection.pair.unflatten(-1, layout.grid),
            embeddings=embeddings,
            part_logits=votes,
            dots=assigned.dots.unflatten(-1, layout.grid),
            distances=assigned.distances.unflatten(-1, layout.grid),
            warped_maps=warped_maps,
        )

    def _look(
        self, images: Tensor, mask: Tensor | None = None, *, answer: bool = False
    ) -> tuple[Tensor, ...]:
        """Stage 1 without noise: dots, distances, maps, embeddings, votes, the selection's three,
        where stage 2 would find the selected patches, and its `answer`, if that is wanted."""
        features = self.stage1.tower.features(images)
        assigned, maps, embeddings, votes = self.discover(features, None)
        with torch.autocast(images.device.type, enabled=False):
            chosen = self._select(assigned, maps, None)
        if mask is not None:
            chosen = selection_of(mask, maps)
        stage = (assigned.dots, assigned.distances, maps, embeddings, votes)
        seen = (*stage, chosen.hard, chosen.pair, chosen.surrogate)
        if self.stage2 is None:
            return seen
        rows = packed_places(visible_tokens(chosen.hard, self.stage2.prefix))
        logits = (self.stage2.filled(images, *rows[:2]),) if answer else ()
        return *seen, *rows, *logits

    def discover(
        self, features: Tensor, noise: Noise | None
    ) -> tuple[Assignment, Tensor, Tensor, Tensor]:
        """Stage 1 from patch features [B, N, D]: distances, maps [B, K + 1, N], modulated
        embeddings [B, D, K + 1] and votes [B, C, K]. Never under autocast: distances decide by
        small differences."""
        with torch.autocast(features.device.type, enabled=False):
            assigned, maps = self.assign(features, noise, Purpose.MAPS)
            embeddings = self.stage1.modulation(part_embeddings(maps, features))
            return assigned, maps, embeddings, self.votes(embeddings, noise)

    def classify(self, images: Tensor, mask: Tensor, *, packed: bool = True) -> Tensor:
        """Stage 2 alone: logits [B, C] of images whose patches outside mask [B, gh, gw] (bool) are
        hidden, whatever `gradient` is."""
        if self.stage2 is None:
            reason = "2: PDiscoFormer has no second stage that a mask could go to"
            raise BadOption("stages", 1, reason)
        expected = [len(images), *self.stage2.tower.layout(images).grid]
        if list(mask.shape) != expected or mask.dtype != torch.bool:
            raise BadOption("mask", f"{mask.dtype} {list(mask.shape)}", f"bool {expected}")
        visible = visible_tokens(mask.flatten(1).to(images.device), self.stage2.prefix)
        if packed:
            return self.stage2.packed(images, visible)
        return self.stage2.masked(images, reads_only(visible))

    @torch.no_grad()
    def select(self, images: Tensor) -> Tensor:
        """Stage 1 alone: the patches [B, N] (bool) that stage 2 reads."""
        assigned, maps, noise = self.assign_images(images)
        with torch.autocast(images.device.type, enabled=False):
            return self._select(assigned, maps, noise).hard

    @torch.no_grad()
    def maps(self, images: Tensor) -> Tensor:
        """Stage 1 alone: the soft maps [B, K + 1, gh, gw], background last."""
        return self.assign_images(images)[1].unflatten(2, self.stage1.tower.layout(images).grid)

    def assign_images(self, images: Tensor) -> tuple[Assignment, Tensor, Noise | None]:
        """Distances and soft maps [B, K + 1, N] of normalised images, and the noise in them. Never
        under autocast: that is what thresholds are compared with."""
        noise, features = self.noise_for(images), self.stage1.tower.features(images)
        with torch.autocast(images.device.type, enabled=False):
            return *self.assign(features, noise), noise

    def assign(
        self, features: Tensor, noise: Noise | None = None, purpose: Purpose = Purpose.MAPS
    ) -> tuple[Assignment, Tensor]:
        """Patch features [B, N, D] -> distances and soft maps [B, K + 1, N], with what an
        intervention does to them."""
        assigned = self.stage1.assign(features)
        limited = not self.training and self.intervention.quantile is not None
        by = self.intervention.by if limited else None
        logits = reject_unlike(assigned, self.limits) if by == "dot" else -assigned.distances
        maps = part_maps(logits, None if noise is None else noise.gumbel(purpose, logits))
        if by == "distance":
            maps = reject_far(maps, assigned, self.limits)
        return assigned, maps

    def votes(self, embeddings: Tensor, noise: Noise | None = None) -> Tensor:
        """Modulated embeddings [B, D, K + 1] -> what each part votes for [B, C, K]."""
        share, kept = self.options.part_dropout, None
        if self.training and share > 0 and noise is not None:
            kept = noise.kept(Purpose.DROP_EMBEDDINGS, self.parts, share, embeddings)
        return part_logits(embeddings, self.stage1.classifier.weight, kept, share)

    def mean_vote(self, votes: Tensor) -> Tensor:
        """[B, C, K] -> [B, C]: the mean over parts that an intervention leaves."""
        if self.training or not self.intervention.drop_parts:
            return votes.mean(dim=-1)
        return mean_vote(votes, self.removed)

    def answer(
        self,
        images: Tensor,
        selection: Selection,
        packed: bool | None = None,
        *,
        hard: bool = False,
        rows: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Stage 2 on what stage 1 selected: logits [B, C]. `hard` takes the selection as a
        constant, whatever `gradient` is; `rows` is its `packed_places`, where that was made."""
        assert self.stage2 is not None
        stage, gradient = self.stage2, self.options.gradient
        if self._packs(packed, hard=hard):
            if rows:
                return stage.packed_rows(images, *rows)
            return stage.packed(images, visible_tokens(selection.hard, stage.prefix))
        if self._constant(hard):
            return stage.masked(images, reads_only(visible_tokens(selection.hard, stage.prefix)))
        prefix = stage.prefix.to(selection.surrogate.dtype)
        if gradient == "soft":
            share = visible_tokens(selection.pair[:, 0], prefix)
            return stage.masked(images, reads_softly(share))
        weights = visible_tokens(selection.relaxed, prefix)
        return stage.masked(images, reads_straight_through(weights))

    def _constant(self, hard: bool) -> bool:
        """Whether no gradient reaches the selection."""
        gradient, learning = self.options.gradient, self.training and torch.is_grad_enabled()
        return hard or gradient == "none" or (gradient == "ste" and not learning)

    def _packs(self, packed: bool | None, *, hard: bool) -> bool:
        """Whether stage 2 runs on selected tokens only."""
        if self.stage2 is None:
            return False
        constant = self._constant(hard)
        if packed and not constant:
            reason = f"False: gradient={self.options.gradient!r} needs the hidden tokens too"
            raise BadOption("packed", packed, reason)
        return constant and (not self.training if packed is None else packed)

    def view_parts(self) -> Parts:
        """How `sc.wrap` splits this module."""
        return view_parts(self)

    def save(self, folder: str | Path, name: str = "ifam", **metadata: Any) -> Path:
        """Write NAME.json and NAME.safetensors, which `sc.load(folder)` reads; returns the card's
        path. `metadata` is added to the card."""
        from seecause.faithful.run import save_network

        return save_network(self, Path(folder), name, metadata)

    def noise_for(self, images: Tensor, noise: Noise | None = None) -> Noise | None:
        """The noise of a run on these images: what is given, or what this mode draws by itself."""
        if noise is not None and len(noise.ids) != len(images):
            expected = f"one for each of the {len(images)} images"
            raise BadOption("noise", f"{len(noise.ids)} ids", expected)
        if self.training:
            return noise or Noise.fresh(len(images), images.device)
        return noise or Noise.of(images) if self.options.eval_noise else None

    def _select(self, assigned: Assignment, maps: Tensor, noise: Noise | None) -> Selection:
        if self.intervention and not self.training:
            return select_without(maps, self.removed)
        if noise is not None and self.options.mask_noise == "own":  # independent of the maps'
            maps = part_maps(-assigned.distances, noise.gumbel(Purpose.MASK, maps))
        share, kept = self.options.part_dropout2, None
        if self.training and share > 0 and noise is not None:
            kept = noise.kept(Purpose.DROP_MASK, self.parts, share, maps)
        return select(maps, kept)

    def _check_layout(self, layout: TokenLayout) -> None:
        if self.parts > layout.n_patches:
            most = f"at most {layout.n_patches}: there is one patch for each part at best"
            raise BadOption("parts", self.parts, most)
