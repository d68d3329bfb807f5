"""Versions of images that should get the same prediction, and what a model predicts for them.

Transplants put the object of image i on the background of image j:

    pixel p of the result = i's pixel p                 inside i's mask
                            j's pixel p                 elsewhere, outside j's erased region
                            another patch of j          in it: j's mask grown by one patch

The patches that fill an erased region are drawn from the patches of j outside of it. The object is
cut by pixels, with soft edges. Every draw is a hash of (seed, image, number of the transplant): the
first four of eight transplants are those of `per_image=4`. Images may be raw or normalised, because
copying and mixing commute with normalisation. Transplants are rendered when they are indexed, so
eight for each image take the memory of one batch.

Images are told apart by their content (`content_keys`): neither the order of the images nor the
names of their folders decides which are put together. Donors of an image are drawn without
repeats as long as there are others. A cut whose mask is `refused` takes part in nothing.

A test has versions of two kinds:

    moved     each object on backgrounds of images that the model predicts otherwise (or the other
              version of a pair)
    control   each object on backgrounds of images that it predicts the same (or the image itself):
              the effect of cutting alone. By predictions and not by labels, so that it is a control
              also where backgrounds are independent of the class

    flips              share of versions whose prediction is not that of the image, over the images
                       that count (`Predictions.counted`)
    transplant-worst   lowest accuracy over class x donor class; it needs no group label, and
                       decides between remedies. Cells of few images (not versions) are pooled by
                       class, then altogether
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

from seecause._random import bits, lattice
from seecause.background.images import LabelledImages, logits_of
from seecause.background.last_layer import LastLayer, features
from seecause.errors import BadOption
from seecause.metrics.statistics import GroupAccuracy
from seecause.models.base import ImageModel, content_keys
from seecause.models.view import VisionModel
from seecause.options import Count, Seed, checked

log = logging.getLogger(__name__)

Donors = Literal["any", "same-class", "other-class"]
SOFT = 1 / 150  # deviation of soft edges, as a share of the image's longer side
FEWEST_PATCHES = 12  # patches per side of the fill grid, at least
REFUSALS = ("", "empty", "covering the image", "fragmented", "outlier")
SMALLEST, LARGEST = 0.002, 0.95  # share of the image that a mask may cover
FAR = 8.0  # robust standard deviations from which a cut is an outlier to the model
OF_VERSIONS = ("source", "donor", "number", "control")  # fields with a row for each version
FEWEST = 5  # minimum number of images of a cell in `worst_cell`; smaller cells are pooled
AT_ONCE = 256  # versions rendered at once
_DRAW, _FILL = 1, 2  # stream identifiers for the random hash
_STEP, _KEY = 0x9E3779B1, (1 << 62) - 1  # an odd factor that tells summands apart; the bits of keys
_VERSION = re.compile(r"~\d+(\.\w+)?$")  # the end of an id that tells versions of an image apart


@dataclass(frozen=True, eq=False)
class Versions:
    """M versions of images, rendered when they are indexed: transplants of images with object masks
    in use, or versions of pairs."""

    data: LabelledImages
    source: Tensor  # [M] image that the version belongs to
    donor: Tensor  # [M] image whose background it has; of pairs 1 for the other version, else 0
    number: Tensor  # [M] number of the transplant among those of its image
    control: Tensor  # [M] bool: control versions, which show the effect of cutting alone
    seed: int = 0
    memo: dict[str, Any] = field(default_factory=dict)  # features by model

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Some of the versions, rendered, [m, 3, H, W]."""
        data, source, donor = self.data, self.source[rows], self.donor[rows]
        images = data.images[source]
        if data.masks is None:
            if data.other_background is None:
                return images
            other = (donor == 1)[:, None, None, None]
            return torch.where(other, data.other_background[source], images)
        masks = data.masks.hard.to(source.device)
        holes = _erased_regions(masks[donor])
        drawn = self._keys[source] + _STEP * self.number[rows] & _KEY
        background = _filled(data.images[donor], holes, self.seed, drawn)
        objects, place = source.unique(return_inverse=True)  # each has several versions
        share = _softened(masks[objects][:, None].to(images.dtype))
        return images.mul_(share[place]).add_(background.mul_((1 - share)[place]))

    @cached_property
    def _keys(self) -> Tensor:
        return content_keys(self.data.images)

    @property
    def labels(self) -> Tensor:
        """[M] classes of the objects."""
        return self.data.need_labels()[self.source]

    @property
    def donor_labels(self) -> Tensor:
        """[M] classes of the images whose background it is; of pairs, which version it is."""
        return self.donor if self.data.masks is None else self.data.need_labels()[self.donor]

    @property
    def paired(self) -> bool:
        """Whether these are versions of pairs, not transplants."""
        return self.data.masks is None and self.data.other_background is not None

    def clean(self, plain: Tensor, moved: Tensor) -> Tensor:
        """The rows [n, ...] of plain images: of pairs, those of the second versions, which a mark
        does not change."""
        if not self.paired:
            return plain
        rows = (self.donor == 1).nonzero()[:, 0]
        return moved[rows[self.source[rows].argsort(stable=True)].cpu()]

    def features(self, model: VisionModel) -> list[Tensor]:
        """Features of the last layer: of images [n, P] and of versions [M, P]."""
        key = model.fingerprint()
        if key not in self.memo:
            self.memo[key] = self._over(features, model)
        return self.memo[key]

    def predict(self, model: ImageModel, before: Predictions | None = None) -> Predictions:
        """Predictions of images and versions; those of the first versions of each image may be
        known from `before`."""
        if before is None:
            return Predictions(self, *self._over(logits_of, model))
        new = self.number > before.versions.number.max()
        rest = replace(self, memo={}, **{name: getattr(self, name)[new] for name in OF_VERSIONS})
        plain, more = rest._over(logits_of, model)
        moved = more.new_empty(len(self), more.shape[1])
        moved[new.cpu()], moved[~new.cpu()] = more, before.moved
        return Predictions(self, plain, moved)

    def predict_under(self, model: VisionModel, layer: LastLayer) -> Predictions:
        """Predictions of the model with another last layer, from its features."""
        return Predictions(self, *(layer(rows) for rows in self.features(model)))

    def _over(self, run: Callable[[Any, Tensor], Tensor], model: ImageModel) -> list[Tensor]:
        """`run(model, ...)` of images and of versions, on the CPU, `AT_ONCE` versions at a time."""
        rows = torch.arange(len(self), device=self.source.device).split(AT_ONCE)
        plain = run(model, self.data.images).cpu()
        moved = [run(model, self[each]).cpu() for each in rows if len(each)]
        return [plain, torch.cat([plain[:0], *moved])]


