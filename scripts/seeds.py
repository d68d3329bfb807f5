"""How studies that train several seeds write a number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    if not values:
        return "-"
    return percent(statistics.fmean(values)) + (
        f" ± {percent(statistics.stdev(values))}" if len(values) > 1 else ""
    )
