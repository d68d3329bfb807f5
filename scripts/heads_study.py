"""Does CIGMA find the heads that read the background, and does removing them help? Known answers, five models, every control.

    python scripts/heads_study.py --device cuda --models DIR --out docs/results      # DIR: critters-biased-1.json, .safetensors and so on; seed 0 is built in
    python scripts/heads_study.py --limit 16 --out /tmp/study                          # small: the same code, no meaning

Heads are scored on training pictures that are answered right, K is chosen on balanced validation pictures, numbers are those of balanced test pictures.
Writes heads-critters.md and heads-critters.csv; every number of the page is computed here. `scripts/heads_page.py` puts them into words.
"""

from __future__ import annotations

import hashlib
import json
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
from scripts.head_methods import GREY, PRINTED, as_scores, cigma, contrastive_gating, controls
from scripts.heads_page import AS_MANY, write
from scripts.kept_pieces import write_whole
from seecause.data import critters
from seecause.engine.chunks import budget
from seecause.heads import (
    HeadScores,
    Masks,
    discover_masks,
    first_order,
    greedy,
    information_gains,
    interchange,
    iou,
    mediated,
    penalised,
    protected,
    random_sets,
    regress,
    retrain,
    score,
    select,
)  # fmt: skip
from seecause.heads.cases import Cases, critter_cases, logits_of, right_ones
from seecause.heads.removal import Look, logits_without, outcomes
from seecause.metrics import group_accuracy, rank_correlation
from seecause.models.sources import saved
from seecause.models.view import VisionModel

KS = (1, 2, 4, 8)
GATING = {"masks": 5, "batch": 32}
DFR = {"refits": 5, "strengths": (1.0, 0.3, 0.1, 0.03, 0.01)}
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
    waiting: dict[str, Future[VisionModel]] = field(default_factory=dict)  # retrained models, by seed

    @contextmanager
    def fast(self) -> Iterator[None]:
        """TF32 for the block, if asked for. Not while models are still being wrapped elsewhere: that is verified in float32."""
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
    models: Annotated[Path | None, typer.Option(help="Folder with more seeds of critters-biased: NAME.json beside NAME.safetensors.")] = None,
    sweep: Annotated[Path | None, typer.Option(help="Folder of models trained at other background reliabilities, for H1.")] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    limit: Annotated[int | None, typer.Option(help="So many pictures of every kind: a small run.")] = None,
    gating_steps: Annotated[int, typer.Option(help="Updates in each of the three fits of Causal Head Gating; its authors take 500.")] = Sizes.gating_steps,
    memory: Annotated[int, typer.Option(help="GiB of activations at once on a GPU.")] = 16,
    biased: Annotated[str, typer.Option(help="Seed 0.")] = "builtin:critters-biased",
    known: Annotated[str, typer.Option(help="A model with planted heads.")] = "builtin:critters-planted",
    clean: Annotated[str, typer.Option(help="A model that was trained on `clean`.")] = "builtin:critters-vit",
    tf32: Annotated[bool, typer.Option(help="Multiply in TF32 on a GPU where answers are counted and gates fitted; scores are always float32.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of the results page.")] = Path("docs/results"),
    work: Annotated[Path | None, typer.Option(help="Keep finished seeds here, so that the same command goes on where it stopped.")] = None,
) -> None:
    """Run the study and write its page."""
    sizes = Sizes(gating_steps=gating_steps)
    if limit is not None:
        sizes = Sizes(limit, limit, 32, 32, limit, 64, draws=2, mask_steps=3, gating_steps=2, regression_draws=32)
    study = Study(sizes)
    seeds = {"0": sc.load(biased, device=device), **({} if models is None else opened(models, device))}
    study.about = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "tf32": tf32 and device.startswith("cuda"),
        "limit": limit,
        "seeds": list(seeds),
        "dfr": DFR,
    }
    room = budget(memory << 30) if device.startswith("cuda") else budget(256 << 20)
    with room, ThreadPoolExecutor(4) as pool, study.timed("all"):
        with study.timed("retraining, in the background"):
            kept = {seed: None if work is None else work / f"{seed}-{state(model, sizes)}.json" for seed, model in seeds.items()}
            study.waiting = {seed: pool.submit(retrained, model, sizes) for seed, model in seeds.items() if not is_done(kept[seed])}
        for seed, model in seeds.items():
            print(f"seed {seed}{': finished before' * is_done(kept[seed])}", flush=True)
            recall_or_run(study, seed, model, kept[seed])
        with study.timed("planted"):
            planted(study, sc.load(known, device=device))
        with study.timed("clean model, sweep"):
            others = {"critters-vit": sc.load(clean, device=device), **({} if sweep is None else opened(sweep, device))}
            for name, model in others.items():
                study.facts.append({"model": name, "r_s": reliability(name, sweep), **about(model, cases(model, "balanced", "test", sizes.measured), sizes)[0]})
    write(study, out)
    for what, seconds in study.seconds.items():
        print(f"{seconds:7.1f} s  {what}")