@checked
def transplant(
    data: LabelledImages,
    *,
    per_image: Count = 8,
    donors: Donors = "any",
    classes: Tensor | None = None,
    seed: Seed = 0,
) -> Versions:
    """Put objects of images on each other's backgrounds.

    Args:
        data: Labelled images with object masks in use.
        per_image: Transplants of each image.
        donors: Classes that lend backgrounds. "same-class" is a control: it shows the effect of
            cutting alone.
        classes: Classes [n] that tell donors apart; None: the labels.
        seed: Of the draws.

    Returns:
        `Versions`. An image without an object or without a background gives no transplant; one
        without a background lends none to others.

    Example:
        >>> import torch
        >>> images, masks = torch.rand(4, 3, 8, 8), torch.zeros(4, 4, 4, dtype=torch.bool)
        >>> masks[:, 1:3, 1:3] = True
        >>> data = LabelledImages(images, torch.tensor([0, 0, 1, 1]), masks)
        >>> moved = transplant(data, per_image=2)
        >>> len(moved), moved[:3].shape
        (8, torch.Size([3, 3, 8, 8]))
    """
    if data.masks is None:
        raise BadOption("masks", None, "object masks: data.with_masks(object_masks(...))")
    masks, device = data.masks.hard, data.images.device
    objects = masks.flatten(1).any(dim=1) & ~masks.flatten(1).all(dim=1)
    grounds = ~_erased_regions(masks).flatten(1).all(dim=1)
    if data.masks.refused is not None:
        objects, grounds = (some & (data.masks.refused == 0) for some in (objects, grounds))
    # drawn on the CPU: a GPU would synchronise for each image
    classes = (data.need_labels() if classes is None else classes).cpu()
    keys = content_keys(data.images).cpu()
    source, donor, number = _draw(
        classes, objects.cpu(), grounds.cpu(), keys, per_image, donors, seed
    )
    if len(source) == 0:
        raise BadOption(
            "masks",
            f"{int(objects.sum())} of {len(masks)} with an object and a background",
            f"at least two such images for donors={donors!r}; in a mask 0 is background",
        )
    if skipped := len(data) - len(source.unique()):
        log.warning(
            "%d of %d images are not transplanted (donors: %s): no object, no background,"
            " or no donor",
            skipped,
            len(data),
            donors,
        )
    source, *drawn = (each.to(device) for each in (source, donor, number))
    return Versions(data, source, *drawn, control=torch.zeros_like(source).bool(), seed=seed)


