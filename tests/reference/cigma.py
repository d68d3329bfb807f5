"""CIGMA by definition: one image, one mask, one head and one native forward at a time.

A head is removed by zeroing its columns of the output projection; it is replaced by a hook there
(which `nn.MultiheadAttention` never calls). Divergences are the textbook sums. Nothing of the
package is used.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]


def js(p: Tensor, q: Tensor) -> float:
    """Of two distributions [C]: half the divergence of each from their mean."""
    total = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        m = (a + b) / 2
        total += (a * math.log(a / m) if a > 0 else 0) / 2 + (
            b * math.log(b / m) if b > 0 else 0
        ) / 2
    return total


def answer(forward: Forward, image: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.softmax(forward(image[None])[0] / temperature, dim=-1)


def erased(image: Tensor, keep: Tensor, fill: str = "grey") -> Tensor:
    """The picture [3, H, W] where `keep` [H, W]; elsewhere 0, the grey of normalised pictures, or
    its mean colour."""
    new = image.clone()
    for channel in range(3):
        new[channel][~keep] = image[channel].mean() if fill == "mean" else 0.0
    return new


def projection(block: nn.Module) -> nn.Linear:
    """The output projection of a native block, under any of its names."""
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear) and name.split(".")[-1] in (
            "proj",
            "o_proj",
            "out_proj",
            "attn_out_proj",
            "projection_layer",
        ):
            return part
        if name.endswith("output.dense") and "attention" in name:
            return part  # type: ignore[return-value]
    raise AssertionError(f"no output projection in {type(block).__name__}")


@contextmanager
def without(block: nn.Module, head: int, width: int) -> Iterator[None]:
    """The block with one head's columns of the output projection at zero."""
    weight = projection(block).weight
    columns = slice(head * width, (head + 1) * width)
    with torch.no_grad():
        before = weight[:, columns].clone()
        weight[:, columns] = 0
        try:
            yield
        finally:
            weight[:, columns] = before


@contextmanager
def carrying(block: nn.Module, head: int, width: int, content: Tensor) -> Iterator[None]:
    """The block whose head brings `content` [T, dh] to the output projection."""

    def put(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        new = args[0].clone()
        new[..., head * width : (head + 1) * width] = content
        return (new,)

    handle = projection(block).register_forward_pre_hook(put)
    try:
        yield
    finally:
        handle.remove()


def carried(forward: Forward, block: nn.Module, image: Tensor) -> Tensor:
    """What arrives at a block's output projection in a plain run, [T, H * dh]."""
    seen: list[Tensor] = []
    handle = projection(block).register_forward_pre_hook(
        lambda module, args: seen.append(args[0][0].clone())
    )
    try:
        forward(image[None])
    finally:
        handle.remove()
    return seen[0]


def gains(
    forward: Forward, image: Tensor, keep: Tensor, temperature: float = 1.0, fill: str = "grey"
) -> tuple[float, float]:
    """FIG and BIG of one image."""
    whole = answer(forward, image, temperature)
    return js(whole, answer(forward, erased(image, ~keep, fill), temperature)), js(
        whole, answer(forward, erased(image, keep, fill), temperature)
    )


def head_effects(
    images: int,
    blocks: Sequence[nn.Module],
    heads: int,
    width: int,
    measure: Callable[[int], float],
    changed: Callable | None = None,
) -> Tensor:
    """measure(i) - measure(i) without the head, for every image, layer and head: [B, L, H].
    `changed(i, layer, head)` gives another context than zeroing."""
    table = torch.zeros(images, len(blocks), heads, dtype=torch.float64)
    for i in range(images):
        whole = measure(i)
        for layer, block in enumerate(blocks):
            for head in range(heads):
                with without(block, head, width) if changed is None else changed(i, layer, head):
                    table[i, layer, head] = whole - measure(i)
    return table


def mask(
    forward: Forward,
    image: Tensor,
    *,
    steps: int,
    grid: int,
    rate: float,
    weights: tuple[float, float, float],
    init: float = 0.5,
    sigmoid: bool = False,
) -> Tensor:
    """The soft mask [g, g] of one image, by torch's own Adam."""
    with torch.no_grad():
        whole = answer(forward, image)
    base = image.mean(dim=(1, 2), keepdim=True)
    start = math.log(init / (1 - init)) if sigmoid else init
    raw = torch.full((grid, grid), start, dtype=image.dtype, requires_grad=True)
    optimiser = torch.optim.Adam([raw], lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        m = raw.sigmoid() if sigmoid else raw
        large = F.interpolate(
            m[None, None], size=image.shape[1:], mode="bilinear", align_corners=False
        )[0]
        p = answer(forward, large * image + (1 - large) * base)
        middle = (p + whole) / 2
        divergence = ((p * (p / middle).log()).sum() + (whole * (whole / middle).log()).sum()) / 2
        rough = (m[1:] - m[:-1]).abs().mean() + (m[:, 1:] - m[:, :-1]).abs().mean()
        (weights[0] * divergence + weights[1] * m.mean() + weights[2] * rough).backward()
        optimiser.step()
        if not sigmoid:
            with torch.no_grad():
                raw.clamp_(0, 1)
    return (raw.sigmoid() if sigmoid else raw).detach()


@contextmanager
def gated(blocks: Sequence[nn.Module], gates: Tensor, width: int) -> Iterator[None]:
    """Every head of every block multiplied by its gate [L, H] at the output projection."""

    def multiply(level: int) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        return lambda module, args: (args[0] * gates[level].repeat_interleave(width),)

    handles = [
        projection(block).register_forward_pre_hook(multiply(level))
        for level, block in enumerate(blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def second_order(
    forward: Forward,
    blocks: Sequence[nn.Module],
    heads: int,
    width: int,
    image: Tensor,
    keep: Tensor,
    signs: Tensor,
) -> Tensor:
    """What BIG of one image is guessed to lose without each head [L, H], from the whole Jacobian of
    both answers in all gates and one probe with the given signs [C]."""
    pair = torch.stack([image, erased(image, keep)])

    def answers(gates: Tensor) -> Tensor:
        with gated(blocks, gates, width):
            return torch.log_softmax(forward(pair), dim=-1)

    whole = torch.ones(len(blocks), heads, dtype=image.dtype)
    log_p, log_q = answers(whole)
    by_gate = torch.autograd.functional.jacobian(answers, whole)  # [2, C, L, H]
    p, q = log_p.exp(), log_q.exp()
    m = (p + q) / 2
    guesses = torch.zeros_like(whole)
    now, most = js(p, q), math.log(2)
    for level in range(len(blocks)):
        for head in range(heads):
            of_p, of_q = by_gate[0, :, level, head], by_gate[1, :, level, head]
            slope = (p * of_p * (log_p - m.log()) + q * of_q * (log_q - m.log())).sum() / 2
            apart = of_p - of_q
            probe = (signs * m.sqrt() * (apart - (m * apart).sum())).sum()
            x = -most * math.log(1 - now / most)
            moved = max(0.0, x - float(slope) / (1 - now / most) + 0.6 * float(probe) ** 2 / 8)
            guesses[level, head] = now - most * (1 - math.exp(-moved / most))
    return guesses
