"""Which reading of CAAP is right, how well does it find the object, and does it show a background
that a model uses?

    python scripts/caap_study.py critters
    # embedded models, 512 pictures
    python scripts/caap_study.py photos --data pets:PATH --model timm:vit_tiny_patch16_224 --weights
    FILE

Writes one results page (Markdown) with the exact protocol. Every number in it is printed by this
script.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor

import seecause as sc
from seecause import critters
from seecause.data import open_data
from seecause.data.batch import to_batch
from seecause.engine.blanks import blank_image
from seecause.engine.machine import machine
from seecause.metrics import (
    Summary,
    insertion_deletion,
    localization,
    paired_difference,
    rank_correlation,
    summarise,
)
from seecause.models.view import VisionModel

app = typer.Typer(add_completion=False, no_args_is_help=True)

METHODS: dict[str, dict[str, Any]] = {
    "caap, source": {"tail": "source"},
    "caap, source, from block 1": {"tail": "source", "layers": (1, None)},
    "caap, patched": {"tail": "patched"},
    "caap, blank": {"tail": "blank"},
    "caap, all": {"tail": "all"},
    "caap, source, logit": {"tail": "source", "score": "logit"},
    "caap, patched, from block 1": {"tail": "patched", "layers": (1, None)},
    "e-caap": {"approx": "e-caap"},
    "e-caap as printed": {"approx": "e-caap-printed"},
    "caap, source, delete": {"tail": "source", "direction": "delete"},
    "simple-insertion": {"method": "simple-insertion"},
    "simple-deletion": {"method": "simple-deletion"},
    "random": {"method": "random"},
    "center": {"method": "center"},
    "sobel": {"method": "sobel"},
}
CONTROLS = ("random", "center", "sobel")
METRICS = (
    "AUPR_1",
    "AUPR_0",
    "pointing game",
    "insertion",
    "deletion",
    "ins - del",
    "rank correlation with patched",
)


@dataclass
class Scores:
    """Values of every image for one method, metric by metric."""

    values: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in METRICS})

    def add(self, **found: Tensor) -> None:
        for name, value in found.items():
            self.values[name].append(value.detach().cpu().double())

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self.values[name])


def study(
    model: VisionModel, batches: list[tuple[Tensor, Tensor, Tensor]], *, order: str
) -> dict[str, Scores]:
    """All methods on all pictures: (images, labels, masks) batches; the target is the given
    label."""
    scores = {name: Scores() for name in METHODS}
    for images, labels, masks in track(batches, "pictures"):
        maps = {
            name: sc.attribute(model, images, labels, **options)
            for name, options in METHODS.items()
        }
        for name, found in maps.items():
            place = localization(found.maps, masks)
            curves = insertion_deletion(
                model,
                images,
                found.maps,
                labels,
                order=order,
                steps="rise" if order == "pixel" else 16,
            )
            scores[name].add(**{
                "AUPR_1": place.aupr1, "AUPR_0": place.aupr0, "pointing game": place.pointing,
                "insertion": curves.insertion_area, "deletion": curves.deletion_area,
                "ins - del": curves.difference,
                "rank correlation with patched": rank_correlation(found.maps, maps["caap, patched"].maps),
            })  # fmt: skip
    return scores


def table(scores: dict[str, Scores]) -> str:
    head = "| method | " + " | ".join(METRICS) + " |\n|---|" + "---|" * len(METRICS) + "\n"
    percent = {name: 100.0 for name in METRICS} | {"rank correlation with patched": 1.0}
    lines = [
        f"| {name} | " + " | ".join(_cell(summarise(found[m]), percent[m]) for m in METRICS) + " |"
        for name, found in scores.items()
    ]
    return head + "\n".join(lines) + "\n"


def margins(scores: dict[str, Scores], method: str = "caap, source") -> str:
    """Paired differences from the controls, in standard errors."""
    shown = ("AUPR_1", "AUPR_0", "pointing game")
    head = f"| {method} less | " + " | ".join(shown) + " |\n|---|" + "---|" * len(shown) + "\n"
    lines = []
    for control in CONTROLS:
        gaps = [paired_difference(scores[method][m], scores[control][m]) for m in shown]
        lines.append(
            f"| {control} | "
            + " | ".join(
                f"{_cell(gap, 100)} ({gap.mean / max(gap.standard_error, 1e-12):+.0f} SE)"
                for gap in gaps
            )
            + " |"
        )
    return head + "\n".join(lines) + "\n"


def _cell(summary: Summary, scale: float) -> str:
    return summary.text(1 if scale == 100 else 3, scale=scale)


@app.command("critters")
def critters_models(
    pictures: Annotated[int, typer.Option(help="Test pictures of each model.")] = 512,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the results page.")] = Path("docs/results"),
    batch: int = 64,
) -> None:
    """The embedded models on generated pictures whose object is known to the pixel."""
    model = sc.load("builtin:critters-vit", device=device)
    page = [_title("CAAP on Critters", f"critters --pictures {pictures}", model)]
    scores = study(model, _drawn(model, pictures, batch), order="patch")
    page += [
        f"## critters-vit ({pictures} test pictures of `clean`, target = label)\n",
        "Insertion and deletion in patch order, 16 steps.\n",
        table(scores),
        "\nPaired differences from the controls:\n",
        margins(scores),
    ]
    page += [
        "\n## Where the positive attribution lies\n",
        _background_table(device, pictures, batch),
    ]
    _write(out / "caap-critters.md", page)


@app.command()
def photos(
    data: Annotated[str, typer.Option(help="A dataset with masks, such as pets:PATH.")],
    model: Annotated[str, typer.Option(help="A model, such as timm:NAME.")],
    weights: Annotated[str | None, typer.Option(help="Its weights.")] = None,
    limit: Annotated[int | None, typer.Option(help="Pictures at most.")] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the results page.")] = Path("docs/results"),
    batch: int = 32,
) -> None:
    """A real model on photos with masks."""
    view = sc.load(model, weights=weights, device=device)
    found = open_data(data, limit=limit)
    batches = _batches(view, found, batch)
    with torch.no_grad():
        right = torch.cat(
            [view(images).argmax(dim=1) == labels for images, labels, _ in batches]
        ).double()
    scores = study(view, batches, order="pixel")
    kind = data.partition(":")[0]
    page = [
        _title("CAAP on photos", f"photos --data {kind}:PATH --model {model} --weights FILE", view)
    ]
    page += [
        (
            f"{len(found)} photos of `{kind}` with masks; plain accuracy {right.mean():.3f}; target"
            " = label; RISE insertion and deletion, pixel order.\n"
        ),
        table(scores),
    ]
    page += ["\nPaired differences from the controls:\n", margins(scores)]
    page += ["\nPaired differences from `caap, source`:\n", _against(scores)]
    _write(out / "caap-photos.md", page)


@app.command()
def quick(
    pictures: Annotated[int, typer.Option(help="Test pictures.")] = 512,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the results page.")] = Path("docs/results"),
    batch: int = 32,
) -> None:
    """Only what is cheap on a CPU: localization against the controls, by probability and by logit,
    and E-CAAP against exact CAAP."""
    model = sc.load("builtin:critters-vit", device=device)
    chosen = {
        name: METHODS[name]
        for name in (
            "caap, source",
            "caap, source, logit",
            "e-caap",
            "e-caap as printed",
            *CONTROLS,
        )
    }
    scores = {name: Scores() for name in chosen}
    agreement: dict[str, list[Tensor]] = {"e-caap": [], "e-caap as printed": []}
    for images, labels, masks in track(_drawn(model, pictures, batch), "pictures"):
        maps = {
            name: sc.attribute(model, images, labels, **options).maps
            for name, options in chosen.items()
        }
        for name, found in maps.items():
            place = localization(found, masks)
            scores[name].add(
                **{"AUPR_1": place.aupr1, "AUPR_0": place.aupr0, "pointing game": place.pointing}
            )
        for name, values in agreement.items():
            values.append(rank_correlation(maps[name], maps["caap, source"]))
    page = [_title("CAAP on Critters: controls and E-CAAP", f"quick --pictures {pictures}", model)]
    page += [
        f"{pictures} test pictures of `clean` on critters-vit; target = label. Paired differences,"
        " in standard errors of the difference:\n"
    ]
    page += [margins(scores), "", margins(scores, "caap, source, logit")]
    page += [
        "\nSpearman's rank correlation with exact CAAP (`tail=source`):\n",
        "| approximation | rank correlation |",
        "|---|---|",
    ]
    page += [
        f"| {name} | {_cell(summarise(torch.cat(values)), 1)} |"
        for name, values in agreement.items()
    ]
    _write(out / "caap-quick.md", page)


def _against(scores: dict[str, Scores], method: str = "caap, source") -> str:
    shown = ("AUPR_1", "AUPR_0", "pointing game", "ins - del")
    head = f"| less {method} | " + " | ".join(shown) + " |\n|---|" + "---|" * len(shown) + "\n"
    others = [name for name in scores if name != method]
    return (
        head
        + "\n".join(
            f"| {name} | "
            + " | ".join(
                _cell(paired_difference(scores[name][m], scores[method][m]), 100) for m in shown
            )
            + " |"
            for name in others
        )
        + "\n"
    )


def _background_table(device: str, pictures: int, batch: int) -> str:
    """The share of positive attribution on background patches, beside how often another background
    changes the answer."""
    lines = [
        (
            "| model | pictures | target | share on the background | share of the area | background"
            " flips | flips, untrained |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name, regime in (("critters-vit", "clean"), ("critters-biased", "certified")):
        model = sc.load(f"builtin:{name}", device=device)
        untrained = sc.load("timm:vit_tiny_patch16_224", weights="random", device=device, size=96)
        shares, areas, flips, blank_flips = [], [], [], []
        for start in range(0, pictures, batch):
            latents = critters.draw(
                regime, "test", min(batch, pictures - start), seed=1, start=start, device=device
            )
            picture = critters.render(latents)
            other = critters.render(
                latents,
                do=critters.Do(background=(latents.background + 1) % len(critters.BACKGROUNDS)),
            )
            images, swapped = (
                model.preprocess.normalise(p.image).to(model.dtype) for p in (picture, other)
            )
            share, space = background_share(model, images, picture.mask)
            shares.append(share)
            areas.append(space)
            with torch.no_grad():
                flips.append(model(images).argmax(dim=1) != model(swapped).argmax(dim=1))
                blank_flips.append(
                    untrained(images).argmax(dim=1) != untrained(swapped).argmax(dim=1)
                )
        figures = [
            _cell(summarise(torch.cat(v).double()), 100)
            for v in (shares, areas, flips, blank_flips)
        ]
        lines.append(f"| {name} | {regime} | predicted class | {' | '.join(figures)} |")
    return (
        "\n".join(lines)
        + "\n\nShares in percent: of max(0, A_i - f(blank)), a patch counted by how much of it is"
        " background.\n"
    )


def background_share(model: VisionModel, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] share of the positive attribution that lies on the background, and the background's share
    of the area."""
    found = sc.attribute(model, images)
    classes = torch.tensor(found.manifest["target"]["class"], device=images.device)
    with torch.no_grad():
        neutral = model(blank_image(model, (images.shape[-2], images.shape[-1]))).softmax(dim=-1)[
            0, classes
        ]
    positive = (found.maps - neutral[:, None, None]).clamp_min(0)
    outside = torch.nn.functional.adaptive_avg_pool2d(
        (~mask)[:, None].float(), found.maps.shape[1:]
    )[:, 0]
    return (positive * outside).sum(dim=(1, 2)) / positive.sum(dim=(1, 2)).clamp_min(
        1e-12
    ), outside.mean(dim=(1, 2))


def _drawn(model: VisionModel, pictures: int, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Test pictures of `clean`, drawn on the model's device."""
    found = []
    for start in range(0, pictures, size):
        latents = critters.draw(
            "clean", "test", min(size, pictures - start), start=start, device=model.device
        )
        picture = critters.render(latents)
        found.append((model.preprocess.normalise(picture.image), latents.label, picture.mask))
    return found


def _batches(model: VisionModel, data: Any, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        tuple(to_batch(model, [data[i] for i in range(a, min(a + size, len(data)))]))
        for a in range(0, len(data), size)
    ]  # type: ignore[misc]


def _title(title: str, command: str, model: VisionModel) -> str:
    return (
        f"# {title}\n\nWritten by `python scripts/caap_study.py {command}` (seecause"
        f" {sc.__version__}, torch {torch.__version__}, {machine(model.device)},"
        f" {str(model.dtype).removeprefix('torch.')}). Percent, mean ± standard error; higher is"
        " better except deletion.\n"
    )


def _write(path: Path, page: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page)
    path.write_text(text, encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    app()
