"""The figure of the study: pictures of the four groups, true masks, and parts."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from scripts.shortcut.data import Cutouts, Pictures, compose
from scripts.shortcut.methods import Setup, shown_places
from scripts.shortcut.plan import Results, chosen
from seecause.faithful.drawing import part_picture

SIDE, GAP, COLOURS = 140, 4, 256  # pixels of a tile and between tiles; colours of the palette, to keep the file small


def draw(setup: Setup, results: Results, cutouts: Cutouts) -> bytes:
    """One PNG: a column for each picture; below it its animal, and its parts by PDiscoFormer and iFAM where they are trained."""
    pictures = shown_pictures(setup, cutouts)
    raw = pictures.images.float() / 255
    rows = [[_image(image) for image in raw], [_image(torch.where(mask, image, 0.25 * image)) for image, mask in zip(raw, pictures.masks, strict=True)]]
    for best in (chosen("pdisco", results), chosen("ifam", results)):
        if best is not None:
            winners = torch.tensor(results[best.file]["shown"])  # [n, gh, gw]
            maps = F.one_hot(winners, best.parts + 1).movedim(-1, 1).float()
            rows.append([part_picture(image, one) for image, one in zip(raw, maps, strict=True)])
    each = SIDE + GAP
    sheet = Image.new("RGB", (len(raw) * each - GAP, len(rows) * each - GAP), "white")
    for top, tiles in enumerate(rows):
        for left, tile in enumerate(tiles):
            sheet.paste(tile.resize((SIDE, SIDE), Image.Resampling.BILINEAR), (left * each, top * each))
    file = io.BytesIO()
    sheet.quantize(COLOURS).save(file, "PNG", optimize=True)
    return file.getvalue()


def shown_pictures(setup: Setup, cutouts: Cutouts) -> Pictures:
    """The test pictures whose parts every job keeps, made again on the CPU."""
    rows = cutouts.rows("test")
    places = shown_places(cutouts.species[rows].repeat(2), torch.arange(2).repeat_interleave(len(rows)))
    return compose(cutouts, rows.repeat(2)[places], places // len(rows), seed=0, size=setup.size, device=torch.device("cpu"))


def _image(raw: Tensor) -> Image.Image:
    return Image.fromarray((raw * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
