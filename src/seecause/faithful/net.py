"""iFAM: a classifier that cannot look elsewhere (arXiv 2506.08915).

Stage 1 discovers parts; their union is a hard mask; stage 2 answers from the selected patches
alone, so the mask is the explanation, and a guarantee (but for the ablation `gradient="soft"`,
which reads every patch a little and promises nothing). With `stages=1` this is PDiscoFormer, its
baseline: the parts' own votes, from features that have seen the whole picture.

Where paper and released code differ, there is an option for each (docs/faithful.md has the table).
The default is the paper's rule in `gradient`, `presence` and `eval_noise`; the code's are `"none"`,
`"local"` and `True`. Three defaults are not what the paper writes. `mask_noise="own"` is the
code's: the mask of a training step comes from a Gumbel draw of its own, not from the maps
(`"maps"`). `modulation="joint"` is what both repositories compute, not `"per_part"`.
`orthogonality="parts"` sets part embeddings apart as PDiscoFormer does; the paper's words say
`"prototypes"`, iFAM's code computes `"ifam_code"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from seecause.errors import BadOption
from seecause.faithful.attention import Gradient, reads_only, reads_softly, reads_straight_through
from seecause.faithful.losses import Orthogonality
from seecause.faithful.masks import (
    Assignment,
    Selection,
    reject_far,
    reject_unlike,
    select,
    select_without,
)
from seecause.faithful.noise import Noise, Purpose
from seecause.faithful.output import By, IFAMOutput, Intervention, Thresholds
from seecause.faithful.parts import mean_vote, part_embeddings, part_logits, part_maps
from seecause.faithful.stages import MaskedStage, PartStage
from seecause.faithful.tower import visible_tokens
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess

Freeze = Literal["stage1", "both", "none"]
MaskNoise = Literal["own", "maps"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "stages": (1, 2),
    "gradient": get_args(Gradient),
    "modulation": ("joint", "per_part"),
    "orthogonality": get_args(Orthogonality),
    "presence": ("global", "local"),
    "mask_noise": get_args(MaskNoise),
    "freeze": get_args(Freeze),
}


class IFAM(nn.Module):
    """Two copies of `backbone` (a native vision transformer), `parts` prototypes, `classes` answers
    (a count, or their names).

    `mask_noise`: where there is noise, the mask is decided by a draw of its `own`, or by that of
    the `maps` themselves.
    `freeze`: `stage1` trains its special tokens and positions only, `both` does the same to stage
    2, `none` trains everything. `preprocess` and `architecture` are for saving and wrapping, where
    the backbone does not tell them.
    """

    removed: Tensor
    limit_bits: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        parts: int,
        classes: int | Sequence[str],
        *,
        stages: Literal[1, 2] = 2,
        gradient: Gradient = "ste",
        modulation: Literal["joint", "per_part"] = "joint",
        orthogonality: Orthogonality = "parts",
        presence: Literal["global", "local"] = "global",
        eval_noise: bool = False,
        mask_noise: MaskNoise = "own",
        part_dropout: float = 0.3,
        part_dropout2: float = 0.3,
        freeze: Freeze = "stage1",
        preprocess: Preprocess | None = None,
        architecture: dict[str, Any] | None = None,
    ):
        super().__init__()
        names = () if isinstance(classes, int) else tuple(classes)
        count = classes if isinstance(classes, int) else len(names)
        self.options: dict[str, Any] = {
            "parts": parts, "classes": count, "stages": stages, "gradient": gradient,
            "modulation": modulation, "orthogonality": orthogonality,
            "presence": presence, "eval_noise": eval_noise, "mask_noise": mask_noise,
            "part_dropout": part_dropout, "part_dropout2": part_dropout2,
            "freeze": freeze,
        }  # fmt: skip
        _check_options(self.options)
        self.stage1 = PartStage(backbone, parts=parts, classes=count, joint=modulation == "joint")
        self.stage2 = MaskedStage(backbone, classes=count) if stages == 2 else None
        if freeze != "none":
            self.stage1.tower.freeze()
        if freeze == "both" and self.stage2 is not None:
            self.stage2.tower.freeze()
        found = self.stage1.tower.parts
        self.class_names, self.preprocess, self.architecture = (
            names,
            preprocess or found.preprocess,
            architecture,
        )
        self.gradient: Gradient = gradient
        self.mask_noise: MaskNoise = mask_noise
        self.eval_noise, self.part_dropout, self.part_dropout2 = (
            eval_noise,
            part_dropout,
            part_dropout2,
        )
        if found.size is not None:
            self._check_layout(found.layout_at(*found.size))
        self.thresholds: dict[tuple[float, By], Thresholds] = {}
        self.intervention = Intervention()
        self.register_buffer(
            "removed", torch.zeros(parts, dtype=torch.bool), persistent=False
        )  # buffers, so that kept runs notice them
        self.register_buffer("limit_bits", torch.zeros(parts, dtype=torch.int64), persistent=False)

    @property
    def parts(self) -> int:
        """K, without the background."""
        return self.options["parts"]

    @property
    def classes(self) -> int:
        return self.options["classes"]

    @property
    def stages(self) -> int:
        return self.options["stages"]

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
        noise = self._noise(images, noise)
        features, *moved = self.stage1.tower.features(
            images if warped is None else torch.cat([images, warped])
        ).split(len(images))  # [B, N, D] each
        assigned, maps, embeddings, votes = self.first(features, noise)
        with torch.autocast(images.device.type, enabled=False):
            selection = self._select(assigned, maps, noise) if mask is None else _given(mask, maps)
        second = None
        if moved:
            with torch.autocast(images.device.type, enabled=False):
                second = self.assign(moved[0], noise, Purpose.WARPED)[1].unflatten(2, layout.grid)
        logits = (
            self.mean_vote(votes)
            if self.stage2 is None
            else self.answer(images, selection, packed, hard=mask is not None)
        )
        grids = [
            t.unflatten(-1, layout.grid)
            for t in (maps, selection.hard, selection.pair, assigned.dots, assigned.distances)
        ]
        return IFAMOutput(
            logits, grids[0], grids[1], grids[2], embeddings, votes, grids[3], grids[4], second
        )

    def first(
        self, features: Tensor, noise: Noise | None
    ) -> tuple[Assignment, Tensor, Tensor, Tensor]:
        """Stage 1 from patch features [B, N, D]: distances, maps [B, K + 1, N], modulated
        embeddings [B, D, K + 1] and votes [B, C, K]."""
        with torch.autocast(
            features.device.type, enabled=False
        ):  # distances decide by small differences
            assigned, maps = self.assign(features, noise, Purpose.MAPS)
            embeddings = self.stage1.modulation(part_embeddings(maps, features))
            return assigned, maps, embeddings, self.votes(embeddings, noise)

    def classify(self, images: Tensor, mask: Tensor, *, packed: bool = True) -> Tensor:
        """Stage 2 alone: logits [B, C] of images whose patches outside mask [B, gh, gw] (bool) are
        hidden, whatever `gradient` is."""
        if self.stage2 is None:
            raise BadOption(
                "stages", 1, "2: PDiscoFormer has no second stage that a mask could go to"
            )
        layout = self.stage2.tower.layout(images)
        if mask.shape != (len(images), *layout.grid) or mask.dtype != torch.bool:
            raise BadOption(
                "mask", f"{mask.dtype} {list(mask.shape)}", f"bool {[len(images), *layout.grid]}"
            )
        visible = visible_tokens(mask.flatten(1).to(images.device), self.stage2.prefix)
        return (
            self.stage2.packed(images, visible)
            if packed
            else self.stage2.masked(images, reads_only(visible))
        )

    @torch.no_grad()
    def select(self, images: Tensor) -> Tensor:
        """Stage 1 alone: the patches [B, N] (bool) that stage 2 reads."""
        noise, features = self._noise(images, None), self.stage1.tower.features(images)
        with torch.autocast(images.device.type, enabled=False):
            return self._select(*self.assign(features, noise), noise).hard

    @torch.no_grad()
    def maps(self, images: Tensor) -> Tensor:
        """Stage 1 alone: the soft maps [B, K + 1, gh, gw], background last."""
        noise, features = self._noise(images, None), self.stage1.tower.features(images)
        with torch.autocast(images.device.type, enabled=False):
            return self.assign(features, noise)[1].unflatten(
                2, self.stage1.tower.layout(images).grid
            )

    def assign(
        self, features: Tensor, noise: Noise | None = None, purpose: Purpose = Purpose.MAPS
    ) -> tuple[Assignment, Tensor]:
        """Patch features [B, N, D] -> distances and soft maps [B, K + 1, N], with what an
        intervention does to them."""
        assigned = self.stage1.assign(features)
        limited = (
            None if self.training or self.intervention.quantile is None else self.intervention.by
        )
        logits = -assigned.distances if limited != "dot" else reject_unlike(assigned, self.limits)
        maps = part_maps(logits, None if noise is None else noise.gumbel(purpose, logits))
        if limited == "distance":
            maps = reject_far(maps, assigned, self.limits)
        return assigned, maps

    def votes(self, embeddings: Tensor, noise: Noise | None = None) -> Tensor:
        """Modulated embeddings [B, D, K + 1] -> what each part votes for [B, C, K]."""
        kept = None
        if self.training and self.part_dropout > 0 and noise is not None:
            kept = noise.kept(Purpose.DROP_EMBEDDINGS, self.parts, self.part_dropout, embeddings)
        return part_logits(embeddings, self.stage1.classifier.weight, kept, self.part_dropout)

    def mean_vote(self, votes: Tensor) -> Tensor:
        """[B, C, K] -> [B, C]: the mean over parts that an intervention leaves."""
        return (
            votes.mean(dim=-1)
            if self.training or not self.intervention.drop_parts
            else mean_vote(votes, self.removed)
        )

    def view_parts(self) -> Parts:
        """How `sc.wrap` splits this module."""
        from seecause.faithful.view import view_parts

        return view_parts(self)

    def save(self, folder: str | Path, name: str = "ifam", **told: Any) -> Path:
        """Write NAME.json and NAME.safetensors, which `sc.load(folder)` reads; returns the card's
        path. `told` is added to the card."""
        from seecause.faithful.save import save

        return save(self, Path(folder), name, told)

    def _select(self, assigned: Assignment, maps: Tensor, noise: Noise | None) -> Selection:
        if self.intervention and not self.training:
            return select_without(maps, self.removed)
        if noise is not None and self.mask_noise == "own":  # independent of the maps'
            maps = part_maps(-assigned.distances, noise.gumbel(Purpose.MASK, maps))
        kept = None
        if self.training and self.part_dropout2 > 0 and noise is not None:
            kept = noise.kept(Purpose.DROP_MASK, self.parts, self.part_dropout2, maps)
        return select(maps, kept)

    def answer(
        self,
        images: Tensor,
        selection: Selection,
        packed: bool | None = None,
        *,
        hard: bool = False,
    ) -> Tensor:
        """Stage 2 on what stage 1 selected: logits [B, C]. `hard` takes the selection as a
        constant, whatever `gradient` is."""
        assert self.stage2 is not None
        stage, gradient = self.stage2, self.gradient
        constant = (
            hard
            or gradient == "none"
            or (gradient == "ste" and not (self.training and torch.is_grad_enabled()))
        )
        if packed and not constant:
            raise BadOption(
                "packed", packed, f"False: gradient={gradient!r} needs the hidden tokens too"
            )
        if constant:
            visible = visible_tokens(selection.hard, stage.prefix)
            return (
                stage.packed(images, visible)
                if packed or (packed is None and not self.training)
                else stage.masked(images, reads_only(visible))
            )
        if gradient == "soft":
            return stage.masked(
                images,
                reads_softly(
                    visible_tokens(selection.pair[:, 0], stage.prefix.to(selection.pair.dtype))
                ),
            )
        return stage.masked(
            images,
            reads_straight_through(
                visible_tokens(selection.relaxed, stage.prefix.to(selection.surrogate.dtype))
            ),
        )

    def _noise(self, images: Tensor, given: Noise | None) -> Noise | None:
        if given is not None and len(given.ids) != len(images):
            raise BadOption(
                "noise", f"{len(given.ids)} ids", f"one for each of the {len(images)} images"
            )
        if self.training:
            return given or Noise.fresh(len(images), images.device)
        return given or Noise.of(images) if self.eval_noise else None

    def _check_layout(self, layout: TokenLayout) -> None:
        if self.parts > layout.n_patches:
            raise BadOption(
                "parts",
                self.parts,
                f"at most {layout.n_patches}: there is one patch for each part at best",
            )


def _given(mask: Tensor, maps: Tensor) -> Selection:
    """A mask [B, gh, gw] from outside, beside maps [B, K + 1, N]."""
    if mask.dtype != torch.bool or mask.flatten(1).shape != (len(maps), maps.shape[2]):
        raise BadOption(
            "mask",
            f"{mask.dtype} {list(mask.shape)}",
            f"bool, one value for each of {len(maps)} x {maps.shape[2]} patches",
        )
    return Selection(
        mask.flatten(1).to(maps.device),
        torch.stack([maps[:, :-1].amax(dim=1), maps[:, -1]], dim=1),
        maps[:, :-1].sum(dim=1),
    )


def _check_options(options: dict[str, Any]) -> None:
    for name, allowed in CHOICES.items():
        if options[name] not in allowed or isinstance(options[name], bool):
            raise BadOption(name, options[name], f"one of {', '.join(map(str, allowed))}")
    for name, least in (("parts", 1), ("classes", 1)):
        if not isinstance(options[name], int) or options[name] < least:
            raise BadOption(name, options[name], "a whole number of at least 1")
    for name in ("part_dropout", "part_dropout2"):
        if not isinstance(options[name], int | float):
            raise BadOption(name, options[name], "a share in [0, 1]")
    if not 0 <= options["part_dropout"] < 1:
        raise BadOption("part_dropout", options["part_dropout"], "a share in [0, 1)")
    if not 0 <= options["part_dropout2"] <= 1:
        raise BadOption("part_dropout2", options["part_dropout2"], "a share in [0, 1]")
