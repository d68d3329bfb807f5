"""All words of an answer at once against one word at a time: CPU seconds, and how far apart.

python benchmarks/lvlm_words.py [--model builtin:critters-llava] [--masks 64]

The embedded model says one word; a sentence is given to it. Seconds are of this process alone, so a
busy machine tells the same.
"""

from __future__ import annotations

import argparse
import time

import torch

import seecause as sc

ANSWER = "the creature is in the dunes . the tail is jade ."
QUESTION = "What is in the background?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:critters-llava")
    parser.add_argument("--masks", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lvlm = sc.lvlm.load(options.model)
    bank = sc.lvlm.make_bank(lvlm, sc.lvlm.calibration_critters(20))
    picture = sc.data.open_picture("critters:clean:test#3")
    given = (lvlm, picture, QUESTION, bank)
    ids = lvlm.answer_ids(picture, QUESTION, ANSWER)
    sc.lvlm.AnswerEngine(*given, answer=ids[:1])  # the bank is made once

    start = time.process_time()
    engine = sc.lvlm.AnswerEngine(*given, answer=ids)
    words = sc.lvlm.trace_words(engine, masks=options.masks)
    at_once = time.process_time() - start

    start, apart = time.process_time(), 0.0
    for place in range(len(ids)):
        one = sc.lvlm.MaskEngine(*given, answer=ids, position=place, floor=None)
        heads = sc.lvlm.attribute_heads(one, masks=options.masks).coefficients * one.span
        sc.lvlm.attribute_tokens(one, masks=options.masks)
        apart = max(apart, float((words.heads[place] - heads).abs().max()))
    singly = time.process_time() - start
    print(
        f"{len(ids)} words, {options.masks} masks: {at_once:.2f} s at once, {singly:.2f} s one by"
        f" one ({singly / at_once:.1f} times); heads differ by {apart:.1e} logits at most"
    )


if __name__ == "__main__":
    main()
