"""Max-min diversity, token by token, pair by pair."""

import torch
from torch import Tensor


def most_diverse(tokens: Tensor, count: int) -> set[int]:
    """The greedy choice among tokens [N, D]."""

    def distance(i: int, j: int) -> float:
        return 1 - float(torch.cosine_similarity(tokens[i], tokens[j], dim=0))

    everyone = range(len(tokens))
    chosen = [max(everyone, key=lambda i: min(distance(i, j) for j in everyone if j != i))]
    while len(chosen) < count:
        rest = [j for j in everyone if j not in chosen]
        chosen.append(max(rest, key=lambda j: min(distance(j, s) for s in chosen)))
    return set(chosen)
