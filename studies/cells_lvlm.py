"""Cells about head attribution on critters-llava: does what the paper claims hold at this scale?

Every creature in every drawing style equally often, one question, independent masks for each
picture. Pictures whose answer is wrong or moved by less than a floor are holes with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from scipy.stats import pearsonr
from torch import Tensor

from seecause import critters
from seecause.bench.lvlm_study import head_numbers, seed_of, token_numbers
from seecause.bench.study import Row, StudyContext
from seecause.critters import PARTS, STYLES, answers, wordings
from seecause.data.images import to_pil
from seecause.errors import BadInput, SeecauseError
from seecause.lvlm import (
    MaskEngine,
    attribute_heads,
    calibration_critters,
    compare_wordings,
    draw_masks,
    group_heads,
    grouping,
    head_words,
    load,
    make_bank,
    object_share,
    ratio_study,
    sufficiency,
    text_effects,
    threshold_study,
    trace_heads,
    trace_tokens,
)
from seecause.lvlm.analysis import LEVELS, RATIOS, cosines, depth_of_use
from seecause.lvlm.trace import rows_of

SUBJECT, PART = "creature", "tail"
LENS = {"heads": 5, "words": 10}
Earlier = dict[str, list[Row]]


@dataclass(frozen=True, eq=False)
class Case:
    index: int
    picture: Image.Image
    mask: Tensor  # [H, W] bool
    parts: Tensor  # [H, W]
    answer: str
    part_answer: str

    def row(self, style: str, background: str) -> Row:
        return {
            "picture": self.index, "object": self.answer, "style": style, "background": background,
        }  # fmt: skip


def draw_cases(count: int) -> list[tuple[Case, Row]]:
    """Every creature in every style equally often, and how each is called in a table."""
    latents, cases = critters.draw("balanced", "test", count), []
    for index in range(count):
        style = STYLES[index // len(critters.CLASSES) % len(STYLES)]
        one = latents[index : index + 1]
        scene = critters.render(one, style=style)
        words = answers(one, SUBJECT)[0], answers(one, PART)[0]
        case = Case(index, to_pil(scene.image[0]), scene.mask[0], scene.parts[0], *words)
        cases.append((case, case.row(style, critters.BACKGROUNDS[int(one.background)])))
    return cases


@lru_cache(maxsize=3)
def opened(model: str, device: str, dtype: str = "float32") -> tuple[Any, Any]:
    """A model and the average pictures that stand in for a missing one."""
    lvlm = load(model, device=device, dtype=dtype)
    return lvlm, make_bank(lvlm, calibration_critters())


def engine_of(lvlm: Any, bank: Any, case: Case, floor: float, subject: str = SUBJECT) -> Any:
    """The engine of a right answer that the picture moves enough, or why there is none."""
    right = case.answer if subject == SUBJECT else case.part_answer
    try:
        engine = MaskEngine(lvlm, case.picture, wordings(subject)[0], bank, floor=floor)
    except BadInput:
        return "the picture moves the answer too little"
    return engine if engine.answer.strip() == right else "wrong answer"


def heads(
    context: StudyContext,
    *,
    model: str,
    part: int,
    parts: int,
    pictures: int,
    masks: int,
    floor: float,
) -> list[Row]:
    """Head attribution of some pictures: numbers, coefficients, and what each word receives."""
    lvlm, bank = opened(model, context.device)
    rows = []
    for case, row in draw_cases(pictures)[part::parts]:
        engine = engine_of(lvlm, bank, case, floor)
        if isinstance(engine, str):
            rows.append({**row, "left_out": engine})
            continue
        seed = seed_of(f"heads {case.index}")
        trace = trace_heads(engine, how="fit", masks=masks, seed=seed)
        words = head_words(engine, trace.heads, **LENS)
        effects = text_effects(engine, trace.chosen)
        row |= head_numbers(engine, trace) | {"largest_single": float(trace.causal.max())}
        row["lens"] = float(any(one.says(case.answer) for one in words))
        row |= {"coefficients": trace.heads.coefficients.tolist(), "chosen": trace.chosen.tolist()}
        row |= {"attention": trace.attention.tolist(), "deltas": effects.deltas.tolist()}
        for name, curve in trace.curves.items():
            row[f"faithfulness_{name}"] = float(curve.faithfulness.mean())
            for level, (enough, needed) in zip(
                LEVELS, threshold_study(curve).tolist(), strict=True
            ):
                row |= {f"enough_{name}_{level}": enough, f"needed_{name}_{level}": needed}
        rows.append(row)
    return rows


def known(earlier: Earlier) -> list[Row]:
    return [row for row in earlier["heads"] if "coefficients" in row]


def stacked(rows: list[Row], name: str) -> Tensor:
    return torch.stack([torch.tensor(row[name]) for row in rows])


def tokens(
    context: StudyContext, *, model: str, part: int, parts: int, pictures: int, masks: int,
    floor: float, earlier: Earlier,
) -> list[Row]:  # fmt: skip
    """Image tokens, given the text rows that the whole set of pictures keeps."""
    lvlm, bank = opened(model, context.device)
    before = {row["picture"]: row for row in known(earlier)}
    text = rows_of(stacked(list(before.values()), "deltas").mean(dim=0))
    rows = []
    for case, row in draw_cases(pictures)[part::parts]:
        if case.index not in before:
            continue
        found = before[case.index]
        engine = MaskEngine(lvlm, case.picture, wordings(SUBJECT)[0], bank, floor=floor)
        chosen, seed = torch.tensor(found["chosen"]), seed_of(f"tokens {case.index}")
        own = rows_of(torch.tensor(found["deltas"]))
        row["sufficiency_own_rows"] = float(sufficiency(engine, chosen, own))
        try:
            trace = trace_tokens(
                engine,
                torch.tensor(found["coefficients"]),
                chosen,
                text=text,
                how="fit",
                masks=masks,
                seed=seed,
            )
            row |= token_numbers(trace, case.mask)
            row["tokens_for_80"] = tokens_for(trace.tokens.coefficients, 0.8)
        except BadInput:  # the rows of the whole set carry nothing in this picture
            row["sufficiency"] = 0.0
        rows.append({**row, "kept rows": int(text.sum()), "rows": len(text)})
    return rows


def tokens_for(values: Tensor, share: float) -> int:
    """The fewest tokens that hold `share` of the positive part."""
    positive = values.clamp(min=0).sort(descending=True).values
    return int((positive.cumsum(0) < share * positive.sum()).sum()) + 1


@dataclass(frozen=True, eq=False)
class Asked:
    """One picture of many that have heads, and what a further look at it needs."""

    context: StudyContext
    model: str
    case: Case
    masks: int
    floor: float
    level: float  # of agreement, for `adaptive`
    whole: Tensor  # [L, H], coefficients with all masks

    def engine(self, subject: str = SUBJECT) -> Any:
        lvlm, bank = opened(self.model, self.context.device)
        return engine_of(lvlm, bank, self.case, self.floor, subject)

    def seed(self, name: str) -> int:
        return seed_of(f"{name} {self.case.index}")


def further(
    context: StudyContext, *, look: str, model: str, pictures: int, count: int, masks: int,
    floor: float, earlier: Earlier, level: float = 0.0,
) -> list[Row]:  # fmt: skip
    """One of LOOKS at `count` of the pictures that have heads, spread over all of them."""
    cases, there = {case.index: case for case, _ in draw_cases(pictures)}, known(earlier)
    count, rows = min(count, len(there)), []
    for row in (there[place * len(there) // count] for place in range(count)):
        case, whole = cases[row["picture"]], torch.tensor(row["coefficients"])
        question = Asked(context, model, case, masks, floor, level, whole)
        rows += [{"picture": case.index, **numbers} for numbers in LOOKS[look](question)]
    return rows


def part_question(question: Asked) -> list[Row]:
    """A question about one part, with the part's own pixels as the reference."""
    engine, case, masks = question.engine(PART), question.case, question.masks
    if isinstance(engine, str):
        return [{"left_out": engine}]
    trace = trace_heads(engine, how="fit", masks=masks, seed=question.seed("part"))
    options = {"how": "fit", "masks": masks, "seed": question.seed("part tokens")}
    try:
        tokens = trace_tokens(engine, trace.heads.coefficients, trace.chosen, **options).tokens
    except BadInput:
        return [{"left_out": "its own rows carry too little"}]
    areas = (case.parts == PARTS.index(PART) + 1, case.mask)
    shares = [object_share(tokens.coefficients, tokens.tokens, area) for area in areas]
    if None in shares:
        return [{"left_out": "no token speaks for the answer"}]
    on_part, on_creature = shares
    row = {"part_share": on_part.share, "part_area": on_part.area}
    return [{**row, "object_share": on_creature.share}]


