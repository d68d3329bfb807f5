"""Does a classifier that cannot look elsewhere hold up where a shortcut fails, and which parts of iFAM matter?

    python scripts/faithful_study.py run --device cuda --minutes 9      # trains what is still missing, most important rows first; run again to go on
    python scripts/faithful_study.py report                             # docs/results/faithful-critters.md and .csv from what is there

How reliable the background of `simplicity` is, is chosen by what ERM alone does, before any other method runs: the least of RELIABILITIES at which it fails.
Every training is one JSON file under --work, so a run can be stopped at any time. Toy networks keep a GPU waiting for the next kernel, so several
trainings share it (--workers).
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import seecause
from seecause.data.critters import REGIMES, Regime
from seecause.faithful import IFAM, LossWeights
from seecause.train.ifam import fit, seen_in_training
from seecause.train.ifam_backbone import pretrain
from seecause.train.ifam_evaluate import balanced, choose, measure, measure_changed
from seecause.train.ifam_pictures import Scenes
from seecause.train.ifam_recipe import IfamRecipe, Pretraining, build

app = typer.Typer(add_completion=False, no_args_is_help=True)

BASE = IfamRecipe("study", pretraining_samples=409_600, samples=122_880, epochs=30)
SEEDS = (0, 1, 2)
SHAPING_OFF = LossWeights(presence=0, background=0, total_variation=0, entropy=0, equivariance=0, orthogonality=0)
NO_STAGE_1 = dataclasses.replace(BASE.weights, class1=0)
MAIN: dict[str, dict[str, Any]] = {
    "ERM ViT": {"reads": "everything"},
    "PDiscoFormer, K = 4": {"options": {"stages": 1}},
    "early mask, ground truth": {"reads": "creature"},
    "early mask, ground truth, whole patches": {"reads": "creature", "covered": 1.0},
    "iFAM, K = 4": {},
    "iFAM, K = 1": {"parts": 1},
    "iFAM, K = 8": {"parts": 8},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no straight-through gradient": {"options": {"gradient": "none"}},
    "soft masks": {"options": {"gradient": "soft"}},
    "no stage-1 loss": {"weights": NO_STAGE_1},
    "stage 2 frozen": {"options": {"freeze": "both"}},
    "no shaping, K = 1": {"parts": 1, "weights": SHAPING_OFF},
    "stage-2 part dropout 0": {"options": {"part_dropout2": 0.0}},
    "stage-2 part dropout 0.1": {"options": {"part_dropout2": 0.1}},
    "stage-2 part dropout 0.5": {"options": {"part_dropout2": 0.5}},
    "background loss at the paper's weight 2": {"weights": LossWeights()},
    "stage 1 trained whole": {"options": {"freeze": "none"}},
    "backbone: DINO": {"pretraining": "dino"},
    "ERM ViT, from scratch": {"reads": "everything", "pretraining": "none"},
}
CHANGEABLE = ("PDiscoFormer, K = 4", "iFAM, K = 1", "iFAM, K = 4", "iFAM, K = 8")  # rows that are tried with interventions too
RATES = ((5e-4, 1.0), (2e-4, 1.0), (1e-3, 1.0))  # learning rate and factor of the head, tried for ERM
RELIABILITIES = (0.95, 0.97, 0.99)  # of the background of `simplicity`
FAILS = 0.9  # worst-group accuracy on validation, mean over seeds, below which ERM is said to fail
TEST, VAL, CALIBRATION = 4096, 2048, 2048  # pictures


@dataclass(frozen=True)
class Training:
    """One row, one regime, one seed."""

    row: str
    regime: str
    seed: int

    @property
    def recipe(self) -> IfamRecipe:
        return dataclasses.replace(BASE, regime=regime_of(self.regime), seed=self.seed, **{**MAIN, **ABLATIONS}[self.row])

    @property
    def file(self) -> str:
        word = "".join(c if c.isalnum() else "-" for c in self.row.lower())
        return f"{self.regime}_{word}_{self.seed}.json"


def simplicity(reliability: float) -> str:
    return f"simplicity {reliability:g}"


def regime_of(name: str) -> Regime:
    """`certified`, or `simplicity` and how reliable its background is."""
    kind, _, reliability = name.partition(" ")
    return dataclasses.replace(REGIMES[kind], background_reliability=float(reliability)) if reliability else REGIMES[kind]


def first_plan() -> list[Training]:
    """ERM on everything."""
    return [Training("ERM ViT", regime, seed) for regime in (*map(simplicity, RELIABILITIES), "certified") for seed in SEEDS]


def second_plan(regime: str) -> list[Training]:
    """Most important first: the main rows on both regimes, other K, then ablations seed by seed."""
    first, others = list(MAIN)[1:5], list(MAIN)[5:]
    jobs = [Training(row, where, seed) for rows in (first, others) for where in (regime, "certified") for seed in SEEDS for row in rows]
    return jobs + [Training(row, regime, seed) for seed in SEEDS for row in ABLATIONS]


def where_erm_fails(results: list[dict[str, Any]]) -> str:
    """The least reliable `simplicity` at which ERM fails on validation pictures; the most reliable if it fails nowhere."""
    for regime in map(simplicity, RELIABILITIES):
        found = _seeds(results, "ERM ViT", regime)
        if len(found) == len(SEEDS) and statistics.mean(result["val"]["worst"] for result in found) < FAILS:
            return regime
    return simplicity(RELIABILITIES[-1])


@app.command()
def run(
    work: Path = Path("faithful-study"),
    device: str = "cuda",
    minutes: Annotated[float, typer.Option(help="Start nothing that would not end by then.")] = 9.0,
    workers: int = 6,
    rows: Annotated[str, typer.Option(help="Only rows with this text in their name.")] = "",
    quick: Annotated[bool, typer.Option(help="A handful of steps: that it runs, not what it shows.")] = False,
) -> None:
    """Train what is missing."""
    work.mkdir(parents=True, exist_ok=True)
    ends = time.time() + 60 * minutes
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for eyes in [pool.submit(learn_to_see, work, "parts", seed, device, quick) for seed in SEEDS]:
            eyes.result()

        def follow_all(jobs: list[Training]) -> None:
            todo = [job for job in jobs if not (work / job.file).exists() and rows.lower() in job.row.lower()]
            print(f"{len(todo)} of {len(jobs)} trainings are missing", flush=True)
            for job, done in [(job, pool.submit(follow, work, job, device, ends, quick)) for job in todo]:
                print(f"{job.regime:<15} seed {job.seed}  {job.row:<32} {done.result()}", flush=True)

        follow_all(first_plan())
        if all((work / job.file).exists() for job in first_plan()):
            chosen = where_erm_fails(_results(work))
            print(f"{chosen} is where ERM is compared with the others", flush=True)
            follow_all(second_plan(chosen))


def _results(work: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(work.glob("*.json"))]


def learn_to_see(work: Path, kind: Pretraining, seed: int, device: str, quick: bool) -> Path:
    """The backbone all rows of a seed start from."""
    path = work / f"backbone-{kind}-{seed}.pt"
    if path.exists():
        return path
    torch.set_num_threads(1)
    recipe = _sized(dataclasses.replace(BASE, seed=seed, pretraining=kind), quick)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    model = pretrain(recipe, device=torch.device(device), hear=rows.append, every=max(1, recipe.pretraining_steps // 8))
    torch.save({"weights": model.state_dict(), "log": rows, "seconds": time.perf_counter() - began}, path.with_suffix(".partial"))
    return path.with_suffix(".partial").rename(path)


def follow(work: Path, job: Training, device: str, ends: float, quick: bool) -> str:
    """Train and measure one row, if there is time; says how it went."""
    took = [json.loads(path.read_text())["seconds"] for path in work.glob("*.json")]
    if time.time() + (1.1 * max(took) if took else 30) > ends:
        return "left for the next run"
    torch.set_num_threads(1)
    began, recipe, where = time.perf_counter(), _sized(job.recipe, quick), torch.device(device)
    backbone = build(recipe).to(where)
    if recipe.pretraining != "none":
        eyes = learn_to_see(work, recipe.pretraining, job.seed, device, quick)
        backbone.load_state_dict(torch.load(eyes, map_location=where, weights_only=True)["weights"])
    few = 64 if quick else None
    test, val = (balanced(split, count, seed=job.seed, size=recipe.size, device=where) for split, count in (("test", few or TEST), ("val", few or VAL)))
    net, told = fit_best(recipe, backbone, where, val)
    found: dict[str, Any] = {"row": job.row, "regime": job.regime, "seed": job.seed, **measure(net, recipe, test).row(), **told}
    if job.row in CHANGEABLE:
        chosen = choose(net, recipe, seen_in_training(recipe, few or CALIBRATION, where), val)
        found["chosen"] = chosen
        found["changed"] = measure_changed(net, recipe, test, chosen).row()
    found |= {"seconds": time.perf_counter() - began, "device": _machine(where), "torch": torch.__version__, "quick": quick}
    (work / job.file).with_suffix(".partial").write_text(json.dumps(found, indent=1))
    (work / job.file).with_suffix(".partial").rename(work / job.file)
    return f"AA {found['average']:.3f}  WGA {found['worst']:.3f}  {found['seconds']:.0f} s"


def fit_best(recipe: IfamRecipe, backbone: torch.nn.Module, device: torch.device, val: Scenes) -> tuple[IFAM, dict[str, Any]]:
    """ERM is trained at several rates, and the one with the best worst group on validation is kept; others once, at the recipe's."""
    nets, told = [], []
    for rate, factor in RATES if recipe.reads == "everything" else [(recipe.learning_rate, recipe.head_factor)]:
        log: list[dict[str, Any]] = []
        one = dataclasses.replace(recipe, learning_rate=rate, head_factor=factor)
        nets.append(fit(one, copy.deepcopy(backbone), device=device, hear=log.append))
        told.append({"rate": rate, "head_factor": factor, "val": measure(nets[-1], one, val).row(), "log": log[-1]})
    best = max(range(len(nets)), key=lambda place: (told[place]["val"]["worst"], told[place]["val"]["average"]))
    return nets[best], {**told[best], "tried": told}