def opened(folder: Path, device: str) -> dict[str, VisionModel]:
    """All models of a folder, by the last word of their names."""
    found = {}
    for card in sorted(folder.rglob("*.json")):
        if card.with_suffix(".safetensors").is_file():
            source = saved(card.parent, card.stem)
            found[card.stem.rpartition("-")[2] if card.stem.startswith("critters-biased-") else card.stem] = sc.wrap(
                source.module.to(device), name=card.stem, **source.told
            )
    return found


def reliability(name: str, folder: Path | None) -> float:
    """r_s of the pictures a model was trained on, from its card."""
    if folder is None or not (folder / f"{name}.json").is_file():
        return critters.REGIMES["clean"].background_reliability
    recipe = json.loads((folder / f"{name}.json").read_text())["recipe"]
    return recipe.get("background_reliability", critters.REGIMES[recipe["regime"]].background_reliability)


def cases(model: VisionModel, regime: str, split: str, count: int, *, start: int = 0, mat: bool = False, swaps: bool = True) -> Cases:
    latents = critters.draw(regime, split, count, start=start, device=model.device)
    return critter_cases(model, latents.on_mat(mat) if mat else latents, name=f"critters:{regime}:{split}", swaps=swaps)


def retrained(model: VisionModel, sizes: Sizes) -> VisionModel:
    """DFR on balanced validation pictures that nothing else uses."""
    held = cases(model, "balanced", "val", sizes.retrained, start=8192, swaps=False)
    return retrain(model, held.images, held.labels, torch.tensor(held.groups), **DFR)  # type: ignore[arg-type]


def about(model: VisionModel, measured: Cases, sizes: Sizes) -> tuple[Row, list[Look]]:
    """What an audit says of the whole model, and the looks it used."""
    found = discover_masks(model, measured.images, steps=sizes.mask_steps)
    looks = [Look(found, "mean"), Look(measured.oracle, "mean"), Look(measured.oracle, "grey"), Look(None, measured.swapped)]  # type: ignore[arg-type]
    gains = {look.name: information_gains(model, measured.images, look.masks, baseline=look.baseline) for look in looks}
    assert measured.truth is not None and measured.swapped is not None
    flips = logits_of(model, measured.swapped.background).argmax(dim=1) != logits_of(model, measured.images).argmax(dim=1)
    row: Row = {"IoU": float(iou(found, measured.truth).nanmean()), "flips": float(flips.double().mean())}
    for name, one in gains.items():
        row |= {f"BIR, {name}": one.bir_ratio_of_means, f"BIR (mean of ratios), {name}": one.bir_mean_of_ratios, f"BIG, {name}": float(one.big.mean())}
    return row, looks


def selections(study: Study, model: VisionModel, train: Cases, balanced: Cases, masks: Masks) -> dict[str, HeadScores]:
    """Scores of every method, on the same pictures."""
    truth, swap, images, labels, sizes = train.oracle, train.swapped, train.images, train.labels, study.sizes
    assert truth is not None and swap is not None and labels is not None
    given = {"target": labels}
    with study.timed("cigma scores"):
        looks = {
            PRINTED: Look(masks, "mean"),
            "cigma, discovered masks, grey": Look(masks, "grey"),
            "cigma, true masks": Look(truth, "mean"),
            GREY: Look(truth, "grey"),
            "cigma, exact swap": Look(None, swap),
        }
        found = cigma(model, images, labels, looks)
    found[f"{GREY} + strict guard"] = protected(found[GREY])
    with study.timed("mean ablation, regression"):
        found["mean ablation, true masks, grey"] = penalised(score(model, images, truth, baseline="grey", operator="mean", **given))
        found["regression, true masks, grey"] = regress(model, images, truth, baseline="grey", draws=sizes.regression_draws, **given)
    with study.timed("greedy"):
        picked = greedy(model, images, truth, top=max(KS), rule=penalised, baseline="grey", **given)
        found["greedy, true masks, grey"] = as_scores(model, picked.heads)
    with study.timed("controls"):
        found |= controls(model, images, labels, truth)
    with study.timed("gating"), study.fast():
        found |= gating(model, train, balanced, sizes)
    with study.timed("interchange"):
        gold = interchange(model, images, swap)
        assert gold.foreground is not None
        found["interchange (gold)"] = HeadScores(gold.background, gold.background_error)
        found["interchange, background less object"] = HeadScores(gold.background - gold.foreground)
    return found


