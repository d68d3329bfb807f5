"""HeAr (arXiv 2509.17588): all tables and figures with numbers.

hear/table-1            coefficients of nine other prompts beside those of the paper's own
hear/table-2            how well the linear fit predicts masked answers
hear/table-3            the response where only the important text tokens see the image
hear/figure-3, 11       heads that are enough and needed, by four rankings (3B: bars over models)
hear/figure-4           image tokens beside weighted attention
hear/figure-5, 6        the same counts by threshold, and by the share of ablated heads
hear/figure-7, 12       single heads: what removing one costs, how often one is used
hear/figure-9, 13       do coefficients follow the object, the super-category or the style?
hear/figure-10          in how many images a head is strong
hear/figure-14          coefficients beside attention to the image
hear/figure-15          what blocking a text token costs

Images are those that the model names correctly (`right_answers`). Most of these read other columns
of the same rows, those of `traced`: an image is traced once for all of them.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from seecause.data.dataset import Dataset, Sample, open_data, to_pil
from seecause.errors import BadInput
from seecause.experiments.base import PAPERS, Part, Row, opened_data, register_published
from seecause.files import digest, digest_json, write_json
from seecause.lvlm.attribute import (
    How,
    attribute_heads,
    correlation,
    scan,
    trace_answer,
)
from seecause.lvlm.bank import MeanBank, make_bank
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.model import LVLM, load
from seecause.options import Count

PROMPTS: list[str] = PAPERS["hear"]["prompts"]  # the paper's own and nine others (section C.3)
RATIOS: list[float] = PAPERS["hear"]["ratios"]  # of ablated heads (section B.2)
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of faithfulness; completeness is 1 less it
STRONG, NEAREST = 0.1, 5
Asked = dict[str, Any]  # options of `attribute_heads`
Ask = Callable[..., MaskEngine]  # of a question about the image


# ---------------------------------------------------------------- images and answers


@lru_cache(maxsize=1)
def _opened(spec: str, device: str) -> LVLM:
    return load(spec, device=device)


@lru_cache(maxsize=1)
def _bank(spec: str, device: str, data: str, count: int) -> MeanBank:
    """The average of images drawn from a dataset by seed 0; an explained image that is one of them
    is left out of it."""
    dataset = opened_data(data, None)
    places = random.Random(0).sample(range(len(dataset)), min(count, len(dataset)))
    return make_bank(_opened(spec, device), [to_pil(dataset[place].image) for place in places])


def right_answers(
    model: Mapping[str, Any],
    data: str,
    folder: Path,
    device: str,
    *,
    samples: Count = 200,
    most: Count = 10_000,
    least: Count = 1,
    question: str = PROMPTS[0],
    domains: str = "",
) -> dict[str, Any]:
    """Finds images that the model names correctly, in an order drawn by seed 0: `samples` of them,
    at most `most` and at least `least` of each label, of all or some `domains` (DomainNet)."""
    dataset, taken, counts = open_data(data), list[tuple[int, int]](), Counter[int]()
    what = [dict(model), dataset.fingerprint, samples, most, least, question, domains]
    kept = folder / f"{digest_json(what)}.json"
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        lvlm = _opened(model["spec"], device)
        for place in random.Random(0).sample(range(len(dataset)), len(dataset)):
            if len(taken) == samples:
                break
            sample = dataset[place]
            label = sample.label or 0
            other = domains and _style(dataset, sample) not in domains.split(",")
            if other or counts[label] >= most:
                continue
            ids = lvlm.speak(lvlm.prompt(to_pil(sample.image), question), 8)
            if names(lvlm.processor.tokenizer.decode(ids), dataset.classes[label]):
                counts[label] += 1
                taken.append((place, label))
        write_json(kept, [place for place, label in taken if counts[label] >= least])
    if not (rows := json.loads(kept.read_text(encoding="utf-8"))):
        reason = f"{model['spec']} names none of the images correctly"
        raise BadInput(data, reason, "give other images, or another question")
    return {**model, "question": question, "rows": rows}


def names(said: str, name: str) -> bool:
    """Whether an answer names a class: in its words, as one word, or by its last word; singular or
    plural."""
    said, name = (re.sub(r"[^a-z ]", "", text.lower().replace("_", " ")) for text in (said, name))
    words = {name, name.replace(" ", ""), name.split()[-1]}
    return said.strip() in words | {f"{word}s" for word in words}


def _style(dataset: Dataset, sample: Sample) -> str:
    """The name of the second code of a sample's group: super-category or style."""
    places = getattr(dataset, "places", ())
    return places[sample.group[1]] if sample.group and places else ""


# ---------------------------------------------------------------- rows


