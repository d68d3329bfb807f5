"""`sc.doctor`: every check of a model that needs no images of the user's, made anew.

Probes compare the view with the native model (`engine/verify.py`, `lvlm/model.py`). Proofs show
that edits reach the native computation, and move it to where the engine computes that they do
(`engine/canary.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from seecause.engine import canary, verify
from seecause.faithful.interventions import prove
from seecause.faithful.net import IFAM
from seecause.loading import as_view
from seecause.lvlm import edit, model as language
from seecause.lvlm.model import LVLM
from seecause.models.base import ImageModel
from seecause.results import Result


@dataclass(frozen=True, eq=False, repr=False)
class Checkup(Result):
    """The checks that a model passed, of which those of edits have `moved` something."""

    model: str
    checks: Sequence[verify.Probe]

    def numbers(self) -> dict[str, float]:
        """The error of every check, and how far each known edit moved the output; both are relative
        to the largest output."""
        rows = self.rows()
        moved = {f"{row['name']}, moved": row["moved"] for row in rows if row["moved"] is not None}
        return {row["name"]: row["error"] for row in rows} | moved

    def rows(self) -> list[dict[str, Any]]:
        """One row for each check: `name`, `moved` (None where nothing was edited), `error` and what
        was `compared`."""
        return [
            {
                "name": check.name,
                "moved": getattr(check, "moved", None),
                "error": check.worst,
                "compared": check.compared,
            }
            for check in self.checks
        ]


def doctor(model: ImageModel | LVLM | nn.Module) -> Checkup:
    """Check a model: does its view compute what the model computes, and do edits reach it?

    Args:
        model: What `sc.load`, `sc.wrap`, `sc.lvlm.load` or `sc.lvlm.wrap` returns, an iFAM network,
            or a native classifier.

    Returns:
        A `Checkup`, with one row for each check.

    Raises:
        ViewMismatch: If the view does not compute what the model computes.
        EditLost: If an edit does not reach the native computation, or moves it elsewhere.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> [row["name"] for row in sc.doctor(model).rows()]
        ['logits', 'blocks', 'attention', 'locality', 'gates', 'patch']
    """
    if isinstance(model, LVLM):
        model.forget()
        return Checkup(model.name, [*language.verify(model), *edit.proofs(model)])
    view = as_view(model)
    view.memo.pop("proven weights", None)
    checks = [*verify.verify(view), *canary.proofs(view)]
    if isinstance(view.module, IFAM):
        view.module.graphs.memo.pop("proven weights", None)
        checks += prove(view.module)
    return Checkup(view.name, checks)
