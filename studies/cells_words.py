"""Cells about every word of an answer on critters-llava: are the words that the picture moves the
right ones, and do redirected heads change what is said?

The embedded model answers in one word. `speak` teaches a copy of it whole sentences; with the
average picture the word that tells of the picture is "unsure", as in the embedded model's own
training, and everything else stays as it is:

    What colour is the tail?    the tail is jade .
    What do you see?            the mossling is in the dunes . the tail is jade .

So the truth is known: creature, place and colour come from the picture, all other words do not.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from math import nan
from statistics import mean
from typing import Any

import torch
from cells_lvlm import Case, draw_cases, engine_of, opened
from torch import Tensor
from torch.nn import functional as F

from seecause import critters
from seecause.bench.lvlm_study import seed_of
from seecause.bench.study import Row, StudyContext, summarised
from seecause.critters import PARTS, Latents, answers, choices, wordings
from seecause.critters.train.llava_answers import ask_bank, draw_pictures, packed_mask, see
from seecause.critters.train.llava_model import RECIPES, make_words
from seecause.data.images import to_pil
from seecause.lvlm import (
    AnswerEngine,
    MaskEngine,
    attention_scores,
    attribute_heads,
    calibration_critters,
    coverage,
    edited_heads,
    load,
    make_bank,
    random_orders,
    seen_mask,
    wrap,
)
from seecause.lvlm.words import MOVED

MODEL = "critters-llava"
SUBJECTS = ("creature", "background", *PARTS[1:], "everything")
SAID = {
    "creature": "this creature is the {creature} .",
    "background": "the creature is in the {background} .",
    "everything": "the {creature} is in the {background} . the tail is {tail} .",
}
PART = "the {part} is {{{part}}} ."
LOOK = "What do you see?"
LEVELS = (0.1, 0.2, 0.35, 0.5, MOVED, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # nats
COUNTS = (2, 4, 8, 12, 16)  # heads that are redirected
_AVERAGED, _REFRESH = 24, 10  # pictures of an average, steps until a new one
_RATE, _BLIND = 7e-4, 0.3


def asked(subject: str, wording: int) -> str:
    texts = (LOOK,) if subject == "everything" else wordings(subject)
    return texts[wording % len(texts)]


def said(subject: str) -> str:
    """The sentence with places for what the picture tells."""
    return SAID.get(subject) or PART.format(part=subject)


def filled(latents: Latents, subject: str) -> list[str]:
    """The true sentence about each picture."""
    known = {name: answers(latents, name) for name in ("creature", "background", *PARTS[1:])}
    each = ({name: words[i] for name, words in known.items()} for i in range(len(latents)))
    return [said(subject).format(**facts) for facts in each]


def picture_words() -> set[str]:
    """Words that only the picture tells."""
    return {word for subject in ("creature", "background", "tail") for word in choices(subject)}


def _packed(words: Any, texts: list[list[tuple[str, str]]]) -> tuple[Tensor, Tensor]:
    """Questions and answers of each picture as ids [B, Q, L], and which of them are answers."""
    pairs = [
        [(words.prompt(question)[1], _ids(words, answer)) for question, answer in row]
        for row in texts
    ]
    longest = max(len(q) + len(a) for row in pairs for q, a in row)
    ids = torch.full((len(pairs), len(pairs[0]), longest), words.pad)
    told = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(pairs):
        for j, (question, answer) in enumerate(row):
            ids[i, j, : len(question) + len(answer)] = torch.tensor(question + answer)
            told[i, j, len(question) : len(question) + len(answer)] = True
    return ids, told


def _ids(words: Any, text: str) -> list[int]:
    return [*(words.id(word) for word in text.split()), words.end]


def _loss(model: Any, words: Any, features: Tensor, ids: Tensor, told: Tensor) -> Tensor:
    """Cross-entropy of the answers' words; all questions share one run of the picture."""
    pictures, questions, length = ids.shape
    embed = model.get_input_embeddings()
    prefix = torch.tensor(words.prompt("")[0], device=ids.device)
    states = torch.cat(
        [embed(prefix).expand(pictures, -1, -1), features, embed(ids.flatten(1))], dim=1
    )
    head = len(prefix) + features.shape[1]
    place = torch.arange(head + length, device=ids.device)
    positions = torch.cat([place[:head], place[head:].repeat(questions)]).expand(pictures, -1)
    out = model.model.language_model(
        inputs_embeds=states,
        position_ids=positions,
        attention_mask=packed_mask(head, questions, length, states.device),
        use_cache=False,
    ).last_hidden_state[:, head:]
    out = out.unflatten(1, (questions, length))[:, :, :-1]
    right = told[:, :, 1:]
    return F.cross_entropy(model.lm_head(out[right]), ids[:, :, 1:][right])


