"""Does a model answer from the background? Several measurements side by side, because each one
alone can be fooled.

discovered masks   keep the model's own evidence: if that is the background, BIG is small (see
                   `masks`)
mean fill          most of a picture's mean colour is its background's, so it can give the
                   background away (see `erase`)
grey fill          tells nothing of the picture, but no picture looks like it
exact swap         the same object elsewhere: where it can be had, believe it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause.background._outcomes import SWAP, Examples, background_gaps, examples, readable_twins
from seecause.background.erase import Erasure, Fill, Masks
from seecause.background.gains import Gains, information_gains
from seecause.background.images import (
    Pictures,
    Progress,
    logits_of,
    model_for,
    no_progress,
    pictures_of,
)
from seecause.background.masks import MaskSearch, check_search, discover_masks, iou, mask_options
from seecause.data.dataset import Dataset, Hole
from seecause.data.registry import as_data
from seecause.errors import BadOption
from seecause.metrics.accuracy import GroupAccuracy, clopper_pearson
from seecause.models.base import ImageModel, protocol
from seecause.models.eval_mode import in_eval_mode

MaskSource = Literal["discovered", "oracle", "both"]
Counted = Literal["right", "all"]
SOME, MUCH = 0.1, 0.5  # BIR, or share of flips, from which the background matters some, and mostly
ENOUGH = 20  # answers that an interval can be believed of
SHOWN = 6  # pictures
AuditFinding = Literal["hardly", "partly", "mostly", "perhaps", "cannot tell", "too few"]


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """FIG and BIG of every picture by every erasure, and what the answers do otherwise."""

    pictures: Pictures
    logits: Tensor  # [N, C]
    erasures: dict[str, Erasure]
    gains: dict[str, Gains]
    overlap: Tensor | None = None  # [N], IoU of discovered with true masks
    flips: Tensor | None = None  # [N] bool: another background, another answer
    groups: GroupAccuracy | None = None
    counted: Tensor | None = None  # [N] bool: pictures that gains are averaged over; None for all
    # BG-gap (ImageNet-9), and pictures of mixed_same and mixed_rand that it is of
    gap: tuple[float, int, int] | None = None
    holes: tuple[Hole, ...] = ()  # pictures that could not be read, of mixed_same too
    examples: Examples | None = None  # of the worst pictures
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        low, high = self.interval
        share = f"background share {self.background_share:.2f} ({low:.2f} to {high:.2f})"
        return f"Audit({self.finding}: {share} by {self.trusted}, {self.pictures!r})"

    @property
    def means(self) -> dict[str, Gains]:
        """Gains of the pictures that count: by default those that are answered right, since a wrong
        answer has no object to hang on."""
        if self.counted is None:
            return self.gains
        return {name: gains.take(self.counted) for name, gains in self.gains.items()}

    @property
    def trusted(self) -> str:
        """The erasure to believe: an exact swap if there is one, else, of those with true masks if
        there are any, the one that finds most."""
        means = self.means
        if SWAP in means:
            return SWAP
        true = [name for name in means if not self.is_discovered(name)]
        return max(true or means, key=lambda name: means[name].bir_or_zero)

    @property
    def background_share(self) -> float:
        """How much the answers hang on the background: BIR by the trusted erasure, or the share of
        flips if that is more."""
        ratio = self.means[self.trusted].bir_or_zero
        return ratio if self.flips is None else max(ratio, float(self.flips.double().mean()))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of `background_share`: of BIR by bootstrap, or of flips (Clopper-Pearson) if they
        are more."""
        gains = self.means[self.trusted]
        if self.flips is not None and float(self.flips.double().mean()) > gains.bir_or_zero:
            total = torch.tensor([len(self.flips)])
            low, high = clopper_pearson(self.flips.sum()[None], total)[0].tolist()
            return low, high
        low, high = gains.interval
        return (low, high) if low == low else (gains.bir_or_zero, gains.bir_or_zero)

    @property
    def finding(self) -> AuditFinding:
        """How far the model answers from the background, where the interval tells. Masks of the
        model's own say "perhaps" at most, and fewer than `ENOUGH` answers nothing, unless there are
        exact swaps."""
        if self.trusted != SWAP and len(self.means[self.trusted].big) < ENOUGH:
            return "too few"
        low, high = self.interval
        if high < SOME:
            return "hardly"
        if low < SOME:
            return "cannot tell"
        if self.is_discovered(self.trusted):
            return "perhaps"
        return "partly" if self.background_share < MUCH else "mostly"

    def is_discovered(self, name: str) -> bool:
        """Whether an erasure has masks of the model's own."""
        masks = self.erasures[name].masks
        return masks is not None and masks.source == "discovered"

    @property
    def accuracy(self) -> float | None:
        if self.pictures.labels is None:
            return None
        right = self.logits.argmax(dim=1) == self.pictures.labels.to(self.logits.device)
        return float(right.double().mean())

    def worst(self, count: int) -> list[int]:
        """Places of the pictures whose answers hang most on the background, by the trusted
        erasure."""
        gains = self.gains[self.trusted]
        order = (gains.bir + 1e-3 * gains.big).argsort(descending=True, stable=True)
        return order[:count].tolist()

    @property
    def shown(self) -> Erasure | None:
        """The erasure with masks that finds most: what pictures are shown with."""
        masked = [name for name, erasure in self.erasures.items() if erasure.masks is not None]
        if not masked:
            return None
        return self.erasures[max(masked, key=lambda name: self.gains[name].bir_ratio_of_means)]