def rewordings(question: Asked) -> list[Row]:
    """Cosines of coefficients between wordings, and their ceiling: the same one, fresh masks."""
    lvlm, bank = opened(question.model, question.context.device)
    case = question.case
    options = {"how": "fit", "masks": question.masks, "floor": question.floor}
    options |= {"answer": case.answer, "seed": question.seed("words")}
    try:
        compared = compare_wordings(lvlm, case.picture, wordings(SUBJECT), bank, **options)
    except BadInput:
        return []
    each = {f"cosine_{place}": value for place, value in enumerate(compared.cosines.tolist(), 1)}
    return [{**each, "ceiling": compared.ceiling}]


def ratios(question: Asked) -> list[Row]:
    """Other shares of ablated heads, compared with 0.75."""
    seed, usual, rows = question.seed("ratio"), RATIOS.index(0.75), []
    fits = ratio_study(question.engine(), RATIOS, masks=question.masks, seed=seed)
    for p, fit in zip(RATIOS, fits, strict=True):
        pair = (fit.heads.coefficients[None], fits[usual].heads.coefficients[None])
        row = {"r2": fit.heads.r2, "enough_hear": fit.enough, "needed_hear": fit.needed}
        rows.append({"p": p, **row, "cosine": float(cosines(*pair))})
    return rows


