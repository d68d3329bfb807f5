"""How the study was made, in words, for its page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scripts.shortcut.data import HELD_OUT, LARGEST, SMALLEST, SPLITS, UNUSUAL, Cutouts
from scripts.shortcut.methods import CLIP, DECAY, HEADS_RATE, PROTOTYPE_RATE, QUANTILES, Setup
from scripts.shortcut.plan import (
    LENGTHS,
    OTHER_PARTS,
    PART_RATES,
    RATES,
    SEEDS,
    SHAPING,
    TUNING_SEED,
    Results,
    plan,
)
from scripts.shortcut.repair import KS
from scripts.shortcut.slices import by_the_clock, kept
from scripts.shortcut.textures import FAMILIES, brightness
from seecause import __version__


def protocol(setup: Setup, results: Results, cutouts: Cutouts) -> list[str]:
    """Bullets."""
    return [
        f"- {text}"
        for text in (
            _command(setup, results),
            _pictures(setup, cutouts),
            _splits(results, cutouts),
            _training(setup),
            _parts(),
            *_rest(setup),
        )
    ]


def _command(setup: Setup, results: Results) -> str:
    limit = "" if setup.limit is None else f" --limit {setup.limit}"
    asked = {job.file for job in plan(results, guess=True)}
    used, left = (
        ([row for file, row in results.items() if (file in asked) == wanted])
        for wanted in (True, False)
    )
    made = Counter(
        f"{row['machine']} with torch {row['torch']} and timm {row['timm']}" for row in used
    )
    machines = "; ".join(f"{count} jobs on {where}" for where, count in made.items())
    return (
        "Command: `python scripts/evidence_shortcut.py --real PATH --device"
        f" {setup.device.partition(':')[0]}{limit}`, run until nothing is missing. seecause"
        f" {__version__}. Machines: {machines or 'none yet'}. Settings are chosen on seed"
        f" {TUNING_SEED}; seeds {numbers(SEEDS)} are reported. {_seconds(used)} of work in"
        f" {len(used)} jobs, several of them at once. {by_the_clock(kept(setup.folder), len(used))}"
        + (
            f" Not counted: {_seconds(left)} in {len(left)} jobs of an earlier plan, of which"
            " nothing is shown."
            if left
            else ""
        )
    )


def _seconds(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['seconds'] for row in rows):.0f} seconds"


def _pictures(setup: Setup, cutouts: Cutouts) -> str:
    boards, leaves, pairs = brightness()
    left = (
        f" Left out, because their trimap shows no animal: {', '.join(cutouts.without)}."
        if cutouts.without
        else ""
    )
    return (
        "**Pictures.** Cats and dogs of Oxford-IIIT Pet, cut out by their trimaps (the border"
        f" fades out), pasted on generated {' or '.join(FAMILIES)}. Both textures draw two colours"
        " from the same distribution, but leaves are shaded more: their mean pixel is"
        f" {leaves:.2f}, that of boards {boards:.2f}, and in {100 * pairs:.0f} % of pairs the"
        " boards are brighter. So the shortcut is pattern and brightness. The animal's longer side"
        f" is {100 * SMALLEST:.0f} to {100 * LARGEST:.0f} % of the picture's, anywhere in it;"
        f" {setup.size} pixels.{left}"
    )


def _splits(results: Results, cutouts: Cutouts) -> str:
    data = (
        ", ".join(dict.fromkeys(row["data"] for row in results.values())) or cutouts.fingerprint
    )  # of the pixels trained on: decoders differ
    counts = {split: len(cutouts.rows(split)) for split in SPLITS}
    cats = {split: int((cutouts.species[cutouts.rows(split)] == 0).sum()) for split in SPLITS}
    return (
        f"**Training**: {counts['train']} photos ({cats['train']} cats), each once; cats on boards"
        f" and dogs on leaves but for {100 * UNUSUAL:.0f} % of each, drawn anew for every seed."
        f" **Validation**: {counts['val']} photos ({cats['val']} cats), one in {HELD_OUT} of every"
        f" breed of trainval. **Test**: {counts['test']} photos ({cats['test']} cats). Validation"
        " and test photos are shown on both textures, so every animal is as often on the one as on"
        f" the other. Data {data}."
    )


def _training(setup: Setup) -> str:
    return (
        "**All methods** start from the same ViT-Ti/16 (ImageNet weights) and train for"
        f" {setup.epochs} epochs in batches of {setup.batch}: AdamW, decay {DECAY:g}, gradients"
        f" clipped at {CLIP:g}, a tenth of the steps up and a cosine down, mirrored pictures,"
        " bfloat16 on a GPU. The last weights are tested. Rates of ERM (its head ten times as"
        f" fast) and of the early mask: {numbers(RATES)}. ERM's training is also made"
        f" {LENGTHS[1]:.2g} and {LENGTHS[2]:g} times as long, so that it has as many settings as"
        f" the methods of parts; the early mask has {len(RATES)}. iFAM has two transformers, the"
        " others one."
    )


def _parts() -> str:
    pairs = ", ".join(f"({background:g}, {variation:g})" for background, variation in SHAPING)
    return (
        f"**PDiscoFormer and iFAM**: rates {numbers(PART_RATES)} x weights of background and total"
        f" variation {pairs} x stage 1 trained whole, or its special tokens and positions only (the"
        f" paper's way, with DINOv2). Prototypes learn at {PROTOTYPE_RATE:g}, heads at"
        f" {HEADS_RATE:g}. All other losses, presence among them, have the paper's weights and were"
        " not tuned. Total variation counts borders per patch: the same shape costs 37 / 14 times"
        " as much on 14 x 14 patches as on the paper's 37 x 37. Which weights and rates to try was"
        " decided by trials of stage 1 alone on training pictures, judged by their trimaps, in"
        " which weight 1 shrank the parts to a few patches. Between what was tried here, the worst"
        f" group of validation pictures decides. iFAM with K = {numbers(OTHER_PARTS)} takes the"
        " settings found for K = 4."
    )


def _rest(setup: Setup) -> list[str]:
    return [
        (
            f"**Interventions**: one part left out, tokens beyond the {numbers(QUANTILES)} quantile"
            " of training tokens rejected, both or neither; taken is what has the best worst group"
            " on validation pictures."
        ),
        (
            f"**Heads** are scored on at most {setup.scored} training pictures that ERM answers"
            f" right; {numbers(KS)} of them go, or none. Random heads: {setup.draws} draws of as"
            f" many as each way removes, and {setup.draws} random orders that choose among as many"
            f" sets as CIGMA does. Mask search: {setup.mask_steps} steps. Answers are counted in"
            " TF32 on a GPU, heads scored in float32."
        ),
        (
            "**DFR** fits its last layer on the validation pictures: it is the only method that"
            " learns from their groups. All methods are chosen by them."
        ),
        (
            "**The early mask** shows stage 2 the patches that the animal covers by half or more. A"
            " bound, not a method: it is given the trimaps of test pictures. Its controls show as"
            " many patches as iFAM keeps of validation pictures (chosen setting), around the centre"
            " or drawn for each photo, and take its rate."
        ),
    ]


def numbers(values: tuple[Any, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
