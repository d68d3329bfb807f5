"""All words of an answer at once against one word at a time: seconds, and how far apart; and what
differentiating at fewer masks costs.

python benchmarks/lvlm_words.py [--masks 64] [--truth 256] [--device cpu]

The embedded model says one word; a sentence is given to it. On a CPU seconds are of this process
alone, so a busy machine tells the same. Near: Pearson's correlation of a word's heads with those
of `--truth` other masks, mean over the words that the picture moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import mean

import torch

import seecause as sc
from seecause.lvlm.attribute import correlation

ANSWER = "the creature is in the dunes . the tail is jade ."
QUESTION = "What is in the background?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:critters-llava")
    parser.add_argument("--masks", type=int, default=64)
    parser.add_argument("--truth", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lvlm = sc.lvlm.load(options.model, device=options.device)
    bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(20))
    picture = sc.data.open_image("critters:clean:test#3")
    given = (lvlm, picture, QUESTION, bank)
    ids = lvlm.answer_ids(picture, QUESTION, ANSWER)
    sc.lvlm.trace_words(sc.lvlm.AnswerEngine(*given, answer=ids[:2]), masks=4)  # warm-up
    clock = time.process_time if options.device == "cpu" else time.perf_counter

    def at_once(masks: int | None, seed: int = 0) -> tuple[sc.lvlm.AnswerWords, float]:
        start = clock()
        engine = sc.lvlm.AnswerEngine(*given, answer=ids)
        return sc.lvlm.trace_words(engine, masks=masks, seed=seed), clock() - start

    words, taken = at_once(options.masks)
    short, taken_short = at_once(None)
    start, apart = clock(), 0.0
    for place in range(len(ids)):
        one = sc.lvlm.MaskEngine(*given, answer=ids, position=place, floor=None)
        heads = sc.lvlm.attribute_heads(one, masks=options.masks).coefficients * one.span
        sc.lvlm.attribute_tokens(one, masks=options.masks)
        apart = max(apart, float((words.heads[place] - heads).abs().max()))
    singly = clock() - start
    print(
        f"{len(ids)} words, {options.masks} masks: {taken:.2f} s at once, {singly:.2f} s one by"
        f" one ({singly / taken:.1f} times); heads differ by {apart:.1e} logits at most"
    )
    slopes = short.protocol["sampling"]["slopes"]
    print(
        f"    differentiated at {slopes} of {short.protocol['sampling']['masks']}, the default:"
        f" {taken_short:.2f} s ({singly / taken_short:.1f} times)"
    )
    truth, _ = at_once(options.truth, seed=1)
    for name, traced in (("all", words), ("default", short)):
        print(
            f"    {name}: near {near(traced, truth):.4f}, at worst {near(traced, truth, min):.4f}"
        )


def near(
    words: sc.lvlm.AnswerWords, truth: sc.lvlm.AnswerWords, over: Callable[..., float] = mean
) -> float:
    moved = truth.moved().nonzero()[:, 0].tolist()
    return over([correlation(words.heads[i].flatten(), truth.heads[i].flatten()) for i in moved])


if __name__ == "__main__":
    main()
