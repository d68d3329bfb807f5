"""The images of the documentation: python docs/pictures.py NAME

app        docs/app-*.webp: the four steps of `seecause serve`; with --out, every step and tool at
           two widths and in two themes into that folder
critters   docs/critters.png: every class on every background, one scene under each intervention
demo       docs/demo.png: one creature on two backgrounds and the maps of two models
discover   docs/discover.png: kinds of patches that turn images of critters-biased
gallery    docs/gallery.jpg: every method on one photo, with its scores; SEECAUSE_REAL is a folder
           with the weights of the README's first image (without it, timm fetches its own)
heads      docs/heads.png: the demo's audit and pruning of critters-biased
repair     docs/repair.png: the demo's repair, critters-biased before and after
trust      docs/trust.png: every method, by the published results
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import cyclopts
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seecause.critters.rendering import Do, render
from seecause.critters.world import BACKGROUNDS, CLASSES, PARTS, Latents, draw

QUIET = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync",
         "disable-background-networking", "disable-component-update")  # fmt: skip
PICTURES_ALONE = (
    ".bar, h1, .note, .more, .fold { display: none } h2 { margin-top: 1.2rem }"
    " main { padding-bottom: 1rem }"
)
GAP, TEXT, SCENE = 6, 16, 10  # pixels between images and for a caption; whose counterfactuals
OURS = ("caap", "mosaic", "caap+mosaic")


def contact_sheet(size: int = 112, seed: int = 7) -> Image.Image:
    """Every class on every background, and one scene under each intervention."""
    grid = draw("balanced", "test", len(CLASSES) * len(BACKGROUNDS), seed=seed)
    image = render(grid, size=size).image  # row-major over backgrounds, then classes
    rows = [(list(CLASSES), part) for part in image.split(len(CLASSES))]
    return _sheet(rows + counterfactuals(grid[SCENE], size))


def counterfactuals(latents: Latents, size: int) -> list[tuple[list[str], Tensor]]:
    """Two rows of captions and images [8, 3, H, W]: interventions on one scene."""
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
    """Images on white with a caption under each."""
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


BIASED = "model=critters-biased&image=s0"
SHOWN = {  # panel of the page -> link, button that is pressed, what is waited for
    "explain": (f"#explain?{BIASED}", None, "#panel-explain .heat"),
    "changed": (f"#explain?{BIASED}", "Change the background", ".then:not(:empty)"),
    "brush": (f"#explain?{BIASED}&explain.tool=brush&explain.patches=66-70.78-82.90-94.102-106",
        None, ".stage-answers li"),
    "doubt": (f"#doubt?{BIASED}&doubt.evidence=true", None, ".evidence p"),
    "test": (f"#test?{BIASED}", None, ".cut"),
    "audit": (f"#test?{BIASED}", "Audit the dataset", ".verdict"),
    "repair": (f"#repair?{BIASED}", "Try last-layer", "[data-taken=true]"),
    "swap": ("#swap?model=critters-vit&image=s0&swap.b=s4&swap.patches=65-70.77-82.89-93"
        "&swap.across=-1", "Fewest patches", ".found .count"),
    "heads": ("#heads?model=critters-biased&image=s8&heads.by=background&heads.off=4.19.43", None,
        ".head-buttons .for"),
    "parts": ("#parts?image=s3&parts.out=2", None, ".part-boxes input"),
    "ask": ("#ask?image=s3&ask.blind=1.9", None, "[data-sum]"),
    "runs": ("#runs", None, ".run-list button"),
}  # fmt: skip
WALKED = {"explain": 850, "doubt": 975, "test": 800, "repair": 1150}  # docs/app.md: heights


def app(out: Path | None) -> None:
    """The four steps for docs/app.md; with `out`, everything into that folder, to be looked at."""
    from playwright.sync_api import sync_playwright

    from seecause.app.server import create_app
    from seecause.app.state import open_state
    from seecause.cli import run as command

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.app.conftest import DATA, MODELS, serving
    from tests.conftest import CHROMIUM, CHROMIUM_ARGUMENTS

    views = [(1280, "light")] if out is None else list(product((1280, 390), ("light", "dark")))
    with tempfile.TemporaryDirectory() as results, sync_playwright() as play:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            explained = str(Path(results) / "explained")
            command(["explain", "critters:clean:test#9", "--out", str(explained)])
        state = open_state(MODELS, data=DATA, runs=[Path(results)])
        with serving(create_app(state)) as address:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_ARGUMENTS))
            for name, (width, scheme) in product(SHOWN if out else WALKED, views):
                size = {"width": width, "height": WALKED.get(name, 860)}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                show_panel(page, address, name)
                if out is not None:
                    page.screenshot(path=out / f"{name}-{width}-{scheme}.png", full_page=True)
                else:
                    shot = Image.open(io.BytesIO(page.screenshot()))
                    shot.save(Path("docs") / f"app-{name}.webp", quality=82, method=6)
                page.close()
            browser.close()
        state.close()


def show_panel(page: Any, address: str, name: str) -> None:
    """Open a panel and wait until everything on it is answered."""
    link, button, awaited = SHOWN[name]
    page.set_default_timeout(300_000)
    page.goto(f"{address}/{link}")
    if button:
        page.locator("html[data-asking='0']").wait_for()
        page.get_by_role("button", name=button).first.click()
    page.locator(awaited).first.wait_for()
    page.locator("html[data-asking='0']").wait_for()
    page.evaluate("Promise.allSettled([...document.images].map((image) => image.decode()))")
    page.evaluate("window.scrollTo(0, 0)")


def photograph_sections(sections: Any, out: Path, size: tuple[int, int]) -> None:
    """Sections of a page, without what is written around their images."""
    from seecause.report import write_page

    def shoot(page: Any) -> None:
        page.add_style_tag(content=PICTURES_ALONE)
        page.locator("main").screenshot(path=out)

    photograph(lambda folder: write_page(folder / "page.html", "", sections), shoot, size)


def demo(out: Path) -> None:
    """One creature on two backgrounds: the maps of two models, on one scale."""
    from seecause import attribute, load
    from seecause.attribution.attribute import top_answers
    from seecause.critters.demo import TWO_MODELS, pairs_of_scenes
    from seecause.report import Card, MapView, Section, Strip, cards_html
    from seecause.report.figures import scale_of

    both, models = pairs_of_scenes(2), [load(name) for name in TWO_MODELS]
    raw, runs = render(both).image, []
    for model in models:
        images = model.preprocess.normalise(raw)
        answers = top_answers(model, images, target=both.creature, count=2)
        name = model.name.rpartition(":")[2]
        runs.append((name, attribute(model, images, both.creature).maps, answers))
    cards = []
    for first in (0, 2):
        scale, strips = scale_of(*(maps[i] for _, maps, _ in runs for i in (first, first + 1))), []
        for i, scene in enumerate(("as drawn", "on another background"), start=first):
            views = [MapView(name, maps[i], scale, answers=told[i]) for name, maps, told in runs]
            strips.append(Strip(raw[i], views, label=scene))
        cards.append(Card(CLASSES[int(both.creature[first])], strips))
    section = Section("Which patches caused the prediction?", cards_html(cards), "")
    photograph_sections([section], out, (1240, 900))


def trust(out: Path) -> None:
    """Every method by what the studies measured, those on all photos; ours in red."""
    import csv

    import matplotlib.pyplot as plt

    means: dict[str, dict[str, float]] = {}
    for name in ("evidence-attribution", "mosaic"):  # the later study replaces the earlier
        with (Path("docs/results") / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                wanted = ("imagenet, label", "ins-del"), ("pets, label", "aupr1")
                if (row["table"], row["metric"]) in wanted and row["n"] in ("300", "500"):
                    means.setdefault(row["method"], {})[row["metric"]] = 100 * float(row["mean"])
    figure, axis = plt.subplots(figsize=(9, 5), dpi=110)
    for method, values in means.items():
        if len(values) < 2:
            continue
        left = method in ("raw-attention", "legrad", "attcat")  # or names would meet
        ours, control = method in OURS, method in ("random", "center", "sobel")
        colour = "#b4451f" if ours else "#9a9aa2" if control else "#264478"
        axis.scatter(values["aupr1"], values["ins-del"], s=60 if ours else 22, color=colour)
        place = values["aupr1"], values["ins-del"]
        look = {"color": colour, "fontsize": 8, "weight": "bold" if ours else "normal"}
        side = {"xytext": (-6, -3), "ha": "right"} if left else {"xytext": (6, -3), "ha": "left"}
        axis.annotate(method, place, textcoords="offset points", **look, **side)
    axis.set_xlabel("finds the object: AUPR_1 on 300 pets")
    axis.set_ylabel("faithful: insertion less deletion on 500 ImageNet photos")
    axis.set_xlim(32, 102)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def gallery(out: Path) -> None:
    """Every method on one photo, the most faithful first; a CSV of the scores is written beside."""
    import csv
    import os

    import matplotlib.pyplot as plt

    from examples.first_picture import INK, SOFT, caption, draw, photo, strength_of
    from seecause import attribute, load, metrics
    from seecause.attribution.registry import methods

    real = os.environ.get("SEECAUSE_REAL")
    weights = {"weights": f"{real}/vit_tiny_patch16_224.safetensors"} if real else {}
    model = load("timm:vit_tiny_patch16_224", **weights)
    images = model.preprocess(photo("coffee"))
    target = model(images).argmax(dim=1)
    rows, strengths = [], {}
    for name in methods():
        print(name, flush=True)  # noqa: T201
        result = attribute(model, images, target, method=name)
        finest = result.maps if result.native is None else result.native
        scores = metrics.insertion_deletion(model, images, finest, target)
        strengths[name] = strength_of(result, 0)
        names = ("insertion", "deletion", "ins-del")
        rows.append({"method": name, **{key: round(float(scores[key][0]), 4) for key in names}})
    rows.sort(key=lambda row: -row["ins-del"])
    with (Path("docs/results") / "gallery.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    raw = model.preprocess.raw(images)[0].clamp(0, 1).permute(1, 2, 0).numpy()
    margins = {"left": 0.005, "right": 0.995, "top": 0.995, "bottom": 0.03}
    figure, axes = plt.subplots(
        5, 6, figsize=(12, 11.4), dpi=110, gridspec_kw={"wspace": 0.05, "hspace": 0.2, **margins}
    )
    draw(axes.flat[0], raw, None)
    caption(axes.flat[0], f"photo: {model.classes[int(target)].split(',')[0]}", INK, "bold")
    for axis, row in zip(axes.flat[1:], rows, strict=False):
        draw(axis, raw, strengths[row["method"]])
        ours = row["method"] in OURS
        text = f"{row['method']}  {100 * row['ins-del']:.0f}"
        caption(axis, text, "#b4451f" if ours else SOFT, "bold" if ours else "normal")
    for axis in axes.flat[len(rows) + 1 :]:
        axis.set_axis_off()
    figure.savefig(out, pil_kwargs={"quality": 85, "optimize": True})


def heads(out: Path) -> None:
    from seecause.cli import run

    def make(folder: Path) -> Path:
        options = ["--limit", "8", "--top", "6", "--option", "draws=3"]
        if code := run(["heads", "prune", *options, "--out", str(folder / "pruned")]):
            raise SystemExit(code)
        return folder / "pruned" / "index.html"

    def shoot(page: Any) -> None:
        page.add_style_tag(content=PICTURES_ALONE)
        page.locator("main").screenshot(path=out)

    photograph(make, shoot, (1100, 900))


def repair(out: Path) -> None:
    from seecause.critters.demo import repair as repair_job

    gallery, *_ = repair_job("cpu", shown=3).sections
    photograph_sections([gallery], out, (1150, 700))


def discover(out: Path) -> None:
    from seecause.cli import run

    def make(folder: Path) -> Path:
        code = run(["discover", "--out", str(folder / "kinds")])
        if code:
            raise SystemExit(code)
        return folder / "kinds" / "index.html"

    def shoot(page: Any) -> None:
        page.add_style_tag(content=".bar, h1, h2, .lead, .note, .more { display: none }")
        page.screenshot(path=out)

    photograph(make, shoot, (1200, 805))


PICTURES = {
    "app": app, "critters": lambda out: contact_sheet().save(out), "demo": demo,
    "discover": discover, "gallery": gallery, "heads": heads, "repair": repair, "trust": trust,
}  # fmt: skip


def main(name: str, out: Path | None = None) -> None:
    """Write one image of the list above; `out` is its file, or for "app" a folder."""
    file = f"{name}.{'jpg' if name == 'gallery' else 'png'}"
    PICTURES[name](out if name == "app" else out or Path("docs") / file)


if __name__ == "__main__":
    cyclopts.run(main)
