"""Slow twins of last layers: Newton's method with the whole Hessian, and directions taken out
of features instead of the layer."""

import torch
from torch import Tensor


def balanced(labels: Tensor, classes: int) -> Tensor:
    counts = torch.stack([(labels == kind).sum() for kind in range(classes)]).double()
    weights = torch.stack([1 / counts[int(label)] for label in labels])
    return weights * len(labels) / weights.sum()


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(dim=0)) / x.std(dim=0, correction=0)


def ridge_logistic(x: Tensor, labels: Tensor, classes: int, strength: float) -> Tensor:
    """Logits [N, C] of the layer that minimises C sum w nll + |W|^2 / 2 on standardised features,
    centred over classes: an intercept for all of them changes nothing."""
    z = standardised(x)
    weights, rows = balanced(labels, classes), torch.cat([z, torch.ones(len(z), 1).double()], dim=1)
    flat = torch.zeros(classes * rows.shape[1], dtype=torch.float64)

    def loss(flat: Tensor) -> Tensor:
        layer = flat.view(classes, -1)
        scores = rows @ layer.T
        nll = scores.logsumexp(dim=1) - scores.gather(1, labels[:, None])[:, 0]
        return strength * (weights * nll).sum() + layer[:, :-1].square().sum() / 2

    for _ in range(50):
        gradient = torch.func.grad(loss)(flat)
        hessian = torch.func.hessian(loss)(flat)
        flat = flat - torch.linalg.lstsq(hessian, gradient[:, None], driver="gelsd").solution[:, 0]
    scores = rows @ flat.view(classes, -1).T
    return scores - scores.mean(dim=1, keepdim=True)


def without_directions(
    x: Tensor, versions: Tensor, pictures: Tensor, rank: int, weight: Tensor, bias: Tensor
) -> Tensor:
    """Logits [N, C] of features x whose part along the first directions of change between versions
    [M, P] of pictures [M] is that of the mean version."""
    moved = []
    for picture in sorted(set(pictures.tolist())):
        own = versions[pictures == picture]
        moved += [row - own.mean(dim=0) for row in own]
    moved = torch.stack(moved)
    _, vectors = torch.linalg.eigh(moved.T @ moved)
    mean, changed = versions.mean(dim=0), x.clone()
    for vector in vectors.T.flip(0)[:rank]:
        for place in range(len(x)):
            changed[place] += ((mean - x[place]) @ vector) * vector
    return changed @ weight.T + bias
