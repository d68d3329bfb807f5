"""Our own methods, and the leaderboard of methods on worlds whose causes are known.

ours/mosaic, mosaic-settings   mosaic beside all methods, and its options (functions of caap.py)
ours/words                     do redirected heads change what a language model says?
critters/leaderboard           every method, selector and plug-in against the truth, 0 to 1:

    parts     the four parts of a creature, as evidence for one of two classes that share other
              parts with it: (1 + Spearman's correlation of the difference of two maps, summed over
              each part, with the difference of the logits that are lost without the part) / 2
    causes    the same images for a model that reads creatures and one that reads backgrounds, where
              exchanging both says so: area under the ROC curve of each map for the pixels of the
              cause, the mean of the two
    heads     the five heads of critters-planted through which alone the background is read: area
              under the ROC curve of a selector's scores of all heads, for each 32 images
    words     the heads of critters-llava: the share of edits, of the top 2 to 16 heads of a
              ranking, that make the model say what it says of another image

Maps of parts and causes are compared on the same pixels, so one that depends on neither class nor
model has exactly 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from seecause import critters
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import methods
from seecause.background.heads import select, selectors
from seecause.background.images import LabelledImages, critter_images, logits_of
from seecause.critters.world import QUESTION, Latents
from seecause.data.dataset import to_pil
from seecause.experiments.base import Row, register_published
from seecause.experiments.caap import Asked
from seecause.loading import load
from seecause.lvlm.attribute import (
    attention_scores,
    attribute_heads,
    causal_scores,
    random_orders,
)
from seecause.lvlm.bank import MeanBank, make_bank
from seecause.lvlm.edit import edited_heads
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.model import LVLM, calibration_critters, load as load_lvlm
from seecause.metrics.parts import PartTruth, measure_truth, neighbours, part_importances
from seecause.metrics.pixels import to_pixels
from seecause.metrics.statistics import rank_correlation

# ---------------------------------------------------------------- words

COUNTS = (2, 4, 8, 16)  # heads that are redirected together
RANKINGS: dict[str, Callable[[MaskEngine], Tensor]] = {
    "derivative": lambda engine: attribute_heads(engine).coefficients,
    "fit": lambda engine: attribute_heads(engine, how="fit", masks=1000).coefficients,
    "causal": causal_scores,
    "attention": attention_scores,
    "random": lambda engine: random_orders(engine, 1, seed=engine.target)[0],
}


@lru_cache(maxsize=1)
def _llava(device: str) -> tuple[LVLM, MeanBank]:
    lvlm = load_lvlm("builtin:critters-llava", device=device)
    return lvlm, make_bank(lvlm, calibration_critters())


def redirected(*, ranking: str, limit: int | None, device: str) -> list[Row]:
    """Whether the top heads of a ranking, which are shown another image while the model generates,
    make it say what it says of that one."""
    lvlm, bank = _llava(device)
    rows = list[Row]()
    images = critters.render(critters.draw("balanced", "test", max(2, limit or 32))).image
    pictures = [to_pil(image) for image in images]
    for i, picture in enumerate(pictures):  # the one before is another creature
        engine = MaskEngine(lvlm, picture, QUESTION, bank, floor=None)
        prompt, other = lvlm.prompt(picture, QUESTION), pictures[i - 1]
        wanted = lvlm.speak(lvlm.prompt(other, QUESTION), 1)
        order = RANKINGS[ranking](engine).flatten().argsort(descending=True).tolist()
        for count in COUNTS:
            heads = [divmod(head, lvlm.n_heads) for head in order[:count]]
            with edited_heads(lvlm, heads, redirect=other):
                changed = lvlm.speak(prompt, 1) == wanted
            rows.append({"image": str(i), "heads": count, "changed": 100.0 * changed})
    return rows


# ---------------------------------------------------------------- the leaderboard

IMAGES, TOGETHER = 128, 32  # by default; of a score of heads
SLOWEST = ("gating", "mda", "rise", "tis")
READERS = {"critters-vit": "reads creatures", "critters-biased": "reads backgrounds"}


def entries() -> list[dict[str, str]]:
    """Every world with every method that competes in it, those of other packages included; the
    slowest come last, so that a run that is stopped has all others."""
    known = {"parts": methods(), "causes": methods(), "heads": selectors(), "words": RANKINGS}
    every = [{"world": world, "method": name} for world, names in known.items() for name in names]
    return sorted(every, key=lambda entry: entry["method"] in SLOWEST)


def compete(
    *,
    world: str,
    method: str,
    limit: int | None,
    device: str,
    settings: Mapping[str, Asked] | None = None,
) -> list[Row]:
    """Scores of a method against the truth in one world; `settings` are options of methods."""
    options = (settings or {}).get(method, {})
    rows = WORLDS[world](method, limit or IMAGES, device, **options)
    return [{"data": world, **row} for row in rows]


def area(values: Tensor, truth: Tensor) -> float:
    """The area under the ROC curve of values for what is true."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth.flatten().cpu(), values.flatten().cpu()))


