"""Head attribution on the embedded LLaVA: coefficients, words, tokens, blind answers and edits."""

from __future__ import annotations

from functools import cache

import seecause as sc
from tests.golden.record import Named, golden

QUESTION = "What is the name of this creature?"


@cache
def setting(dtype):
    """Model, image, bank and mask engine."""
    lvlm = sc.lvlm.load("builtin:critters-llava", device="cpu", dtype=dtype)
    picture = sc.data.open_image("critters:clean:test#3")
    bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(16))
    return lvlm, picture, bank, sc.lvlm.MaskEngine(lvlm, picture, QUESTION, bank)


@golden("lvlm")
def responses(dtype) -> Named:
    """Logits, and responses to masks of heads."""
    lvlm, picture, bank, engine = setting(dtype)
    yield "target", engine.target
    yield "blind", sc.lvlm.blind_logits(lvlm, picture, QUESTION, bank, [(0, 4), (1, 1)])
    yield "seen", sc.lvlm.blind_logits(lvlm, picture, QUESTION, bank)
    masks = sc.lvlm.draw_masks(6, engine.n_components, p=0.75, seed=0)
    yield "masks", masks.double()
    yield "responses", engine.evaluate(masks)
    yield "adjusted", engine.adjusted(masks)
    yield "spoken", lvlm.speak(lvlm.prompt(picture, QUESTION), 8)
    yield "spoken-blind", sc.lvlm.speak_blind(lvlm, picture, QUESTION, bank, [(0, 4)], length=6)


@golden("lvlm")
def heads(dtype) -> Named:
    """Coefficients by each estimator, causal and attention scores."""
    *_, engine = setting(dtype)
    for how, masks in (("derivative", 16), ("corrected", 64), ("fit", 64)):
        found = sc.lvlm.attribute_heads(engine, how=how, masks=masks)
        yield f"{how}/coefficients", found.coefficients
        yield f"{how}/order", found.order().double()
    yield "causal", sc.lvlm.causal_scores(engine)
    yield "attention", sc.lvlm.attention_scores(engine)


@golden("lvlm")
def tokens(dtype) -> Named:
    """Text rows, image tokens and weighted attention, given the heads that are enough."""
    *_, engine = setting(dtype)
    trace = sc.lvlm.trace_heads(engine, masks=16)
    yield "chosen", trace.chosen.double()
    for name, counts in trace.counts().items():
        yield f"counts/{name}", counts
    found = sc.lvlm.trace_tokens(engine, trace.heads.coefficients, trace.chosen, masks=16)
    yield "deltas", found.effects.deltas
    yield "rows", found.text.double()
    yield "sufficiency", found.sufficiency
    yield "gamma", found.tokens.coefficients
    yield "weighted", found.weighted
    for number, each in enumerate(sc.lvlm.head_words(engine, trace.heads, heads=3)):
        yield f"words/{number}", [each.layer, each.head, each.coefficient]


@golden("lvlm")
def words(dtype) -> Named:
    """Every word of an answer."""
    lvlm, picture, bank, _ = setting(dtype)
    engine = sc.lvlm.AnswerEngine(lvlm, picture, "What colour is the tail?", bank)
    found = sc.lvlm.trace_words(engine, masks=16)
    for name in ("log_seen", "log_unseen", "spans", "heads", "heads_error", "image", "heads_r2"):
        yield name, getattr(found, name)


@golden("lvlm")
def edits(dtype) -> Named:
    """Logits of the first generated token while heads are edited inside the native forward."""
    lvlm, picture, bank, _ = setting(dtype)
    other = sc.data.open_image("critters:clean:test#5")
    prompt, seen = lvlm.prompt(picture, QUESTION), []
    handle = lvlm.decoder.head.register_forward_hook(lambda _, __, out: seen.append(out[0, -1]))
    given = {"blind": {"blind": bank}, "redirect": {"redirect": other}, "boost": {"boost": 2.0}}
    try:
        for name, options in given.items():
            with sc.lvlm.edited_heads(lvlm, [(0, 4), (1, 1)], **options):
                lvlm.speak(prompt, 1)
            yield name, seen.pop()
    finally:
        handle.remove()


@golden("lvlm", slow=True)
def classifier(dtype) -> Named:
    """A classifier of words: its answers and its maps."""
    from seecause import critters

    lvlm, *_ = setting(dtype)
    view = sc.lvlm.classifier(lvlm, list(critters.CLASSES)[:4], question=QUESTION)
    data = sc.data.open_data("critters:clean:test", limit=2)
    images, _, _ = sc.data.to_batch(view, [data[0], data[1]])
    yield "logits", view(images)
