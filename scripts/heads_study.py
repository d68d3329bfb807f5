"""Does CIGMA find the heads that read the background, and does removing them help? Known answers,
five models, every control.

    python scripts/heads_study.py --device cuda --models DIR --sweep DIR             # minutes on an
    H200; seed 0 of critters-biased is built in
    python scripts/heads_study.py --limit 16 --out /tmp/study                          # small: the
    same code, no meaning

DIR is what `seecause zoo train critters-biased --seed 1 --out DIR` (and so on) and
`--background-reliability 0.5 --out DIR` write; docs/heads.md has the lines. Heads are scored on
training pictures that are answered right, K is chosen on balanced validation pictures, numbers are
those of balanced test pictures. Writes heads-critters.md and heads-critters.csv; every number of
the page is computed here. `scripts/heads_page.py` puts them into words.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from sklearn.metrics import roc_auc_score
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from scripts.heads_numbers import AS_MANY, DFR, ERM, RANDOM
from scripts.heads_page import write
from scripts.heads_parts import (
    GATING,
    about,
    agreement,
    cases,
    gold_facts,
    measure,
    screen_facts,
    selections,
)
from scripts.kept_pieces import write_whole
from seecause import critters
from seecause.engine.chunks import budget
from seecause.engine.machine import machine
from seecause.heads import Erasure, discover_masks, random_sets, retrain_last_layer
from seecause.heads.outcomes import logits_without
from seecause.heads.pictures import Pictures, answered_right
from seecause.models.sources import saved
from seecause.models.view import VisionModel

KS = (1, 2, 4, 8, 16)
RETRAINED = {"refits": 5, "strengths": (1.0, 0.3, 0.1, 0.03, 0.01)}
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How many pictures of each kind."""

    scored: int = 256
    measured: int = 192  # for FIG, BIG and BIR
    val: int = 512
    test: int = 2048
    iid: int = 1024
    retrained: int = 1024
    draws: int = 20
    bir_draws: int = (
        5  # random sets whose BIR is measured by every look; the others by exact swap alone
    )
    mask_steps: int = 250
    gating_steps: int = 100
    regression_draws: int = 32


