"""Head attribution on the embedded LLaVA: coefficients, words, tokens, blind heads and edits."""

from functools import cache

import torch

import seecause as sc
from seecause.lvlm.attribute import attention_scores, causal_scores, draw_masks
from tests.golden.record import DEVICE, Named, golden

QUESTION = "What is the name of this creature?"


@cache
def setting(dtype):
    """Model, image, bank and mask engine."""
    lvlm = sc.lvlm.load("builtin:critters-llava", device=DEVICE, dtype=dtype)
    picture = sc.data.open_image("critters:clean:test#3")
    bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(16))
    return lvlm, picture, bank, sc.lvlm.MaskEngine(lvlm, picture, QUESTION, bank)


@golden("lvlm")
def responses(dtype) -> Named:
    """Logits, and responses to masks of heads."""
    lvlm, picture, bank, engine = setting(dtype)
    yield "target", engine.target
    whole = torch.ones(2, lvlm.n_layers, lvlm.n_heads, dtype=torch.bool)
    whole[0, [0, 1], [4, 1]] = False
    word = sc.lvlm.AnswerEngine(lvlm, picture, QUESTION, bank, answer=[engine.target])
    blind, seen = word.logits(whole.flatten(1))[:, 0]
    yield "blind", blind
    yield "seen", seen
    masks = draw_masks(6, engine.n_components, p=0.75, seed=0)
    yield "masks", masks.double()
    yield "responses", engine.evaluate(masks)
    yield "adjusted", engine.adjusted(masks)
    prompt = lvlm.prompt(picture, QUESTION)
    yield "spoken", lvlm.speak(prompt, 8)
    with sc.lvlm.edited_heads(lvlm, [(0, 4)], blind=bank, image=picture):
        yield "spoken-blind", lvlm.speak(prompt, 6)


@golden("lvlm")
def heads(dtype) -> Named:
    """Coefficients by each estimator, causal and attention scores."""
    *_, engine = setting(dtype)
    for how, masks in (("derivative", 16), ("fit", 64)):
        found = sc.lvlm.attribute_heads(engine, how=how, masks=masks)
        yield f"{how}/coefficients", found.coefficients
        yield f"{how}/order", found.order().double()
    yield "causal", causal_scores(engine)
    yield "attention", attention_scores(engine)


@golden("lvlm")
def tokens(dtype) -> Named:
    """Text rows, image tokens and weighted attention, given the heads that are enough."""
    *_, engine = setting(dtype)
    trace = sc.lvlm.trace_answer(engine, masks=16)
    yield "chosen", trace.chosen.double()
    for name, counts in trace.counts().items():
        yield f"counts/{name}", counts
    found = trace.tokens
    yield "deltas", found.deltas
    yield "rows", found.rows.double()
    yield "sufficiency", found.sufficiency
    yield "gamma", found.attribution.coefficients
    yield "weighted", found.weighted
    for number, each in enumerate(trace.words[:3]):
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
    given = {"blind": {"blind": bank}, "redirect": {"redirect": other}}
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
