"""Does a view compute what its native model computes? Three probes (see `model.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.engine.verify import TOLERANCE, Probe, compare, listening, need_finite
from seecause.engine.walk import walk
from seecause.errors import BadOption, ViewMismatch
from seecause.lvlm._cache import read_shared, text_keep, with_own_text
from seecause.lvlm.prompt import Prompt
from seecause.models.decoder import run, sees_all_before, with_deepstack

if TYPE_CHECKING:
    from seecause.lvlm.model import LVLM

SIDE = (224, 320)  # of the noise picture


def noise_prompt(lvlm: LVLM, seed: int = 0) -> Prompt:
    """A picture of noise and a question, where nothing better is at hand; with an answer where its
    rows see otherwise than those of the question."""
    if lvlm.processor is None:
        raise BadOption(
            "processor", None, "a processor, native `inputs` to verify with, or check=False"
        )
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    answer = [1, 2] if lvlm.decoder.reads_prefix else None
    return lvlm.prompt(Image.fromarray(pixels), "What is in the picture?", answer)


@torch.no_grad()
def verify(lvlm: LVLM, prompt: Prompt | None = None) -> list[Probe]:
    """Run the probes; raises `ViewMismatch` with the probe and the block."""
    prompt = prompt or noise_prompt(lvlm)
    decoder = lvlm.decoder
    with listening([block.native for block in decoder.blocks]) as outputs:
        native = lvlm.module(**prompt.inputs, use_cache=False).logits.to(lvlm.device)
    outputs = [output.to(lvlm.device) for output in outputs]
    need_finite(native)
    if len(outputs) != len(decoder.blocks):
        seen = f"{len(outputs)} of {len(decoder.blocks)} blocks were called"
        raise ViewMismatch("blocks", "the native run", seen)
    keys: list[tuple[Tensor, Tensor]] = []
    final = run(
        decoder,
        prompt.embeddings,
        prompt.at,
        deepstack=prompt.deepstack,
        image=prompt.image,
        record=lambda _, k, v: keys.append((k, v)),
    )
    tolerance = TOLERANCE.get(lvlm.dtype, 2e-4)
    blocks = _text_rows(lvlm, prompt, keys, outputs, tolerance)
    words = f"{native.shape[-1]} words"
    answer = decoder.head(decoder.norm(final))
    logits = compare("logits", "the vocabulary", answer, native, tolerance, words)
    return [logits, *blocks]


def _text_rows(
    lvlm: LVLM,
    prompt: Prompt,
    keys: list[tuple[Tensor, Tensor]],
    outputs: list[Tensor],
    tolerance: float,
) -> list[Probe]:
    """Text rows of every block from the native rows before it: plainly, and over recorded keys."""
    at, text = prompt.at, prompt.text
    rows, before = at.take(at.index[text]), at.take(at.index[: text.start])
    keep = text_keep(rows.index, prompt.prefix) if prompt.prefix > text.start else None
    plain, banked = 0.0, 0.0
    for step in walk(lvlm, prompt.embeddings, at):
        block, expected, states = step.block, outputs[step.index], step.h[:, text]
        probe = compare("blocks", block.name, block(step.h, at), expected, tolerance, "")
        plain = max(plain, probe.worst)
        q, k, v = block.qkv(states, rows)
        old_k, old_v = (old[:, :, : text.start] for old in keys[step.index])
        bias = None if sees_all_before(block) else block.bias(rows, before)
        assert block.rotate is not None
        shared = read_shared(q, block.rotate(old_k, before), old_v, scale=block.scale, bias=bias)
        choose = torch.ones(shared[1].shape, dtype=torch.bool, device=q.device)
        o = with_own_text(q, k, v, shared, shared, choose, scale=block.scale, keep=keep)
        got = block.finish(states, o)
        probe = compare("attention", block.name, got, expected[:, text], 2 * tolerance, "")
        banked = max(banked, probe.worst)
        # the next block starts from the native states
        step.out = with_deepstack(expected, prompt.deepstack, step.index, prompt.image)
    tested = f"{prompt.n_text} text rows against {text.start} recorded keys, every block"
    return [
        Probe("blocks", plain, f"{lvlm.n_layers} block outputs"),
        Probe("attention", banked, tested),
    ]
