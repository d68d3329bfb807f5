"""Head attribution on critters-llava: does what the paper claims of large models hold at this
scale?

    python scripts/lvlm_study.py                                                    # a GPU:
    minutes; writes docs/results/lvlm-critters.md and .csv
    python scripts/lvlm_study.py --planted DIR/critters-llava-planted               # also the model
    of `seecause zoo train critters-llava-planted --out DIR`
    python scripts/lvlm_study.py --limit 8 --masks 400 --planted-masks 400 --out /tmp/lvlm.md     #
    a CPU: that it runs, not what it shows

120 pictures (8 creatures x 3 drawing styles x 5), one question, independent masks for each.
Pictures whose answer is wrong or moved by less than `--floor` logits are left out and counted. The
claims and their rules are in `lvlm_study_page.py`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause
from scripts.lvlm_study_page import (
    LENS_HEADS,
    LENS_WORDS,
    PART,
    SUBJECT,
    Adaptive,
    Case,
    Found,
    Planted,
    Ratio,
    report,
    write_csv,
)
from seecause import critters
from seecause.bench.lvlm_study import head_numbers, seed_of, token_numbers
from seecause.critters import PARTS, STYLES, answers, wordings
from seecause.data.images import to_pil
from seecause.engine.machine import machine
from seecause.errors import SeecauseError, WeakAnswer
from seecause.lvlm import (
    LVLM,
    MaskEngine,
    MeanBank,
    attribute_heads,
    calibration_critters,
    causal_scores,
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
    trace_heads,
    trace_tokens,
)  # fmt: skip
from seecause.lvlm.analysis import cosines
from seecause.lvlm.trace import RATIOS, rows_of

PICTURES, REWORDED, RATIO_PICTURES, TAIL_PICTURES, HALF_PICTURES, PLANTED_PICTURES = (
    120,
    40,
    8,
    32,
    8,
    24,
)
PLANTED_MASKS = (
    10_000  # the paper's; the least of the planted heads is worth less than the noise of 3,000
)
ADAPTIVE_PICTURES, ADAPTIVE_STEP, AGREEMENTS = 24, 100, (0.9, 0.95, 0.99)
PLANTED = "builtin:critters-llava-planted"


def main(
    model: str = "builtin:critters-llava",
    planted: Annotated[
        str, typer.Option(help="The variant with known heads; left out where it is not there.")
    ] = PLANTED,
    out: Path = Path("docs/results/lvlm-critters.md"),
    device: Annotated[str, typer.Option(help="auto: the GPU if there is one.")] = "auto",
    limit: Annotated[int, typer.Option(help="Pictures.")] = PICTURES,
    masks: Annotated[
        int,
        typer.Option(help="For each fit; the paper has 10,000 for a thousand heads, here are 48."),
    ] = 3000,
    planted_masks: Annotated[
        int, typer.Option(help="The same for the planted variant.")
    ] = PLANTED_MASKS,
    floor: float = 1.0,
) -> None:
    """Measure, judge the claims, and write the page."""
    began = time.perf_counter()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    lvlm = load(model, device=device, dtype="float32")
    bank = make_bank(lvlm, calibration_critters())
    found = study(lvlm, bank, limit, masks, floor)
    _lap(began, "main study")
    part_question(lvlm, bank, found, masks, floor)
    rewordings(lvlm, bank, found, masks, floor)
    ratios(lvlm, bank, found, masks, floor)
    _lap(began, "other questions, wordings and ratios")
    half_precision(load(model, device=device, dtype="bfloat16"), lvlm, bank, found, masks, floor)
    adaptive(lvlm, bank, found, floor)
    _lap(began, "bfloat16 and adaptive masks")
    planted_truth(planted, device, found, planted_masks)
    _lap(began, "planted heads")
    out.parent.mkdir(parents=True, exist_ok=True)
    versions = f"seecause {seecause.__version__}, torch {torch.__version__}, {machine(device)}"
    command = "python scripts/lvlm_study.py" + " --planted DIR/critters-llava-planted" * (
        planted != PLANTED
    )
    page = report(
        found,
        command=command,
        versions=versions,
        model=model,
        masks=masks,
        floor=floor,
        seconds=time.perf_counter() - began,
    )
    out.write_text("\n".join(page) + "\n", encoding="utf-8")
    write_csv(found, out.with_suffix(".csv"))
    print("\n".join(page))


def study(lvlm: LVLM, bank: MeanBank, limit: int, masks: int, floor: float) -> Found:
    """Heads, text rows and image tokens of every picture, and what groups pictures and heads."""
    cases, question = draw_cases(limit), wordings(SUBJECT)[0]
    effects = {}
    for case in cases:
        engine = asked(lvlm, bank, case, question, floor, case.answer)
        if isinstance(engine, str):
            case.skipped = engine
            continue
        case.heads = trace_heads(engine, masks=masks, seed=seed_of(f"heads {case.index}"))
        case.numbers = head_numbers(engine, case.heads) | {
            "largest_single": float(case.heads.causal.max())
        }
        words = head_words(engine, case.heads.heads, heads=LENS_HEADS, words=LENS_WORDS)
        case.numbers["lens"] = float(any(one.says(case.answer) for one in words))
        effects[case.index] = text_effects(engine, case.heads.chosen)
    if not effects:
        raise typer.BadParameter("no picture is left; give a lower --floor")
    deltas = torch.stack([found.deltas for found in effects.values()]).mean(dim=0)
    text, own = rows_of(deltas), []
    for case in cases:
        if case.heads is None:
            continue
        engine = MaskEngine(lvlm, case.picture, question, bank, floor=floor)
        try:
            seed = seed_of(f"tokens {case.index}")
            found = trace_tokens(
                engine,
                case.heads.heads.coefficients,
                case.heads.chosen,
                text=text,
                masks=masks,
                seed=seed,
            )
        except WeakAnswer:  # the dataset's rows carry nothing in this picture
            case.numbers["sufficiency"] = 0.0
            continue
        case.numbers |= token_numbers(found, case.mask) | {
            "tokens_for_80": tokens_for(found.tokens.coefficients, 0.8)
        }
        own.append(sufficiency(engine, case.heads.chosen, rows_of(effects[case.index].deltas)))
    tokens = lvlm.prompt(cases[0].picture, question).n_image
    made = Found(
        cases,
        text,
        next(iter(effects.values())).pieces,
        deltas,
        tokens,
        len(lvlm.decoder.head.weight),
        torch.tensor(own),
    )
    vectors, known = made.coefficients.flatten(1), made.known
    for name, labels in (
        ("object", [c.answer for c in known]),
        ("style", [c.style for c in known]),
        ("background", [c.background for c in known]),
    ):
        try:
            made.groups[name] = grouping(vectors, labels)
        except SeecauseError as why:
            print(f"no grouping by {name}: {why}")
    try:
        made.head_groups = group_heads(made.coefficients)
    except SeecauseError as why:
        print(f"no groups of heads: {why}")
    return made


def draw_cases(limit: int) -> list[Case]:
    """Every creature in every style equally often."""
    latents = critters.draw("balanced", "test", limit)
    cases = []
    for index in range(limit):
        style = STYLES[index // len(critters.CLASSES) % len(STYLES)]
        one = latents[index : index + 1]
        drawn = critters.render(one, style=style)
        place = critters.BACKGROUNDS[int(one.background)]
        answer, part_answer = answers(one, SUBJECT)[0], answers(one, PART)[0]
        cases.append(
            Case(
                index,
                to_pil(drawn.image[0]),
                drawn.mask[0],
                drawn.parts[0],
                style,
                place,
                answer,
                part_answer,
            )
        )
    return cases


def asked(
    lvlm: LVLM, bank: MeanBank, case: Case, question: str, floor: float, answer: str
) -> MaskEngine | str:
    """The engine of a right answer that the picture moves enough, or why there is none."""
    try:
        engine = MaskEngine(lvlm, case.picture, question, bank, floor=floor)
    except WeakAnswer:
        return "the picture moves the answer too little"
    return engine if engine.answer.strip() == answer else "wrong answer"


def some(found: Found, count: int) -> list[Case]:
    """The first `count` pictures that have heads, spread over all of them."""
    known = found.known
    return [
        known[place * len(known) // min(count, len(known))]
        for place in range(min(count, len(known)))
    ]


def part_question(lvlm: LVLM, bank: MeanBank, found: Found, masks: int, floor: float) -> None:
    """A question about one part, with the part's own pixels as the reference."""
    rows: dict[str, list[float]] = {"part": [], "creature": [], "area": [], "left out": []}
    for case in some(found, TAIL_PICTURES):
        engine = asked(lvlm, bank, case, wordings(PART)[0], floor, case.part_answer)
        rows["left out"].append(float(isinstance(engine, str)))
        if isinstance(engine, str):
            continue
        heads = trace_heads(engine, masks=masks, seed=seed_of(f"part {case.index}"))
        try:
            tokens = trace_tokens(
                engine,
                heads.heads.coefficients,
                heads.chosen,
                masks=masks,
                seed=seed_of(f"part tokens {case.index}"),
            ).tokens
        except WeakAnswer:  # its own rows carry too little
            rows["left out"][-1] = 1.0
            continue
        part = object_share(tokens.coefficients, tokens.tokens, case.parts == PARTS.index(PART) + 1)
        whole = object_share(tokens.coefficients, tokens.tokens, case.mask)
        if part is None or whole is None:  # no token speaks for the answer
            rows["left out"][-1] = 1.0
            continue
        for name, value in (("part", part.share), ("creature", whole.share), ("area", part.area)):
            rows[name].append(value)
    found.part = {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}