@app.command()
def report(work: Path = Path("faithful-study"), out: Path = Path("docs/results/faithful-critters.md")) -> None:
    """Write the tables from the trainings that are there; rows with fewer than three seeds say so."""
    results = _results(work)
    if not results or any(result["quick"] for result in results):
        raise typer.BadParameter("no full trainings there (quick ones are not reported); use `run` first")
    chosen = where_erm_fails(results)
    page = ["# iFAM on Critters", "", *_protocol(results[0]), "", *_first_section(results, chosen)]
    for regime in (chosen, "certified"):
        lines = []
        for row in MAIN:
            found = _seeds(results, row, regime)
            if found:
                lines.append(_line(row, found, found))
                if row in CHANGEABLE:
                    lines.append(_line(f"{row}, with interventions", found, [result["changed"] for result in found]))
        if lines:
            page += ["", f"## `{regime}`", "", *_head("method"), *lines, "", _gap(results, regime)]
    lines = [_line(row, found, found) for row in ABLATIONS if (found := _seeds(results, row, chosen))]
    if lines:
        reference = [_line(row, found, found) for row in ("iFAM, K = 4", "PDiscoFormer, K = 4") if (found := _seeds(results, row, chosen))]
        page += ["", f"## What matters? (`{chosen}`, K = 4 unless said)", "", *_head("change"), *reference, *lines]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(page) + "\n", encoding="utf-8")
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("row", "regime", "seed", "average", "worst", "iou", "kept", "changed_average", "changed_worst", "drop", "quantile", "seconds"))
        for r in results:
            changed, chosen = r.get("changed", {}), r.get("chosen", {})
            numbers = [f"{r[key]:.4f}" if key in r else "" for key in ("average", "worst", "iou", "kept")]
            after = [f"{changed[key]:.4f}" if key in changed else "" for key in ("average", "worst")]
            writer.writerow((r["row"], r["regime"], r["seed"], *numbers, *after, chosen.get("drop", ""), chosen.get("quantile", ""), f"{r['seconds']:.1f}"))
    print("\n".join(page))