def versions_to_learn(data: LabelledImages, per_image: int, *, seed: int) -> Versions:
    """Versions for training: objects on any background; of pairs (no masks in use), both
    versions."""
    if data.masks is not None:
        return transplant(data, per_image=per_image, seed=seed)
    return _pair_versions(data, 0, 1)


def versions_to_test(
    model: ImageModel, data: LabelledImages, per_image: int, *, seed: int
) -> Versions:
    """Versions for a test: objects on backgrounds of images that `model` predicts otherwise, and as
    control, of images that it predicts the same; of pairs (no masks in use), the other version and
    the image itself."""
    if data.masks is None:
        both = _pair_versions(data, 1, 0)
        return replace(both, control=both.donor == 0)
    predicted = logits_of(model, data.images).argmax(dim=1)
    if len(predicted.unique()) < 2:
        predicted = data.need_labels()  # if the model predicts one class only
    options: Any = {"per_image": per_image, "classes": predicted, "seed": seed}
    moved = transplant(data, donors="other-class", **options)
    if torch.bincount(predicted).max() < 2:
        return moved
    same = transplant(data, donors="same-class", **options)
    same = replace(same, control=torch.ones_like(same.control))
    both: Any = {n: torch.cat([getattr(each, n) for each in (moved, same)]) for n in OF_VERSIONS}
    return Versions(data, **both, seed=seed)


def _pair_versions(data: LabelledImages, *which: int) -> Versions:
    """The images themselves (0), their other versions (1), or both."""
    places = torch.arange(len(data), device=data.images.device)
    source = places.repeat(len(which))
    donor = torch.tensor(which, device=places.device).repeat_interleave(len(data))
    return Versions(data, source, donor, donor, torch.zeros_like(source, dtype=torch.bool))