def traced(
    part: Part,
    *,
    look: Literal["trace", "prompts", "ratios", "groups"] = "trace",
    how: How = "derivative",
    masks: Count | None = None,
    calibration: Count = 100,
    floor: float = 1.0,
) -> list[Row]:
    """Rows about each image, which are told apart by the columns that they have: all that a trace
    finds, other `prompts`, or other `ratios` of ablated heads."""
    spec, dataset, rows = part.model["spec"], opened_data(part.data, None), list[Row]()
    lvlm, bank = _opened(spec, part.device), _bank(spec, part.device, part.data, calibration)
    drawn: Asked = {"how": how, "masks": masks}
    for place in part.model["rows"][part.start : part.stop]:
        sample = dataset[place]
        name = dataset.classes[sample.label or 0]
        about = {"image": sample.id, "object": name, "style": _style(dataset, sample)}
        drawn["seed"] = int(digest(sample.id)[:7], 16)
        with suppress(BadInput):  # the image, or what is left of it, moves the answer too little
            ask = partial(MaskEngine, lvlm, to_pil(sample.image), bank=bank)
            engine = ask(part.model["question"], floor=floor)
            rows += [about | row for row in LOOKS[look](engine, drawn, ask)]
    return groups(rows) if look == "groups" else rows


def trace(engine: MaskEngine, drawn: Asked, ask: Ask) -> Iterator[Row]:
    """Fit, counts of heads, every head, words of the top heads, text tokens."""
    found = trace_answer(engine, **drawn)
    heads, tokens, causal = found.heads, found.tokens, found.causal
    assert tokens is not None
    together = correlation(heads.coefficients.flatten(), found.attention.flatten())
    yield {
        **{"fit": "heads", "R2": heads.r2, "rho": heads.pearson, "together": together},
        **{"largest": float(causal.max()), "kept": tokens.sufficiency},
        **{"tokens R2": tokens.attribution.r2, "tokens rho": tokens.agreement},
    }
    for ranking, curves in found.curves.items():
        for level in LEVELS:
            counts = {"enough": curves.enough(level), "needed": curves.needed(round(1 - level, 1))}
            own = {"ranking": ranking} if level == 0.8 else {}
            means = {key: float(count.double().mean()) for key, count in counts.items()}
            yield {"order": ranking, "level": level, **own, **means}
    for row in found.rows():
        strong = float(row["coefficient"] > STRONG)
        row |= {"enough": None, "used": float(row["enough"]), "strong": strong}
        yield {**row, "layer": str(row["layer"])}
    for place, lost in enumerate(tokens.deltas.tolist()):
        yield {"text": "blocked", "token": f"{place} {engine.prompt.pieces[place]}", "lost": lost}


def wordings(engine: MaskEngine, drawn: Asked, ask: Ask) -> Iterator[Row]:
    """Cosines of coefficients with those of other prompts, and of the same one with other masks,
    which is the most that can be expected."""
    own = attribute_heads(engine, **drawn).coefficients.flatten()
    asked = {"the same": engine.question} | {str(i): PROMPTS[i] for i in range(1, len(PROMPTS))}
    for number, (prompt, words) in enumerate(asked.items(), start=1):
        other = ask(words, answer=[engine.target], floor=None)
        again = {**drawn, "seed": drawn["seed"] + number}
        found = attribute_heads(other, **again).coefficients.flatten()
        yield {"prompt": prompt, "similarity": float(torch.cosine_similarity(own, found, dim=0))}


def ratios(engine: MaskEngine, drawn: Asked, ask: Ask) -> Iterator[Row]:
    """Heads that are enough and needed, by coefficients from masks that ablate other shares."""
    for p in RATIOS:
        heads = attribute_heads(engine, **drawn, p=p)
        curves = scan(engine, heads.order())
        counts = {"enough": float(curves.enough()[0]), "needed": float(curves.needed()[0])}
        yield {"ranking": "hear", "ablated": p, "R2": heads.r2, **counts}


def vectors(engine: MaskEngine, drawn: Asked, ask: Ask) -> Iterator[Row]:
    """The coefficients alone."""
    yield {"vector": attribute_heads(engine, **drawn).coefficients.flatten().tolist()}


LOOKS = {"groups": vectors, "trace": trace, "prompts": wordings, "ratios": ratios}


# ---------------------------------------------------------------- over images


def groups(found: list[Row]) -> list[Row]:
    """How many of the five nearest images (cosine of coefficients) share an image's object,
    super-category or style."""
    made, values = list[Row](), torch.tensor([row.pop("vector") for row in found])
    count, unit = len(found), torch.nn.functional.normalize(values, dim=1)
    near = (unit @ unit.T - 2 * torch.eye(count)).topk(min(NEAREST, count - 1), dim=1).indices
    for kind in ("object", "style"):
        names = [row[kind] for row in found]
        same = torch.tensor([[name == other for other in names] for name in names]).double()
        chance = (same.sum(dim=1) - 1) / (count - 1)
        for row, purity, luck in zip(found, same.gather(1, near).mean(dim=1), chance, strict=True):
            numbers = {"purity": float(purity), "chance": float(luck)}
            made.append({**row, "grouping": kind, **numbers})
    return made


register_published(__name__, globals(), ())