def rewordings(lvlm: LVLM, bank: MeanBank, found: Found, masks: int, floor: float) -> None:
    """Cosines of coefficients between wordings, and their ceiling, on the same answer; pictures
    that some wording moves too little are left out."""
    questions, rows = wordings(SUBJECT), []
    for case in some(found, REWORDED):
        try:
            one = compare_wordings(
                lvlm,
                case.picture,
                questions,
                bank,
                answer=case.answer,
                masks=masks,
                floor=floor,
                seed=seed_of(f"words {case.index}"),
            )
        except WeakAnswer:
            continue
        rows.append(torch.cat([one.cosines, torch.tensor([one.ceiling], dtype=torch.float64)]))
    if not rows:
        return
    *others, found.ceiling = torch.stack(rows).T
    found.cosines = dict(zip(questions[1:], others, strict=True))


def ratios(lvlm: LVLM, bank: MeanBank, found: Found, masks: int, floor: float) -> None:
    """Other shares of ablated heads."""
    made = []
    for case in some(found, RATIO_PICTURES):
        engine = asked(lvlm, bank, case, wordings(SUBJECT)[0], floor, case.answer)
        if not isinstance(engine, str):
            made.append(
                ratio_study(engine, RATIOS, masks=masks, seed=seed_of(f"ratio {case.index}"))
            )
    if not made:
        return
    usual = RATIOS.index(0.75)
    for place, ratio in enumerate(RATIOS):
        alike = [
            float(cosines(one[place].heads.coefficients[None], one[usual].heads.coefficients[None]))
            for one in made
        ]
        rows = [one[place] for one in made]
        columns = (
            [row.heads.r2 for row in rows],
            [row.enough for row in rows],
            [row.needed for row in rows],
            alike,
        )
        found.ratios.append(Ratio(ratio, *(sum(values) / len(values) for values in columns)))


