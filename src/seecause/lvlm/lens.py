"""What the important heads would say on their own (logit lens; head attribution, section 4.4).

A head's output at one text row goes through the final norm and the vocabulary, and the words with
the largest logits are read. The paper leaves row and norm open: here the last row, with the norm;
`image_only` reads the part of the output that comes from image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from seecause.lvlm.attribute import HeadAttribution
from seecause.lvlm.engine import MaskEngine


@dataclass(frozen=True)
class HeadWords:
    layer: int
    head: int
    coefficient: float
    words: tuple[str, ...]  # the likeliest first

    def says(self, word: str) -> bool:
        return word.strip().lower() in (other.strip().lower() for other in self.words)


def head_words(
    engine: MaskEngine,
    found: HeadAttribution,
    *,
    heads: int = 5,
    words: int = 10,
    row: int = -1,
    image_only: bool = False,
) -> list[HeadWords]:
    """The `words` likeliest words of each of the top `heads` heads, in the intact model."""
    seen = engine.look()
    said = []
    for layer, head in found.top(min(heads, engine.n_components)):
        logits = seen.lens(layer, head, row=row, image_only=image_only)
        pieces = engine.lvlm.pieces(logits.topk(min(words, len(logits))).indices)
        said.append(
            HeadWords(
                layer,
                head,
                float(found.coefficients[layer, head]),
                tuple(piece.strip() for piece in pieces),
            )
        )
    return said