def _protocol(result: dict[str, Any]) -> list[str]:
    return [
        f"Written by `python scripts/faithful_study.py report` (seecause {seecause.__version__}, torch {result['torch']}, {result['device']}). "
        f"Percent, mean ± standard deviation over seeds {', '.join(map(str, SEEDS))}.",
        "",
        "AA is the accuracy against the creature on balanced test pictures (every creature on every background equally often), WGA that of the worst "
        f"of the 32 groups (creature, background), {TEST // 32} pictures each. IoU: selected patches against the creature's pixels, over all test "
        "pictures. Kept: the share of patches the classifier reads.",
        "",
        f"All rows of a seed start from the same backbone, pretrained on `clean` by naming parts ({BASE.pretraining_samples:,} pictures). Then come "
        f"{BASE.samples:,} pictures of the regime in batches of {BASE.batch}, with the paper's loss weights but {BASE.weights.background:g} for the "
        "background. The average of the last weights is tested, and nothing is chosen on test. "
        f"ERM is trained at {len(RATES)} rates, and the one with the best worst group on {VAL:,} balanced validation pictures is kept; other rows are "
        "trained once. "
        f"`with interventions`: one part left out, tokens beyond a quantile rejected, both or neither, whatever has the best WGA on {VAL:,} balanced "
        "validation pictures. The early mask with ground truth shows the patches that the creature covers by half or more: its edge, with some background "
        "around it. `whole patches`: only those that it covers wholly, so that no pixel of the background is read.",
    ]