def half_precision(
    half: LVLM, full: LVLM, bank: MeanBank, found: Found, masks: int, floor: float
) -> None:
    """R2 of bfloat16 responses against float32 ones on the same masks."""
    half_bank = make_bank(half, bank.pictures)
    scores = []
    for case in some(found, HALF_PICTURES):
        engine = MaskEngine(full, case.picture, wordings(SUBJECT)[0], bank, floor=floor)
        other = MaskEngine(
            half, case.picture, wordings(SUBJECT)[0], half_bank, answer=[engine.target], floor=0
        )
        drawn = draw_masks(min(1000, masks), engine.n_components, seed=case.index)
        true, rounded = engine.evaluate(drawn).double().cpu(), other.evaluate(drawn).double().cpu()
        scores.append(
            float(1 - (true - rounded).square().sum() / (true - true.mean()).square().sum())
        )
    found.half = torch.tensor(scores, dtype=torch.float64)


def adaptive(lvlm: LVLM, bank: MeanBank, found: Found, floor: float) -> None:
    """Masks asked until two halves of them agree, and how far what they say is from the fit with
    all masks."""
    engines = [
        (case, MaskEngine(lvlm, case.picture, wordings(SUBJECT)[0], bank, floor=floor))
        for case in some(found, ADAPTIVE_PICTURES)
    ]
    for level in AGREEMENTS:
        rows = []
        for case, engine in engines:
            start = time.perf_counter()
            fit = attribute_heads(
                engine,
                adaptive=True,
                agreement=level,
                step=ADAPTIVE_STEP,
                seed=seed_of(f"adaptive {case.index}"),
            )
            taken, last = time.perf_counter() - start, fit.protocol["history"][-1]
            assert case.heads is not None
            whole = case.heads.heads.coefficients
            best = [
                set(one.flatten().topk(last["top"]).indices.tolist())
                for one in (fit.coefficients, whole)
            ]
            alike = float(cosines(fit.coefficients[None], whole[None]))
            rows.append(
                (
                    fit.masks,
                    last["in both"],
                    len(best[0] & best[1]),
                    alike,
                    taken,
                    float(last["agreement"] >= level),
                )
            )
            found.top = last["top"]
        found.adaptive.append(Adaptive(level, *torch.tensor(rows, dtype=torch.float64).T))