@dataclass
class Study:
    """Everything found, for the page."""

    sizes: Sizes
    rows: list[Row] = field(default_factory=list)  # seed x method x K
    heads: list[Row] = field(default_factory=list)  # seed x method: agreement with the gold score
    facts: list[Row] = field(default_factory=list)  # one for each model
    planted: list[Row] = field(default_factory=list)
    removed: Row = field(default_factory=dict)  # planted model without its background heads
    seconds: dict[str, float] = field(default_factory=dict)
    about: Row = field(default_factory=dict)
    waiting: dict[str, Future[VisionModel]] = field(
        default_factory=dict
    )  # retrained models, by seed

    @contextmanager
    def fast(self) -> Iterator[None]:
        """TF32 for the block, if asked for. Not while models are still being wrapped elsewhere:
        that is verified in float32."""
        for one in self.waiting.values():
            one.result()
        torch.set_float32_matmul_precision("high" if self.about["tf32"] else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def main(
    models: Annotated[
        Path | None,
        typer.Option(
            help="Folder with more seeds of critters-biased: NAME.json beside NAME.safetensors."
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="Folder of models trained at other background reliabilities, for H1."),
    ] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    limit: Annotated[
        int | None, typer.Option(help="So many pictures of every kind: a small run.")
    ] = None,
    gating_steps: Annotated[
        int,
        typer.Option(
            help="Updates in each of the three fits of Causal Head Gating; its authors take 500."
        ),
    ] = Sizes.gating_steps,
    memory: Annotated[int, typer.Option(help="GiB of activations at once on a GPU.")] = 16,
    biased: Annotated[str, typer.Option(help="Seed 0.")] = "builtin:critters-biased",
    known: Annotated[
        str, typer.Option(help="A model with planted heads.")
    ] = "builtin:critters-planted",
    clean: Annotated[
        str, typer.Option(help="A model that was trained on `clean`.")
    ] = "builtin:critters-vit",
    tf32: Annotated[
        bool,
        typer.Option(
            help=(
                "Multiply in TF32 on a GPU where answers are counted and gates fitted; scores are"
                " always float32."
            )
        ),
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder of the results page.")] = Path("docs/results"),
    work: Annotated[
        Path | None,
        typer.Option(
            help="Keep finished seeds here, so that the same command goes on where it stopped."
        ),
    ] = None,
) -> None:
    """Run the study and write its page."""
    torch.backends.cudnn.allow_tf32 = (
        False  # its default rounds the patch embedding even where everything else is float32
    )
    sizes = Sizes(gating_steps=gating_steps)
    if limit is not None:
        sizes = Sizes(
            limit,
            limit,
            32,
            32,
            limit,
            64,
            draws=2,
            mask_steps=3,
            gating_steps=2,
            regression_draws=32,
            bir_draws=1,
        )
    study = Study(sizes)
    seeds = {"0": sc.load(biased, device=device), **opened(models, device, seeds=True)}
    study.about = {
        "device": machine(device),
        "tf32": tf32 and device.startswith("cuda"),
        "limit": limit,
        "seeds": list(seeds),
        "dfr": RETRAINED,
        "command": command(
            models=models, sweep=sweep, limit=limit, gating_steps=gating_steps, tf32=tf32
        ),
    }
    room = budget(memory << 30) if device.startswith("cuda") else budget(256 << 20)
    with room, ThreadPoolExecutor(4) as pool, study.timed("all"):
        with study.timed("retraining, in the background"):
            kept = {
                seed: None if work is None else work / f"{seed}-{state(model, sizes)}.json"
                for seed, model in seeds.items()
            }
            study.waiting = {
                seed: pool.submit(retrained, model, sizes)
                for seed, model in seeds.items()
                if not is_done(kept[seed])
            }
        for seed, model in seeds.items():
            print(f"seed {seed}{': finished before' * is_done(kept[seed])}", flush=True)
            recall_or_run(study, seed, model, kept[seed])
        with study.timed("planted"):
            planted(study, sc.load(known, device=device))
        with study.timed("clean model, sweep"):
            others = {
                "critters-vit": sc.load(clean, device=device),
                **opened(sweep, device, seeds=False),
            }
            for name, model in others.items():
                row, _ = about(
                    model, cases(model, "balanced", "test", sizes.measured), sizes.mask_steps
                )
                study.facts.append({"model": name, "r_s": reliability(name, sweep), **row})
    write(study, out)
    for what, seconds in study.seconds.items():
        print(f"{seconds:7.1f} s  {what}")


def command(**given: Any) -> str:
    """The command line of a page: what was asked for, folders as DIR."""
    usual = {"gating_steps": Sizes.gating_steps, "tf32": True}
    told = {
        name: "DIR" if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None and value != usual.get(name)
    }
    flags = [
        (
            f"--no-{name.replace('_', '-')}"
            if value is False
            else f"--{name.replace('_', '-')} {value}"
        )
        for name, value in told.items()
    ]
    return " ".join(["python scripts/heads_study.py", *flags])


def opened(folder: Path | None, device: str, *, seeds: bool) -> dict[str, VisionModel]:
    """Models of a folder: more seeds of critters-biased, by seed, or all others, by name. One
    folder may hold both."""
    found = {}
    for card in [] if folder is None else sorted(folder.rglob("*.json")):
        seed = re.fullmatch(r"critters-biased-(\d+)", card.stem)
        if card.with_suffix(".safetensors").is_file() and (seed is not None) == seeds:
            source = saved(card.parent, card.stem)
            found[seed[1] if seed else card.stem] = sc.wrap(
                source.module.to(device), name=card.stem, **source.told
            )
    return found


def reliability(name: str, folder: Path | None) -> float:
    """r_s of the pictures a model was trained on, from its card."""
    card = None if folder is None else next(folder.rglob(f"{name}.json"), None)
    if card is None:
        return critters.REGIMES["clean"].background_reliability
    recipe = json.loads(card.read_text())["recipe"]
    own = recipe.get("background_reliability")
    return critters.REGIMES[recipe["regime"]].background_reliability if own is None else own


def retrained(model: VisionModel, sizes: Sizes) -> VisionModel:
    """DFR on balanced validation pictures that nothing else uses."""
    held = cases(model, "balanced", "val", sizes.retrained, start=8192, swaps=False)
    return retrain_last_layer(
        model, held.images, held.labels, torch.tensor(held.groups), **RETRAINED
    )  # type: ignore[arg-type]


def state(model: VisionModel, sizes: Sizes) -> str:
    """What decides the numbers of a seed, as a short name."""
    return hashlib.sha256(
        f"3 {sc.__version__} {model.fingerprint()} {sizes} {KS} {RETRAINED} {GATING}".encode()
    ).hexdigest()[:12]


def is_done(kept: Path | None) -> bool:
    return kept is not None and kept.is_file()


def recall_or_run(study: Study, seed: str, model: VisionModel, kept: Path | None) -> None:
    """A seed from an earlier run, or from a new one."""
    tables = {"rows": study.rows, "heads": study.heads, "facts": study.facts}
    if kept is not None and kept.is_file():
        for name, rows in json.loads(kept.read_text()).items():
            tables[name] += rows
        return
    before = {name: len(rows) for name, rows in tables.items()}
    one_seed(study, seed, model)
    if kept is not None:
        write_whole(kept, json.dumps({name: rows[before[name] :] for name, rows in tables.items()}))


def one_seed(study: Study, seed: str, model: VisionModel) -> None:
    """All methods on one model."""
    sizes = study.sizes
    with study.timed("pictures"):
        train = answered_right(
            model, cases(model, "certified", "train", 4 * sizes.scored), share=0.4, cap=sizes.scored
        )
        plain = (
            ("balanced", "train", sizes.scored),
            ("balanced", "val", sizes.val),
            ("balanced", "test", sizes.test),
            ("certified", "test", sizes.iid),
        )
        balanced, val, test, iid = (cases(model, *kind, swaps=False) for kind in plain)
        measured = cases(model, "balanced", "test", sizes.measured)
    with study.timed("masks"):
        masks = discover_masks(model, train.images, steps=sizes.mask_steps)
        row, looks = about(model, measured, sizes.mask_steps)
    found = selections(study, model, train, balanced, masks, max(KS))
    told = {
        "model": f"critters-biased {seed}",
        "r_s": critters.REGIMES["certified"].background_reliability,
    }
    study.facts.append({**told, **row, **screen_facts(model, train, found), **gold_facts(found)})
    study.heads += [
        {"seed": seed, "method": name, **agreement(model, train, one, found)}
        for name, one in found.items()
    ]
    seen = (val, test, iid, measured)
    with study.timed("removals"), study.fast():
        wanted = {
            (name, k): tuple(sorted(one.top(min(k, one.value.numel()))))
            for name, one in found.items()
            for k in KS
        }
        sets = list(dict.fromkeys([(), *wanted.values()]))
        measured_by = dict(zip(sets, measure(model, sets, *seen, looks), strict=True))
        study.rows += [
            {"seed": seed, "method": name, "K": k, **measured_by[heads]}
            for (name, k), heads in wanted.items()
        ]
        study.rows.append({"seed": seed, "method": ERM, "K": 0, **measured_by[()]})
    with study.timed("random removals"), study.fast():
        by_lot(study, seed, model, {len(heads) for heads in wanted.values()}, seen, looks)
    with study.timed("retrained model"), study.fast():
        study.rows.append(
            {
                "seed": seed,
                "method": DFR,
                "K": 0,
                **measure(study.waiting[seed].result(), [()], *seen, looks)[0],
            }
        )


def by_lot(
    study: Study,
    seed: str,
    model: VisionModel,
    sizes: set[int],
    seen: tuple[Pictures, Pictures, Pictures, Pictures],
    looks: list[Erasure],
) -> None:
    """Random sets for every K, and as large as each set that was really removed: heads with scores
    of 0 or less stay, so some are smaller than K."""
    total, draws, number = (
        model.n_layers * model.n_heads,
        study.sizes.draws,
        int(seed) if seed.isdigit() else 0,
    )
    asked = {min(k, total): k for k in reversed(KS)}
    for size in sorted((sizes | asked.keys()) - {0}):
        sets = random_sets(model, size, draws=draws, seed=number)
        most = study.sizes.bir_draws
        found = measure(model, sets[:most], *seen, looks) + (
            measure(model, sets[most:], *seen, looks[-1:]) if sets[most:] else []
        )
        name = (
            {"method": RANDOM, "K": asked[size]}
            if size in asked
            else {"method": AS_MANY, "K": size}
        )
        study.rows += [
            {"seed": seed, **name, "draw": draw, **one} for draw, one in enumerate(found)
        ]


def planted(study: Study, model: VisionModel) -> None:
    """A model whose background heads are known: does each method find them?"""
    roles: dict[tuple[int, int], str] = model.module.roles  # type: ignore[assignment]
    train = answered_right(
        model,
        cases(model, "matted", "train", 4 * study.sizes.scored),
        share=0.4,
        cap=study.sizes.scored,
    )
    balanced = cases(model, "balanced", "train", study.sizes.scored, mat=True)
    masks = discover_masks(model, train.images, steps=study.sizes.mask_steps)
    quiet = replace(study, seconds={})  # counted as a whole
    for name, one in selections(quiet, model, train, balanced, masks, max(KS)).items():
        values = one.value.nan_to_num(neginf=-1e9)
        study.planted.append(
            {
                "method": name,
                "AUROC": float(
                    roc_auc_score(
                        [role == "background" for role in roles.values()],
                        [float(values[h]) for h in roles],
                    )
                ),
            }
        )
    known = [head for head, role in roles.items() if role == "background"]
    test = cases(model, "balanced", "test", study.sizes.measured, mat=True)
    assert test.swapped is not None and test.labels is not None
    whole, cut = (
        logits_without(model, torch.cat([test.images, test.swapped.background]), [heads])[
            0
        ].unflatten(0, (2, -1))
        for heads in ([], known)
    )
    study.removed = {
        "heads": len(known),
        "largest difference before": _gap(whole),
        "largest difference after": _gap(cut),
        "accuracy before": _right(whole[0], test.labels),
        "accuracy after": _right(cut[0], test.labels),
    }


def _gap(pair: Tensor) -> float:
    return float((pair[0] - pair[1]).abs().max())


def _right(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(dim=1) == labels).double().mean())


if __name__ == "__main__":
    typer.run(main)
