"""How a classifier that speaks is read, and where its tokens are: the joints of `classifier`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seecause.errors import NotDefined
from seecause.models.block import same
from seecause.models.layout import At, TokenLayout
from seecause.models.readout import Readout


@dataclass(frozen=True)
class PromptLayout(TokenLayout):
    """Words, the grid of image tokens, words again. Positions are the decoder's."""

    suffix: int = 0  # tokens behind the picture
    places: Callable[[], At] | None = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        return self.prefix + self.n_patches + self.suffix

    @property
    def patches(self) -> slice:
        return slice(self.prefix, self.prefix + self.n_patches)

    def at(self, device: torch.device | str = "cpu") -> At:
        assert self.places is not None
        found = self.places()
        return At(found.index, self, found.memo)


@dataclass(eq=False)
class Spoken(Readout):
    """Reads some rows of the decoder: the words they would say next."""

    rows: tuple[int, ...] = ()

    def read_prefix(self, layout: TokenLayout) -> tuple[int, ...]:
        return self.rows


@dataclass(eq=False)
class Described(Readout):
    """Hands all states of a vision tower to the rest of the model. No single token is read, and no
    mean of them."""

    rest: Callable[[Tensor], Tensor] = same  # states [B, T, D] -> logits [B, C]

    @property
    def has_mean(self) -> bool:
        return True  # attention rows of all patches count alike

    def __call__(self, h: Tensor, layout: TokenLayout) -> Tensor:
        return self.rest(h)


def refuse(pooled: Tensor) -> Tensor:
    """In place of a head on pooled features, for methods that pool by themselves."""
    raise NotDefined(
        "this method",
        "the answer is read from all image tokens by a language model, which no pooled features"
        " replace",
        "Use head scores",
    )
