"""See what causes a vision transformer's answer, and change it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from seecause import bench, data, faithful, heads, lvlm, metrics
    from seecause.attribution.attribute import attribute
    from seecause.attribution.explain import explain
    from seecause.attribution.registry import methods
    from seecause.attribution.result import Attribution
    from seecause.engine.chunks import budget
    from seecause.engine.patching import Site, patch, run
    from seecause.errors import SeecauseError
    from seecause.loading import load, wrap
    from seecause.models.heads import CosineHead, Similarity
    from seecause.repair.eye import eye
    from seecause.repair.transplant import transplant

_WHERE = {
    "Attribution": "seecause.attribution.result",
    "CosineHead": "seecause.models.heads",
    "SeecauseError": "seecause.errors",
    "Similarity": "seecause.models.heads",
    "Site": "seecause.engine.patching",
    "attribute": "seecause.attribution.attribute",
    "budget": "seecause.engine.chunks",
    "explain": "seecause.attribution.explain",
    "eye": "seecause.repair.eye",
    "load": "seecause.loading",
    "methods": "seecause.attribution.registry",
    "patch": "seecause.engine.patching",
    "run": "seecause.engine.patching",
    "transplant": "seecause.repair.transplant",
    "wrap": "seecause.loading",
}

_PACKAGES = ("bench", "data", "faithful", "heads", "lvlm", "metrics")

__all__ = [
    "Attribution",
    "CosineHead",
    "SeecauseError",
    "Similarity",
    "Site",
    "attribute",
    "bench",
    "budget",
    "data",
    "explain",
    "eye",
    "faithful",
    "heads",
    "load",
    "lvlm",
    "methods",
    "metrics",
    "patch",
    "run",
    "transplant",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `import seecause` loads neither torch nor a model library."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"seecause.{name}")
    raise AttributeError(f"module 'seecause' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
