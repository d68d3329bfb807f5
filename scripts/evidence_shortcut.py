"""Does a real vision transformer fall for a shortcut on real photos, and what helps? Cats and dogs
on two textures, in the manner of Waterbirds.

    python scripts/evidence_shortcut.py --real PATH --device cuda --minutes 9         # run again
    until nothing is missing
    python scripts/evidence_shortcut.py --real PATH --limit 40 --device cpu           # small: the
    same code, no meaning

PATH holds `pets_small/` (Oxford-IIIT Pet in the layout of its release) and
`vit_tiny_patch16_224.safetensors`. Every training is one JSON file under --work, so a run can be
stopped at any time. Several trainings share a GPU. Writes evidence-shortcut.md, .csv and two .png;
the exit code is 1 while something is missing.
--minutes 0 trains nothing and writes the page of what is there, on any machine: give the --device
of the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.shortcut.methods import FILE, Job, Setup, run
from scripts.shortcut.page import write
from scripts.shortcut.plan import Results, expected, is_complete, missing
from scripts.shortcut.slices import remember
from seecause.errors import DataMissing, SeecauseError

SMALL: dict[str, Any] = {"epochs": 1, "batch": 8, "mask_steps": 5, "scored": 16, "draws": 2}
MISSING = 1  # exit code
SLACK = 1.1  # times the expected seconds must be left


def main(
    real: Annotated[Path, typer.Option(help="Folder with pets_small/ and the weights.")],
    limit: Annotated[
        int | None,
        typer.Option(help="So many photos of every split, one epoch: a small run.", min=4),
    ] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[
        float,
        typer.Option(
            help=(
                "Start nothing that would not end by then, one job aside if none would; 0: nothing."
            )
        ),
    ] = 9.0,
    out: Annotated[Path, typer.Option(help="Folder of the results page.")] = Path("docs/results"),
    work: Annotated[Path, typer.Option(help="Keep finished trainings here.")] = Path(
        "out/evidence"
    ),
    workers: Annotated[
        int | None, typer.Option(help="Trainings at once.", show_default="6 on a GPU, 2 elsewhere")
    ] = None,
) -> None:
    """Run what is missing and write the page of what is there."""
    try:
        study = open_study(
            real, work, device=device, **({} if limit is None else {"limit": limit, **SMALL})
        )
        workers = workers if workers is not None else 6 if device.startswith("cuda") else 2
        try:
            carry_out(study, ends=time.time() + 60 * minutes, workers=workers)
        finally:  # whatever stops it, the page shows what is there
            results = finished(study)
            write(study, results, out)
    except SeecauseError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if not is_complete(results):
        print(f"not finished: {_left(results)}; run the same command again")
        raise typer.Exit(MISSING)


def open_study(real: Path, work: Path, **told: Any) -> Setup:
    """A study in a folder of its own: runs of other sizes, weights, photos or kinds of device do
    not mix."""
    lists = [real / "pets_small" / "annotations" / name for name in ("trainval.txt", "test.txt")]
    for needed in (*lists, *([] if "architecture" in told else [real / FILE])):
        if not needed.is_file():
            raise DataMissing(
                str(needed),
                "no such file",
                "give --real the folder with pets_small/ and the weights",
            )
    setup = Setup(real, work, **told)
    folder = work / f"shortcut-{_key(setup, lists)}"
    folder.mkdir(parents=True, exist_ok=True)
    return dataclasses.replace(setup, folder=folder)


def _key(setup: Setup, lists: list[Path]) -> str:
    """Of all that decides a number."""
    sizes = {
        name: value
        for name, value in dataclasses.asdict(setup).items()
        if name not in ("real", "folder", "device")
    }
    files = [*lists, *([] if setup.architecture is not None else [setup.real / FILE])]
    decides = {
        "version": 3,
        **sizes,
        "device": torch.device(setup.device).type,
        "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


def finished(setup: Setup) -> Results:
    return {path.name: json.loads(path.read_text()) for path in sorted(setup.folder.glob("*.json"))}


def carry_out(setup: Setup, *, ends: float, workers: int) -> None:
    """Do what the plan asks for, `workers` jobs at once (0: in this process), as long as there is
    time."""
    results = finished(setup)
    print(f"{len(results)} trainings are there; {_left(results)}", flush=True)
    began, there = time.time(), len(results)
    try:
        _carry_out(setup, results, ends=ends, workers=workers)
    finally:
        if len(results) > there:
            remember(
                setup.folder,
                seconds=time.time() - began,
                workers=workers,
                jobs=len(results) - there,
            )


def _carry_out(setup: Setup, results: Results, *, ends: float, workers: int) -> None:
    """Adds to `results`. However little time there is, one job is done: slices that are too short
    for any would never end."""
    running: dict[Future[Any], Job] = {}
    failed: set[Job] = set()
    there = len(results)
    with _pool(workers) as pool:
        while True:
            waiting = [
                job for job in missing(results) if job not in failed and job not in running.values()
            ]
            for job in waiting[: max(1, workers) - len(running)]:
                first = not running and not failed and len(results) == there
                if time.time() + SLACK * expected(job, results) <= ends or (
                    first and time.time() < ends
                ):
                    running[pool.submit(run, setup, job)] = job
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(done)
                try:
                    results[job.file] = done.result()
                    print(f"{job.file:<40} {_said(results[job.file])}", flush=True)
                except SeecauseError as wrong:  # the others go on; the page shows the hole
                    failed.add(job)
                    print(f"{job.file:<40} failed: {wrong}", flush=True)


def _left(results: Results) -> str:
    holes = missing(results, guess=True)
    seconds = sum(expected(job, results) for job in holes)
    return (
        f"{len(holes)} are missing, at most about {seconds:.0f} seconds of work, if the best"
        " settings so far stay the best"
    )


def _said(found: dict[str, Any]) -> str:
    told = {
        name: found[name]["test"] for name in ("dfr", "printed", "guarded") if name in found
    } or {"test": found["test"]}
    numbers = "  ".join(
        f"{name}: AA {one['average']:.3f} WGA {one['worst']:.3f}" for name, one in told.items()
    )
    return f"{numbers}  {found['seconds']:.0f} s"


def _pool(workers: int) -> Executor:
    return (
        ProcessPoolExecutor(
            workers,
            mp_context=get_context("spawn"),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        if workers
        else _Here()
    )


class _Here(Executor):
    """Runs everything at once, in this process."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **told: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given, **told))
        except SeecauseError as wrong:
            done.set_exception(wrong)
        return done


if __name__ == "__main__":
    typer.run(main)
