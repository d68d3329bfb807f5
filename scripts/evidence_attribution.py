"""Which attribution method can be trusted on a real ViT and real photos?

    make evidence-attribution REAL=PATH                                  # or: python
    scripts/evidence_attribution.py --real PATH
    make evidence-attribution REAL=PATH LIMIT=40                         # two cores

PATH holds vit_tiny_patch16_224.safetensors, pets/ (Oxford-IIIT Pet with trimaps and
imagenet_labels.csv) and imagenet/val/<wnid>/*.JPEG. All methods by all metrics of the paper, for
the given label and for the predicted class; maps without signs and smoothed; sanity checks; CAAP's
tails, blanks, selections, layers and scores. Stops between two shards when --minutes are over; the
same command again goes on. Writes evidence-attribution.md, .csv and pictures: what is not done yet
is a hole on the page, and the exit code is 1 until there is none. Every number on the page is
computed here. --only-page writes it again. Another model, other methods or a limit have a work
folder of their own.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.attribution_changed import read_changed, score_changed
from scripts.attribution_page import write
from scripts.attribution_parts import Done, Part, Photoset, Sizes, parts, photoset
from scripts.attribution_patches import read_patches, score_patches
from scripts.tables import with_reference
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.attribution.registry import methods as all_methods
from seecause.bench.ablate import save_depth
from seecause.bench.plan import Request, Store, make_plan
from seecause.bench.runner import inspect, run
from seecause.bench.work import Worker, open_model, read_samples
from seecause.data import open_data
from seecause.data.batch import to_batch
from seecause.data.photos import Photos
from seecause.engine.machine import machine
from seecause.errors import DataMissing, SeecauseError
from seecause.models.base import ImageModel

MACHINE = "machine.txt"  # in the work folder: where its shards were made
MODEL = "timm:vit_tiny_patch16_224"
OUT_OF_TIME = "the time was over; run the same command again to go on"
WARM = 8  # photos of the call that no one times
SETS = {"pets": "Oxford-IIIT Pet photos", "imagenet": "ImageNet validation photos"}


def main(
    real: Annotated[str, typer.Option(help="Folder with the weights, pets/ and imagenet/.")] = "",
    limit: Annotated[
        int | None,
        typer.Option(help="Photos of each set, spread evenly.", show_default="all", min=1),
    ] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[float, typer.Option(help="Begin no new shard after so many.")] = 9,
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("docs/results"),
    work: Annotated[Path, typer.Option(help="Where finished work is kept.")] = Path("out/evidence"),
    method: Annotated[
        str | None, typer.Option(help="Methods, separated by commas.", show_default="all")
    ] = None,
    model: Annotated[
        str, typer.Option(help="timm:NAME; its weights are NAME.safetensors.")
    ] = MODEL,
    only_page: Annotated[
        bool,
        typer.Option(
            help=(
                "Run nothing: write the page of what is in --work, whichever machine and versions"
                " made it."
            )
        ),
    ] = False,
) -> None:
    began = time.monotonic()
    try:
        deadline = None if only_page else began + 60 * minutes
        complete = study(
            real,
            limit,
            "cpu" if only_page else device,
            deadline,
            out,
            work / work_folder(limit, method, model),
            method,
            model,
        )
    except SeecauseError as refused:
        typer.echo(str(refused), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{time.monotonic() - began:.0f} s; {out / 'evidence-attribution.md'}")
    if not complete:
        typer.echo("Not complete: run the same command again.")
        raise typer.Exit(1)


def study(
    real: str,
    limit: int | None,
    device: str,
    deadline: float | None,
    out: Path,
    work: Path,
    method: str | None,
    name: str,
) -> bool:
    """Whatever is not done yet, as far as the time allows (None: nothing), and the page; whether
    all is done."""
    if deadline is None and not work.is_dir():
        raise DataMissing(
            str(work),
            "no work of this study is there",
            "give the --work, --limit, --method and --model of the run, or leave out --only-page",
        )
    weights, folder = _found(real, f"{name.partition(':')[2]}.safetensors")
    base = Request(
        model=name,
        data="",
        methods={},
        weights=str(weights),
        device=device,
        precision="high" if device.startswith("cuda") else "highest",
        threads=torch.get_num_threads(),
    )
    model = open_model(base)
    torch.set_float32_matmul_precision(base.precision)  # after the view was verified
    sets = [
        photoset(kind, title, _photos(f"{kind}:{folder / kind}", limit), model)
        for kind, title in SETS.items()
    ]
    for photos in sets:
        typer.echo(
            f"{photos.title}: {len(photos.data)}, {photos.right.double().mean():.1%} answered right"
        )
    sizes, methods = Sizes.of(limit), with_reference(_methods(method))
    todo = parts(model, sets, methods, sizes, base)
    if deadline is None:
        done = [_kept(part, model, work) for part in todo]
    else:
        _tell(todo, model)
        _warm_up(model, sets[0])
        done = [_perform(part, model, work, deadline) for part in todo]
    patches = {one.part.name: read_patches(one) for one in done if one.part.on_patches}
    changed = {one.part.name: read_changed(one) for one in done}
    made_on = ", ".join(_machines(work)) or machine(device)
    write(
        out,
        work,
        sets,
        done,
        patches,
        changed,
        sizes,
        command=_command(limit, method, name),
        machine=made_on,
    )
    return all(one.status.complete for one in done) and not any(
        found.missing for found in (*patches.values(), *changed.values())
    )


def work_folder(limit: int | None, method: str | None, model: str) -> str:
    """The work folder: the study's own, or one for each limit, choice of methods and model."""
    named = {
        "model": None if model == MODEL else model.partition(":")[2].replace("/", "-"),
        "limit": limit,
        "methods": method and _digest(method),
    }
    return "-".join(
        ["attribution", *(f"{what}-{value}" for what, value in named.items() if value is not None)]
    )