@lru_cache(maxsize=3)
def _scenes(name: str, regime: str, count: int, device: str) -> tuple[Any, Latents, LabelledImages]:
    view = load(f"builtin:{name}", device=device)
    latents = critters.draw(regime, "test", count, device=view.device)
    return view, latents, critter_images(view, latents)


@lru_cache(maxsize=1)
def _truth(view: Any, latents: Latents) -> PartTruth:
    return measure_truth(view, latents)


def parts_world(method: str, count: int, device: str, **options: Any) -> list[Row]:
    view, latents, images = _scenes("critters-vit", "clean", count, device)
    truth, parts = _truth(view, latents), critters.render(latents).parts
    found, lost = list[Tensor](), list[Tensor]()
    for classes in neighbours(truth.creature):
        maps = attribute(view, images.images, classes.to(view.device), method, **options).maps
        found.append(part_importances(to_pixels(maps, images.size), parts)[0].cpu())
        lost.append(replace(truth, creature=classes).drops)
    agreed = rank_correlation(found[0] - found[1], lost[0] - lost[1])
    scores = (1 + agreed.nan_to_num(nan=0)) / 2  # two equal maps agree and disagree
    return [{"image": f"{place}", "score": x} for place, x in enumerate(scores.tolist())]


def causes_world(method: str, count: int, device: str, **options: Any) -> list[Row]:
    columns, clear, rows = dict[str, list[float]](), torch.ones(count).bool(), list[Row]()
    for name, column in READERS.items():
        view, latents, images = _scenes(name, "balanced", count, device)
        labels = logits_of(view, images.images).argmax(dim=1)
        shown: Any = (images.other_background, images.other_object)
        after = [logits_of(view, x).softmax(dim=1)[range(count), labels] for x in shown]
        behind = name == "critters-biased"  # is the background the cause?
        clear &= ((after[0] < after[1]) == behind).cpu()
        truth = (critters.render(latents).parts == 0) == behind
        maps = attribute(view, images.images, labels, method, **options).maps
        columns[column] = list(map(area, to_pixels(maps, images.size), truth))
    for place in clear.nonzero()[:, 0].tolist():
        row = {column: areas[place] for column, areas in columns.items()}
        rows.append({"image": f"{place}", "score": sum(row.values()) / 2, **row})
    return rows


def heads_world(method: str, count: int, device: str, **options: Any) -> list[Row]:
    view, _, images = _scenes("critters-planted", "matted", count, device)
    images, rows = images.with_masks(images.truth), list[Row]()
    truth = torch.zeros(view.n_layers, view.n_heads)
    for head, role in view.module.roles.items():
        truth[head] = role == "background"
    for number, some in enumerate(torch.arange(count).split(TOGETHER)):
        options = {"seed": number} if method == "random" else options
        value = select(method, view, images.take(some), **options).value
        found = area(value.nan_to_num(nan=-1e9), truth)
        rows.append({"image": f"images {number}", "score": found})
    return rows


def words_world(method: str, count: int, device: str) -> list[Row]:
    scores = dict[str, float]()
    for row in redirected(ranking=method, limit=min(count, 32), device=device):
        scores[row["image"]] = scores.get(row["image"], 0.0) + row["changed"] / 100 / len(COUNTS)
    return [{"image": image, "score": score} for image, score in scores.items()]


WORLDS = {
    "parts": parts_world,
    "causes": causes_world,
    "heads": heads_world,
    "words": words_world,
}

register_published(__name__, globals(), ())
