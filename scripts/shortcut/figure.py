"""The figures of the study: pictures of the four groups with their parts, once with the photos and
once with silhouettes in their place."""

from __future__ import annotations

import dataclasses
import io

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from scripts.shortcut.data import GROUPS, SPECIES, Cutouts, Pictures, compose
from scripts.shortcut.methods import Method, Setup, shown_places
from scripts.shortcut.plan import Results, chosen
from scripts.shortcut.textures import FAMILIES
from seecause.faithful.images import part_picture

SIDE, GAP, LEFT, TOP, FOOT = (
    140,
    4,
    108,
    24,
    30,
)  # pixels of a tile, between tiles, and of the words around them
COLOURS = 256  # of the palette, to keep the file small
GREY, LINE, OUTLINE = 225, 40, 5  # a silhouette's grey, its outline's, and how wide that is
ROWS: dict[Method, str] = {"pdisco": "PDiscoFormer", "ifam": "iFAM"}


def draw(setup: Setup, results: Results, cutouts: Cutouts, *, photos: bool) -> bytes:
    """One PNG: a column for each picture; below it its parts by PDiscoFormer and iFAM where they
    are trained. Silhouettes unless `photos`."""
    pictures = shown_pictures(setup, cutouts if photos else silhouettes(cutouts))
    raw = pictures.images.float() / 255
    if not photos:
        raw = torch.where(_edge(pictures.masks)[:, None], LINE / 255, raw)
    rows, most = {"picture": [_image(image) for image in raw]}, 0
    for method, name in ROWS.items():
        best = chosen(method, results)
        if best is not None:
            winners = torch.tensor(results[best.file]["shown"])  # [n, gh, gw]
            maps = F.one_hot(winners, best.parts + 1).movedim(-1, 1).float()
            rows[name] = [part_picture(image, one) for image, one in zip(raw, maps, strict=True)]
            most = max(most, best.parts)
    titles = [f"{SPECIES[label]} on {FAMILIES[place]}" for label, place in pictures.groups.tolist()]
    file = io.BytesIO()
    _sheet(rows, titles, most).quantize(COLOURS).save(file, "PNG", optimize=True)
    return file.getvalue()


def silhouettes(cutouts: Cutouts) -> Cutouts:
    """The same shapes in one plain grey: nothing of the photos is left but the outline that the
    trimap draws."""
    rgba = cutouts.rgba.clone()
    rgba[:, :3] = GREY
    return dataclasses.replace(cutouts, rgba=rgba)


def shown_pictures(setup: Setup, cutouts: Cutouts) -> Pictures:
    """The test pictures whose parts every job keeps, made again on the CPU."""
    rows = cutouts.rows("test")
    places = shown_places(
        cutouts.species[rows].repeat(2), torch.arange(2).repeat_interleave(len(rows))
    )
    return compose(
        cutouts,
        rows.repeat(2)[places],
        places // len(rows),
        seed=0,
        size=setup.size,
        device=torch.device("cpu"),
    )


def _sheet(rows: dict[str, list[Image.Image]], titles: list[str], parts: int) -> Image.Image:
    """Tiles with the names of rows on the left, of columns above, and of colours below."""
    each, font = SIDE + GAP, ImageFont.load_default(14)
    sheet = Image.new(
        "RGB",
        (LEFT + each * 2 * len(GROUPS) - GAP, TOP + len(rows) * each - GAP + FOOT * (parts > 0)),
        "white",
    )
    pen = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        pen.text(
            (LEFT + column * each + SIDE / 2, TOP / 2), title, fill="black", font=font, anchor="mm"
        )
    for line, (name, tiles) in enumerate(rows.items()):
        pen.text(
            (LEFT - 8, TOP + line * each + SIDE / 2), name, fill="black", font=font, anchor="rm"
        )
        for column, tile in enumerate(tiles):
            sheet.paste(
                tile.resize((SIDE, SIDE), Image.Resampling.BILINEAR),
                (LEFT + column * each, TOP + line * each),
            )
    middle = sheet.height - FOOT / 2
    for part in range(parts):
        left, whole = (
            LEFT + part * 80,
            F.one_hot(torch.tensor([[part]]), parts + 1).movedim(-1, 0),
        )  # [K + 1, 1, 1]: one patch, this part
        sheet.paste(
            part_picture(torch.full((3, 12, 12), GREY / 255), whole).resize((12, 12)),
            (left, round(middle) - 6),
        )
        pen.text((left + 18, middle), f"part {part}", fill="black", font=font, anchor="lm")
    if parts:
        pen.text(
            (LEFT + parts * 80 + 8, middle),
            "dark: no part. Each model has parts of its own.",
            fill="black",
            font=font,
            anchor="lm",
        )
    return sheet


def _edge(masks: Tensor) -> Tensor:
    """[N, H, W] bool: the rim of each shape."""
    inside = -F.max_pool2d(-masks[:, None].float(), OUTLINE, stride=1, padding=OUTLINE // 2)[:, 0]
    return masks & (inside < 0.5)


def _image(raw: Tensor) -> Image.Image:
    return Image.fromarray((raw * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