def _perform(part: Part, model: ImageModel, work: Path, deadline: float) -> Done:
    began = time.monotonic()

    def enough() -> str:
        return OUT_OF_TIME if time.monotonic() > deadline else ""

    store, worker = (
        Store(work / part.name),
        Worker(make_plan(part.request, model, part.data), model, part.data),
    )
    status = run(
        store,
        worker,
        advance=lambda images: _remember(work, machine(part.request.device)),
        enough=enough,
    )
    done = Done(part, store, worker.plan, status)
    if part.request.study == "layers" and status.complete:
        save_depth(store, worker)  # always: what an earlier run left may be of other photos
    if part.on_patches:
        score_patches(done, model, enough)
    score_changed(done, model, enough)
    said = [
        f"{status.done} of {status.total} shards",
        *([f"{len(status.holes)} holes"] if status.holes else []),
        *status.failed.values(),
        status.stopped,
    ]
    typer.echo(
        f"{part.name}: {'; '.join(text for text in said if text)}; {time.monotonic() - began:.1f} s"
    )
    return done


def _kept(part: Part, model: ImageModel, work: Path) -> Done:
    """A part as it was left, by the plan it was made with: other versions and devices would ask for
    other shards. One that was not begun has nothing."""
    store = Store(work / part.name)
    if not (store.folder / "manifest.json").is_file():
        plan = make_plan(part.request, model, part.data)
        return Done(part, store, plan, inspect(store, plan))
    plan = store.plan()
    if list(plan.samples) != [
        photo.id for photo in part.data.photos
    ]:  # or the model answers otherwise here, where the predicted class is explained
        raise DataMissing(
            str(store.folder),
            "it was made of other photos than are asked for",
            "give the --real, --limit and --model it was made with",
        )
    done = Done(part, store, plan, inspect(store, plan))
    if part.on_patches:
        score_patches(done, model, lambda: False, answers=False)
    score_changed(done, model, lambda: False)
    return done


def _warm_up(model: ImageModel, photos: Photoset) -> None:
    """One forward and backward that no one times: what a device loads first is not the cost of the
    first method."""
    samples, _ = read_samples(photos.data, 0, min(WARM, len(photos.data)))
    if samples:
        attribute(
            model,
            to_batch(model, list(samples.values())).images,
            None,
            "integrated-gradients",
            steps=2,
        )


def _machines(work: Path) -> list[str]:
    """Where the shards in a work folder were made."""
    return (
        (work / MACHINE).read_text(encoding="utf-8").splitlines()
        if (work / MACHINE).is_file()
        else []
    )


def _remember(work: Path, name: str) -> None:
    if name not in _machines(work):
        (work / MACHINE).write_text("\n".join([*_machines(work), name]) + "\n", encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _tell(todo: list[Part], model: ImageModel) -> None:
    """The plan and what it costs, before anything runs."""
    patches = model.check(
        torch.zeros(1, 3, *model.preprocess.size, device=model.device, dtype=model.dtype)
    ).n_patches
    for part in todo:
        typer.echo(
            f"  {part.name}: {len(part.request.methods)} methods, {len(part.data)} photos, about"
            f" {part.forwards(patches):,} forwards"
        )
    typer.echo(
        f"  in all about {sum(part.forwards(patches) for part in todo):,} forwards; what is done"
        " already is not done again"
    )


def _found(real: str, weights: str) -> tuple[Path, Path]:
    """The weights and the folder, or what is missing."""
    if not real:
        raise DataMissing(
            "REAL",
            "no folder is given",
            f"make evidence-attribution REAL=PATH, where PATH holds {weights}, pets/ and imagenet/",
        )
    folder = Path(real)
    for path in (folder / weights, *(folder / kind for kind in SETS)):
        if not path.exists():
            raise DataMissing(
                str(path),
                "it does not exist",
                f"give a folder REAL=PATH that holds {weights}, pets/ and imagenet/"
                " (docs/evidence.md)",
            )
    return folder / weights, folder


def _photos(spec: str, limit: int | None) -> Photos:
    found = open_data(spec, limit=limit)
    assert isinstance(found, Photos)
    return found


def _methods(asked: str | None) -> list[str]:
    names = [name.strip() for name in asked.split(",")] if asked else sorted(all_methods())
    return [find(name).name for name in names]


def _command(limit: int | None, method: str | None, model: str) -> str:
    """What to type for the same page; the folder, the machine and the time do not matter."""
    if method is None and model == MODEL:
        return "make evidence-attribution REAL=PATH" + ("" if limit is None else f" LIMIT={limit}")
    given = {"--limit": limit, "--method": method, "--model": model}
    return " ".join(
        [
            "python scripts/evidence_attribution.py --real PATH",
            *(f"{name} {value}" for name, value in given.items() if value is not None),
        ]
    )


if __name__ == "__main__":
    typer.run(main)