@in_eval_mode
def heads_audit(
    model: ImageModel,
    data: Dataset | Pictures | str,
    *,
    masks: MaskSource = "both",
    fills: Sequence[Fill] = ("mean", "grey"),
    temperature: float = 1.0,
    count: Counted = "right",
    same: Dataset | Pictures | str | None = None,
    progress: Progress = no_progress,
    **search: Any,
) -> Audit:
    """FIG, BIG and BIR of every picture, by every way there is to take its background away:
    discovered and true masks, each with every fill, and exact swaps where the data has them.

    `masks`: "discovered" by the model, "oracle" (the data's own), or "both" as far as the data has
    them. `count`: means are those of "right" answers (of "all" where none is right, or there are no
    labels); flips and groups are always of all pictures. `same`: of ImageNet-9's mixed_rand, the
    variant mixed_same, for the BG-gap. `search`: options of `discover_masks`.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = sc.data.open_data("critters:certified:test", limit=24)
    >>> sc.background.heads_audit(model, data, masks="oracle").finding
    'mostly'
    """
    _check_audit(masks, fills, count, search)
    data = as_data(data)
    model = model_for(model, data)
    pictures = pictures_of(model, data, progress)
    asked = {"temperature": temperature, **search}
    sources, overlap = _masks(model, pictures, masks, asked, progress)
    masked = [Erasure(source, fill) for source in sources for fill in fills]
    erasures = {erasure.name: erasure for erasure in (*masked, *pictures.exact_swaps)}
    gains = {}
    for name, erasure in erasures.items():
        around = {"baseline": erasure.baseline, "temperature": temperature}
        gains[name] = information_gains(model, pictures.images, erasure.masks, **around)
    logits = logits_of(model, pictures.images)
    right = None if pictures.labels is None else (logits.argmax(dim=1) == pictures.labels).cpu()
    some_right = count == "right" and right is not None and bool(right.any())
    twin = None if same is None else pictures_of(model, as_data(same), progress)
    options = {"masks": masks, "fills": ", ".join(fills), "temperature": temperature}
    options |= {"count": count} | ({} if masks == "oracle" else _search_record(search))
    result = Audit(
        pictures=pictures,
        logits=logits.cpu(),
        erasures=erasures,
        gains=gains,
        overlap=overlap,
        flips=_flips(model, pictures, logits),
        groups=None if right is None else pictures.by_group(right),
        counted=right if some_right else None,
        gap=None if twin is None else _gap(model, twin, pictures),
        holes=(*pictures.holes, *(() if twin is None else twin.holes)),
        protocol={"method": "audit", "options": options, **protocol(model, pictures.images)},
    )
    return replace(result, examples=_worst_examples(model, result))


def _check_audit(masks: str, fills: Sequence[str], count: str, search: Mapping[str, Any]) -> None:
    """Refuse what cannot be used, or would not be, before any picture is read."""
    if masks not in get_args(MaskSource):
        raise BadOption("masks", masks, f"one of {', '.join(get_args(MaskSource))}")
    if count not in get_args(Counted):
        raise BadOption("count", count, f"one of {', '.join(get_args(Counted))}")
    if not fills or any(fill not in get_args(Fill) for fill in fills):
        raise BadOption("fills", fills, f"some of {', '.join(get_args(Fill))}")
    check_search(search)
    unused = mask_options(search) if masks == "oracle" else {}
    if unused:
        expected = "masks='discovered' or 'both': masks='oracle' searches none"
        raise BadOption("search", ", ".join(unused), expected)


def _worst_examples(model: ImageModel, audit: Audit) -> Examples:
    places = torch.tensor(audit.worst(SHOWN))
    erasure = None if audit.shown is None else audit.shown.take(places)
    return examples(model, audit.pictures.take(places), erasure)


def _masks(
    model: ImageModel,
    pictures: Pictures,
    source: MaskSource,
    search: dict[str, Any],
    progress: Progress,
) -> tuple[list[Masks], Tensor | None]:
    """Discovered masks, then true ones, where they are asked for and exist; and their IoU."""
    if source == "oracle":
        return [pictures.true_masks()], None
    with progress("searching masks", len(pictures)) as advance:
        discovered = discover_masks(model, pictures.images, progress=advance, **search)
    overlap = None if pictures.truth is None else iou(discovered, pictures.truth).cpu()
    truth = pictures.oracle if source == "both" else None
    return [discovered] if truth is None else [discovered, truth], overlap


def _flips(model: ImageModel, pictures: Pictures, logits: Tensor) -> Tensor | None:
    if pictures.swapped is None:
        return None
    elsewhere = logits_of(model, pictures.swapped.background)
    return (elsewhere.argmax(dim=1) != logits.argmax(dim=1)).cpu()


def _gap(model: ImageModel, same: Pictures, random: Pictures) -> tuple[float, int, int]:
    (gap,) = background_gaps(model, same, random, [[]])
    first, second = readable_twins(same, random)
    return gap, len(first), len(second)


def _search_record(search: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"steps": search.get("steps", MaskSearch.steps)}
    if others := mask_options(search):
        record["mask options"] = ", ".join(f"{name}={value}" for name, value in others.items())
    return record