def check_cuts(model: ImageModel, data: LabelledImages) -> LabelledImages:
    """The images with `refused` of their masks set, and a note that counts the refused ones.

    A mask is refused if it is empty, covers the image, is in pieces of which none is half of it, or
    if the object on any background is an outlier to the model: its features are farther from those
    of every plain image than is usual for cuts, by `FAR` robust standard deviations.
    """
    masks = data.masks
    assert masks is not None
    reasons = torch.tensor([_broken(mask) for mask in masks.hard.cpu().numpy()], dtype=torch.long)
    usable = reasons == 0
    data = data.with_masks(replace(masks, refused=reasons.to(masks.hard.device)))
    if usable.sum() >= FEWEST:
        run = features if isinstance(model, VisionModel) else logits_of
        cuts = transplant(data, per_image=2)
        plain, moved = (rows.double() for rows in cuts._over(run, model))
        far = torch.cdist(moved, plain).amin(dim=1)
        near = torch.full((len(data),), torch.inf, dtype=far.dtype)
        near = near.scatter_reduce(0, cuts.source.cpu(), far, "amin")  # of two cuts the nearer
        spread = 1.4826 * (far - far.median()).abs().median()
        outlier = usable & near.isfinite() & (near > far.median() + FAR * spread)
        reasons = torch.where(outlier, REFUSALS.index("outlier"), reasons)
    if not (count := int((reasons > 0).sum())):
        return data.with_masks(replace(masks, refused=None))
    kinds = Counter(REFUSALS[reason] for reason in reasons.tolist() if reason)
    note = f"{count} of {len(data)} cuts are refused and not counted: "
    note += ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    log.warning(note)
    notes = (*masks.notes, note)
    return data.with_masks(replace(masks, refused=reasons.to(masks.hard.device), notes=notes))


def _broken(mask: np.ndarray) -> int:
    """Why a mask [h, w] is no cut, as an index of `REFUSALS`; 0 if it is one."""
    share = float(mask.mean())
    if share < SMALLEST or share > LARGEST:
        return REFUSALS.index("empty" if share < SMALLEST else "covering the image")
    pieces: Any = cast(Any, ndimage.label(mask, np.ones((3, 3))))[0]
    largest = np.bincount(pieces[mask]).max()
    return REFUSALS.index("fragmented") if 2 * largest < mask.sum() else 0


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits of images and of their versions, on the CPU, and the numbers that follow from them."""

    versions: Versions
    plain: Tensor  # [n, C]
    moved: Tensor  # [M, C], controls among them

    @property
    def correct(self) -> Tensor:
        """[n] bool."""
        return self.plain.argmax(dim=1) == self.versions.data.need_labels().cpu()

    @property
    def counted(self) -> Tensor:
        """[n] bool: images whose flips count, those with a correct prediction. For pairs, a correct
        prediction of either version is enough: a mark may make the first one wrong."""
        if self.versions.data.masks is not None:
            return self.correct
        return self.correct | (self.accuracy_by_image() > 0)

    def accuracy_by_image(self) -> Tensor:
        """[n] float64: accuracy over the versions of each image on other backgrounds, or over both
        versions of a pair; NaN without any."""
        rows = ~self.versions.control.cpu() | self.versions.paired
        return self._by_image(self._correct_versions(), rows)

    def flips_by_image(self, control: bool = False) -> Tensor:
        """[n] float64: share of each image's versions of one kind with another prediction than the
        image; NaN without versions."""
        plain = self.plain.argmax(dim=1)[self.versions.source.cpu()]
        kind = self.versions.control.cpu() == control
        return self._by_image(self.moved.argmax(dim=1) != plain, kind)

    def _by_image(self, values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Means over the versions (rows [M] bool) of each image."""
        source, values = self.versions.source.cpu()[rows], values[rows].double()
        sums = torch.zeros(len(self.plain), dtype=torch.float64).index_add(0, source, values)
        return sums / torch.bincount(source, minlength=len(sums))  # NaN for 0 of 0

    def _correct_versions(self) -> Tensor:
        return self.moved.argmax(dim=1) == self.versions.labels.cpu()

    @property
    def accuracy(self) -> float:
        return float(self.correct.double().mean())

    @property
    def other_accuracy(self) -> float:
        """Accuracy on other backgrounds, of pairs on both versions: the mean over images."""
        return float(self.accuracy_by_image().nanmean())

    def losses(self, before: Predictions) -> Tensor:
        """[n] float64: what each plain image loses against `before`: 1 if its prediction was
        correct and is no more, -1 the other way round. If labels are the model's own predictions,
        the probability that it gave to the earlier prediction less that of the later one."""
        plain, earlier = (each.versions.clean(each.plain, each.moved) for each in (self, before))
        data = self.versions.data
        if data.labels is None or data.own_labels:
            share = earlier.double().softmax(dim=1)
            kept = share.gather(1, plain.argmax(dim=1, keepdim=True))
            return share.amax(dim=1) - kept[:, 0]
        right = (logits.argmax(dim=1) == data.labels.cpu() for logits in (earlier, plain))
        first, second = (correct.double() for correct in right)
        return first - second

    @cached_property
    def draw_error(self) -> float:
        """Standard error of extra flips by the draw of backgrounds alone, for these images."""
        drawn = int(self.versions.number.max())  # one less than the versions of a kind
        shares = torch.stack(self.compared).nan_to_num()
        if not drawn and not self.versions.paired:  # one draw does not show its spread
            shares[:] = shares.mean(dim=1, keepdim=True)
        return float((shares * (1 - shares) / max(1, drawn)).sum().sqrt() / max(1, shares.shape[1]))

    @cached_property
    def compared(self) -> tuple[Tensor, Tensor]:
        """Shares of versions with another prediction, [m] each: on backgrounds of images that are
        predicted otherwise, and in the controls. Of the counted images that have both; where no
        image has a control, of all counted images, and the second is NaN."""
        shares = (self.flips_by_image(), self.flips_by_image(control=True))
        moved, control = (share[self.counted] for share in shares)
        known = ~moved.isnan() & (~control.isnan() | control.isnan().all())
        return moved[known], control[known]

    @property
    def flips(self) -> float:
        """Mean share of predictions that change, over the `compared` images; NaN without any."""
        return float(self.compared[0].mean())

    @property
    def control_flips(self) -> float:
        """Mean share of predictions that change in the controls, over the same images."""
        return float(self.compared[1].mean())

    @cached_property
    def transplant_worst(self) -> float:
        labels, donors = self.versions.labels.cpu(), self.versions.donor_labels.cpu()
        images = origins(self.versions.data.ids)[self.versions.source.cpu()]
        return worst_cell(self._correct_versions(), labels, donors, images)

    @property
    def groups(self) -> GroupAccuracy | None:
        return self.versions.data.by_group(self.correct)

    def numbers(self, *, groups: bool = False) -> dict[str, float]:
        """Numbers by name, for tables; NaN if the data does not allow them."""
        by_group = self.groups if groups else None
        return {
            "accuracy": self.accuracy,
            "flips": self.flips,
            "control flips": self.control_flips,
            "other accuracy": self.other_accuracy,
            "transplant-worst": self.transplant_worst,
            "worst group": torch.nan if by_group is None else by_group.worst,
        }


