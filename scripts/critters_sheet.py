"""Draw docs/critters.png: every class on every background, then one scene under each intervention.

python scripts/critters_sheet.py --out docs/critters.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seecause import critters
from seecause.critters import BACKGROUNDS, CLASSES, Do, render

_GAP, _TEXT = 6, 16
_SCENE = 10  # the sample whose counterfactuals are shown


def main(
    out: Annotated[Path, typer.Option(help="PNG to write")] = Path("docs/critters.png"),
    size: Annotated[int, typer.Option(help="pixels a side of each picture")] = 112,
    seed: Annotated[int, typer.Option(help="of the world")] = 7,
) -> None:
    """Write the contact sheet."""
    grid = critters.draw("balanced", "test", len(CLASSES) * len(BACKGROUNDS), seed=seed)
    image = render(grid, size=size).image  # row-major over backgrounds, then classes
    rows = [
        (list(CLASSES), image[index * len(CLASSES) : (index + 1) * len(CLASSES)])
        for index in range(len(BACKGROUNDS))
    ]
    sheet(rows + counterfactuals(grid[_SCENE], size)).save(out)


def counterfactuals(latents: critters.Latents, size: int) -> list[tuple[list[str], Tensor]]:
    """Two rows of captions and pictures [8, 3, H, W]: interventions on one scene."""
    parts = critters.PARTS
    done = {
        "as drawn": Do(),
        **{f"no {part}": Do(without=(part,)) for part in parts[1:]},
        "other feet": Do(swap={"feet": "paws"}),
        "other crest": Do(swap={"crest": "crown"}),
        "only background": Do(without=parts),
        **{
            f"on {name}": Do(background=code)
            for code, name in enumerate(BACKGROUNDS)
            if code != int(latents.background)
        },
        "half the cue": Do(cue=0.5),
        "no background": Do(cue=0.0),
        "moved": Do(move=(-size // 9, size // 9)),
    }
    names = list(done)
    pictures = torch.cat([render(latents, size=size, do=do).image for do in done.values()])
    styles = ("flat", "sketch")
    pictures = torch.cat(
        [pictures, *(render(latents, size=size, style=style).image for style in styles)]
    )
    names += [f"{style} style" for style in styles]
    return [(names[:8], pictures[:8]), (names[8:16], pictures[8:16])]


def sheet(rows: list[tuple[list[str], Tensor]]) -> Image.Image:
    """Pictures on white with a caption under each."""
    size = rows[0][1].shape[-1]
    wide = max(len(names) for names, _ in rows)
    page = Image.new(
        "RGB", (wide * (size + _GAP) + _GAP, len(rows) * (size + _GAP + _TEXT) + _GAP), "white"
    )
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=12)
    for row, (names, images) in enumerate(rows):
        top = _GAP + row * (size + _GAP + _TEXT)
        for column, (name, image) in enumerate(zip(names, images, strict=True)):
            left = _GAP + column * (size + _GAP)
            pixels = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
            page.paste(Image.fromarray(pixels), (left, top))
            pen.text(
                (left + size / 2, top + size + 1), name, fill="#444444", font=font, anchor="ma"
            )
    return page


if __name__ == "__main__":
    typer.run(main)