def gating(model: VisionModel, train: Cases, balanced: Cases, sizes: Sizes) -> dict[str, HeadScores]:
    """Causal Head Gating on biased labels, on balanced ones, and contrastive: keep the object's pictures, suppress the background's."""
    options: dict[str, Any] = {**GATING, "steps": sizes.gating_steps}
    assert train.labels is not None and balanced.labels is not None and train.truth is not None
    return {
        "gating, biased labels": select("gating", model, train.images, train.labels, **options),
        "gating, balanced labels": select("gating", model, balanced.images, balanced.labels, **options),
        "gating, contrastive": contrastive_gating(model, train.images, train.labels, train.truth == 1, **options),
    }


def state(model: VisionModel, sizes: Sizes) -> str:
    """What decides the numbers of a seed, as a short name."""
    return hashlib.sha256(f"2 {sc.__version__} {model.fingerprint()} {sizes} {KS} {DFR} {GATING}".encode()).hexdigest()[:12]


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
        train = right_ones(model, cases(model, "certified", "train", 4 * sizes.scored), share=0.4, cap=sizes.scored)
        plain = (("balanced", "train", sizes.scored), ("balanced", "val", sizes.val), ("balanced", "test", sizes.test), ("certified", "test", sizes.iid))
        balanced, val, test, iid = (cases(model, *kind, swaps=False) for kind in plain)
        measured = cases(model, "balanced", "test", sizes.measured)
    with study.timed("masks"):
        masks = discover_masks(model, train.images, steps=sizes.mask_steps)
        row, looks = about(model, measured, sizes)
    found = selections(study, model, train, balanced, masks)
    study.facts.append({"model": f"critters-biased {seed}", "r_s": 0.95, **row, **screen_facts(model, train, found), **gold_facts(found)})
    study.heads += [{"seed": seed, "method": name, **agreement(model, train, one, found)} for name, one in found.items()]
    with study.timed("removals"), study.fast():
        wanted = {(name, k): tuple(sorted(one.top(min(k, one.value.numel())))) for name, one in found.items() for k in KS}
        sets = list(dict.fromkeys([(), *wanted.values()]))
        measured_by = dict(zip(sets, measure(model, sets, val, test, iid, measured, looks), strict=True))
        study.rows += [{"seed": seed, "method": name, "K": k, **measured_by[heads]} for (name, k), heads in wanted.items()]
        study.rows.append({"seed": seed, "method": "none (ERM)", "K": 0, **measured_by[()]})
    with study.timed("random removals"), study.fast():
        lots = [
            (k, heads)
            for k in KS
            for heads in random_sets(model, min(k, model.n_layers * model.n_heads), draws=sizes.draws, seed=int(seed) if seed.isdigit() else 0)
        ]
        for draw, ((k, _), one) in enumerate(zip(lots, measure(model, [h for _, h in lots], val, test, iid, measured, looks[-1:]), strict=True)):
            study.rows.append({"seed": seed, "method": "random", "K": k, "draw": draw % sizes.draws, **one})
        really = random_sets(model, len(wanted[f"{GREY} + guard", max(k for k in KS if k <= 4)]), draws=sizes.draws, seed=int(seed) if seed.isdigit() else 0)
        study.facts[-1][AS_MANY] = [one["test worst group"] for one in measure(model, really, val, test, iid, measured, looks[-1:])]
    with study.timed("retrained model"), study.fast():
        study.rows.append(
            {"seed": seed, "method": "retrained last layer (DFR)", "K": 0, **measure(study.waiting[seed].result(), [()], val, test, iid, measured, looks)[0]}
        )


