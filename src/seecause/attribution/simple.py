"""Simple insertion and deletion (CAAP, table 12): the same neighbourhoods, moved as pixels instead
of activations.

Insertion pastes the picture's pixels at S(i) into the blank and reads the class score; deletion
covers them with the blank and takes the drop of the score. One forward per patch. For patch
embeddings without overlap this is activation patching at the embedding (l_s = l_e = 0, tail = all),
which the tests use as a cross-check of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.registry import Maps, method
from seecause.attribution.select import Select, selection
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import batched, fit, in_chunks
from seecause.models.base import ImageModel
from seecause.models.layout import pixel_cells
from seecause.target import Score, Target


@method(
    "simple-insertion",
    forwards="N",
    needs="logits",
    architectures=("transformer", "staged", "dense"),
)
@torch.no_grad()
def simple_insertion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The class score of the blank with one neighbourhood of pixels pasted in."""
    bound = target.bind(_plain(model, images)) if target.open else target
    empty, marks = _prepare(model, images, select, blank, seed)
    return Maps(_scores(model, empty.expand_as(images), images, marks, bound, score), bound)


@method(
    "simple-deletion",
    forwards="N + 1",
    needs="logits",
    architectures=("transformer", "staged", "dense"),
    signed=True,
)
@torch.no_grad()
def simple_deletion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The drop of the class score when one neighbourhood is covered."""
    logits = _plain(model, images)
    bound = target.bind(logits)
    plain = bound.score(logits, score, sigmoid=model.sigmoid)
    empty, marks = _prepare(model, images, select, blank, seed)
    return Maps(
        plain[:, None] - _scores(model, images, empty.expand_as(images), marks, bound, score), bound
    )


def _prepare(
    model: ImageModel, images: Tensor, select: Select | Tensor, blank: Blank | Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """The blank [1, 3, H, W] and the pixels of every neighbourhood [N, H, W]."""
    layout = model.check(images)
    size = (images.shape[-2], images.shape[-1])
    chosen = (
        selection(layout.cells, select).to(images.device).unflatten(1, layout.grid)
    )  # [N, gh, gw]
    rows, columns = (
        pixel_cells(side, cells, images.device)
        for side, cells in zip(size, layout.grid, strict=True)
    )
    marks = chosen[:, rows[:, None], columns]  # [N, H, W]
    return blank_image(model, size, blank, seed=seed), marks


def _scores(
    model: ImageModel, below: Tensor, above: Tensor, marks: Tensor, target: Target, score: Score
) -> Tensor:
    """Scores [B, N] of `below` with `above` pasted at each mark; as many at a time as fit, of
    whatever images."""
    n, total = len(marks), len(below) * len(marks)

    def run_chunk(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=below.device)  # of B * N
        image, patch = item // n, item % n
        mixed = torch.where(marks[patch][:, None], above[image], below[image])  # [m, 3, H, W]
        return target.take(image).score(model(mixed), score, sigmoid=model.sigmoid)

    together = fit(total, model.forward_bytes(model.check(below)), below.device)
    return torch.cat(list(in_chunks(run_chunk, total, together, what="patches"))).view(-1, n)


def _plain(model: ImageModel, images: Tensor) -> Tensor:
    """Logits of the pictures as they are, [B, C]."""
    return batched(
        model, images, fit(len(images), model.forward_bytes(model.check(images)), images.device)
    )
