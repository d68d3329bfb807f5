"""What `lvlm_study.py` measured, the paper's claims with the rule that judges each, and the
page."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from scipy.stats import pearsonr
from torch import Tensor

from seecause.critters import wordings
from seecause.lvlm import HeadTrace, importance_map, threshold_study
from seecause.lvlm.analysis import Grouping, HeadGroups, depth_of_use
from seecause.lvlm.trace import LEVELS, RANKINGS
from seecause.metrics import Summary, paired_difference, summarise

SUBJECT, PART, LENS_WORDS, LENS_HEADS = "creature", "tail", 10, 5
SMALL = 0.01  # a head without which F changes by less hardly matters


@dataclass(eq=False)
class Case:
    """One picture and everything measured on it."""

    index: int
    picture: Image.Image
    mask: Tensor  # [H, W] bool
    parts: Tensor  # [H, W]
    style: str
    background: str
    answer: str
    part_answer: str
    numbers: dict[str, Any] = field(default_factory=dict)
    heads: HeadTrace | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Claim:
    said: str  # by the paper
    rule: str
    found: str
    seen: bool


@dataclass(frozen=True)
class Ratio:
    """Means over pictures, for one share of ablated heads."""

    p: float
    r2: float
    enough: float
    needed: float
    alike: float  # cosine with p = 0.75


@dataclass(frozen=True, eq=False)
class Adaptive:
    """Masks asked until two half fits agree by `level`; the rest [pictures]."""

    level: float
    masks: Tensor
    halves: Tensor  # of the largest coefficients, how many the halves have in common
    whole: Tensor  # and how many the fit has in common with that of all masks
    alike: Tensor  # cosine with that fit
    seconds: Tensor
    agreed: Tensor  # 1, or 0 where the masks ran out first


@dataclass(frozen=True, eq=False)
class Planted:
    """Known heads: which of them are among the largest [pictures, readers], and what F loses
    without each."""

    readers: list[tuple[int, int]]
    right: Tensor
    effects: Tensor
    outside: float  # the most that F changes without any other head, in float32
    exactly: float  # the same in float64
    masks: int


@dataclass(eq=False)
class Found:
    """What all parts of the study give."""

    cases: list[Case]
    text: Tensor  # u* [T]
    pieces: tuple[str, ...]
    deltas: Tensor  # [T] means
    image_tokens: int
    vocabulary: int
    own_rows: Tensor  # sufficiency of each picture's own rows
    groups: dict[str, Grouping] = field(default_factory=dict)
    head_groups: HeadGroups | None = None
    cosines: dict[str, Tensor] = field(default_factory=dict)  # by wording
    ceiling: Tensor = field(default_factory=lambda: torch.zeros(0))
    ratios: list[Ratio] = field(default_factory=list)
    part: dict[str, Tensor] = field(default_factory=dict)
    half: Tensor = field(
        default_factory=lambda: torch.zeros(0)
    )  # R2 of bfloat16 against float32 responses
    planted: Planted | str = ""  # or why it was not measured
    adaptive: list[Adaptive] = field(default_factory=list)
    top: int = 0  # coefficients that adaptive fits are compared in

    @property
    def known(self) -> list[Case]:
        return [case for case in self.cases if not case.skipped]

    @property
    def traces(self) -> list[HeadTrace]:
        return [case.heads for case in self.known if case.heads is not None]

    def summary(self, name: str) -> Summary:
        return summarise(self.column(name))

    def column(self, name: str) -> Tensor:
        """[pictures], NaN where a picture has no such number, so that columns can be paired."""
        found = [case.numbers.get(name) for case in self.known]
        return torch.tensor(
            [torch.nan if value is None else value for value in found], dtype=torch.float64
        )

    @property
    def coefficients(self) -> Tensor:
        return torch.stack([trace.heads.coefficients for trace in self.traces])  # [S, L, H]

    @property
    def attention(self) -> Tensor:
        return torch.stack([trace.attention for trace in self.traces])

    @property
    def chosen(self) -> Tensor:
        return torch.stack([trace.chosen for trace in self.traces]).reshape(self.attention.shape)


def claims(found: Found) -> list[Claim]:
    """What the paper says, how it is judged here, and what came out."""
    return [*_claims_of_heads(found), *_claims_over_samples(found), *_claims_of_tokens(found)]


def _claims_of_heads(found: Found) -> list[Claim]:
    r2, pearson = found.summary("r2"), found.summary("pearson")
    made = [
        Claim(
            "a linear fit predicts masked answers (R² 0.77-0.92)",
            "mean R² at least 0.77",
            f"R² {pm(r2)}, Pearson {pm(pearson)}",
            r2.mean >= 0.77,
        )
    ]
    for kind, words in (
        ("enough", "fewest heads are enough (80 %)"),
        ("needed", "fewest heads must go (20 % left)"),
    ):
        gaps = {
            other: paired_difference(found.column(f"{kind}_{other}"), found.column(f"{kind}_hear"))
            for other in RANKINGS[1:]
        }
        text = f"{pm(found.summary(f'{kind}_hear'), 1)} heads; more by " + ", ".join(
            f"{signed(gap)} ({other})" for other, gap in gaps.items()
        )
        fewer = all(gap.mean > 2 * gap.standard_error for gap in gaps.values())
        made.append(
            Claim(
                f"by head attribution the {words}",
                "fewer than each baseline by 2 standard errors",
                text,
                fewer,
            )
        )
    levels = {
        name: (
            torch.stack([threshold_study(trace.curves[name]) for trace in found.traces]).mean(dim=0)
        )
        for name in RANKINGS
    }
    best = all(bool((levels["hear"] <= levels[other]).all()) for other in RANKINGS[1:])
    made.append(
        Claim(
            "and so at every threshold from 0.5 to 0.9",
            "no baseline has a lower mean count at any (table below)",
            "",
            best,
        )
    )
    gap = paired_difference(found.column("needed_hear"), found.column("enough_hear"))
    made.append(
        Claim(
            "many more heads must go than are enough",
            "above 2 standard errors",
            f"{signed(gap)} heads",
            gap.mean > 2 * gap.standard_error,
        )
    )
    small = float(
        (found.column("largest_single") <= 0.05).double().mean()
    )  # every known picture has one
    made.append(
        Claim(
            "no single head is worth over 5 % in 80 % of samples",
            "loss without any one head at most 0.05 in 80 %",
            f"in {small:.0%}",
            small >= 0.8,
        )
    )
    depth = depth_of_use(found.chosen)
    made.append(
        Claim(
            "important heads are mid to late",
            "mean depth of x* at least 0.5 (0 first layer, 1 last)",
            f"{depth:.2f}",
            depth >= 0.5,
        )
    )
    test = pearsonr(
        found.coefficients.mean(dim=0).flatten().numpy(),
        found.attention.mean(dim=0).flatten().numpy(),
    )
    text = f"r {test.statistic:.2f}, p {test.pvalue:.2g}"
    made.append(
        Claim(
            "coefficients do not follow attention",
            "correlation over heads not significant (p > 0.05)",
            text,
            bool(test.pvalue > 0.05),
        )
    )
    late = [row for row in found.ratios if row.p > 0.5 and row.p != 0.75]  # not against itself
    stable = bool(late) and all(row.alike >= 0.9 for row in late)
    made.append(
        Claim(
            "stable for p above 50 %",
            "cosine with p = 0.75 at least 0.9",
            ", ".join(f"{row.alike:.3f} (p {row.p})" for row in late),
            stable,
        )
    )
    return made


def _claims_over_samples(found: Found) -> list[Claim]:
    made = []
    if {"object", "style"} <= set(found.groups):
        first, second = found.groups["object"], found.groups["style"]
        by = [
            f"{name}: {g.purity:.2f} of neighbours alike (chance {g.chance:.2f}), silhouette"
            f" {g.silhouette:.2f}"
            for name, g in found.groups.items()
        ]
        clear = first.excess > second.excess and first.silhouette > second.silhouette
        made.append(
            Claim(
                "heads follow the object, not the style",
                "purity above chance and silhouette both larger by object",
                "; ".join(by),
                clear,
            )
        )
    if found.cosines:
        each = [summarise(values) for values in found.cosines.values()]
        text = ", ".join(map(pm, each)) + f"; ceiling (fresh masks) {pm(summarise(found.ceiling))}"
        made.append(
            Claim(
                "rewording changes little (cosines 0.91-0.97)",
                "mean at least 0.91 for each wording",
                text,
                all(one.mean >= 0.91 for one in each),
            )
        )
    if found.head_groups is not None:
        use = [found.head_groups.use(group) for group in (0, 1)]
        text = ", ".join(
            f"{len(one)} heads strong in {float(one.mean()):.0%} of the pictures" for one in use
        )
        split = float(use[0].mean()) >= 0.8 and float(use[1].mean()) <= 0.5
        made.append(
            Claim(
                "some heads are always used, others sometimes",
                "two clusters: strong in 80 % or more, and in 50 % or less",
                text,
                split,
            )
        )
    lens, chance = found.summary("lens"), 1 - (1 - LENS_WORDS / found.vocabulary) ** LENS_HEADS
    rule = f"answer among the {LENS_WORDS} words of a top-{LENS_HEADS} head, 0.2 above chance"
    made.append(
        Claim(
            "top heads' own words name the object (logit lens)",
            rule,
            f"{pm(lens)} (chance {chance:.2f})",
            lens.mean >= chance + 0.2,
        )
    )
    return made


def _claims_of_tokens(found: Found) -> list[Claim]:
    kept = [
        piece.strip() or "newline"
        for piece, keep in zip(found.pieces, found.text.tolist(), strict=True)
        if keep
    ]
    enough = found.summary("sufficiency")
    text = (
        f"kept: `{' '.join(kept)}` ({len(kept)} of {len(found.pieces)}); sufficiency {pm(enough)}"
    )
    few_rows = 3 * len(kept) <= len(found.pieces) and enough.mean >= 0.82
    rule = "at most a third of the rows kept, sufficiency at least 0.82"
    made = [
        Claim("a few role and final tokens receive the picture (0.82-0.99)", rule, text, few_rows)
    ]
    few, share, area = (
        found.summary(name) for name in ("tokens_for_80", "object_share", "object_area")
    )
    rule = f"80 % of the positive effect in a fifth of the {found.image_tokens} tokens"
    made.append(
        Claim(
            "image tokens are sparse",
            rule,
            f"in {pm(few, 1)} tokens",
            few.mean <= found.image_tokens / 5,
        )
    )
    text = (
        f"{pm(share)} (the object is {pm(area)} of the picture; weighted attention"
        f" {pm(found.summary('weighted_object_share'))})"
    )
    made.append(
        Claim(
            "mostly on the object",
            "at least half of the positive effect on it",
            text,
            share.mean >= 0.5,
        )
    )
    rest = 1 - share.mean
    made.append(
        Claim(
            "and some on the background",
            "5 % to 50 % of the positive effect off the object",
            f"{rest:.3f}",
            0.05 <= rest <= 0.5,
        )
    )
    weighted = found.summary("token_attention")
    made.append(
        Claim(
            "weighted attention agrees with image tokens (Pearson 0.70)",
            "mean Pearson at least 0.60",
            pm(weighted),
            weighted.mean >= 0.6,
        )
    )
    return made


def report(
    found: Found,
    *,
    command: str,
    versions: str,
    model: str,
    masks: int,
    floor: float,
    seconds: float,
) -> list[str]:
    judged = claims(found)
    left_out = {
        why: sum(case.skipped == why for case in found.cases)
        for why in sorted({case.skipped for case in found.cases if case.skipped})
    }
    return [
        "# Head attribution on critters-llava",
        "",
        (
            f"Written by `{command}` ({versions}, {seconds:.0f} s in all). {model}, question:"
            f" {wordings(SUBJECT)[0]!r}. {len(found.known)} of {len(found.cases)} pictures; left"
            f" out: {', '.join(f'{count} ({why})' for why, count in left_out.items()) or 'none'}"
            f" (floor {floor:g} logits). {masks:,} masks for each fit; two half fits of a picture"
            f" agree by {pm(found.summary('split_half'))} (heads) and"
            f" {pm(found.summary('token_split_half'))} (image tokens). Mean ± standard error over"
            " pictures."
        ),
        "",
        (
            f"## What the paper claims: {sum(claim.seen for claim in judged)} of {len(judged)} seen"
            " at this scale"
        ),
        "",
        (
            "A toy of 48 heads shows whether a claim can hold outside large models. Where one is"
            " not seen here, it may still hold for them."
        ),
        "",
        "| the paper | judged by | here | |",
        "|---|---|---|---|",
        *(
            f"| {claim.said} | {claim.rule} | {claim.found} |"
            f" {'seen' if claim.seen else '**not seen**'} |"
            for claim in judged
        ),
        "",
        (
            "Not tested: growth with model size, the place of heads in real decoders, LLaVA-1.5"
            " against LLaVA-NeXT. They need real weights."
        ),
        *_rankings(found),
        *_details(found),
    ]


def _rankings(found: Found) -> list[str]:
    page = [
        "",
        "## Heads needed by each ranking",
        "",
        "| ranking | enough for 80 % | must go until 20 % | mean of faithfulness |",
        "|---|---|---|---|",
    ]
    for name in RANKINGS:
        mean = summarise(
            torch.stack([trace.curves[name].faithfulness.mean() for trace in found.traces])
        )
        page.append(
            f"| {name} | {pm(found.summary(f'enough_{name}'), 1)} |"
            f" {pm(found.summary(f'needed_{name}'), 1)} | {pm(mean)} |"
        )
    page += [
        "",
        "Other thresholds, enough / must go, means:",
        "",
        "| ranking | " + " | ".join(map(str, LEVELS)) + " |",
        "|---" * (len(LEVELS) + 1) + "|",
    ]
    for name in RANKINGS:
        counts = (
            torch.stack([threshold_study(trace.curves[name]) for trace in found.traces])
            .mean(dim=0)
            .tolist()
        )
        page.append(
            f"| {name} | "
            + " | ".join(f"{enough:.1f} / {needed:.1f}" for enough, needed in counts)
            + " |"
        )
    return page


def _details(found: Found) -> list[str]:
    use = importance_map(found.chosen)
    page = [
        "",
        "## How often a head is one of x*",
        "",
        "| layer | " + " | ".join(f"head {head}" for head in range(use.shape[1])) + " |",
    ]
    page += [
        "|---" * (use.shape[1] + 1) + "|",
        *(
            f"| {layer} | " + " | ".join(f"{v:.2f}" for v in row) + " |"
            for layer, row in enumerate(use.tolist())
        ),
    ]
    page += [
        "",
        "## Shares of ablated heads",
        "",
        "| p | R² | enough | must go | cosine with p = 0.75 |",
        "|---|---|---|---|---|",
    ]
    page += [
        f"| {row.p} | {row.r2:.3f} | {row.enough:.1f} | {row.needed:.1f} | {row.alike:.3f} |"
        for row in found.ratios
    ]
    page += [
        "",
        "## What each word receives",
        "",
        "| row | " + " | ".join(piece.strip() or "newline" for piece in found.pieces) + " |",
    ]
    page += [
        "|---" * (len(found.pieces) + 1) + "|",
        "| Delta | " + " | ".join(f"{value:.2f}" for value in found.deltas.tolist()) + " |",
        "",
    ]
    page.append(
        "With each picture's own rows instead of the dataset's, sufficiency is"
        f" {pm(summarise(found.own_rows))}."
    )
    part, area, creature = (summarise(found.part[name]) for name in ("part", "area", "creature"))
    page += ["", f"## A part as reference: {wordings(PART)[0]!r}", ""]
    measured = (
        f"{pm(part)} of the positive effect lies on the {PART} itself ({pm(area)} of the picture),"
        f" {pm(creature)} on the creature, over {part.n} pictures."
    )
    page.append(
        f"{measured if part.n else 'Not measured.'} {int(found.part['left out'].sum())} left out"
        " (wrong answer, or moved by less than the floor)."
    )
    page += ["", "## Planted heads", "", *_planted(found.planted), "", "## bfloat16", ""]
    half = summarise(found.half)
    least = float(found.half.min()) if half.n else torch.nan
    page.append(
        f"R² of bfloat16 against float32 responses on the same masks: mean {half.mean:.5f}, least"
        f" {least:.5f}, {half.n} pictures (goal: > 0.999)."
    )
    return [*page, *_adaptive(found)]


def _planted(found: Planted | str) -> list[str]:
    if isinstance(found, str):
        return [found]
    sizes = found.effects.mean(dim=0).tolist()
    strong = [place for place, size in enumerate(sizes) if size >= SMALL]
    told = (
        f"Of the {len(found.readers)} heads with the largest coefficients ({found.masks:,} masks),"
        f" a share of {pm(summarise(found.right.mean(dim=1)))} are the planted ones (at the known"
        f" count this is both precision and recall), over {len(found.right)} pictures. Taking away"
        f" any other head changes F by at most {found.outside:.1e} in float32 and"
        f" {found.exactly:.1e} in"
        f" float64{': the first is rounding' if found.exactly < 1e-12 < found.outside else ''}."
    )
    if 0 < len(strong) < len(found.readers):
        found_strong = float(found.right[:, strong].mean())
        told += (
            f" {len(found.readers) - len(strong)} of the planted heads hardly matter (below"
            f" {SMALL:.0%}); of the others, {found_strong:.1%} are found."
        )
    rows = [
        f"| {layer}.{head} | {size:.4f}{'' if size >= SMALL else f' (below {SMALL:.0%})'} |"
        f" {float(found.right[:, place].mean()):.0%} |"
        for place, ((layer, head), size) in enumerate(zip(found.readers, sizes, strict=True))
    ]
    return [
        told,
        "",
        "| planted head | F changes without it, by (mean) | among the largest |",
        "|---|---|---|",
        *rows,
    ]


def _adaptive(found: Found) -> list[str]:
    """Where halves agreed, and whether that was the whole story."""
    if not found.adaptive:
        return []
    halves, whole = (
        f"largest {found.top} in both halves",
        f"largest {found.top} shared with all masks",
    )
    rows = [
        f"| {one.level:g} | {pm(summarise(one.masks), 0)} | {pm(summarise(one.halves), 1)} |"
        f" {pm(summarise(one.whole), 1)} | {pm(summarise(one.alike))} |"
        f" {pm(summarise(one.seconds), 2)} | {float(one.agreed.mean()):.0%} |"
        for one in found.adaptive
    ]
    return [
        "", "## How many masks does it take?", "",
        f"Masks are asked for a few at a time until two half fits correlate so far, over {len(found.adaptive[0].masks)} pictures. "
        "The fit is compared with that of all masks. Seconds are of this run, whatever else used the device.", "",
        f"| halves agree by | masks | {halves} | {whole} | cosine with all masks | seconds | reached |", "|---|---|---|---|---|---|---|", *rows,
    ]  # fmt: skip


def write_csv(found: Found, path: Path) -> None:
    """One line a picture."""
    names = list(dict.fromkeys(name for case in found.known for name in case.numbers))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("picture", "object", "style", "background", *names, "left_out"))
        for case in found.cases:
            cells = [case.numbers.get(name, "") for name in names]
            shown = [f"{cell:.5g}" if isinstance(cell, float) else cell for cell in cells]
            writer.writerow(
                (case.index, case.answer, case.style, case.background, *shown, case.skipped)
            )


def pm(found: Summary, digits: int = 3) -> str:
    return f"{found.mean:.{digits}f} ± {found.standard_error:.{digits}f}"


def signed(gap: Summary) -> str:
    return f"{gap.mean:+.1f} ± {gap.standard_error:.1f}"