def _first_section(results: list[dict[str, Any]], chosen: str) -> list[str]:
    """Where does ERM fail?"""
    lines = ["## Where does ERM fail?", "", "| pictures | WGA, validation | AA | WGA |", "|---|---|---|---|"]
    for regime in (*map(simplicity, RELIABILITIES), "certified"):
        if found := _seeds(results, "ERM ViT", regime):
            columns = ([r["val"]["worst"] for r in found], [r["average"] for r in found], [r["worst"] for r in found])
            lines.append(f"| `{regime}` | " + " | ".join(map(_spread, columns)) + " |")
    rule = f"the least reliable background at which its WGA on validation is below {100 * FAILS:.0f}, or else the most reliable"
    return [*lines, "", f"Compared with the others on `{chosen}`: {rule}."]


def _seeds(results: list[dict[str, Any]], row: str, regime: str) -> list[dict[str, Any]]:
    return [result for result in results if result["row"] == row and result["regime"] == regime]


def _head(first: str) -> list[str]:
    return [f"| {first} | AA | WGA | IoU | kept |", "|---|---|---|---|---|"]


def _line(title: str, runs: list[dict[str, Any]], values: list[dict[str, Any]]) -> str:
    few = "" if len(runs) == len(SEEDS) else f" ({len(runs)} of {len(SEEDS)} seeds)"
    return f"| {title}{few} | " + " | ".join(_spread([v[key] for v in values if key in v]) for key in ("average", "worst", "iou", "kept")) + " |"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{100 * statistics.mean(values):.1f}" + (f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else "")


def _gap(results: list[dict[str, Any]], regime: str) -> str:
    """iFAM against ERM, seed by seed, where both are there."""
    erm, ifam = ({r["seed"]: r["worst"] for r in _seeds(results, row, regime)} for row in ("ERM ViT", "iFAM, K = 4"))
    gains = [100 * (ifam[seed] - erm[seed]) for seed in SEEDS if seed in erm and seed in ifam]
    return f"WGA of iFAM (K = 4) minus that of ERM, seed by seed: {', '.join(f'{gain:+.1f}' for gain in gains) or 'not measured'} points."


def _sized(recipe: IfamRecipe, quick: bool) -> IfamRecipe:
    if not quick:
        return recipe
    shape = recipe.architecture | {"img_size": 48, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return dataclasses.replace(recipe, architecture=shape, pretraining_samples=32, pretraining_batch=16, samples=32, batch=16, epochs=2)


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    app()
