"""Losses of iFAM (PDiscoFormer, ECCV 2024; iFAM, arXiv 2506.08915), and learning rates.

total = c1 CE(parts) + c2 CE(stage 2) + presence + 2 background + total variation + entropy
        + equivariance + orthogonality

The losses that shape parts are on the soft maps A [B, K + 1, gh, gw] of the plain image:

presence         each part is active in some image       1 - mean_k max_{b, i, j} pool_3x3(A_k)
background       active near the border of each image    -log max_ij m_ij pool_3x3(A_bg)
total variation  maps are connected                      differences of neighbours, per patch
entropy          patches have one clear part             -sum_k A_k log A_k
equivariance     parts move with the image               1 - cosine(A, A of the warped image, back)
orthogonality    embeddings of parts, or the prototypes, are decorrelated
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import affine

from seecause.faithful.net import IFAM, IFAMOutput
from seecause.faithful.parts import Noise
from seecause.faithful.stages import is_token
from seecause.models.block import Named, Size, wide


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the losses, by default those of the paper. SIIM-ACR uses background=0.

    Args:
        class1: Cross-entropy of stage 1.
        class2: Cross-entropy of stage 2.
        presence: Each part is somewhere in the batch.
        background: The background is in every image.
        total_variation: Maps of parts are smooth.
        entropy: Each patch belongs to one part.
        equivariance: Maps follow the image when it is moved.
        orthogonality: Parts differ from each other.

    Example:
        >>> import seecause as sc
        >>> sc.faithful.LossWeights(background=0).presence
        1.0
    """

    class1: float = 1.0
    class2: float = 1.0
    presence: float = 1.0
    background: float = 2.0
    total_variation: float = 1.0
    entropy: float = 1.0
    equivariance: float = 1.0
    orthogonality: float = 1.0