def planted_truth(name: str, device: str, found: Found, masks: int) -> None:
    """The variant in which text may read the picture through a few known heads only."""
    try:
        lvlm, exact = (load(name, device=device, dtype=dtype) for dtype in ("float32", "float64"))
    except SeecauseError as why:
        found.planted = f"Not measured: {why}"
        return
    readers = [tuple(place) for place in lvlm.module.config.text_config.image_readers]
    banks = {one: make_bank(one, calibration_critters()) for one in (lvlm, exact)}
    right, inside, outside = [], [], {one: 0.0 for one in banks}
    for case in draw_cases(min(PLANTED_PICTURES, len(found.cases))):
        engine = MaskEngine(
            lvlm, case.picture, wordings(SUBJECT)[0], banks[lvlm], floor=None
        )  # only the order counts, whatever the span
        size = attribute_heads(
            engine, masks=masks, seed=seed_of(f"planted {case.index}")
        ).coefficients.abs()
        top = {divmod(i, lvlm.n_heads) for i in size.flatten().topk(len(readers)).indices.tolist()}
        right.append([place in top for place in readers])
        twin = MaskEngine(
            exact,
            case.picture,
            wordings(SUBJECT)[0],
            banks[exact],
            answer=[engine.target],
            floor=None,
        )
        for one, asked in ((lvlm, engine), (exact, twin)):
            effect = causal_scores(asked).abs()
            mine = [float(effect[place]) for place in readers]
            for place in readers:
                effect[place] = 0
            outside[one] = max(outside[one], float(effect.max()))
        inside.append(mine)  # in float64
    found.planted = Planted(
        readers,
        torch.tensor(right).double(),
        torch.tensor(inside, dtype=torch.float64),
        outside[lvlm],
        outside[exact],
        masks,
    )


def tokens_for(values: Tensor, share: float) -> int:
    """The fewest tokens that hold `share` of the positive part."""
    kept = values.clamp(min=0).sort(descending=True).values
    return int((kept.cumsum(0) < share * kept.sum()).sum()) + 1


def _lap(began: float, what: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {what} done", flush=True)


if __name__ == "__main__":
    typer.run(main)
