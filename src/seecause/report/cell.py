"""One cell of a coloured grid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A coloured value: how strong, for or against, and what is written in it."""

    strength: int  # percent of the full colour
    sign: str
    text: str
    said: str
    chosen: bool = False
