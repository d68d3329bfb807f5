"""From a model and pictures to heads that go, and what that did: `seecause heads score` and
`seecause heads prune`, for Python too.

Heads are chosen on right answers of `train` and judged on `test`, before and after, against how
many go, and beside random sets of as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from seecause.background._export import Form, export
from seecause.background._outcomes import (
    Curve,
    Examples,
    Outcome,
    background_gaps,
    changes,
    curve,
    examples,
)
from seecause.background.cigma import Screening
from seecause.background.erase import Erasure, Fill, Masks
from seecause.background.heads import (
    Head,
    HeadScores,
    Selector,
    all_heads,
    find_selector,
    head_count,
    need_heads,
    select,
)
from seecause.background.images import (
    AnswerSampling,
    Pictures,
    Progress,
    answered_right,
    logits_of,
    model_for,
    no_progress,
    pictures_of,
)
from seecause.background.masks import check_search, discover_masks, mask_options
from seecause.data.batch import group_shares
from seecause.data.dataset import Dataset, Hole
from seecause.data.registry import as_data
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import check_options

Source = Literal["auto", "discovered", "oracle"]
SHOWN = 6  # pictures
GIVEN = ("masks", "baseline", "mask_steps", "seed", "progress")  # options that a job fills in


@dataclass(frozen=True)
class Background:
    """How the background is told from the object and taken away.

    `masks`: the data's own (oracle), the model's (discovered), or the data's where it has them.
    `fill` replaces the background; "swap" takes exact counterfactuals, which only Critters have.
    `search` are options of `discover_masks`.
    """

    masks: Source = "auto"
    fill: Fill | Literal["swap"] = "grey"
    search: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be used before any picture is read."""
        if self.masks not in get_args(Source):
            raise BadOption("masks", self.masks, f"one of {', '.join(get_args(Source))}")
        fills = (*get_args(Fill), "swap")
        if self.fill not in fills:
            raise BadOption("fill", self.fill, f"one of {', '.join(fills)}")
        check_search(self.search)

    def masks_of(self, model: ImageModel, pictures: Pictures, progress: Progress) -> Masks:
        """True masks, or the model's own."""
        truth = pictures.true_masks() if self.masks == "oracle" else pictures.oracle
        if truth is not None and self.masks != "discovered":
            if others := mask_options(self.search):
                raise BadOption(
                    "search",
                    others,
                    f"none: {pictures.name} has masks of its own, so give masks='discovered'",
                )
            return truth
        with progress("searching masks", len(pictures)) as advance:
            return discover_masks(model, pictures.images, progress=advance, **self.search)

    def erasure(self, model: ImageModel, pictures: Pictures, progress: Progress) -> Erasure:
        """Masks and a fill, or exact swaps."""
        if self.fill != "swap":
            return Erasure(self.masks_of(model, pictures, progress), self.fill)
        if pictures.swapped is None:
            raise BadOption(
                "fill",
                "swap",
                f"mean, grey, blur or noise: {pictures.name} has no other versions of its"
                " pictures, as Critters and pairs:WITH:WITHOUT have",
            )
        return Erasure(None, pictures.swapped)

    def test_erasures(
        self, model: ImageModel, pictures: Pictures, progress: Progress
    ) -> list[Erasure]:
        """What removals are judged by: masks and a fill, and exact swaps where there are some."""
        fill = "grey" if self.fill == "swap" else self.fill
        return [Erasure(self.masks_of(model, pictures, progress), fill), *pictures.exact_swaps]


@dataclass(frozen=True, eq=False)
class ScoredHeads:
    """Scores of every head by a selector, and what they were made of."""

    selector: str
    scores: HeadScores
    pictures: Pictures  # right answers
    erasure: Erasure | None  # of those pictures; None for selectors without masks
    shares: Mapping[Any, float]  # of the groups in all pictures that were read
    options: dict[str, Any]  # of the selector
    record: dict[str, Any]  # everything that decided the scores, for a manifest


