"""Does a classifier that cannot look elsewhere hold up where a shortcut fails, and which parts of
iFAM matter?

    python scripts/faithful_study.py run --device cuda --minutes 9      # trains what is still
    missing, most important rows first; run again to go on
    python scripts/faithful_study.py report                             #
    docs/results/faithful-critters.md and .csv from what is there

How reliable the background of `simplicity` is, is chosen by what ERM alone does, before any other
method runs: the least of RELIABILITIES at which it fails. Every training is one JSON file under
--work, so a run can be stopped at any time. It holds a digest of what decides it: `run` does again
what other settings made, and `report` refuses it. `--accept-old` takes files without a digest at
their word. Toy networks keep a GPU waiting for the next kernel, so several trainings share it
(--workers). `scripts/faithful_plan.py` has the rows, `scripts/faithful_page.py` the page.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.faithful_page import page, write_csv
from scripts.faithful_plan import (
    CHANGEABLE,
    RATES,
    ROWS,
    SEEDS,
    Result,
    Training,
    backbone_recipe,
    digest,
    first_plan,
    fits,
    kind,
    pictures,
    read_results,
    second_plan,
    sized,
    where_erm_fails,
)
from scripts.kept_pieces import write_whole
from seecause.critters.train.ifam import (
    balanced,
    choose,
    fit,
    measure,
    measure_changed,
    seen_in_training,
)
from seecause.critters.train.ifam_backbone import pretrain
from seecause.critters.train.ifam_recipe import IfamRecipe, Pretraining, Scenes, build_backbone
from seecause.engine.machine import machine
from seecause.faithful import IFAM

app = typer.Typer(add_completion=False, no_args_is_help=True)

AcceptOld = Annotated[bool, typer.Option(help="Take results without a digest at their word.")]
_FIRST_GUESS = 30.0  # seconds, for a training of a kind that was never timed


@app.command()
def run(
    work: Path = Path("faithful-study"),
    device: str = "cuda",
    minutes: Annotated[float, typer.Option(help="Start nothing that would not end by then.")] = 9.0,
    workers: int = 6,
    rows: Annotated[str, typer.Option(help="Only rows with this text in their name.")] = "",
    quick: Annotated[
        bool, typer.Option(help="A handful of steps: that it runs, not what it shows.")
    ] = False,
    accept_old: AcceptOld = False,
) -> None:
    """Train what is missing."""
    work.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:

        def there() -> list[Result]:
            return [
                result
                for result in read_results(work).values()
                if fits(result, device, quick=quick, accept_old=accept_old)
            ]

        def follow_all(jobs: list[Training]) -> None:
            done = {(result["row"], result["regime"], result["seed"]) for result in there()}
            todo = [
                job
                for job in jobs
                if dataclasses.astuple(job) not in done and rows.lower() in job.row.lower()
            ]
            print(f"{len(todo)} of {len(jobs)} trainings are missing", flush=True)
            told = (device, (began, began + 60 * minutes), quick, accept_old)
            for job, said in [(job, pool.submit(follow, work, job, *told)) for job in todo]:
                print(
                    f"{job.regime:<15} seed {job.seed}  {job.row:<32} {said.result()}", flush=True
                )

        for eyes in [
            pool.submit(learn_to_see, work, "parts", seed, device, quick, accept_old)
            for seed in SEEDS
        ]:
            eyes.result()
        follow_all(first_plan())
        results = there()
        if all(
            (job.row, job.regime, job.seed) in {(r["row"], r["regime"], r["seed"]) for r in results}
            for job in first_plan()
        ):
            chosen = where_erm_fails(results)
            print(f"{chosen} is where ERM is compared with the others", flush=True)
            follow_all(second_plan(chosen))


def learn_to_see(
    work: Path, pretraining: Pretraining, seed: int, device: str, quick: bool, accept_old: bool
) -> dict[str, Any]:
    """The weights all rows of a seed start from, trained if they are not there."""
    path, recipe = (
        work / f"backbone-{pretraining}-{seed}.pt",
        backbone_recipe(pretraining, seed, quick=quick),
    )
    mark = digest(recipe=dataclasses.asdict(recipe), device=kind(device))
    if path.exists():
        found = torch.load(path, map_location=device, weights_only=True)
        if found["digest"] == mark if "digest" in found else accept_old:
            return found["weights"]
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    model = pretrain(
        recipe,
        device=torch.device(device),
        write_row=rows.append,
        every=max(1, recipe.pretraining_steps // 8),
    )
    made = {
        "weights": model.state_dict(),
        "log": rows,
        "seconds": time.perf_counter() - began,
        "digest": mark,
    }
    torch.save(made, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    return made["weights"]


def follow(
    work: Path,
    job: Training,
    device: str,
    window: tuple[float, float],
    quick: bool,
    accept_old: bool,
) -> str:
    """Train and measure one row, if there is time between the two ends of `window`; says how it
    went."""
    if time.time() + expected(work, job, window[0]) > window[1]:
        return "left for the next run"
    torch.set_num_threads(1)
    began, recipe, where = time.perf_counter(), sized(job.recipe, quick), torch.device(device)
    backbone = build_backbone(recipe).to(where)
    if recipe.pretraining != "none":
        backbone.load_state_dict(
            learn_to_see(work, recipe.pretraining, job.seed, device, quick, accept_old)
        )
    tested, chosen_by, calibrated = pictures(quick)
    test, val = (
        balanced(split, count, seed=job.seed, size=recipe.size, device=where)
        for split, count in (("test", tested), ("val", chosen_by))
    )
    net, told = fit_best(recipe, backbone, where, val)
    found: Result = {
        "row": job.row,
        "regime": job.regime,
        "seed": job.seed,
        **measure(net, recipe, test).row(),
        **told,
    }
    if job.row in CHANGEABLE:
        chosen = choose(net, recipe, seen_in_training(recipe, calibrated, where), val)
        found["chosen"] = chosen
        found["changed"] = measure_changed(net, recipe, test, chosen).row()
    found |= {
        "seconds": time.perf_counter() - began,
        "device": machine(where),
        "torch": torch.__version__,
        "quick": quick,
    }
    found["digest"] = job.digest(device, quick=quick)
    write_whole(work / job.file, json.dumps(found, indent=1))
    return f"AA {found['average']:.3f}  WGA {found['worst']:.3f}  {found['seconds']:.0f} s"


def expected(work: Path, job: Training, since: float) -> float:
    """Seconds a training may take: a tenth more than the longest that reads the same, of this run
    if one has ended, else of any; and its backbone's."""
    took: list[tuple[bool, float]] = []
    for path in work.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if ROWS.get(result["row"], {}).get("reads", "parts") == job.recipe.reads:
            took.append((path.stat().st_mtime >= since, result["seconds"]))
    fresh = [seconds for new, seconds in took if new]
    training = 1.1 * max(fresh or [seconds for _, seconds in took], default=_FIRST_GUESS)
    if (
        job.recipe.pretraining == "none"
        or (work / f"backbone-{job.recipe.pretraining}-{job.seed}.pt").exists()
    ):
        return training
    seen = [
        torch.load(path, map_location="cpu", weights_only=True)["seconds"]
        for path in work.glob("backbone-*.pt")
    ]
    return training + 2 * max(seen, default=_FIRST_GUESS)  # DINO runs two networks on two views