def measure(model: VisionModel, sets: list[Any], val: Cases, test: Cases, iid: Cases, measured: Cases, looks: list[Look]) -> list[Row]:
    """Numbers of the model without each set of heads."""
    rows = [{"removed": len(heads)} for heads in sets]
    for name, some in (("val", val), ("test", test), ("iid", iid)):
        answers = torch.cat([logits_without(model, part, sets).argmax(dim=-1).cpu() for part in some.images.split(512)], dim=1)  # [S, N]
        assert some.labels is not None
        right = answers == some.labels.cpu()
        for row, one in zip(rows, right, strict=True):
            row[f"{name} accuracy"] = float(one.double().mean())
            if name != "iid":
                row[f"{name} worst group"] = group_accuracy(one, some.groups).worst
    for row, one in zip(rows, outcomes(model, measured, sets, looks), strict=True):
        row |= {"flips": one.flips, **{key: value for key, value in one.numbers().items() if key.startswith("BIR")}}
        row["FIG, exact swap"] = float(one.gains["exact swap"].fig.mean())
    return rows


def agreement(model: VisionModel, train: Cases, one: HeadScores, found: dict[str, HeadScores]) -> Row:
    """How like the gold score a method's ranking is, and how much of the background's effect passes through its four best heads."""
    gold, value = found["interchange (gold)"].value, one.value.nan_to_num(neginf=-1e9)
    assert train.swapped is not None
    few = slice(0, 64)
    through = mediated(model, train.images[few], train.swapped.background[few], one.top(4))
    guarded = found["cigma, exact swap"]
    harmed = protected(guarded).value == -torch.inf
    top = one.top(4)
    costly = sum(bool(harmed[head]) for head in top) / len(top) if top else float("nan")
    return {
        "Spearman with gold": float(rank_correlation(value.flatten()[None], gold.flatten()[None])[0]),
        "mediated by top 4": through,
        "costly among top 4": costly,
        "costly among all": float(harmed.double().mean()),
        "top 8": " ".join(f"{layer}.{head}" for layer, head in one.top(min(8, one.value.numel()))),
    }


def screen_facts(model: VisionModel, train: Cases, found: dict[str, HeadScores]) -> Row:
    """Recall of the exact top 4 among the 16 likeliest heads of the first-order guess (H4)."""
    row: Row = {"heads": model.n_layers * model.n_heads}
    for name, masks, baseline in (("grey", train.oracle, "grey"), ("exact swap", None, train.swapped)):
        guess = first_order(model, train.images, masks, baseline=baseline)  # type: ignore[arg-type]
        exact = set(found[GREY if name == "grey" else "cigma, exact swap"].order(positive=False)[:4])
        row[f"recall at 16, {name}"] = len(exact & set(guess.order(positive=False)[:16])) / 4
    return row


def gold_facts(found: dict[str, HeadScores]) -> Row:
    """How concentrated the background's effect is (H5)."""
    values = found["interchange (gold)"].value.flatten().sort().values
    place = torch.arange(1, len(values) + 1)
    return {"Gini": float((2 * place - len(values) - 1).double() @ values / (len(values) * values.sum()))}


def planted(study: Study, model: VisionModel) -> None:
    """A model whose background heads are known: does each method find them?"""
    roles: dict[tuple[int, int], str] = model.module.roles  # type: ignore[assignment]
    train = right_ones(model, cases(model, "matted", "train", 4 * study.sizes.scored), share=0.4, cap=study.sizes.scored)
    balanced = cases(model, "balanced", "train", study.sizes.scored, mat=True)
    masks = discover_masks(model, train.images, steps=study.sizes.mask_steps)
    quiet = replace(study, seconds={})  # counted as a whole
    for name, one in selections(quiet, model, train, balanced, masks).items():
        values = one.value.nan_to_num(neginf=-1e9)
        study.planted.append(
            {"method": name, "AUROC": float(roc_auc_score([role == "background" for role in roles.values()], [float(values[h]) for h in roles]))}
        )
    known = [head for head, role in roles.items() if role == "background"]
    test = cases(model, "balanced", "test", study.sizes.measured, mat=True)
    assert test.swapped is not None and test.labels is not None
    whole, cut = (logits_without(model, torch.cat([test.images, test.swapped.background]), [heads])[0].unflatten(0, (2, -1)) for heads in ([], known))
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
