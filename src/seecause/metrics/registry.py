"""The list of metrics: what each needs, what it gives, and which way is better.

    given = Given(model, images, maps, target, masks=masks)
    measure("insertion-deletion", given)            # {"insertion": [B], "deletion": [B], "ins-del":
    [B]}

A new metric is a function in its own file and an entry here. One entry gives several columns where
they share their forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from seecause.errors import BadOption, UnknownName
from seecause.metrics._probe import Explain
from seecause.metrics.complexity import complexity
from seecause.metrics.energy import energy
from seecause.metrics.fidelity import faithfulness_estimate, infidelity, mu_fidelity, sensitivity_n
from seecause.metrics.insertion_deletion import insertion_deletion
from seecause.metrics.localization import localization
from seecause.metrics.parts import part_truth
from seecause.metrics.perturbation import perturbation, removal
from seecause.metrics.road import road
from seecause.metrics.saco import saco
from seecause.metrics.sanity import Attribute, parameter_randomisation, random_logit
from seecause.metrics.stability import stability
from seecause.models.base import ImageModel
from seecause.target import Spec

if TYPE_CHECKING:
    from seecause.critters import Latents

Direction = Literal["higher", "lower"]  # is better


@dataclass(frozen=True, eq=False)
class Given:
    """What a runner has. A metric that needs something that is None is refused."""

    model: ImageModel | None = None
    images: Tensor | None = None
    maps: Tensor | None = None
    target: Spec = None
    masks: Tensor | None = None
    explain: Explain | None = None  # the method on this model
    attribute: Attribute | None = None  # the method on any model
    latents: Latents | None = None  # of Critters


@dataclass(frozen=True)
class Column:
    """One number for each image: where the result holds it (nowhere: it is the result), and which
    way is better."""

    better: Direction
    field: str = ""


@dataclass(frozen=True)
class Metric:
    """One entry of the registry. `takes` names the fields of `Given` that the function is called
    with, in order."""

    name: str
    run: Callable[..., Any]
    takes: tuple[str, ...]
    columns: Mapping[str, Column]

    @property
    def needs(self) -> tuple[str, ...]:
        """Of masks, model, explain, attribute and latents: what it cannot do without."""
        return tuple(
            name
            for name in ("masks", "model", "explain", "attribute", "latents")
            if name in self.takes
        )

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").split("\n")[0]

    def missing(self, given: Given) -> tuple[str, ...]:
        """What it takes and `given` does not have; without a target the predicted class is
        meant."""
        return tuple(
            need for need in self.takes if need != "target" and getattr(given, need) is None
        )

    def result(self, given: Given, **options: Any) -> Any:
        """What the function returns, with everything it knows beside its columns."""
        for need in self.missing(given):
            raise BadOption(need, None, f"a value: {self.name} needs it")
        return self.run(*(getattr(given, need) for need in self.takes), **options)

    def read(self, found: Any) -> dict[str, Tensor]:
        """The columns of a result, each [B]."""
        return {
            name: attrgetter(column.field)(found) if column.field else found
            for name, column in self.columns.items()
        }


_MAP = ("maps",)
_MASK = ("maps", "masks")
_MODEL = ("model", "images", "maps", "target")
_EXPLAIN = ("model", "images", "explain", "target")
_ATTRIBUTE = ("model", "images", "attribute", "target")
_HIGH, _LOW = Column("higher"), Column("lower")

METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "insertion-deletion",
            insertion_deletion,
            _MODEL,
            {
                "insertion": Column("higher", "insertion_area"),
                "deletion": Column("lower", "deletion_area"),
                "ins-del": Column("higher", "difference"),
            },
        ),
        Metric(
            "perturbation",
            perturbation,
            _MODEL,
            {
                "aopc-morf": Column("higher", "aopc_morf"),
                "aopc-lerf": Column("lower", "aopc_lerf"),
                "abpc": Column("higher", "abpc"),
                "pixel-flipping": Column("lower", "flipping_area"),
            },
        ),
        Metric(
            "removal",
            removal,
            _MODEL,
            {
                "comprehensiveness": Column("higher", "comprehensiveness"),
                "sufficiency": Column("lower", "sufficiency"),
                "log-odds": Column("lower", "log_odds"),
            },
        ),
        Metric("mu-fidelity", mu_fidelity, _MODEL, {"mu-fidelity": _HIGH}),
        Metric("sensitivity-n", sensitivity_n, _MODEL, {"sensitivity-n": _HIGH}),
        Metric(
            "faithfulness-estimate", faithfulness_estimate, _MODEL, {"faithfulness-estimate": _HIGH}
        ),
        Metric("infidelity", infidelity, _MODEL, {"infidelity": _LOW}),
        Metric("saco", saco, _MODEL, {"saco": _HIGH}),
        Metric(
            "road",
            road,
            _MODEL,
            {
                "road-morf": Column("lower", "morf_mean"),
                "road-lerf": Column("higher", "lerf_mean"),
                "road": Column("higher", "combined"),
            },
        ),
        Metric(
            "localization",
            localization,
            _MASK,
            {
                "aupr1": Column("higher", "aupr1"),
                "aupr0": Column("higher", "aupr0"),
                "pointing": Column("higher", "pointing"),
            },
        ),
        Metric(
            "energy",
            energy,
            _MASK,
            {
                "energy-pointing": Column("higher", "energy"),
                "relevance-mass": Column("higher", "mass"),
                "relevance-rank": Column("higher", "rank"),
                "top-k": Column("higher", "top"),
            },
        ),
        Metric(
            "complexity",
            complexity,
            _MAP,
            {"gini": Column("higher", "gini"), "entropy": Column("lower", "entropy")},
        ),
        Metric(
            "stability",
            stability,
            _EXPLAIN,
            {
                "max-sensitivity": Column("lower", "max_sensitivity"),
                "avg-sensitivity": Column("lower", "avg_sensitivity"),
            },
        ),
        Metric(
            "random-logit",
            random_logit,
            _EXPLAIN,
            {
                "random-logit": Column("lower", "signed"),
                "random-logit-abs": Column("lower", "absolute"),
            },
        ),
        Metric(
            "parameter-randomisation",
            parameter_randomisation,
            _ATTRIBUTE,
            {"mprt": Column("lower", "signed"), "mprt-abs": Column("lower", "absolute")},
        ),
        Metric(
            "parts",
            part_truth,
            ("model", "latents", "explain"),
            {
                "part-correctness": Column("higher", "correctness"),
                "part-contrastivity": Column("higher", "contrastivity"),
                "background-independence": Column("higher", "background_independence"),
            },
        ),
    )
}


def find(name: str) -> Metric:
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return METRICS[name]


def measure(name: str, given: Given, **options: Any) -> dict[str, Tensor]:
    """The columns of one metric, each [B]. `options` are the metric's own."""
    metric = find(name)
    return metric.read(metric.result(given, **options))
