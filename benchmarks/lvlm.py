"""How long do ten thousand masks take, for one picture and one question?

    python benchmarks/lvlm.py                                        # LLaVA-1.5-7B-, LLaVA-NeXT-7B-
    and Qwen2-VL-7B-shaped, bf16, on one GPU
    python benchmarks/lvlm.py --models llava-1.5-7b --parts ceiling,eager
    python benchmarks/lvlm.py --models toy --device cpu --masks 200  # does it run?

Weights are random (the arithmetic is the same), pictures are noise, and nothing is downloaded.
Printed for each model: the bank (per calibration picture), the prefix (everything that runs once
for a picture), the responses to all masks, the fit, peak memory, the share of this GPU's measured
ceiling for matrix products; the plain way: every mask with its whole sequence, as many at once
as fit, on a subset, scaled up; the careful plain way: the same with keys and values of the picture
computed once (`cached`); mean derivatives of few masks, their time and how near they are to the fit
of all (`--masks 30000` for a sharp one); and all that `seecause lvlm trace` computes (`command`).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import cyclopts
import torch
from scipy.stats import spearmanr
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lvlm_shapes import SHAPES
from benchmarks.timing import CompiledBlock, clock, title, usual_dtype
from seecause.lvlm import (
    LVLM,
    MaskEngine,
    MeanBank,
    attribute_heads,
    trace_answer,
    wrap,
)
from seecause.lvlm.attribute import (
    ORDERS,
    POINTS,
    causal_scores,
    correlation,
    draw_masks,
    elastic_net,
    fit,
    random_orders,
    scan,
)
from seecause.lvlm.bank import bank_of_prompts
from tests.reference import hear

PARTS = "ceiling,eager,compiled,plain,cached,derivative,command"
WAYS = (("derivative", (16, 64, 256)), ("fit", (10_000,)))
TOP = 50  # heads compared
PLAIN_BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def main(
    models: str = "llava-1.5-7b,llava-next-7b,qwen2-vl-7b",
    parts: str = PARTS,
    masks: int = 10_000,
    calibration: int = 4,
    block: int = 0,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Measure and print."""
    where = torch.device(device)
    chosen = parts.split(",")
    ablated = f"{masks:,} masks, 75 % of the heads ablated in each"
    title(where, ablated, f"{calibration} calibration pictures", "random weights")
    ceiling = None
    if "ceiling" in chosen:
        ceiling = measured_ceiling(where)
        print(
            "matrix products: not measured, only on a GPU\n"
            if ceiling is None
            else f"matrix products: {ceiling / 1e12:.0f} TFLOP/s measured\n"
        )
    for name in models.split(","):
        run_model(name, chosen, masks, calibration, block or None, where, ceiling)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def run_model(
    name: str,
    parts: list[str],
    masks: int,
    calibration: int,
    block: int | None,
    where: torch.device,
    ceiling: float | None,
) -> None:
    module, inputs = SHAPES[name](where, usual_dtype(where))
    lvlm = wrap(module, name=name, check=False)
    _, built = clock(lambda: lvlm.read(inputs(0)), where)  # warm-up of the tower
    prompts, read = clock(lambda: [lvlm.read(inputs(1 + i)) for i in range(calibration)], where)
    bank, banked = clock(lambda: bank_of_prompts(lvlm, prompts), where)
    engine, ready = clock(
        lambda: MaskEngine(lvlm, lvlm.read(inputs(0)), None, bank, floor=None),
        where,
    )
    engine.block_size, t, n = block, engine.n_text, engine.n_image
    print(
        f"## {name}: {lvlm.n_layers} x {lvlm.n_heads} heads, {engine.prompt.image.start} + {n} +"
        f" {t} tokens (before, image, text)\n"
    )
    print(
        f"bank {(read + banked) / calibration:.2f} s a picture; prefix, both banks and the intact"
        f" answer {ready:.2f} s (first run {built:.1f} s)"
    )
    drawn = draw_masks(masks, engine.n_components)
    found = None
    for mode in ("eager", "compiled"):
        if mode in parts:
            found = responses(lvlm, engine, drawn, mode, where, ceiling)
    for way in ("plain", "cached"):
        if way in parts:
            plain(lvlm, engine, bank, drawn, found, where, way)
    if "command" in parts:
        for turn in ("the first time", "again"):  # kernels are compiled the first time
            command(engine, where, turn)
    if found is not None:
        answers = found[0].double().cpu()
        _, taken = clock(lambda: fit(drawn, answers, device=where), where)
        print(f"fit: {taken:.2f} s (three elastic nets: all masks, and two halves)")
        if "derivative" in parts:
            derivative(drawn, found[0], engine, where)
    print()


def responses(
    lvlm: LVLM,
    engine: MaskEngine,
    drawn: Tensor,
    mode: str,
    where: torch.device,
    ceiling: float | None,
) -> tuple[Tensor, float]:
    """All masks once, after a warm-up of two blocks."""
    eager_blocks = lvlm.decoder.blocks
    if mode == "compiled":
        lvlm.decoder.blocks = [CompiledBlock(**vars(block)) for block in eager_blocks]
    size = engine._at_once(len(drawn), engine.cache, mixed=False)
    _, warm = clock(lambda: engine.evaluate(drawn[: 2 * size]), where)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    found, taken = clock(lambda: engine.evaluate(drawn), where)
    lvlm.decoder.blocks = eager_blocks
    peak = (
        f", {torch.cuda.max_memory_allocated(where) / 2**30:.1f} GiB"
        if where.type == "cuda"
        else ""
    )
    work = flops(lvlm, engine) * len(drawn)
    share = "" if ceiling is None else f" = {work / taken / ceiling:.0%} of the ceiling"
    print(
        f"{mode}: {taken:.2f} s for {len(drawn):,} responses, {len(drawn) / taken:,.0f} masks/s,"
        f" {size} at once{peak}; {work / taken / 1e12:.3g} TFLOP/s{share} (warm-up {warm:.1f} s)"
    )
    return found, taken


