"""Which heads carry the picture into the answer (head attribution, Kim et al. 2025).

beta_n = mean of F over masks with head n on, less the mean with it off, the other heads at random
(a q-weighted Banzhaf value)
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from seecause.errors import BadOption, DataMissing
from seecause.lvlm.engine import MaskEngine
from seecause.lvlm.masks import Law
from seecause.lvlm.regress import Regression, Sampling, regress

VALUES, CARD = "coefficients.safetensors", "attribution.json"
Head = tuple[int, int]  # (layer, head), both from 0


@dataclass(frozen=True, eq=False)
class HeadAttribution:
    """One coefficient for each head: the share of the picture's effect on the answer that it
    brings."""

    coefficients: Tensor  # [L, H] float64, on the CPU
    intercept: float
    r2: float  # on masks the fit has not seen
    pearson: float
    masks: int
    agreement: float  # of two half fits
    protocol: dict[str, Any] = field(default_factory=dict)

    def order(self) -> Tensor:
        """Component indices l * H + h from the largest coefficient down, [L*H]."""
        return self.coefficients.flatten().argsort(descending=True, stable=True)

    def top(self, k: int) -> list[Head]:
        """The `k` heads with the largest coefficients."""
        if not 0 <= k <= self.coefficients.numel():
            raise BadOption("k", k, f"a count up to {self.coefficients.numel()}")
        return [divmod(i, self.coefficients.shape[1]) for i in self.order()[:k].tolist()]

    def mask(self, k: int) -> Tensor:
        """The top k heads on, the others off: [L*H]."""
        on = torch.zeros(self.coefficients.numel(), dtype=torch.bool)
        on[self.order()[:k]] = True
        return on

    def save(self, folder: str | Path) -> Path:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / VALUES).write_bytes(save({"coefficients": self.coefficients.contiguous()}))
        rest = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "coefficients"
        }
        (folder / CARD).write_text(json.dumps(rest, indent=2) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> HeadAttribution:
        folder = Path(folder)
        if not (folder / CARD).is_file() or not (folder / VALUES).is_file():
            raise DataMissing(
                str(folder),
                f"no {VALUES} and {CARD} there",
                "give a folder that HeadAttribution.save wrote",
            )
        return cls(
            load_file(folder / VALUES)["coefficients"],
            **json.loads((folder / CARD).read_text(encoding="utf-8")),
        )


def attribute_heads(
    engine: MaskEngine,
    *,
    masks: int = 10_000,
    p: float = 0.75,
    law: Law = "bernoulli",
    split: float = 0.8,
    alpha: float = 5e-4,
    l1_ratio: float = 0.5,
    seed: int = 0,
    adaptive: bool = False,
    agreement: float = 0.9,
    step: int = 1000,
) -> HeadAttribution:
    """Ablate a share `p` of all heads at random, `masks` times, and fit. Use another `seed` for
    each picture: shared masks correlate their errors.

    `adaptive` asks `step` masks at a time, at most `masks`, until coefficients from two halves of
    them correlate by `agreement`.
    """
    how = Sampling(masks, p, law, split, alpha, l1_ratio, seed, adaptive, agreement, step)
    found = regress(engine.evaluate, engine.n_components, how, engine.lvlm.device)
    grid = found.coefficients.reshape(engine.lvlm.n_layers, engine.lvlm.n_heads)
    return HeadAttribution(
        grid,
        found.intercept,
        found.r2,
        found.pearson,
        found.masks,
        found.agreement,
        protocol(engine, how, found),
    )


def protocol(engine: MaskEngine, how: Sampling, found: Regression) -> dict[str, Any]:
    """How a fit was made."""
    return {
        **engine.protocol(),
        "sampling": dataclasses.asdict(how),
        "converged": found.converged,
        "history": found.history,
    }
