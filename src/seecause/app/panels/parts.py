"""Parts: predictions of a classifier that reads its parts only (iFAM) without some of them.

A part that is removed from the mask becomes background, and background is not read: no hidden pixel
can change the prediction.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import Index, OnPicture, Panel, answers, as_script
from seecause.app.state import ActionContext
from seecause.data.dataset import to_pil
from seecause.faithful.evaluation import part_image
from seecause.faithful.interventions import evaluating, intervene, network
from seecause.faithful.net import IFAM, IFAMOutput
from seecause.models.base import ImageModel
from seecause.models.block import wide
from seecause.report.background import css_colours, note_of, seen_pixels
from seecause.report.figures import data_uri


class Masked(OnPicture):
    """`out`: parts that are taken out."""

    out: Annotated[tuple[Index, ...], Field(max_length=256)] = ()


@torch.no_grad()
def look(context: ActionContext, request: Masked) -> Reply:
    """Parts of the image, the patches that are read, and predictions with all and with these
    parts."""
    model, image = context.model, context.image(request.picture)
    with own_network(context) as net:
        whole = net(image)
        with intervene(net, drop_parts=request.out):
            changed = net(image)
    raw = wide(model.preprocess.raw(image))[0].clamp(0, 1).cpu()
    winner = whole.maps[0].argmax(dim=0).cpu()  # [gh, gw]; the background is the last
    return {
        "picture": data_uri(part_image(raw, whole.maps[0].cpu(), removed=request.out)),
        "seen": data_uri(to_pil(seen_pixels(raw, changed.mask[0].cpu())), photo=True),
        "size": list(raw.shape[-2:]),
        "grid": list(winner.shape),
        "winner": winner.flatten().tolist(),
        "parts": _parts(model, net, whole, winner),
        "share": float(changed.mask.double().mean()),
        "before": answers(model, whole.logits[0], whole.logits[0]),
        "after": answers(model, changed.logits[0], whole.logits[0]),
        "empty": bool(changed.empty[0]),
        "note": note_of(net),
    }


@contextmanager
def own_network(context: ActionContext) -> Iterator[IFAM]:
    """A network of the same weights that only this panel touches, one job at a time: parts are
    taken out of a network itself, and other jobs may be using the served one."""
    served = context.served
    with served.lock:
        lock = served.memo.setdefault("parts lock", threading.Lock())
    with lock:
        if "parts network" not in served.memo:
            shared = network(context.model)
            weights = {id(weight): weight for weight in shared.parameters()}
            served.memo["parts network"] = deepcopy(shared, weights)
        with evaluating(served.memo["parts network"]):
            yield served.memo["parts network"]


def _parts(model: ImageModel, net: IFAM, whole: IFAMOutput, winner: Tensor) -> list[Reply]:
    """Every part: its colour, its number of patches, and the class that it votes for."""
    votes = whole.part_logits[0].argmax(dim=0).tolist()  # [K]
    return [
        {
            "part": part,
            "colour": colour,
            "patches": int((winner == part).sum()),
            "votes": model.class_name(votes[part]),
        }
        for part, colour in enumerate(css_colours(net.parts))
    ]


def copy(context: ActionContext, request: Masked) -> Reply:
    """Python code that computes these results without the app."""
    return as_script("parts", context, request)


PANEL = Panel(
    "parts",
    "Parts",
    "What does it answer without this part?",
    actions=(look, copy),
    kinds=("ifam",),
)