@dataclass(frozen=True)
class TrainingLosses:
    """The losses of a network in one training step, which every training loop calls."""

    net: IFAM
    weights: LossWeights = LossWeights()

    def __call__(
        self, images: Tensor, labels: Tensor, ids: Tensor, seed: int, step: int
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The total, every loss by name (for the log, without gradient), and logits [B, C]. A
        fourth channel of the images is a given mask.

        Noise and dropped parts are keyed by (seed, step, sample id), the affine map by (seed,
        step): the same in any process, batch or resumed run.
        """
        size, mask = (images.shape[-2], images.shape[-1]), None
        if images.shape[1] > 3:
            images, mask = images[:, :3], self.net.on_patches(images[:, 3])
        moved = Affine.draw(seed, step, size) if self.weights.equivariance else None
        warped = None if moved is None else moved.warp(images)
        out = self.net(images, noise=Noise(seed, step, ids), warped=warped, mask=mask)
        # maps are float32 already, and CUDA refuses binary cross entropy in half precision
        with torch.autocast(images.device.type, enabled=False):
            losses = objective(self.net, out, labels, size=size, moved=moved, weights=self.weights)
        detached = {name: value.detach() for name, value in losses.items()}
        return losses["total"], detached, out.logits.detach()


def objective(
    net: IFAM,
    out: IFAMOutput,
    labels: Tensor,
    *,
    size: Size,
    moved: Affine | None = None,
    weights: LossWeights | None = None,
) -> dict[str, Tensor]:
    """Every loss by name, unweighted, and their weighted `total`. `moved` is the affine map
    that was applied to the images of `out.warped_maps`."""
    if net.options.selects != "parts":  # a baseline
        classes = F.cross_entropy(wide(out.logits), labels)
        return {"class2": classes, "total": classes}
    weights, embeddings, form = weights or LossWeights(), out.embeddings, net.options.orthogonality
    if form == "prototypes":  # treated as the parts of one image
        embeddings = wide(net.stage1.prototypes).T[None]  # [1, D, K + 1]
    losses = {
        "class1": F.cross_entropy(out.stage1_logits, labels),
        "presence": presence_loss(out.maps, across=net.options.presence),
        "background": background_loss(out.maps),
        "total_variation": total_variation_loss(out.maps),
        "entropy": entropy_loss(out.maps),
        "orthogonality": orthogonality_loss(embeddings, form=form),
    }
    if net.stage2 is not None:
        losses["class2"] = F.cross_entropy(wide(out.logits), labels)
    if moved is not None and out.warped_maps is not None:
        losses["equivariance"] = equivariance_loss(out.maps, out.warped_maps, moved, size)
    factors = asdict(weights)
    terms = [factors[name] * value for name, value in losses.items() if factors[name]]
    return {**losses, "total": sum(terms, out.maps.new_zeros(()))}


def presence_loss(maps: Tensor, *, across: Literal["global", "local"] = "global") -> Tensor:
    """1 - the mean over foreground parts of their strongest 3 x 3 neighbourhood in the batch.

    `global`: the batch of all processes, with gradient to the process that has the strongest;
    `local`: of this process.
    """
    best = _pooled(maps[:, :-1]).flatten(2).max(dim=2).values.max(dim=0).values  # [K]
    if across == "global" and dist.is_initialized():
        best = torch.stack(all_gather(best)).max(dim=0).values
    return 1 - best.mean()


def background_loss(maps: Tensor) -> Tensor:
    """-log of the background's strongest 3 x 3 neighbourhood, weighed by how near it is to the
    border; logarithms end at -100."""
    pooled = _pooled(maps[:, -1:])[:, 0]
    strongest = (pooled * border(*pooled.shape[1:], like=pooled)).flatten(1).max(dim=1).values
    # NaN would raise an unclear error in `binary_cross_entropy`; the other losses still show NaN
    strongest = strongest.nan_to_num(0.0).clamp(0, 1)
    return F.binary_cross_entropy(strongest, torch.ones_like(strongest))


def border(rows: int, columns: int, *, like: Tensor) -> Tensor:
    """(x^2 + y^2) / 2 for x, y in [-1, 1]: 1 in corners, 0.5 in the middle of edges, 0 in the
    centre."""
    y, x = (torch.linspace(-1, 1, n, dtype=like.dtype, device=like.device) for n in (rows, columns))
    return (y[:, None].square() + x.square()) / 2


def total_variation_loss(maps: Tensor) -> Tensor:
    """Absolute differences of neighbours, summed over all K + 1 maps, per patch."""
    down, across = maps.diff(dim=2).abs().sum(), maps.diff(dim=3).abs().sum()
    return (down + across) / (maps.shape[0] * maps.shape[2] * maps.shape[3])


def entropy_loss(maps: Tensor) -> Tensor:
    """Mean entropy of a patch's assignment, in nats."""
    sure = maps.clamp_min(torch.finfo(maps.dtype).eps)
    return -(maps * sure.log()).sum(dim=1).mean()


def orthogonality_loss(
    embeddings: Tensor, *, form: Literal["parts", "ifam_code", "prototypes"] = "parts"
) -> Tensor:
    """How much the modulated embeddings [B, D, K + 1] overlap, background included.

    `parts`, `prototypes`: the mean square of U^T U - I for unit columns U (PDiscoFormer).
    `ifam_code`: the trainer of iFAM passes the transpose, so that features are normalised over
    parts and the Gram matrix is D x D; computed here as (|V V^T|^2 - D) / D^2 with V (K + 1) x D.
    """
    unit = F.normalize(embeddings, dim=2 if form == "ifam_code" else 1)
    gram = unit.transpose(1, 2) @ unit  # [B, K + 1, K + 1]
    if form != "ifam_code":
        return (gram - torch.eye(gram.shape[1]).to(gram)).square().mean()
    width = embeddings.shape[1]  # the D x D matrix has the same squares
    return ((gram.square().sum(dim=(1, 2)) - width) / width**2).mean()


@dataclass(frozen=True)
class Affine:
    """Turn by `angle` degrees and scale about the centre, then shift by (x, y) pixels."""

    angle: float
    shift: tuple[int, int]  # x, y
    scale: float

    @classmethod
    def draw(cls, seed: int, step: int, size: Size) -> Affine:
        """The map of one step, for a whole batch of images of (height, width): angle in +-90
        degrees, shift of up to 11 % of each side in whole pixels, scale 0.8-1.4."""
        draw = random.Random(f"{seed} {step}")
        angle = draw.uniform(-90, 90)
        down, across = (round(draw.uniform(-0.11, 0.11) * side) for side in size)
        return cls(angle, (across, down), draw.uniform(0.8, 1.4))

    def warp(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W], bilinear; what comes from outside is 0, the mean colour."""
        moved = [*self.shift], self.scale, [0.0, 0.0], InterpolationMode.BILINEAR
        return affine(images, self.angle, *moved)

    def unwarp(self, maps: Tensor, size: Size) -> Tensor:
        """Maps [B, K, gh, gw] of a warped image of `size` pixels, brought back in two
        nearest-neighbour steps."""
        rows, columns = maps.shape[2:]
        back: Any = [-self.shift[0] * columns / size[1], -self.shift[1] * rows / size[0]]
        maps = affine(maps, 0.0, back, 1.0, [0.0, 0.0])
        return affine(maps, -self.angle, [0, 0], 1 / self.scale, [0.0, 0.0])


def equivariance_loss(maps: Tensor, warped_maps: Tensor, moved: Affine, size: Size) -> Tensor:
    """1 - the mean cosine of foreground maps [B, K + 1, gh, gw] and those of the warped images of
    `size`, brought back. Gradient flows through both."""
    back = moved.unwarp(warped_maps[:, :-1], size)
    return 1 - torch.mean(F.cosine_similarity(maps[:, :-1].flatten(2), back.flatten(2), dim=2))


def parameter_groups(
    net: IFAM,
    base_lr: float,
    weight_decay: float,
    *,
    prototype_factor: float = 1e3,
    head_factor: float = 1e4,
) -> list[Named]:
    """Groups for an optimiser: what is trainable, at the paper's rates. Only matrices of backbones
    and classifiers are decayed."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        factor, decays = head_factor, name.endswith(("classifier.weight", "head.weight"))
        if ".tower." in name:
            factor, decays = 1.0, parameter.ndim >= 2 and not is_token(name)
        elif name == "stage1.prototypes":
            factor = prototype_factor
        if parameter.requires_grad:
            key = (base_lr * factor, weight_decay if decays else 0.0)
            groups.setdefault(key, []).append(parameter)
    return [{"params": each, "lr": lr, "weight_decay": wd} for (lr, wd), each in groups.items()]


def _pooled(maps: Tensor) -> Tensor:
    """3 x 3 means, without padding."""
    return F.avg_pool2d(maps, 3, stride=1)
