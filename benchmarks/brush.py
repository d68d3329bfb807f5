"""How long does the page's brush take, without the network?

    python benchmarks/brush.py                                       # on a GPU, where there is one
    python benchmarks/brush.py --device cpu --models builtin:critters-vit

The function behind the Explain panel, called as the server calls it: a picture is opened, then one
patch after the other is brushed, up to 40 at once. Printed for each model: the opening, which
records the picture, the first answer, which records the blank, and the median and the slowest of
the others. Weights of timm's models are random: the arithmetic is the same.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cyclopts
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import heading, row, title
from seecause.app.panels import OnPicture
from seecause.app.panels.explain import Brush, brush, look
from seecause.app.sessions import Sessions
from seecause.app.state import ActionContext, open_state
from seecause.loading import load

WARM_UPS, BRUSHED = 5, 40


def main(
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    models: str = "builtin:critters-vit,timm:vit_base_patch16_224,timm:vit_large_patch16_224",
    strokes: int = 200,
) -> None:
    """Measure and print one row for each model."""
    title(torch.device(device), "float32", f"{strokes} strokes")
    heading("model", "opening, ms", "first, ms", "median, ms", "slowest, ms")

    def drawn(spec: str) -> Any:
        return load(spec, weights="random" if spec.startswith("timm:") else None, device=device)

    state = open_state(models.split(","), load=drawn)
    for key, served in state.models.items():
        context = ActionContext(
            state, Sessions().open(), served, lambda share, words="": None, served.view
        )
        opening, first, *taken = [1e3 * seconds for seconds in brushing(context, key, strokes)]
        taken = taken[WARM_UPS:]
        row(key, *(f"{ms:.1f}" for ms in (opening, first, statistics.median(taken), max(taken))))
    state.close()


def brushing(context: ActionContext, model: str, strokes: int) -> list[float]:
    """Seconds of the opening, and of one stroke after the other. An answer holds Python's numbers:
    it waits for the GPU."""
    draw, patches = random.Random(0), list(range(context.model.layout.n_patches))
    begins = time.perf_counter()
    look(context, OnPicture(model=model, picture="s0"))
    taken = [time.perf_counter() - begins]
    draw.shuffle(patches)
    for stroke in range(1, 2 + strokes + WARM_UPS):
        chosen = tuple(patches[place % len(patches)] for place in range(stroke)[-BRUSHED:])
        begins = time.perf_counter()
        brush(context, Brush(model=model, picture="s0", patches=chosen))
        taken.append(time.perf_counter() - begins)
    return taken


if __name__ == "__main__":
    cyclopts.run(main)
