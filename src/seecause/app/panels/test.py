"""Test: does the prediction stay with the object when the background changes?

The object of one image is put on the backgrounds of eight samples, as transplants of `sc.audit`
are. Backgrounds of samples that the model predicts otherwise come first. The mask of the object is
known to the data, brushed, or found by another served network. The audit of a whole dataset is in
`repair.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    Name,
    OnPicture,
    Panel,
    Patches,
    answers,
    brushed_mask,
    photo,
)
from seecause.app.panels.repair import GIVEN, mask_source
from seecause.app.state import ActionContext, OpenedPicture
from seecause.background.gains import information_gains
from seecause.background.images import LabelledImages, Masks, logits_of
from seecause.background.masks import object_masks
from seecause.background.transplant import Versions
from seecause.errors import BadImage

BACKGROUNDS = 8
SMALL, LARGE = 0.01, 0.8  # shares of an image that an object covers at least and at most
MOSTLY_FILLED = 0.5  # share of a background that its own object hid


class Place(OnPicture):
    """`brushed`: patches of the object; otherwise `masks` says where they are from."""

    brushed: Patches = ()
    masks: Name = GIVEN


@torch.no_grad()
def place(context: ActionContext, request: Place) -> Reply:
    """The object on eight backgrounds with the predictions; without a mask, what is missing."""
    model, frame = context.model, context.served.frame
    picture = context.picture(request.picture)
    donors = [each for each in context.averaged_pictures() if each.id != picture.id]
    if not donors:
        raise BadImage("the samples", "no other image", "start the server with more images")
    images = torch.cat([each.inputs[frame] for each in (picture, *donors)])
    logits = logits_of(model, images)
    names = [model.class_name(best) for best in logits.argmax(dim=1).tolist()]
    rows = [0, *_varied(names)]
    shown = [(picture, *donors)[row] for row in rows]
    images = images[rows]
    masks = _masks(context, request, shown, images)
    if not bool(masks[0].any()):
        return {"patches": [], "tiles": [], "missing": True}
    data = LabelledImages(images, torch.zeros(len(images), dtype=torch.long), Masks(masks))
    places = torch.arange(len(images) - 1, device=images.device)
    none = torch.zeros_like(places)
    moved = Versions(data, none, places + 1, places, none.bool())[:]
    truth = picture.truth if picture.truth in model.classes else names[0]
    tiles = []
    covered = masks.double().mean(dim=(1, 2)).tolist()
    for place, row in enumerate(logits_of(model, moved), start=1):
        answer = model.class_name(int(row.argmax()))
        tiles.append(
            {
                "picture": photo(model, moved[place - 1 : place]),
                "background": shown[place].name,
                "donor": names[rows[place]],
                "answer": answer,
                "answers": answers(model, row, logits[0]),
                "right": answer == truth,
                "bad": _bad_cut(covered[0], covered[place]),
            }
        )
    gains = None if model.sigmoid else information_gains(model, data.take(none[:1]))
    return {
        "patches": Masks(masks[:1])
        .on_patches(model.layout.grid)
        .flatten()
        .nonzero()[:, 0]
        .tolist(),
        "tiles": tiles,
        "missing": False,
        "dependence": None if gains is None or gains.degenerate[0] else float(gains.bir[0]),
        "truth": truth,
        "named": picture.truth == truth,
        "plain": answers(model, logits[0], logits[0]),
    }


def _varied(names: list[str]) -> list[int]:
    """Eight images but the first, in turn for each predicted class, the first one's class last."""
    seen = Counter[str]()
    turns = [(name == names[0], seen.update([name]), seen[name]) for name in names]
    return sorted(range(1, len(names)), key=lambda row: turns[row][::2])[:BACKGROUNDS]


def _masks(
    context: ActionContext, request: Place, pictures: list[OpenedPicture], images: Tensor
) -> Tensor:
    """Objects [n, H, W] (bool), empty where nothing knows them; the first may be brushed."""
    model, size = context.model, context.model.preprocess.size
    if request.masks == GIVEN:
        none = torch.zeros(1, *size, device=images.device)
        known = [each.masks.get(context.served.frame, none) for each in pictures]
        masks = torch.cat(known) == 1
    else:
        source: Any = mask_source(context, request.masks)
        with torch.enable_grad():
            masks = object_masks(model, LabelledImages(images), source).hard
    if request.brushed:
        masks[0] = brushed_mask(model, request.brushed)[0]
    return masks


def _bad_cut(share: float, hidden: float) -> str:
    """Why a transplant says little, by the shares that the object covers in its image, and the
    other object in the background; empty if it does not."""
    if share < SMALL:
        return "the object is too small"
    if share > LARGE:
        return "the object leaves no background"
    return "most of this background is filled in" if hidden > MOSTLY_FILLED else ""


PANEL = Panel(
    "test",
    "Test",
    "Does the prediction follow the background?",
    actions=(place,),
)
