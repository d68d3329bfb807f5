"""iFAM: a classifier that reads selected patches only (arXiv 2506.08915).

Stage 1 discovers parts; their union is a hard mask; stage 2 predicts from the selected patches
alone, so the mask is a faithful explanation (except for the ablation `gradient="soft"`, which reads
every patch a little). With `stages=1` this is PDiscoFormer, its baseline, whose parts vote with
features that have seen the whole image.

A saved network is NAME.json, a card that describes how it is built, and NAME.safetensors, its
weights. The card describes the backbone as its library builds it:

    {"library": "timm", "name": NAME, "options": {...}}                    timm.create_model
    {"library": "timm", "class": "VisionTransformer", "arguments": {...}}  the class itself
    {"library": "transformers", "class": NAME, "config": {...}}            with its configuration
    {"library": "torchvision", "name": NAME, "options": {...}}             models.get_model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from seecause.engine.graphs import ModuleOwner, captured
from seecause.errors import BadOption, NotDefined
from seecause.faithful.parts import (
    Assignment,
    IFAMOutput,
    Noise,
    Purpose,
    Selection,
    mean_vote,
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
    found_objects,
    has_kernel,
    one_stage_parts,
    packed_places,
    reads_only,
    reads_softly,
    reads_straight_through,
    two_stage_parts,
    visible_tokens,
)
from seecause.files import write_json
from seecause.loading import Source, build_native, fill, saved
from seecause.models.block import Named, wide
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess
from seecause.options import Fraction, Limit, check_options

By = Literal["distance", "dot"]


@dataclass(frozen=True, kw_only=True)
class IFAMOptions:
    """Options of `IFAM`. Where the paper and the released code differ, there is a value for each.

    Attributes:
        stages: 2, or 1 for PDiscoFormer.
        gradient: How stage 2 trains stage 1: "ste" by straight-through gradients (the paper),
            "none" not at all (the code), "soft" by a soft mask (an ablation).
        modulation: Layer normalisation of all part embeddings together ("joint", the code) or of
            each ("per_part", the paper).
        orthogonality: What is decorrelated: embeddings of "parts" (PDiscoFormer), their transpose
            ("ifam_code") or the "prototypes" (the paper).
        presence: Whether each part must be in the batch of all processes ("global", the paper) or
            of each process ("local", the code).
        eval_noise: Draw Gumbel noise in eval mode too (the code).
        mask_noise: Whether the mask has a draw of its "own" (the code) or that of the "maps" (the
            paper).
        part_dropout: Probability that a part has no vote in a training step.
        part_dropout2: Probability that a part is dropped from the mask in a training step.
        freeze: "stage1" trains special tokens and positions of its backbone only, "both" also of
            stage 2's backbone, "none" trains everything, "all" classifiers and prototypes only.
        selects: What stage 2 reads: "parts" of stage 1, or, for baselines, "all" patches, object
            masks that are "given" with the images, or masks "found" without labels.
        masking: "early" hides the other patches from stage 2, "late" takes the mean of its last
            tokens in the mask, which have seen the whole image (a baseline).

    Example:
        >>> import seecause as sc
        >>> sc.faithful.IFAMOptions(stages=1).gradient
        'ste'
    """

    stages: Literal[1, 2] = 2
    gradient: Gradient = "ste"
    modulation: Literal["joint", "per_part"] = "joint"
    orthogonality: Literal["parts", "ifam_code", "prototypes"] = "parts"
    presence: Literal["global", "local"] = "global"
    eval_noise: bool = False
    mask_noise: Literal["own", "maps"] = "own"
    part_dropout: Annotated[float, Limit(lambda p: 0 <= p < 1, "a share in [0, 1)")] = 0.3
    part_dropout2: Fraction = 0.3
    freeze: Literal["stage1", "both", "none", "all"] = "stage1"
    selects: Literal["parts", "all", "given", "found"] = "parts"
    masking: Literal["early", "late"] = "early"


@dataclass(frozen=True)
class Intervention:
    """Parts and tokens that are removed from the mask, for `sc.faithful.evaluate`.

    Args:
        drop_parts: Parts dropped from the mask, counted from 0.
        quantile: The quantile of tokens that are kept; None keeps all.
        by: What the quantile is of: the "distance" of a token to its prototype, or the "dot"
            product with it.

    Example:
        >>> import seecause as sc
        >>> str(sc.faithful.Intervention(drop_parts=(2,), quantile=0.99))
        'without part 2, tokens beyond 0.99 by distance'
    """

    drop_parts: tuple[int, ...] = ()
    quantile: float | None = None
    by: By = "distance"

    def __bool__(self) -> bool:
        return bool(self.drop_parts) or self.quantile is not None

    def __str__(self) -> str:
        removed = [f"part {part}" for part in self.drop_parts]
        if self.quantile is not None:
            removed.append(f"tokens beyond {self.quantile:g} by {self.by}")
        return f"without {', '.join(removed)}" if removed else "unchanged"


@dataclass(frozen=True)
class Thresholds:
    """The largest distance from its prototype (or smallest dot product) of a trusted token, for
    each part, and the number of images that decided it."""

    quantile: float
    by: By
    values: tuple[float, ...]  # [K]; infinite where no token was seen
    images: int = 0


class IFAM(nn.Module):
    """A classifier of two copies of a vision transformer: the first finds parts, the second
    predicts from their patches alone.

    `sc.wrap(net)` gives a model for all methods; `sc.faithful.train` trains one.

    Args:
        backbone: A native vision transformer.
        parts: The number of parts K, without the background.
        classes: The number of classes, or their names.
        preprocess: How images are prepared, where the backbone does not define it.
        architecture: How the backbone is built, for saving: `origin` of a loaded model. A model of
            transformers describes itself.
        **options: Fields of `IFAMOptions`.

    Example:
        >>> import timm, torch, seecause as sc
        >>> small = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> backbone = timm.models.VisionTransformer(**small)
        >>> net = sc.faithful.IFAM(backbone, parts=3, classes=5).eval()
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
        architecture: Named | None = None,
        **options: Any,
    ):
        super().__init__()
        check_options("IFAM", IFAMOptions, options)
        self.options = IFAMOptions(**options)
        self.class_names = () if isinstance(classes, int) else tuple(classes)
        self.classes = classes if isinstance(classes, int) else len(self.class_names)
        self.parts = parts
        joint = self.options.modulation == "joint"
        self.stage1 = PartStage(backbone, parts=parts, classes=self.classes, joint=joint)
        self.stage2 = None
        if self.options.stages == 2:
            self.stage2 = MaskedStage(backbone, classes=self.classes)
        stages = [self.stage1] if self.stage2 is None else [self.stage1, self.stage2]
        frozen = {"none": [], "stage1": stages[:1]}.get(self.options.freeze, stages)
        for stage in frozen:
            if self.options.freeze == "all":
                stage.tower.requires_grad_(False)
            else:
                stage.tower.freeze()
        view = self.stage1.tower.parts
        self.preprocess: Any = preprocess or view.preprocess  # None where nothing defines it
        if self.preprocess is not None and view.fixed_size and view.size is not None:
            self.preprocess = replace(self.preprocess, size=view.size)
        self.architecture = architecture or _described(backbone)
        self.thresholds: dict[tuple[float, By], Thresholds] = {}
        self.intervention = Intervention()
        self.graphs = ModuleOwner(self)
        # buffers, so that cached runs notice a change
        self.register_buffer("removed", torch.zeros(parts, dtype=torch.bool), persistent=False)
        self.register_buffer("limit_bits", torch.zeros(parts, dtype=torch.int64), persistent=False)

    @property
    def arguments(self) -> Named:
        """The arguments that build this network again, on the same backbone."""
        return {"parts": self.parts, "classes": self.classes, **asdict(self.options)}

    @property
    def device(self) -> torch.device:
        return self.stage1.prototypes.device

    @property
    def dtype(self) -> torch.dtype:
        return self.stage1.prototypes.dtype

    @property
    def limits(self) -> Tensor:
        """Thresholds in use, [K] float64, kept as bits: a threshold must not be rounded when the
        network is moved to half precision."""
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
        """Predictions, part maps and mask of images, in one pass.

        Args:
            images: Normalised images [B, 3, H, W].
            noise: Keys of the noise in training; by default from torch's generator.
            warped: Other images [B, 3, H, W] whose `warped_maps` are wanted, for the equivariance
                loss.
            mask: Patches [B, gh, gw] (bool) that replace the selection.
            packed: Whether stage 2 runs on selected tokens only, By default it does in eval mode
                where that is faster.
        """
        grid = self.stage1.tower.layout(images).grid
        if mask is not None and self.stage2 is None:
            raise BadOption("mask", "given", "None: PDiscoFormer has no stage that reads a mask")
        if self.options.selects != "parts":
            return self._without_parts(images, mask)
        noise = self.noise_for(images, noise)
        warped_maps, logits = None, None
        packs = self._packs(packed, constant=mask is not None)
        if noise is None and warped is None:  # nothing is drawn, so the run can be replayed
            tensors = (images,) if mask is None else (images, mask.to(images.device))
            at_once = packs and self.stage2 is not None and self.stage2.at_once(images)
            run = partial(self._both_stages, predict=at_once)
            key = ("both stages" if at_once else "stage 1", self.intervention)
            seen = captured(self.graphs, key, lambda: run, *tensors)
            logits = seen[11] if at_once else None
        else:
            both = images if warped is None else torch.cat([images, warped])
            features, *moved = self.stage1.tower.features(both).split(len(images))  # [B, N, D]
            seen = self._first_stage(features, noise, mask)
            if moved:
                warped_maps = self.assign(moved[0], noise, Purpose.WARPED)[1].unflatten(2, grid)
        assigned, (maps, embeddings, votes) = Assignment(*seen[:2]), seen[2:5]
        selection, rows = Selection(*seen[5:8]), seen[8:11]
        if self.stage2 is None:
            logits = self.mean_vote(votes)
        elif logits is None:
            constant = mask is not None
            logits = self.predict(images, selection, packs, constant=constant, rows=rows)
        return IFAMOutput(
            logits=logits,
            maps=maps.unflatten(-1, grid),
            mask=selection.hard.unflatten(-1, grid),
            pair=selection.pair.unflatten(-1, grid),
            embeddings=embeddings,
            part_logits=votes,
            dots=assigned.dots.unflatten(-1, grid),
            distances=assigned.distances.unflatten(-1, grid),
            warped_maps=warped_maps,
        )

    def _first_stage(
        self, features: Tensor, noise: Noise | None, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Stage 1 from patch features: dot products, distances, maps, embeddings, votes, and the
        three tensors of the selection, whose mask may be given."""
        assigned, maps, embeddings, votes = self.discover(features, noise)
        given = None if mask is None else selection_of(mask, maps)
        return *assigned, maps, embeddings, votes, *(given or self._select(assigned, maps, noise))

    def _both_stages(
        self, images: Tensor, mask: Tensor | None = None, *, predict: bool = False
    ) -> tuple[Tensor, ...]:
        """Stage 1 without noise, the places of selected patches for stage 2, and the logits if
        `predict`."""
        seen = self._first_stage(self.stage1.tower.features(images), None, mask)
        if self.stage2 is None:
            return seen
        rows = packed_places(visible_tokens(seen[5], self.stage2.prefix))
        logits = (self.stage2.filled(images, *rows[:2]),) if predict else ()
        return *seen, *rows, *logits

    def _without_parts(self, images: Tensor, mask: Tensor | None) -> IFAMOutput:
        """A baseline that reads a mask [B, gh, gw], which is its only part."""
        stage, grid = self.stage2, self.stage1.tower.layout(images).grid
        if stage is None or (mask is None and self.options.selects == "given"):
            raise BadOption("selects", self.options.selects, "stages=2, and images with masks")
        if mask is None:
            mask = torch.ones(len(images), *grid, dtype=torch.bool, device=images.device)
        if self.options.selects == "found":
            mask = found_objects(self.stage1.tower, images)
        flat = mask.flatten(1)
        if self.options.masking == "early":
            logits = stage.masked(images, reads_only(visible_tokens(flat, stage.prefix)))
        else:
            logits = stage.late(images, flat)
        maps, votes = torch.stack([mask, ~mask], dim=1).float(), logits.float()[..., None]
        empty = maps.new_zeros(len(maps), self.stage1.tower.width, 2)
        return IFAMOutput(logits, maps, mask, maps, empty, votes, maps, maps)

    def on_patches(self, masks: Tensor) -> Tensor:
        """Patches [B, gh, gw] (bool) that masks [B, H, W] in [0, 1] cover by half or more."""
        grid = self.stage1.tower.layout(masks[:, None]).grid
        return F.adaptive_avg_pool2d(masks[:, None], grid)[:, 0] >= 0.5

    def discover(
        self, features: Tensor, noise: Noise | None
    ) -> tuple[Assignment, Tensor, Tensor, Tensor]:
        """Stage 1 from patch features [B, N, D]: distances, maps [B, K + 1, N], modulated
        embeddings [B, D, K + 1] and votes [B, C, K]. Never under autocast, because small
        differences of distances decide."""
        with torch.autocast(features.device.type, enabled=False):
            assigned, maps = self.assign(features, noise)
            means = (maps @ wide(features)).transpose(1, 2) / features.shape[1]  # [B, D, K + 1]
            embeddings = self.stage1.modulation(means)
            return assigned, maps, embeddings, self.votes(embeddings, noise)

    @torch.no_grad()
    def select(self, images: Tensor) -> Tensor:
        """Stage 1 alone: the patches [B, N] (bool) that stage 2 reads."""
        return self._select(*self.assign_images(images)).hard

    @torch.no_grad()
    def maps(self, images: Tensor) -> Tensor:
        """Stage 1 alone: the soft maps [B, K + 1, gh, gw], background last."""
        return self.assign_images(images)[1].unflatten(2, self.stage1.tower.layout(images).grid)

    def assign_images(self, images: Tensor) -> tuple[Assignment, Tensor, Noise | None]:
        """Distances and soft maps [B, K + 1, N] of normalised images, and the noise in them."""
        noise = self.noise_for(images)
        return *self.assign(self.stage1.tower.features(images), noise), noise

    def assign(
        self, features: Tensor, noise: Noise | None = None, purpose: Purpose = Purpose.MAPS
    ) -> tuple[Assignment, Tensor]:
        """Patch features [B, N, D] -> distances and soft maps [B, K + 1, N], under the current
        intervention."""
        assigned = self.stage1.assign(features)
        limited = not self.training and self.intervention.quantile is not None
        by = self.intervention.by if limited else None
        logits = reject_unlike(assigned, self.limits) if by == "dot" else -assigned.distances
        maps = (logits if noise is None else logits + noise.gumbel(purpose, logits)).softmax(dim=1)
        if by == "distance":
            maps = reject_far(maps, assigned, self.limits)
        return assigned, maps

    def votes(self, embeddings: Tensor, noise: Noise | None = None) -> Tensor:
        """Modulated embeddings [B, D, K + 1] -> the vote of each part [B, C, K]."""
        votes = wide(self.stage1.classifier.weight) @ embeddings[..., :-1]
        share = self.options.part_dropout
        if self.training and share > 0 and noise is not None:
            kept = noise.kept(Purpose.DROP_EMBEDDINGS, self.parts, share, embeddings)  # [B, K]
            votes = votes * kept[:, None] / (1 - share)
        return votes

    def mean_vote(self, votes: Tensor) -> Tensor:
        """[B, C, K] -> [B, C]: the mean over parts that an intervention leaves."""
        return mean_vote(votes, self.removed & (not self.training))

    def predict(
        self,
        images: Tensor,
        selection: Selection,
        packed: bool,
        *,
        constant: bool = False,
        rows: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Stage 2 on the selection of stage 1: logits [B, C]. A `constant` selection gets no
        gradient; `rows` are its `packed_places`, where they are known."""
        assert self.stage2 is not None
        stage = self.stage2
        if packed:
            visible = visible_tokens(selection.hard, stage.prefix)
            return stage.packed(images, *(rows or packed_places(visible)))
        if self._constant(constant):
            return stage.masked(images, reads_only(visible_tokens(selection.hard, stage.prefix)))
        prefix = stage.prefix.to(selection.surrogate.dtype)
        if self.options.gradient == "soft":
            share = visible_tokens(selection.pair[:, 0], prefix)
            return stage.masked(images, reads_softly(share))
        weights = visible_tokens(selection.relaxed, prefix)
        return stage.masked(images, reads_straight_through(weights))

    def _constant(self, constant: bool) -> bool:
        """Whether no gradient reaches the selection."""
        gradient, learning = self.options.gradient, self.training and torch.is_grad_enabled()
        return constant or gradient == "none" or (gradient == "ste" and not learning)

    def _packs(self, packed: bool | None = None, *, constant: bool = False) -> bool:
        """Whether stage 2 runs on selected tokens only: by default in eval mode, except on a GPU
        without a kernel for packed rows, where running all tokens is faster."""
        constant = self._constant(constant)
        if packed and not constant:
            reason = f"False: gradient={self.options.gradient!r} needs the hidden tokens too"
            raise BadOption("packed", packed, reason)
        if packed is None:
            kind, dtype = self.device.type, self.dtype
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
            fast = kind != "cuda" or has_kernel(self.device, dtype)
            packed = not self.training and fast
        return constant and packed and self.stage2 is not None

    def view_parts(self) -> Parts:
        """How `sc.wrap` splits this module, which must be in eval mode."""
        from seecause.faithful.interventions import prove

        if self.options.selects != "parts":
            raise NotDefined("a view of a baseline", "it has no parts", "Use selects='parts'")
        parts = one_stage_parts(self) if self.stage2 is None else two_stage_parts(self)
        prove(self)
        return parts

    def noise_for(self, images: Tensor, noise: Noise | None = None) -> Noise | None:
        """The noise of a run on these images: the given one, or what this mode draws itself."""
        if self.training:
            return noise or Noise.fresh(len(images), images.device)
        return noise or Noise.of(images) if self.options.eval_noise else None

    def _select(self, assigned: Assignment, maps: Tensor, noise: Noise | None) -> Selection:
        if self.intervention and not self.training:
            return select_without(maps, self.removed)
        if noise is not None and self.options.mask_noise == "own":  # independent draws
            maps = (noise.gumbel(Purpose.MASK, maps) - assigned.distances).softmax(dim=1)
        share, kept = self.options.part_dropout2, None
        if self.training and share > 0 and noise is not None:
            kept = noise.kept(Purpose.DROP_MASK, self.parts, share, maps)
        return select(maps, kept)

    def save(self, folder: str | Path, name: str = "ifam", **metadata: Any) -> Path:
        """Write NAME.json and NAME.safetensors, which `sc.load(folder)` reads.

        `metadata` is added to the card. Returns the path of the card.
        """
        folder = Path(folder)
        if self.architecture is None:
            expected = "how the backbone is built, as IFAM(..., architecture={'library': ...})"
            raise BadOption("architecture", None, expected)
        # calibrated distances are not valid after heads of stage 1 were removed
        stale = self.options.stages == 1 and metadata.get("removed")
        card = {
            "name": name,
            "architecture": {
                "library": "seecause",
                "class": "IFAM",
                "arguments": self.arguments,
                "backbone": self.architecture,
            },
            "classes": list(self.class_names),
            "preprocess": None if self.preprocess is None else asdict(self.preprocess),
            "thresholds": [] if stale else [asdict(each) for each in self.thresholds.values()],
            **metadata,
        }
        folder.mkdir(parents=True, exist_ok=True)
        weights = {key: value.cpu().contiguous() for key, value in self.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")
        write_json(folder / f"{name}.json", card)
        return folder / f"{name}.json"


def load(folder: str | Path, name: str = "ifam") -> IFAM:
    """Load the network that `IFAM.save` wrote, to train it or to intervene on it.

    `sc.load(folder)` gives a view of the same network, for attribution methods.

    Args:
        folder: The folder it was saved to.
        name: The name it was saved under.

    Returns:
        The network, in eval mode.

    Example:
        >>> import seecause as sc
        >>> net = sc.load("builtin:critters-ifam").module
        >>> folder = net.save("/tmp/seecause-ifam").parent
        >>> sc.faithful.load(folder).parts
        4
    """
    net = saved(Path(folder), name).module
    assert isinstance(net, IFAM)
    return net


def from_card(card: Named, state: dict[str, Tensor], source: str) -> Source:
    """Build a network from its card and its weights (called by `loading.py`)."""
    architecture, frame = card["architecture"], card["preprocess"]
    backbone, arguments = architecture["backbone"], dict(architecture["arguments"])
    if card["classes"]:
        arguments["classes"] = card["classes"]
    preprocess = Preprocess(**frame) if frame else None
    net = IFAM(build_native(backbone), **arguments, preprocess=preprocess, architecture=backbone)
    fill(net, state, source)
    for each in card["thresholds"]:
        key = (each["quantile"], each["by"])
        net.thresholds[key] = Thresholds(*key, tuple(each["values"]), each.get("images", 0))
    return Source(net.eval(), {}, architecture)


def _described(backbone: Any) -> Named | None:
    """How transformers builds a backbone; modules of other libraries have no such description."""
    if type(backbone).__module__.split(".")[0] != "transformers":
        return None
    config, kind = backbone.config.to_dict(), type(backbone).__name__
    return {"library": "transformers", "class": kind, "config": config}
