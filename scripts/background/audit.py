"""What `evidence_background.py` measures on the whole model: accuracy, composites, discovered
masks, FIG and BIG; and what an audit says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scripts.background.composites import ALONE
from scripts.background.photos import Study
from scripts.kept_pieces import Pieces, pack, unpack
from seecause.data.dataset import IGNORE
from seecause.heads import Audit, Erasure, Gains, Masks, discover_masks, information_gains, iou
from seecause.heads._mask_search import harden
from seecause.heads.gains import log_probs
from seecause.heads.pictures import logits_of
from seecause.report.heads_audit import verdict as verdict_lines

MASKED = 75  # photos whose masks are one piece
RHO = 0.35  # share of the pixels that discovered masks keep
FILLS = ("mean", "grey", "blur")
Row = dict[str, Any]


def plain(study: Study) -> Row:
    """The whole model on both sets of photos."""
    found = {}
    for name, cases in (("pets", study.pets), ("imagenet", study.imagenet)):
        logits = logits_of(study.model, cases.images)
        assert cases.labels is not None
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == cases.labels[:, None]
        found[name] = {"top 1": bits(top[:, 0]), "top 5": bits(top.any(dim=1))}
        print(
            f"plain accuracy, {len(cases)} photos of {name}:"
            f" {float(top[:, 0].double().mean()):.3f}",
            flush=True,
        )
    return found


def of_composites(study: Study) -> Row:
    """Answers to every kind of photo; of mixed ones, every draw."""
    made, labels = study.composites, study.pets.labels
    assert labels is not None
    breeds = labels.unique()
    other = labels[
        made.donors["mixed_rand"][0].to(labels.device)
    ]  # a label that is wrong for the animal, and in the first mixed_rand right for the background
    rows: Row = {}
    for name, stack in {**{name: made.alone[name][None] for name in ALONE}, **made.mixed}.items():
        logits = torch.stack(
            [logits_of(study.model, study.seen(pixels)) for pixels in stack]
        )  # [draws, N, C]
        answers = logits.argmax(dim=-1)
        rows[name] = {
            "right": shares(answers == labels),
            "right among breeds": shares(breeds[logits[..., breeds].argmax(dim=-1)] == labels),
            "probability": shares(
                log_probs(logits).exp().gather(-1, labels.expand(len(stack), -1)[..., None])[..., 0]
            ),
            "another's": [
                float(a == b) for a, b in zip(answers[0].tolist(), other.tolist(), strict=True)
            ],
        }
    return {
        "kinds": rows,
        "box": made.boxes.tolist(),
        "animal": study.shapes.double().mean(dim=(1, 2)).tolist(),
        "untiled": made.untiled,
    }


def searched(study: Study, part: slice) -> Row:
    with study.fastly():
        found = discover_masks(
            study.model, study.pets.images[part], steps=study.sizes.mask_steps, rho=RHO
        )
    assert found.soft is not None and found.losses is not None
    return {"soft": pack(found.soft), "losses": found.losses.mean(dim=0).tolist()}


def masks_of(study: Study, pieces: Pieces) -> Masks | None:
    """Discovered masks of all photos, once they are all there."""
    kept = [pieces.found.get(f"masks {start}") for start in range(0, len(study.pets), MASKED)]
    if any(one is None for one in kept):
        return None
    soft = torch.cat([unpack(one["soft"]) for one in kept]).to(study.model.device)
    hard, ties = harden(soft, (study.pets.images.shape[-2], study.pets.images.shape[-1]), rho=RHO)
    return Masks(
        hard,
        soft,
        ties,
        protocol={"source": "discovered", "rho": RHO, "steps": study.sizes.mask_steps},
    )


def fair_looks(study: Study, masks: Masks) -> dict[str, Erasure]:
    """What `seecause heads audit` can do on these photos: discovered and true masks, each with
    every fill."""
    return {
        look.name: look
        for source in (masks, Masks.oracle(study.shapes))
        for look in (Erasure(source, fill) for fill in FILLS)
    }


def audited(study: Study, masks: Masks) -> Row:
    """FIG and BIG of all photos by every look, and how well discovered masks meet the animal,
    beside masks that know nothing of it."""
    model, pets, truth = study.model, study.pets, study.pets.truth
    assert truth is not None
    bare, other = Masks.oracle(truth), Masks.oracle(study.shapes.roll(1, dims=0))
    guess = {
        "discovered masks": masks.hard,
        "control: another photo's discovered mask": masks.hard.roll(1, dims=0),
        "control: centre": centre(masks.hard),
        "control: random pixels": scattered(masks.hard),
    }
    looks = {
        **fair_looks(study, masks),
        "true masks, border left in both, grey": Erasure(bare, "grey"),
        "the animal on another breed's photo": Erasure(None, study.swapped),
        "control: another photo's true mask, grey": Erasure(other, "grey"),
        "control: centre, grey": Erasure(Masks.oracle(guess["control: centre"]), "grey"),
    }
    gains = {
        name: information_gains(model, pets.images, look.masks, baseline=look.baseline)
        for name, look in looks.items()
    }
    return {
        "gains": {
            name: {"fig": one.fig.tolist(), "big": one.big.tolist(), "noise": one.noise_floor}
            for name, one in gains.items()
        },
        "iou": {name: iou(hard, truth).tolist() for name, hard in guess.items()},
        "ties": float(masks.ties.mean()) if masks.ties is not None else None,
        "border": float((truth == IGNORE).double().mean()),
    }


def verdict(study: Study, masks: Masks, found: Row) -> Row:
    """What an audit says of kept gains, by the rules it has when the page is written: the look it
    believes, and its words."""
    looks, told = fair_looks(study, masks), found["audit"]
    kept = {name: told["gains"][name] for name in looks}
    gains = {
        name: Gains(
            *(torch.tensor(one[key], dtype=torch.float64) for key in ("fig", "big")), one["noise"]
        )
        for name, one in kept.items()
    }
    unasked = torch.empty(len(study.pets), 0)  # a verdict does not look at logits
    overlap = torch.tensor(told["iou"]["discovered masks"], dtype=torch.float64)
    report = Audit(
        study.pets, unasked, looks, gains, overlap, counted=unbits(found["plain"]["pets"]["top 1"])
    )
    return {"trusted": report.trusted, "words": verdict_lines(report)}


def centre(like: Tensor) -> Tensor:
    """A box in the middle of each frame [N, H, W], as large as discovered masks are."""
    height, width = like.shape[1:]
    top, left = (round(side * (1 - RHO**0.5) / 2) for side in (height, width))
    found = torch.zeros_like(like)
    found[:, top : height - top, left : width - left] = True
    return found


def scattered(like: Tensor) -> Tensor:
    return (torch.rand(like.shape, generator=torch.Generator().manual_seed(0)) < RHO).to(
        like.device
    )


def bits(values: Tensor) -> str:
    return "".join("01"[int(v)] for v in values.tolist())


def unbits(text: str) -> Tensor:
    return torch.tensor([c == "1" for c in text])


def shares(values: Tensor) -> list[float]:
    """Means over draws [draws, N] -> [N], to the last digit: `numbers.counts` makes counts of them
    again."""
    return values.double().mean(dim=0).tolist()