def worst_cell(
    correct: Tensor, labels: Tensor, donors: Tensor, images: Tensor, *, fewest: int = FEWEST
) -> float:
    """The lowest accuracy over (class, donor class) of versions [M] of images [M]. Cells of fewer
    than `fewest` images are pooled: with the other small cells of their class, with the whole
    class, or altogether, whichever is the first to have enough.

    >>> import torch
    >>> correct, classes = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 1])
    >>> worst_cell(correct, classes, torch.tensor([0, 0, 1, 1]), torch.arange(4), fewest=2)
    0.5
    """

    def enough(rows: Tensor) -> bool:
        return len(images[rows].unique()) >= fewest

    pools, left = list[Tensor](), list[Tensor]()
    for whole in _rows_by(labels):
        cells = [whole[rows] for rows in _rows_by(donors[whole])]
        pools += [cell for cell in cells if enough(cell)]
        small = [cell for cell in cells if not enough(cell)]
        if small:
            rest = torch.cat(small)
            pool = rest if enough(rest) else whole
            (pools if enough(pool) else left).append(pool)
    if left:
        rest = torch.cat(left)
        pools.append(rest if enough(rest) else torch.arange(len(correct)))
    return min(float(correct[pool].double().mean()) for pool in pools)


def _rows_by(codes: Tensor) -> list[Tensor]:
    """Rows of each code [M]."""
    order = codes.argsort(stable=True)
    counts = codes[order].unique_consecutive(return_counts=True)[1]
    return list(order.split(counts.tolist()))