def fit_best(
    recipe: IfamRecipe, backbone: torch.nn.Module, device: torch.device, val: Scenes
) -> tuple[IFAM, dict[str, Any]]:
    """ERM is trained at several rates, and the one with the best worst group on validation is kept;
    others once, at the recipe's."""
    nets, told = [], []
    for rate, factor in (
        RATES if recipe.reads == "everything" else [(recipe.learning_rate, recipe.head_factor)]
    ):
        log: list[dict[str, Any]] = []
        one = dataclasses.replace(recipe, learning_rate=rate, head_factor=factor)
        nets.append(fit(one, copy.deepcopy(backbone), device=device, write_row=log.append))
        told.append(
            {
                "rate": rate,
                "head_factor": factor,
                "val": measure(nets[-1], one, val).row(),
                "log": log[-1],
            }
        )
    best = max(
        range(len(nets)),
        key=lambda place: (told[place]["val"]["worst"], told[place]["val"]["average"]),
    )
    return nets[best], {**told[best], "tried": told}


@app.command()
def report(
    work: Path = Path("faithful-study"),
    out: Path = Path("docs/results/faithful-critters.md"),
    device: str = "cuda",
    accept_old: AcceptOld = False,
) -> None:
    """Write the tables from the trainings that are there; what is missing is said."""
    found = read_results(work)
    strange = [
        name for name, result in found.items() if not fits(result, device, accept_old=accept_old)
    ]
    if strange or not found:
        said = (
            f"{len(strange)} trainings were made by other settings, such as {strange[0]}"
            if strange
            else "no trainings there"
        )
        raise typer.BadParameter(
            f"{said}; `run` (does them again) first, or --accept-old for those without a digest"
        )
    results = list(found.values())
    text = page(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    write_csv(results, out.with_suffix(".csv"))
    print(text)


if __name__ == "__main__":
    app()