@torch.no_grad()
def _average(model: Any, words: Any, features: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values up to the last image token, averaged over pictures."""
    ids = torch.tensor(words.prompt("")[0], device=features.device)
    prefix = model.get_input_embeddings()(ids)
    states = torch.cat([prefix.expand(len(features), -1, -1), features], dim=1)
    cache = model.model.language_model(inputs_embeds=states, use_cache=True).past_key_values
    return [
        (layer.keys.mean(dim=0, keepdim=True), layer.values.mean(dim=0, keepdim=True))
        for layer in cache.layers
    ]


def _blind_loss(model: Any, words: Any, bank: Any, step: int) -> Tensor:
    """Asked of the average picture, a sentence says unsure where the picture would tell."""
    unsure = dict.fromkeys(("creature", "background", *PARTS[1:]), "unsure")
    texts = [[(asked(s, step), said(s).format(**unsure)) for s in SUBJECTS]]
    ids, told = (each[0].to(model.device) for each in _packed(words, texts))
    logits = ask_bank(model, bank, ids)[:, :-1]
    return F.cross_entropy(logits[told[:, 1:]], ids[:, 1:][told[:, 1:]])


@lru_cache(maxsize=1)
def speak(steps: int, batch: int, seed: int, device: str) -> Any:
    """A copy of critters-llava that answers in sentences, verified, and its average picture."""
    torch.manual_seed(seed)
    shipped = load(f"builtin:{MODEL}", device=device)
    model, words = copy.deepcopy(shipped.module).train(), make_words()
    preprocess = RECIPES[MODEL].preprocess
    trained = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.01)
    bank: Any = None
    for step in range(steps):
        count = max(batch, _AVERAGED if step % _REFRESH == 0 else 0)
        latents = critters.draw("balanced", "train", count, start=step * 64)
        with torch.no_grad():
            tower = see(model, draw_pictures(latents, preprocess).to(device))[:, 1:]
            features = model.model.multi_modal_projector(tower)
        if step % _REFRESH == 0:
            bank = _average(model, words, features)
        order = torch.randperm(count)[:batch]
        facts = {s: filled(latents, s) for s in SUBJECTS}
        texts = [[(asked(s, step), facts[s][i]) for s in SUBJECTS] for i in order.tolist()]
        packed = (each.to(device) for each in _packed(words, texts))
        loss = _loss(model, words, features[order.to(device)], *packed)
        loss = loss + _BLIND * _blind_loss(model, words, bank, step)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    lvlm = wrap(model.eval().requires_grad_(False), shipped.processor, name=f"{MODEL}, speaking")
    return lvlm, make_bank(lvlm, calibration_critters())


def words_of(
    context: StudyContext, *, steps: int, batch: int, seed: int, split: str, part: int, parts: int,
    sentences: int,
) -> list[Row]:  # fmt: skip
    """The model's own sentences about some pictures, word by word: how far the picture moves each,
    and whether only the picture tells it. Pictures of `split` choose nothing else."""
    lvlm, bank = speak(steps, batch, seed, context.device)
    start = {"threshold": 10_000, "report": 20_000}[split]
    latents = critters.draw("balanced", "test", sentences, start=start)
    pictures = critters.render(latents, size=RECIPES[MODEL].size).image
    truth, rows = picture_words(), []
    for index in range(sentences)[part::parts]:
        subject = SUBJECTS[index % len(SUBJECTS)]
        question = asked(subject, index // len(SUBJECTS))
        engine = AnswerEngine(lvlm, to_pil(pictures[index]), question, bank)
        place = torch.arange(engine.n_words), torch.tensor(engine.targets)
        gains = (engine.seen[place] - engine.unseen[place]).tolist()
        pieces = [piece.strip() for piece in engine.pieces]
        rows.append(
            {
                "split": split, "picture": start + index, "subject": subject,
                "sentence": " ".join(pieces),
                "right": float(" ".join(pieces) == filled(latents[index : index + 1], subject)[0]),
                "gains": gains, "told": [float(piece in truth) for piece in pieces],
            }
        )  # fmt: skip
    return rows


def thresholds(context: StudyContext, *, earlier: dict[str, list[Row]]) -> list[Row]:
    """In which share of the sentences the moved words are exactly the right ones: by the package's
    own threshold, and by the one that does best on other sentences."""
    chosen, reported = (
        [row for row in earlier["words"] if row["split"] == split]
        for split in ("threshold", "report")
    )
    best = max(LEVELS, key=lambda least: (share_right(chosen, least), -abs(least - MOVED)))
    rows: list[Row] = [
        {"number": "sentences", "value": len(reported)},
        {"number": "as they should be", "value": mean([row["right"] for row in reported])},
    ]
    for name, least in (("the package's", MOVED), ("chosen on others", best)):
        rows.append(
            {"number": f"right words, {name}", "nats": least, "value": share_right(reported, least)}
        )
    gains = [
        (gain, bool(told))
        for row in reported
        for gain, told in zip(row["gains"], row["told"], strict=True)
    ]
    own, other = ([g for g, told in gains if told is wanted] for wanted in (True, False))
    against = [g for g in other if g <= -MOVED]
    return [
        *rows,
        {"number": "words of the picture", "value": len(own)},
        {"number": "least gain of these", "value": min(own, default=nan)},
        {"number": "other words", "value": len(other)},
        {"number": "largest change of these", "value": max(map(abs, other), default=nan)},
        {"number": "of these, against the picture", "value": len(against)},
    ]


def share_right(rows: list[Row], least: float) -> float:
    """Marks as the page has them: a word of the picture is from it, any other is said without
    looking; against the picture is right for none."""
    right = [
        all(
            gain >= least if told else abs(gain) < least
            for gain, told in zip(row["gains"], row["told"], strict=True)
        )
        for row in rows
    ]
    return mean([float(each) for each in right])


def redirects(
    context: StudyContext, *, part: int, parts: int, pictures: int, masks: int, draws: int
) -> list[Row]:
    """Do the top heads of a ranking, shown another picture while the model generates, make it say
    what it says of that one? Random heads are the control."""
    lvlm, bank = opened(f"builtin:{MODEL}", context.device)
    cases = [case for case, _ in draw_cases(pictures)]
    question, rows = wordings("creature")[0], []
    for place in range(len(cases))[part::parts]:
        case = cases[place]
        after = [*cases[place + 1 :], *cases[:place]]  # the next of another kind
        other = next(each for each in after if each.answer != case.answer)
        engine = engine_of(lvlm, bank, case, floor=1.0)
        if isinstance(engine, str):
            rows.append({"picture": case.index, "left_out": engine})
            continue
        prompt = lvlm.prompt(case.picture, question)
        truth = lvlm.speak(lvlm.prompt(other.picture, question), 1)
        for name, orders in rankings(engine, case, masks, draws).items():
            row: Row = {"picture": case.index, "ranking": name}
            for count in COUNTS:
                changed = []
                for order in orders:
                    heads = [divmod(i, lvlm.n_heads) for i in order[:count].tolist()]
                    with edited_heads(lvlm, heads, redirect=other.picture):
                        changed.append(float(lvlm.speak(prompt, 1) == truth))
                row[f"top {count}"] = mean(changed)
            rows.append(row)
    return rows


def redirect_shares(context: StudyContext, *, earlier: dict[str, list[Row]]) -> list[Row]:
    """How often each ranking's redirect succeeds, and how much more often than heads by lot."""
    values = [f"top {count}" for count in COUNTS]
    rows = [row for row in earlier["redirects"] if "ranking" in row]
    return summarised(rows, ["ranking"], values, against={"ranking": "random"})


def rankings(engine: MaskEngine, case: Case, masks: int, draws: int) -> dict[str, list[Tensor]]:
    """Orders of all heads: by the paper's fit, by derivatives, by attention on the picture, by how
    much of it the answer's row has on the creature (gaze), and by lot."""
    seed = seed_of(f"redirect {case.index}")
    fit = attribute_heads(engine, how="fit", masks=masks, seed=seed).order()
    derivative = attribute_heads(engine, seed=seed).order()
    activations, lvlm = engine.activations(), engine.lvlm
    object_mask = seen_mask(lvlm, engine.prompt, case.mask)
    covered = coverage(engine.prompt.tokens, object_mask).nan_to_num()
    grid = [(layer, head) for layer in range(lvlm.n_layers) for head in range(lvlm.n_heads)]
    gaze = [float(activations.attention(*place)[-1].double().cpu() @ covered) for place in grid]
    looks = {"attention": attention_scores(engine).flatten(), "gaze": torch.tensor(gaze)}
    orders = {name: score.argsort(descending=True, stable=True) for name, score in looks.items()}
    single = {"fit": fit, "derivative": derivative, **orders}
    random = list(random_orders(engine, draws, seed=seed))
    return {**{name: [order] for name, order in single.items()}, "random": random}
