"""The pictures of the documentation: python studies/pictures.py critters|demo|heads

critters   docs/critters.png: every class on every background, one scene under each intervention
demo       docs/demo.png: the top of the demo's page, photographed with chromium
heads      docs/heads.png: the demo's audit and repair of critters-biased
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seecause import critters
from seecause.critters import BACKGROUNDS, CLASSES, Do, render

GAP, TEXT, SCENE = 6, 16, 10  # pixels between pictures and for a caption; whose counterfactuals
QUIET = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync",
         "disable-background-networking", "disable-component-update")  # fmt: skip


def critters_sheet(out: Path, size: int = 112, seed: int = 7) -> None:
    grid = critters.draw("balanced", "test", len(CLASSES) * len(BACKGROUNDS), seed=seed)
    image = render(grid, size=size).image  # row-major over backgrounds, then classes
    rows = [(list(CLASSES), part) for part in image.split(len(CLASSES))]
    sheet(rows + counterfactuals(grid[SCENE], size)).save(out)


def counterfactuals(latents: Any, size: int) -> list[tuple[list[str], Tensor]]:
    """Two rows of captions and pictures [8, 3, H, W]: interventions on one scene."""
    parts, own = critters.PARTS, int(latents.background)
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


def sheet(rows: list[tuple[list[str], Tensor]]) -> Image.Image:
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


def photograph(make: Callable[[Path], Path], shoot: Callable[[Any], None], size: Any) -> None:
    """Make a page in a folder that goes away, open it in chromium, and shoot."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page_file = make(Path(folder))
        options = {"executable_path": "/usr/bin/chromium", "args": [f"--{name}" for name in QUIET]}
        browser = play.chromium.launch(**options)
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.goto(page_file.as_uri())
        shoot(page)
        browser.close()


def demo(out: Path) -> None:
    from typer.testing import CliRunner

    from seecause.cli import app

    def make(folder: Path) -> Path:
        done = CliRunner().invoke(app, ["demo", "--out", str(folder / "demo"), "--no-open"])
        if done.exit_code:
            raise typer.Exit(done.exit_code)
        return folder / "demo" / "index.html"

    def shoot(page: Any) -> None:
        page.evaluate("window.scrollTo(0, document.querySelector('h2').offsetTop - 80)")
        page.screenshot(path=out)

    photograph(make, shoot, (1300, 1230))


def heads(out: Path) -> None:
    from seecause.critters.demo import DemoSetting, audit, repair
    from seecause.report.page import write_page

    verdict, *_ = audit(DemoSetting(), models=("builtin:critters-biased",)).sections
    grid, change, *_ = repair(DemoSetting()).sections

    def shoot(page: Any) -> None:
        page.add_style_tag(content=".bar, h1, .note { display: none } h2 { margin-top: 1.2rem }")
        page.locator("main").screenshot(path=out)

    sections = [verdict, grid, change]
    photograph(lambda folder: write_page(folder / "heads.html", "", sections), shoot, (1100, 900))


PICTURES = {"critters": critters_sheet, "demo": demo, "heads": heads}


def main(
    name: Annotated[str, typer.Argument(help=", ".join(PICTURES))],
    out: Annotated[Path | None, typer.Option(help="The PNG to write.")] = None,
) -> None:
    PICTURES[name](out or Path("docs") / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
