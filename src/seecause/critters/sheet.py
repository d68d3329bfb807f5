"""A contact sheet of the generated world: every class on every background, and one scene under each
intervention. `contact_sheet().save("critters.png")` is docs/critters.png."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seecause.critters.latents import CLASSES, PARTS, Latents
from seecause.critters.picture import BACKGROUNDS, Do, render
from seecause.critters.regimes import draw

GAP, TEXT, SCENE = 6, 16, 10  # pixels between pictures and for a caption; whose counterfactuals


def contact_sheet(size: int = 112, seed: int = 7) -> Image.Image:
    grid = draw("balanced", "test", len(CLASSES) * len(BACKGROUNDS), seed=seed)
    image = render(grid, size=size).image  # row-major over backgrounds, then classes
    rows = [(list(CLASSES), part) for part in image.split(len(CLASSES))]
    return _sheet(rows + counterfactuals(grid[SCENE], size))


def counterfactuals(latents: Latents, size: int) -> list[tuple[list[str], Tensor]]:
    """Two rows of captions and pictures [8, 3, H, W]: interventions on one scene."""
    parts, own = PARTS, int(latents.background)
    done = {"as drawn": Do(), **{f"no {part}": Do(without=(part,)) for part in parts[1:]}}
    done |= {"other feet": Do(swap={"feet": "paws"}), "other crest": Do(swap={"crest": "crown"})}
    done["only background"] = Do(without=parts)
    done |= {f"on {name}": Do(background=i) for i, name in enumerate(BACKGROUNDS) if i != own}
    done |= {"half the cue": Do(cue=0.5), "no background": Do(cue=0.0)}
    done["moved"] = Do(move=(-size // 9, size // 9))
    pictures = [render(latents, size=size, do=do).image for do in done.values()]
    pictures += [render(latents, size=size, style=style).image for style in ("flat", "sketch")]
    names, images = [*done, "flat style", "sketch style"], torch.cat(pictures)
    return [(names[:8], images[:8]), (names[8:16], images[8:16])]


def _sheet(rows: list[tuple[list[str], Tensor]]) -> Image.Image:
    """Pictures on white with a caption under each."""
    size, wide = rows[0][1].shape[-1], max(len(names) for names, _ in rows)
    width, height = wide * (size + GAP) + GAP, len(rows) * (size + GAP + TEXT) + GAP
    page = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=12)
    for row, (names, images) in enumerate(rows):
        top = GAP + row * (size + GAP + TEXT)
        for column, (name, image) in enumerate(zip(names, images, strict=True)):
            left = GAP + column * (size + GAP)
            pixels = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
            page.paste(Image.fromarray(pixels), (left, top))
            middle = (left + size / 2, top + size + 1)
            pen.text(middle, name, fill="#444444", font=font, anchor="ma")
    return page
