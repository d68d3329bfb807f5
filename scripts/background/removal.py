"""What `evidence_background.py` does with heads: every method scores them on one half of the pets,
and the model without them is measured on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.background.audit import bits, shares, unbits
from scripts.background.photos import Study
from scripts.head_methods import GREY, PRINTED, cigma, contrastive_gating, controls
from seecause.errors import NothingRight
from seecause.heads import Erasure, HeadScores, Masks, Swapped, regress, select
from seecause.heads.erase import ErasedViews
from seecause.heads.gains import jensen_shannon, log_probs
from seecause.heads.outcomes import logits_without
from seecause.heads.scores import Head

AFTER = ("true masks, grey", "discovered masks, mean")  # looks that are measured without heads too
SWAP = "another breed's photo"
ENDS = {
    "weight norm": "largest weight norm", "output norm": "largest output norm",
    "taylor": "smallest Taylor", "attention mass": "most attention on background",
    "loss change": "largest loss change",
}  # fmt: skip  # which end goes first, where a method's name does not say
BESIDE = {
    "accuracy": "accuracy",
    "shut": "facilitation",
}  # what is kept with scores, and where `HeadScores.after` has it
OPEN = 0.5  # a gate above it is open (Nam et al. 2025)
Row = dict[str, Any]
Heads = tuple[Head, ...]


def scorers(
    study: Study, masks: Masks, known: Row
) -> dict[str, Callable[[], dict[str, HeadScores]]]:
    """Methods that choose heads, in the order they run. All see the same photos: those of the first
    half that are answered right."""
    rows = ((study.half == 0) & unbits(known["pets"]["top 1"])).nonzero()[:, 0]
    if len(rows) == 0:
        raise NothingRight("none of the pets that heads are chosen on")
    here, model, sizes = rows.to(study.model.device), study.model, study.sizes
    images, labels, shapes = study.pets.images[here], study.pets.labels[here], study.shapes[here]  # type: ignore[index]
    truth, own = Masks.oracle(shapes), masks.take(rows)
    swap = Swapped(
        study.swapped.background[here],
        None if study.swapped.foreground is None else study.swapped.foreground[here],
    )
    draws = max(
        sizes.regression_draws, -(-2 * model.n_layers * model.n_heads // len(rows))
    )  # few photos need more
    gating: Row = {
        "fits": sizes.gating_masks,
        "steps": sizes.gating_steps,
        "batch": sizes.gating_batch,
        "seed": study.seed,
    }

    def by_look(**looks: Erasure) -> dict[str, HeadScores]:
        return cigma(model, images, labels, looks)

    def fitted(fit: Callable[[], HeadScores], name: str) -> dict[str, HeadScores]:
        with study.fastly():
            return {name: fit()}

    return {
        "discovered masks": lambda: by_look(
            **{PRINTED: Erasure(own, "mean"), "cigma, discovered masks, grey": Erasure(own, "grey")}
        ),
        "true masks": lambda: by_look(
            **{"cigma, true masks": Erasure(truth, "mean"), GREY: Erasure(truth, "grey")}
        ),
        "swap": lambda: by_look(**{"cigma, another breed's photo": Erasure(None, swap)}),
        "regression": lambda: {
            "regression, true masks, grey": regress(
                model, images, truth, draws=draws, target=labels, seed=study.seed
            )
        },
        "controls": lambda: controls(model, images, labels, truth),
        "gating": lambda: fitted(
            lambda: select("gating", model, images, labels, **gating), "gating"
        ),
        "contrastive gating": lambda: fitted(
            lambda: contrastive_gating(model, images, labels, shapes, **gating),
            "gating, contrastive",
        ),
    }


def records(make: Callable[[], dict[str, HeadScores]]) -> Row:
    """By method: scores, their errors, and accuracy without each head where it was measured. Of
    gating, interference (1 - G+) and G-, without a rule."""
    tables = {
        method: {
            "value": one.after.get("interference", one.value),
            "error": one.error,
            **{name: one.after.get(key) for name, key in BESIDE.items()},
        }
        for method, one in make().items()
    }
    return {
        method: {name: None if table is None else table.tolist() for name, table in some.items()}
        for method, some in tables.items()
    }


def methods(found: Row) -> dict[str, Row]:
    """Records of every finished method, under the name that is printed."""
    kept = {
        method: one
        for name, some in found.items()
        if name.startswith("scores, ")
        for method, one in some.items()
    }
    return {
        ENDS.get(method, method): interfering(one) if method.startswith("gating") else one
        for method, one in kept.items()
    }


def interfering(record: Row) -> Row:
    """Gating with scores above 0 only for heads it calls interfering: 1 - G+ where both gates are
    shut in the mean over fits, else -G+.

    A record without G- goes by G+ alone.
    """
    opened = 1 - torch.tensor(record["value"], dtype=torch.float64)
    shut = (
        torch.zeros_like(opened)
        if record.get("shut") is None
        else torch.tensor(record["shut"], dtype=torch.float64)
    )
    return {
        **record,
        "value": torch.where((opened <= OPEN) & (shut <= OPEN), 1 - opened, -opened).tolist(),
    }


def best(record: Row, k: int) -> Heads:
    """The `k` heads with the highest scores, fewer if fewer are above 0."""
    return tuple(sorted(HeadScores(torch.tensor(record["value"], dtype=torch.float64)).top(k)))


def measured(found: Row) -> dict[Heads, Row]:
    """Every removal that is finished, by the heads that went: it does not matter who chose them."""
    rows = (row for kept in found.values() if isinstance(kept, list) for row in kept)
    return {tuple(sorted((layer, head) for layer, head in row["heads"])): row for row in rows}


def spelled(heads: Heads) -> str:
    """layer.head, both from 0."""
    return " ".join(f"{layer}.{head}" for layer, head in heads)


@dataclass
class Bench:
    """Photos of the half that was not scored, and of ImageNet, in one stack: every set of heads is
    removed under the same eyes."""

    study: Study
    stack: Tensor  # [P, 3, H, W]
    counts: dict[str, int]  # by what they are, in order
    labels: Tensor  # of the pets
    right: Tensor  # [pets of this half] bool: BIR is that of what the whole model answers right
    back: Tensor  # [pets] whose animal stands on each pet's background in the first mixed_rand
    known: dict[Heads, Row] = field(default_factory=dict)  # methods often choose the same heads

    @classmethod
    def of(cls, study: Study, masks: Masks, found: Row) -> Bench:
        """With what `found` has of removals already."""
        rows = (study.half == 1).nonzero()[:, 0]
        here, made = rows.to(study.model.device), study.composites
        place = torch.full((len(study.half),), -1).index_copy(0, rows, torch.arange(len(rows)))
        right = unbits(found["plain"]["pets"]["top 1"])[rows]
        sure = rows[right]
        if len(sure) == 0:
            raise NothingRight("none of the pets that numbers are taken on")
        pictures = {"imagenet": study.imagenet.images, "pets": study.pets.images[here]}
        pictures |= {
            name: study.seen(stack[:, here].flatten(0, 1)) for name, stack in made.mixed.items()
        }
        for look in (
            Erasure(Masks.oracle(study.shapes[sure.to(here.device)]), "grey"),
            Erasure(masks.take(sure), "mean"),
        ):
            erased = ErasedViews(
                study.model, study.pets.images[sure.to(here.device)], look.masks, look.baseline
            ).erased(slice(None))
            assert erased.no_foreground is not None
            pictures |= {
                f"{look.name}, no background": erased.no_background,
                f"{look.name}, no foreground": erased.no_foreground,
            }
        assert study.pets.labels is not None
        back = place[made.donors["mixed_rand"][0].argsort()[rows]]
        counts = {name: len(some) for name, some in pictures.items()}
        return cls(
            study,
            torch.cat(list(pictures.values())),
            counts,
            study.pets.labels[here],
            right,
            back,
            measured(found),
        )

    def without(self, sets: Sequence[Sequence[Head]]) -> list[Row]:
        """What each photo does without each set of heads."""
        with self.study.fastly():
            wanted = [tuple(heads) for heads in sets]
            self.known |= {
                heads: self._one(heads)
                for heads in dict.fromkeys(wanted)
                if heads not in self.known
            }
            return [self.known[heads] for heads in wanted]

    @torch.no_grad()
    def _one(self, heads: Sequence[Head]) -> Row:
        logits = logits_without(self.study.model, self.stack, [heads])[0]
        found = dict(zip(self.counts, logits.split(list(self.counts.values())), strict=True))
        assert self.study.imagenet.labels is not None
        row: Row = {
            "heads": [list(head) for head in heads],
            "imagenet": bits(found["imagenet"].argmax(dim=1) == self.study.imagenet.labels),
        }
        row["pets"] = bits(found["pets"].argmax(dim=1) == self.labels)
        mixed = {
            name: found[name].unflatten(0, (-1, len(self.labels)))
            for name in ("mixed_same", "mixed_rand")
        }  # [draws, pets, C]
        row |= {name: shares(some.argmax(dim=-1) == self.labels) for name, some in mixed.items()}
        sure = self.right.to(logits.device)
        answers = log_probs(found["pets"])[sure]
        versions = {
            name: (found[f"{name}, no foreground"], found[f"{name}, no background"])
            for name in AFTER
        }
        versions[SWAP] = (
            mixed["mixed_rand"][0][self.back.to(logits.device)][sure],
            mixed["mixed_rand"][0][sure],
        )
        gains = {
            name: [jensen_shannon(answers, log_probs(view)).tolist() for view in views]
            for name, views in versions.items()
        }  # FIG, BIG
        row["gains"] = {
            name: [[float(f"{v:.6g}") for v in values] for values in pair]
            for name, pair in gains.items()
        }
        return row