def origins(ids: Sequence[str]) -> Tensor:
    """[n] int: equal for ids of versions of the same image, NAME~1 and NAME~2.

    >>> origins(["a.png", "b~1.png", "b~2.png", "c"]).tolist()
    [0, 1, 1, 2]
    """
    names = [_VERSION.sub("", name) for name in ids]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _erased_regions(masks: Tensor) -> Tensor:
    """Patches of each background that are filled, [n, gh, gw]: those that the mask touches, and the
    neighbours of those that it covers to at least half, unless no patch would be left."""
    sides = [_patch(side) for side in masks.shape[1:]]
    share = F.avg_pool2d(masks[:, None].float(), sides)
    half, touched = share >= 0.5, share[:, 0] > 0
    grown = (F.max_pool2d(half.float(), 3, stride=1, padding=1)[:, 0] > 0) | touched
    return torch.where(grown.flatten(1).all(dim=1)[:, None, None], touched, grown)


def _patch(side: int) -> int:
    """The largest patch that gives at least `FEWEST_PATCHES` a side."""
    sizes = range(1, max(2, side // FEWEST_PATCHES + 1))
    return max(size for size in sizes if side % size == 0)


def _draw(
    classes: Tensor,
    objects: Tensor,
    grounds: Tensor,
    keys: Tensor,
    per_image: int,
    donors: Donors,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Source, donor and number of every transplant, [M] each, image by image: donors in the order
    of a hash of both images."""
    numbers = torch.arange(per_image)
    sources, chosen = [numbers[:0]], [numbers[:0]]
    for place in objects.nonzero()[:, 0].tolist():
        same = classes == classes[place]
        allowed = {"any": grounds, "same-class": grounds & same, "other-class": grounds & ~same}
        pool = allowed[donors].nonzero()[:, 0]
        pool = pool[pool != place]
        if len(pool):
            chance = bits(keys[pool] + _STEP * keys[place] & _KEY, 4 * seed + _DRAW)
            sources.append(torch.full_like(numbers, place))
            chosen.append(pool[chance.argsort(stable=True)[numbers % len(pool)]])
    return torch.cat(sources), torch.cat(chosen), numbers.repeat(len(sources) - 1)


def _filled(images: Tensor, holes: Tensor, seed: int, drawn: Tensor) -> Tensor:
    """Backgrounds [m, 3, H, W] with `holes` [m, gh, gw] filled by other patches of the same
    image, which `drawn` [m] chooses."""
    (rows, columns), height, width = holes.shape[1:], *images.shape[-2:]
    high, wide = height // rows, width // columns
    hole = holes.flatten(1)  # [m, P]
    free_first = hole.byte().argsort(dim=1, stable=True)
    free = (~hole).sum(dim=1, keepdim=True)
    chance = lattice(drawn, 4 * seed + _FILL, rows, columns).flatten(1)
    rank = ((chance * 2**24).long() * free) >> 24  # whole numbers: nothing rounds up to `free`
    drawn = free_first.gather(1, rank)
    own = torch.arange(rows * columns, device=holes.device)
    place = torch.where(hole, drawn, own)  # [m, P]
    patches = images.unflatten(3, (columns, wide)).unflatten(2, (rows, high))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [m, P, 3, high, wide]
    patches = patches[torch.arange(len(images), device=holes.device)[:, None], place]
    patches = patches.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return patches.flatten(4, 5).flatten(2, 3)


def _softened(shapes: Tensor) -> Tensor:
    """Masks [m, 1, H, W] with edges that fade over a few pixels."""
    from torchvision.transforms.functional import gaussian_blur

    sigma = max(0.5, SOFT * max(shapes.shape[-2:]))
    return gaussian_blur(shapes, [2 * round(3 * sigma) + 1] * 2, [sigma] * 2)