def half_precision(question: Asked) -> list[Row]:
    """R2 of bfloat16 responses against float32 ones on the same masks."""
    half, bank = opened(question.model, question.context.device, "bfloat16")
    case, engine, asked = question.case, question.engine(), wordings(SUBJECT)[0]
    other = MaskEngine(half, case.picture, asked, bank, answer=[engine.target], floor=0)
    masks = draw_masks(min(1000, question.masks), engine.n_components, seed=case.index)
    true, rounded = (each.evaluate(masks).double().cpu() for each in (engine, other))
    wrong = (true - rounded).square().sum() / (true - true.mean()).square().sum()
    return [{"r2 of bfloat16": float(1 - wrong)}]


def adaptive(question: Asked) -> list[Row]:
    """Masks asked until two halves of them agree, and how far that is from the fit with all."""
    options = {"agreement": question.level, "step": 100, "seed": question.seed("adaptive")}
    fit = attribute_heads(question.engine(), how="fit", adaptive=True, **options)
    last, pair = fit.protocol["history"][-1], (fit.coefficients, question.whole)
    best = [set(values.flatten().topk(last["top"]).indices.tolist()) for values in pair]
    alike = float(cosines(pair[0][None], pair[1][None].to(pair[0])))
    row = {"masks": fit.masks, "in both halves": last["in both"], "cosine": alike}
    row["shared with all masks"] = len(best[0] & best[1])
    return [{**row, "reached": float(last["agreement"] >= question.level)}]


LOOKS = {
    "part": part_question, "wordings": rewordings, "ratios": ratios, "bfloat16": half_precision,
    "adaptive": adaptive,
}  # fmt: skip


def over_pictures(context: StudyContext, *, earlier: Earlier) -> list[Row]:
    """What only many pictures together say: groups of pictures and of heads, depth, attention."""
    rows, there = [], known(earlier)
    coefficients = stacked(there, "coefficients")
    for name in ("object", "style", "background"):
        try:
            one = grouping(coefficients.flatten(1), [row[name] for row in there])
        except SeecauseError as reason:
            rows.append({"number": f"groups by {name}", "left_out": str(reason)})
            continue
        numbers = {"purity": one.purity, "chance": one.chance, "silhouette": one.silhouette}
        rows += [{"number": f"{kind} by {name}", "value": v} for kind, v in numbers.items()]
    attention = stacked(there, "attention").mean(dim=0).flatten()
    test = pearsonr(coefficients.mean(dim=0).flatten().numpy(), attention.numpy())
    depth = depth_of_use(stacked(there, "chosen").view(coefficients.shape))
    rows += [
        {"number": "mean depth of chosen heads", "value": float(depth)},
        {"number": "correlation with attention", "value": float(test.statistic)},
        {"number": "its p", "value": float(test.pvalue)},
    ]
    try:
        groups = group_heads(coefficients)
    except SeecauseError as reason:
        return [*rows, {"number": "groups of heads", "left_out": str(reason)}]
    for place in (0, 1):
        use = groups.use(place)
        rows.append({"number": f"heads in group {place}", "value": len(use)})
        rows.append({"number": f"strong in, group {place}", "value": float(use.mean())})
    return rows