@in_eval_mode
def score_heads(
    model: ImageModel,
    data: Dataset | Pictures | str,
    *,
    selector: str = "cigma",
    options: Mapping[str, Any] | None = None,
    sampling: AnswerSampling | None = None,
    background: Background | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> ScoredHeads:
    """Score heads on those pictures of `data` that the model answers right.

    selector    a name of `sc.background.selectors()`; `options` are its own
    sampling    which right answers (`AnswerSampling`); None: two fifths of them, at most 512
    background  how it is told from the object and taken away (`Background`); None: by the data's
                masks, or else discovered ones, and grey
    """
    view, options = need_heads(model, "choosing heads"), dict(options or {})
    background = background or Background()
    entry = check_selector(view, selector, options, background)
    if "baseline" not in entry.options and background.fill != "grey":
        raise BadOption(
            "fill",
            background.fill,
            f"'grey', the default: choosing heads by {selector} fills no background",
        )
    return _score(view, data, entry, sampling, background, seed, progress, options)


def _score(
    model: VisionModel,
    data: Dataset | Pictures | str,
    entry: Selector,
    sampling: AnswerSampling | None,
    background: Background,
    seed: int,
    progress: Progress,
    options: dict[str, Any],
) -> ScoredHeads:
    data = as_data(data)
    scorer = need_heads(model_for(model, data), "choosing heads")
    everything = pictures_of(scorer, data, progress)
    if everything.labels is None and "labels" in entry.needs:
        raise BadOption("data", everything.name, f"data with labels: {entry.name} needs them")
    chosen = everything
    if "pairs" in entry.needs:  # what a change does is told by answers that it made wrong, too
        background = replace(background, fill="swap")
    else:
        sampled = asdict(sampling or AnswerSampling())
        chosen = answered_right(scorer, everything, seed=seed, **sampled)
    erasure, keywords = None, dict(options)
    if "baseline" in entry.options:
        erasure = background.erasure(scorer, chosen, progress)
        keywords |= {"masks": erasure.masks, "baseline": erasure.baseline}
    elif "masks" in entry.options:
        erasure = Erasure(background.masks_of(scorer, chosen, progress), "grey")
        keywords |= {"masks": erasure.masks}
    keywords |= {"seed": seed} if "seed" in entry.options else {}
    labels = chosen.labels
    if labels is None:
        labels = logits_of(scorer, chosen.images).argmax(dim=1)
    with progress("scoring heads", len(chosen) * len(all_heads(scorer))) as advance:
        keywords |= {"progress": advance} if entry.tells_progress else {}
        scores = select(entry.name, scorer, chosen.images, labels, **keywords)
    record: dict[str, Any] = {"data": chosen.name, "pictures": len(chosen), "by": entry.name}
    if erasure is not None and "baseline" in entry.options:
        record["background"] = erasure.name
    elif erasure is not None and erasure.masks is not None:
        record["masks"] = erasure.masks.source
    flags = [name for name in ("operator", "guard") if name in entry.options]
    record |= {name: scores.protocol[name] for name in flags}
    record |= {name: _plain(value) for name, value in options.items()}
    record |= {"mask options": others} if (others := mask_options(background.search)) else {}
    shares = group_shares(everything.groups)
    return ScoredHeads(entry.name, scores, chosen, erasure, shares, options, record)


@dataclass(frozen=True, eq=False, repr=False)
class PruneResult:
    """Heads that go, and what that did on other pictures."""

    model: VisionModel  # whole
    heads: list[Head]
    scored: ScoredHeads
    test: Pictures
    curve: Curve  # against how many heads may go, with random sets beside it
    examples: Examples  # before and after
    gaps: tuple[float, float] | None = None  # BG-gap before and after (ImageNet-9)
    holes: tuple[Hole, ...] = ()  # pictures that could not be read, of mixed_same too

    def __repr__(self) -> str:
        shown = ("accuracy", "worst group", "flips")
        numbers = self.changes()
        moved = [f"{n} {numbers[n][0]:.3f} -> {numbers[n][1]:.3f}" for n in shown if n in numbers]
        return f"PruneResult({', '.join([f'without {self.heads}', *moved])})"

    @property
    def before(self) -> Outcome:
        return self.curve.at(0)

    @property
    def after(self) -> Outcome:
        return self.curve.at(len(self.heads))

    def changes(self) -> dict[str, tuple[float, float]]:
        """Numbers by name, before and after."""
        return changes(self.before, self.after, self.gaps)

    @property
    def note(self) -> str:
        """For the README of the exported model."""
        return (
            f"Heads were chosen by {self.scored.selector} on {len(self.scored.pictures)} pictures"
            f" of {self.scored.pictures.name}: the {len(self.heads)} highest scores."
        )

    def export(self, folder: str | Path, *, form: Form = "zeroed") -> Path:
        """Write the model without these heads."""
        return export(self.model, self.heads, folder, form=form, note=self.note)


@in_eval_mode
def prune_and_test(
    model: ImageModel,
    train: Dataset | Pictures | str,
    test: Dataset | Pictures | str,
    *,
    selector: str = "cigma",
    options: Mapping[str, Any] | None = None,
    top: int | float = 0.1,
    sampling: AnswerSampling | None = None,
    background: Background | None = None,
    draws: int = 20,
    same: Dataset | Pictures | str | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> PruneResult:
    """Choose heads on right answers of `train`, remove them, and measure on `test` what that did,
    beside `draws` random sets of as many.

    `selector` scores heads (`sc.background.selectors()` lists them) with its `options`; the highest
    `top` go (a count, or a share of all), but none with a score of 0 or less. `sampling`: which
    right answers; `background`: how it is told from the object and filled. `same`: where `test` is
    ImageNet-9's mixed_rand, the variant mixed_same, for the BG-gap.

    The result has `heads`, `before` and `after`, the `curve` against how many go, and `export`.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> train = sc.data.open_data("critters:certified:train", limit=16)
    >>> test = sc.data.open_data("critters:certified:test", limit=16)
    >>> result = sc.background.prune_and_test(model, train, test, top=2, draws=2)
    >>> len(result.heads), result.curve.ks
    (2, [0, 1, 2, 4])
    """
    view, options = need_heads(model, "choosing heads"), dict(options or {})
    background = background or Background()
    entry = check_selector(view, selector, options, background)
    most = _checked_top(view, top, options.get("screen"))
    if "top" in entry.options:
        options = {"top": most, **options}
    scored = _score(view, train, entry, sampling, background, seed, progress, options)
    heads = scored.scores.top(top)
    test = as_data(test)
    judge = need_heads(model_for(view, test), "choosing heads")
    pictures = pictures_of(judge, test, progress)
    twin = None if same is None else pictures_of(judge, as_data(same), progress)
    erasures = background.test_erasures(judge, pictures, progress)
    ks = _steps(len(heads), int(scored.scores.value.isfinite().sum()))
    drawn: dict[str, Any] = {"draws": draws, "seed": seed, "train": scored.shares}
    with progress("measuring", len(pictures)) as advance:
        removals = curve(judge, pictures, scored.scores, ks, erasures, **drawn, progress=advance)
    gaps = None
    if twin is not None:
        before, after = background_gaps(judge, twin, pictures, [[], heads])
        gaps = before, after
    places = torch.linspace(0, len(pictures) - 1, min(SHOWN, len(pictures))).round().long()
    shown = examples(judge, pictures.take(places), erasures[0].take(places), [[], heads])
    read = [scored.pictures, pictures] + ([] if twin is None else [twin])
    holes = tuple(dict.fromkeys(hole for part in read for hole in part.holes))
    return PruneResult(view, heads, scored, pictures, removals, shown, gaps, holes)


def check_selector(
    model: VisionModel, name: str, options: Mapping[str, Any], background: Background
) -> Selector:
    """A selector by name, if its options and the background can be used: before pictures are
    read."""
    entry = find_selector(name)
    check_options(name, entry.run, options, leave_out=GIVEN)
    screen = options.get("screen")
    total = len(all_heads(model))
    if screen is not None and _screened(screen) > total:
        raise BadOption(
            "screen",
            _screened(screen),
            f"1 to {total}, as many heads as {model.name} has, or none to measure all",
        )
    background.check()
    searches = "masks" in entry.options and background.fill != "swap"
    if (others := mask_options(background.search)) and not searches:
        raise BadOption(
            "search",
            others,
            f"masks that are searched: not selector={name!r}, fill={background.fill!r}",
        )
    return entry


def _checked_top(model: VisionModel, top: int | float, screen: int | Screening | None) -> int:
    """How many heads may go."""
    total = len(all_heads(model))
    count = head_count(top, total) if isinstance(top, float) else top
    if not 1 <= count <= total:
        raise BadOption(
            "top",
            top,
            f"a count from 1 to {total}, as many heads as {model.name} has, or a share of them from"
            f" {1 / total:.2g} to 1.0",
        )
    if screen is not None and count > _screened(screen):
        raise BadOption(
            "screen",
            _screened(screen),
            f"{count} or more, the number of heads that may go: a screen looks for its best only",
        )
    return count


def _screened(screen: int | Screening) -> int:
    return screen if isinstance(screen, int) else screen.top


def _steps(count: int, most: int) -> list[int]:
    """Numbers of heads to try: none, a quarter, half, all and twice as many, where there are."""
    quarters = [count * part // 4 for part in (1, 2, 4, 8)]
    return sorted({0, count, *(max(1, part) for part in quarters if part <= most)})


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    plain = isinstance(value, str | int | float | bool | list | dict | None)
    return value if plain else asdict(value) if isinstance(value, Screening) else str(value)
