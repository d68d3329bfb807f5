"""CIGMA (Maliha & Hougen, CVPR 2026; its appendix is at hand): all tables, and what its text
describes without a table.

cigma/table-1, 2, 7, figure-1    heads removed by CIGMA and by other methods
cigma/table-3, 4, 5, 6           masks, temperature, depth and stability
cigma/top, cigma/share           section D: number of heads, share of the images that choose them
cigma/defaults                   each of our defaults that differs, put back to the paper's

Heads are chosen on correct predictions in one part of the data and judged on another: the training
and the test split, or every second image each where a split is named or there is only one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.background.gains import ByMask, Erased, Gains, jensen_shannon, log_probs
from seecause.background.heads import (
    SELECTORS,
    HeadScores,
    all_heads,
    divprune,
    logits_without,
    masked_images,
    need_heads,
    random_sets,
    select,
)
from seecause.background.images import (
    LabelledImages,
    correct_images,
    logits_of,
    read_images,
)
from seecause.background.masks import Grid, PixelShare, Rule
from seecause.data.dataset import Dataset, Subset, open_data
from seecause.experiments.base import SPLITS, Part, Row, register_published
from seecause.experiments.caap import TRAINING, fine_tuned as fine_tuned
from seecause.loading import LanguageModel
from seecause.metrics.statistics import calibration, nll, rank_correlation
from seecause.models.view import VisionModel
from seecause.options import Count, NotNegative, Positive, Share, Whole

LOWER = ("NLL", "ECE", "BIG", "BIR", "BIR, true masks", "ΔBIR", "rank std", "% moved")
FAR = 5  # ranks
DRAWS = 7  # random sets of heads for each seed
KEEP = 0.098  # of the patches, as DivPrune has it
SEARCH = ("fill", "steps", "grid", "rho", "binarise", "temperature")  # options of `discover_masks`
ALL: dict[str, Any] = {"share": 1.0, "cap": None}  # of the correct predictions
Opened = tuple[VisionModel, LabelledImages, LabelledImages]


def halves(data: str, limit: int | None) -> list[Dataset]:
    """Images to choose heads on, and to judge on: the training and the test split, at most `limit`
    each; or every second image each, of data with one split or a named one."""
    kind, *_, last = data.split(":")
    if kind in TRAINING and last not in SPLITS:
        return [open_data(f"{data}:{split}", limit=limit) for split in (TRAINING[kind], "test")]
    whole = open_data(data, limit=limit)
    return [Subset(data, whole, tuple(range(start, len(whole), 2))) for start in (0, 1)]


@lru_cache(maxsize=1)
def opened(key: str) -> Opened:
    """The model of a part, images of the first half of its data that are predicted correctly, and
    the second half. A vision-language model is asked for the classes of the data."""
    part = Part(**json.loads(key))
    train, test = halves(part.data, part.limit)
    try:
        view = part.view
    except LanguageModel:
        view = _asked(part, train.classes)
    view = need_heads(view)
    images = read_images(view, train)
    return view, correct_images(view, images, **ALL), read_images(view, test)


def _asked(part: Part, classes: tuple[str, ...]) -> VisionModel:
    from seecause.lvlm import classifier, load

    lvlm = load(**part.model, device=part.device)
    config, frame = lvlm.module.config, lvlm.processor.image_processor
    if hasattr(config, "image_grid_pinpoints"):  # LLaVA-NeXT, of one tile
        side = config.vision_config.image_size
        config.image_grid_pinpoints = frame.image_grid_pinpoints = [[side, side]]
    return classifier(lvlm, classes)


@lru_cache(maxsize=1)
def _cache() -> TemporaryDirectory[str]:
    """Where soft masks are kept while this process runs: settings share them."""
    return TemporaryDirectory(prefix="seecause-masks-")


@lru_cache(maxsize=4)
def chosen(key: str, setting: str) -> tuple[LabelledImages, list[HeadScores]]:
    """Judged images that are predicted correctly, with masks, and head scores of each seed, by
    options of `edited`."""
    (view, right, judge), asked = opened(key), json.loads(setting)
    search: dict[str, Any] = {name: asked[name] for name in SEARCH} | {"cache": _cache().name}
    search["weights"] = (1.0, asked["area"], asked["tv"])
    judged = masked_images(view, correct_images(view, judge, **ALL), asked["masks"], **search)
    if (by := asked["selector"]) in ("none", "divprune"):
        return judged, []
    pool, known = masked_images(view, right, asked["masks"], **search), SELECTORS.get(by).options
    options = {name: asked[name] for name in known if name in asked}
    options = asked["gating"] or {} if by == "gating" else options
    drawing = {"share": asked["share"], "cap": asked["cap"] or None}
    drawn = [correct_images(view, pool, seed=seed, **drawing) for seed in range(asked["seeds"])]
    return judged, [select(by, view, images, **options) for images in drawn]


def edited(
    part: Part,
    *,
    selector: Literal["none", "random", "cigma", "taylor", "gating", "divprune"] = "cigma",
    top: float | Whole = 0.1,
    positive: bool = True,
    blocks: Sequence[int] | None = None,
    masks: Literal["discovered"] | None = None,
    fill: ByMask = "grey",
    steps: Count = 250,
    grid: Grid = 32,
    area: NotNegative = 0.01,
    tv: NotNegative = 0.1,
    rho: PixelShare = 0.35,
    binarise: Rule = "topk",
    temperature: Positive = 1.0,
    guard: bool = True,
    floor: bool = True,
    share: Share = 0.4,
    cap: Whole = 512,
    seeds: Count = 3,
    bir: Literal["means", "ratios"] = "means",
    gating: Mapping[str, Any] | None = None,
) -> list[Row]:
    """A model without the heads that a method chooses on correctly predicted images of each seed.

    Args:
        part: Model and data.
        selector: How heads are chosen; "none" removes none, "random" as many as CIGMA, "divprune"
            patches instead, of which 9.8 % stay.
        top: Heads to remove at most, a count or a share of all; the paper: 16.
        positive: Whether heads with scores of 0 or less stay; the paper: False.
        blocks: Remove only those of the top that are in these blocks (from 0, end excluded).
        masks: None for those of the data, if every image has one; the paper: "discovered".
        fill: What hides pixels, in the search for masks and after it; the paper: "mean".
        steps: Steps of that search.
        grid: Cells of its masks on each side; `area` and `tv` are its weights.
        area: Weight of the mean of a mask.
        tv: Weight of its mean total variation.
        rho: Share of the pixels that a mask keeps.
        binarise: How it keeps them; the paper: "percentile".
        temperature: Of predictions, for masks, scores and all measures.
        guard: Subtract from a score what the object loses; the paper: False.
        floor: Treat scores below the noise as 0; the paper: False.
        share: Share of the correct predictions that heads are chosen on.
        cap: At most this many of them; the paper: 0, for all.
        seeds: Draws of them.
        bir: The ratio of means over images; the paper: "ratios", the mean of ratios.
        gating: Options of Causal Head Gating.

    Returns:
        A row for each judged image with means over seeds; for each seed, what has no value for one
        image; and for each pair of seeds and each of the top heads, how stable scores are.
    """
    after = ("part", "top", "positive", "blocks", "bir")  # what does not change scores
    scoring = {name: value for name, value in locals().items() if name not in after}
    if selector == "random":
        scoring["selector"] = "cigma"
    key = json.dumps(vars(part))
    view, _, judge = opened(key)
    judged, scores = chosen(key, json.dumps(scoring))
    count = top if isinstance(top, int) else round(top * len(all_heads(view)))
    sets = [each.top(count, positive=positive) for each in scores] or [[]] * seeds
    if selector == "random":
        sets = [random_sets(view, len(k), draws=1, seed=s)[0] for s, k in enumerate(sets * DRAWS)]
    if blocks is not None:
        sets = [[head for head in heads if head[0] in range(*blocks)] for heads in sets]
    rows = defaultdict[str, Row](dict)

    def add(names: Iterable[str], **columns: Tensor) -> None:
        """Of columns [S + 1, N], the mean over edits of each image."""
        for name, values in columns.items():
            for image, value in zip(names, values[1:].mean(dim=0).tolist(), strict=True):
                rows[image][name] = value

    def forward(images: Tensor) -> Tensor:
        """[S + 1, N, C]: of the whole model, and of each edit."""
        if selector != "divprune":
            return logits_without(view, images, [[], *sets]).cpu()
        few = divprune(view, images, keep=KEEP)[0]
        return torch.stack([logits_of(view, images), *[few] * seeds]).cpu()

    def influence(data: LabelledImages, fill: ByMask) -> Tensor:
        """BIG and FIG [2, S + 1, N]."""
        versions = [data.images, *Erased(view, data, fill).versions(slice(None))]
        log_p = log_probs(torch.stack([forward(each) for each in versions]), temperature)
        return jensen_shannon(log_p[:1], log_p[1:]).double()

    labels, logits = judge.need_labels().cpu(), forward(judge.images) / temperature
    right = 100 * (logits.argmax(dim=-1) == labels).double()  # [S + 1, N]
    losses = torch.stack([nll(each, labels) for each in logits])
    add(judge.ids, Acc=right, NLL=losses, ΔAcc=right - right[0])
    big, fig = both = influence(judged, fill)
    shares = background_shares(both, bir)
    add(judged.ids, BIG=big, FIG=fig, BIR=shares, ΔBIR=shares - shares[0])
    found = judged.masks
    if found is not None and found.overlap is not None:  # those of the data have none
        true = background_shares(influence(judged.with_masks(judged.truth), "grey"), bir)
        add(judged.ids, IoU=found.overlap.expand(2, -1), **{"BIR, true masks": true})
    for seed, heads in enumerate(sets):
        groups = judge.by_group(right[1 + seed] == 100)
        rows[f"seed {seed}"] |= {
            "heads": float(len(heads)),
            "ECE": calibration(logits[1 + seed], labels).error,
            "Worst group": None if groups is None else 100 * groups.worst,
        }
    stable = selector == "cigma" and seeds > 1 and count
    more = stability([each.value for each in scores], count) if stable else []
    return [{"image": image, **row} for image, row in rows.items()] + more


def background_shares(both: Tensor, bir: str) -> Tensor:
    """BIR [S, N] of BIG and FIG [2, S, N]: of each image, or values whose mean is the ratio of
    means, and their standard error that of it (the delta method)."""
    if bir == "ratios":
        return Gains(both[1], both[0], 0.0).bir
    total = both.sum(dim=0)
    ratio = both[0].sum(dim=-1, keepdim=True) / total.sum(dim=-1, keepdim=True)
    return ratio + (both[0] - ratio * total) / total.mean(dim=-1, keepdim=True)


def stability(scores: Sequence[Tensor], count: int) -> list[Row]:
    """How far scores [L, H] of several seeds agree: a row for each pair of them, and for each of
    the `count` heads with the highest mean rank."""
    values = torch.stack([each[each.isfinite()] for each in scores])
    ranks = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1).double()
    a, b = torch.combinations(torch.arange(len(scores))).unbind(dim=1)
    moved = 100 * ((ranks[a] - ranks[b]).abs() > FAR).double().mean(dim=1)
    columns = {"Spearman": rank_correlation(values[a], values[b]), "% moved": moved}
    columns["rank std"] = ranks[:, ranks.mean(dim=0).argsort()[:count]].std(dim=0)
    return [
        {"image": f"{name} {place}", name: value}
        for name, column in columns.items()
        for place, value in enumerate(column.tolist())
    ]


register_published(__name__, globals(), LOWER)