def flops(lvlm: LVLM, engine: MaskEngine) -> float:
    """Useful arithmetic of one mask: linear layers of its text rows, and attention on both banks.
    What the engine saves is counted as done."""
    linear = sum(
        p.numel() for layer in lvlm.decoder.native.layers for p in layer.parameters() if p.ndim == 2
    )
    block = lvlm.blocks[0]
    attention = 2 * 4 * engine.prompt.image.stop * block.heads * block.head_dim * lvlm.n_layers
    return engine.n_text * (2.0 * linear + attention)


def plain(
    lvlm: LVLM,
    engine: MaskEngine,
    bank: MeanBank,
    drawn: Tensor,
    found: tuple[Tensor, float] | None,
    where: torch.device,
    way: str = "plain",
) -> None:
    """Every mask with its whole sequence, or with its text rows behind a cached prefix; as many at
    once as fit."""
    inputs = dict(engine.prompt.inputs)
    keys, values = bank.means(lvlm, engine.prompt)
    means = list(zip(keys, values, strict=True))
    given = hear.arriving(lvlm.module, inputs)
    prefix = hear.remembered(lvlm.module, inputs, means, given) if way == "cached" else None

    def run(x: Tensor) -> Tensor:
        if prefix is not None:
            return hear.cached_batch(lvlm.module, inputs, prefix, x, given)
        return hear.blinded_batch(lvlm.module, inputs, means, x, given)

    best: tuple[float, int, Tensor] | None = None
    for batch in PLAIN_BATCHES:
        x = drawn[:batch].view(-1, lvlm.n_layers, lvlm.n_heads).to(where)
        try:
            run(x)  # warm-up
            states, taken = clock(lambda x=x: run(x), where)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        if best is None or taken / len(x) < best[0]:
            best = (taken / len(x), len(x), states)
        elif taken / len(x) > 1.2 * best[0]:
            break
    assert best is not None
    each, size, states = best
    gain = "" if found is None else f", {each * len(drawn) / found[1]:.1f}x the engine's time"
    print(f"{way} way: {each * len(drawn):.1f} s for {len(drawn):,} ({size} at once){gain}")
    if found is not None:
        ours = found[0][: len(states)].double().cpu() * engine.span + engine.ablated
        theirs = (states.float() @ engine.readouts[0].float()).double().cpu()
        near = correlation(ours, theirs)
        print(f"    the same numbers: correlation {near:.5f} over {len(states)} masks")


def command(engine: MaskEngine, where: torch.device, turn: str) -> None:
    """What `seecause lvlm trace` computes after bank and prefix, and parts of it."""
    _, whole = clock(lambda: trace_answer(engine), where)
    heads, estimated = clock(lambda: attribute_heads(engine), where)
    _, causal = clock(lambda: causal_scores(engine), where)
    _, own = clock(lambda: scan(engine, heads.order()), where)
    orders = random_orders(engine, 2 + ORDERS)
    _, coarse = clock(lambda: scan(engine, orders, points=POINTS), where)
    print(
        f"whole command, {turn}: {whole:.2f} s, of which heads {estimated:.2f}, causal scores"
        f" {causal:.2f}, own curves {own:.2f}, others' {coarse:.2f}"
    )


def derivative(drawn: Tensor, found: Tensor, engine: MaskEngine, where: torch.device) -> None:
    """What a mean derivative costs, and how near each way is to the fit of all responses at hand.
    Its masks are others."""
    many, _, _ = elastic_net(drawn, found.double().cpu(), where)
    top = min(TOP, max(1, len(many) // 4))
    engine.slopes(drawn[:8])  # warm-up
    for how, counts in WAYS:
        for masks in (count for count in counts if how != "fit" or count <= len(drawn)):
            if where.type == "cuda":
                torch.cuda.reset_peak_memory_stats(where)
            made, taken = clock(
                lambda how=how, masks=masks: attribute_heads(engine, how=how, masks=masks, seed=1),
                where,
            )
            peak = torch.cuda.max_memory_allocated(where) / 2**30 if where.type == "cuda" else 0.0
            ours = made.coefficients.flatten()
            common = set(ours.topk(top).indices.tolist()) & set(many.topk(top).indices.tolist())
            ranks = float(spearmanr(ours, many).statistic)
            print(
                f"{how}, {masks:,} masks: {taken:.2f} s, {peak:.1f} GiB; with the fit of"
                f" {len(drawn):,}: Pearson {correlation(ours, many):.3f}, Spearman {ranks:.3f},"
                f" {len(common)} of the largest {top};"
                f" standard error {float(made.standard_error.median()):.5f}"
            )


def measured_ceiling(where: torch.device) -> float | None:
    """The best of a few large bf16 products, FLOP/s; None on a CPU."""
    if where.type != "cuda":
        return None
    best = 0.0
    for m, k, n in ((8192, 8192, 8192), (11000, 4096, 11008), (16384, 4096, 4096)):
        a, b = (
            torch.randn(m, k, device=where, dtype=torch.bfloat16),
            torch.randn(k, n, device=where, dtype=torch.bfloat16),
        )
        for _ in range(10):
            a @ b
        _, taken = clock(lambda a=a, b=b: [a @ b for _ in range(50)], where)
        best = max(best, 50 * 2.0 * m * k * n / taken)
    return best


if __name__ == "__main__":
    cyclopts.run(main)
