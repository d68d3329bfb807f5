"""The verified wrap of a vision-language model: three probes that its decoder view computes what
the model computes.

logits     the view's answer equals the native one
blocks     so does every block's output
attention  the text rows alone, reading recorded keys, give the native rows
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.engine.verify import TOLERANCE, Probe, compare, listening
from seecause.errors import BadOption, ViewMismatch
from seecause.lvlm.attention import blend, read_own, read_shared
from seecause.lvlm.prompt import Prompt
from seecause.lvlm.view import LVLM
from seecause.models.decoder import causal, rotate, run

SIDE = (224, 320)  # of the noise picture


def noise_prompt(lvlm: LVLM, seed: int = 0) -> Prompt:
    """A picture of noise and a question, where nothing better is at hand."""
    if lvlm.processor is None:
        raise BadOption(
            "processor", None, "a processor, native `inputs` to verify with, or check=False"
        )
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    return lvlm.prompt(Image.fromarray(pixels), "What is in the picture?")


@torch.no_grad()
def verify(lvlm: LVLM, prompt: Prompt | None = None) -> list[Probe]:
    """Run the probes; raises `ViewMismatch` with the probe and the block."""
    prompt = prompt or noise_prompt(lvlm)
    decoder = lvlm.decoder
    with listening([block.native for block in decoder.blocks]) as outputs:
        native = lvlm.module(**prompt.inputs, use_cache=False).logits
    if not torch.isfinite(native).all():
        raise ViewMismatch(
            "logits",
            "the native model",
            "its answer is not finite (NaN or infinite weights)",
            "Give intact weights",
        )
    if len(outputs) != len(decoder.blocks):
        raise ViewMismatch(
            "blocks",
            "the native run",
            f"{len(outputs)} of {len(decoder.blocks)} blocks were called",
        )
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
    logits = compare(
        "logits",
        "the vocabulary",
        decoder.head(decoder.norm(final)),
        native,
        tolerance,
        f"{native.shape[-1]} words",
    )
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
    states = prompt.embeddings
    plain, banked = 0.0, 0.0
    for index, block in enumerate(lvlm.blocks):
        expected = outputs[index]
        full = block(states, at)
        plain = max(plain, compare("blocks", block.name, full, expected, tolerance, "").worst)
        q, k, v = block.qkv(states[:, text], rows)
        old_k, old_v = keys[index]
        bias = None if block.additive is causal else block.bias(rows, before)
        shared = read_shared(
            q,
            rotate(old_k[:, :, : text.start], before),
            old_v[:, :, : text.start],
            scale=block.scale,
            bias=bias,
        )
        choose = torch.ones(shared[1].shape, dtype=torch.bool, device=q.device)
        o = blend(read_own(q, k, v, scale=block.scale), shared, None, choose)
        got = block.finish(states[:, text], o)
        banked = max(
            banked,
            compare("attention", block.name, got, expected[:, text], 2 * tolerance, "").worst,
        )
        states = (
            expected if index >= len(prompt.deepstack) else _with_deepstack(expected, prompt, index)
        )
    return [
        Probe("blocks", plain, f"{lvlm.n_layers} block outputs"),
        Probe(
            "attention",
            banked,
            f"{prompt.n_text} text rows against {text.start} recorded keys, every block",
        ),
    ]


def _with_deepstack(states: Tensor, prompt: Prompt, index: int) -> Tensor:
    states = states.clone()
    states[:, prompt.image] += prompt.deepstack[index].to(states)
    return states
