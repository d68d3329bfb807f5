"""iFAM (arXiv 2506.08915): its tables and figure 3.

A cell trains one network, with the settings of recipes/DATASET.toml, and measures it on the test
images, as it is and with interventions. Networks are kept in OUT/trained, where other experiments
find them and a killed training continues. Values are in percent:

    average      accuracy; AUC on SIIM-ACR
    robust       worst-group accuracy; on CUB accuracy on Waterbird200, on SIIM-ACR AUC of the
                 images where a tube misleads
    kept         share of the patches that stage 2 reads
    validation   what chose the epoch

A mean is over trainings, one for each of `seeds`. Interventions of a line NETWORK + CHANGE:

    q = 0.97        tokens further from their prototype than 97 % of training tokens are dropped
    LOO             the part is dropped without which the network is best, or none
    interventions   the best of both
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from seecause.data.dataset import Dataset, open_data
from seecause.experiments.base import MODELS, PAPERS, Part, Row, base_of, register_published
from seecause.faithful.data import batches_of, match_classes, open_split
from seecause.faithful.evaluation import examine, key_points, keypoint_fit_data, open_network
from seecause.faithful.interventions import (
    best_of,
    calibrate,
    intervene,
    leave_one_out,
    try_interventions,
)
from seecause.faithful.net import Intervention
from seecause.faithful.training import TrainConfig, read_config, train
from seecause.files import digest_json
from seecause.options import Count

DATASETS = {about["name"]: about for about in PAPERS["ifam"]["datasets"]}
OTHER = {"tests": {}, "whole": "", "printed": ""}  # any other dataset
RECIPES = Path(__file__).parent / "recipes"
BACKBONES = [MODELS[name]["spec"] for name in ("dinov2-b-reg", "rad-dino")]
QUANTILES = (0.97, 0.99)
Tests = dict[str, Dataset]  # by the value that they give


def measured(
    part: Part,
    *,
    network: str,
    own: Mapping[str, Any],
    on: Sequence[str] = (),
    changes: Sequence[str] = ("",),
    shows: Literal["numbers", "key points", "leave one out"] = "numbers",
    training: Mapping[str, Any] | None = None,
    seeds: Count = 1,
    calibration: Count | None = None,
    chosen: Literal["val", "test"] = "val",
    networks: Mapping[str, str] | None = None,
) -> list[Row]:
    """Rows of a network: of each seed and intervention, or of each seed and dropped part.
    `training` changes settings of the recipe; `networks` are folders of trained ones by name. No
    rows where the paper has none."""
    (kind, base), model = base_of(part.data), dict(part.model)
    about, folder, spec = DATASETS.get(kind, OTHER), Path(model.pop("folder")), model.pop("spec")
    file = RECIPES / f"{kind}.toml"
    recipe = file if file.is_file() else RECIPES / "small.toml"
    given = {**own, **(training or {}), "data": base, "device": part.device}
    if spec not in BACKBONES:  # a user's
        given |= {"backbone": spec, "size": (training or {}).get("size"), **model}
    elif spec != read_config(recipe, data=base, out="").backbone:
        return []
    if on and kind in DATASETS and kind not in on:
        return []
    if chosen == "test":  # trained on all images, the epoch that tests best
        tested = about["printed"].format(base.partition(":")[2]) or part.data
        given |= {"data": base + about["whole"], "val": tested}
    tests, rows = test_sets(part, chosen), list[Row]()
    for seed in range(seeds):
        config = read_config(recipe, **{"seed": seed, **given}, out="")
        name = digest_json({**asdict(config), "device": "", "workers": 0}, length=16)
        config = replace(config, out=str(folder / name))
        known = (networks or {}).get(network)
        line: Row = {"image": f"seed {config.seed}"}
        line["validation"] = math.nan if known else 100 * train(config).best
        net = open_network(known or config.out, device=part.device).net
        if shows == "leave one out":
            rows += without_each(net, kind, tests, line)
            continue
        for change in changes:
            choose = robust(tests) if chosen == "test" else None
            found = intervention(net, kind, change, config, choose, calibration)
            with intervene(net, **asdict(found)):
                values = numbers(net, kind, tests, points=shows == "key points", chosen=chosen)
            method = f"{network} + {change}" if change else network
            rows.append({**line, "method": method, "intervention": str(found), **values})
    return rows


def test_sets(part: Part, chosen: str = "val") -> Tests:
    """The test images. A folder that lacks some is refused."""
    kind, base = base_of(part.data)
    about = DATASETS.get(kind, OTHER)
    names = {"average": part.data, **about["tests"]}
    names |= {"average": about["printed"]} if chosen == "test" and about["printed"] else {}
    path, limit = base.partition(":")[2], part.limit
    return {name: open_data(spec.format(path), limit=limit) for name, spec in names.items()}


def robust(tests: Tests) -> Dataset:
    """The images of the value `robust`."""
    return tests.get("robust", tests["average"])


def checked_data(model: Mapping[str, Any], data: str, folder: Path, device: str) -> dict[str, Any]:
    """Open all splits, before anything is trained."""
    test_sets(Part(model, data, 1, 0, 1, "label", device))
    for split in ("train", "val"):
        open_split(base_of(data)[1], split, limit=1)
    return {**model, "folder": str(folder.resolve())}


def intervention(
    net: Any,
    kind: str,
    change: str,
    config: TrainConfig,
    choose: Dataset | None,
    calibration: int | None,
) -> Intervention:
    """What the words of a change mean, chosen on the images `choose` or on validation images."""
    found = Intervention()
    if change and not net.thresholds:
        learned = open_split(config.data, "train", limit=calibration)
        calibrate(net, (batch[0] for batch in batches_of(net, learned)), QUANTILES)
    for word in change.split(" + ") if change else ():
        if word.startswith("q = "):
            found = replace(found, quantile=float(word.removeprefix("q = ")))
            continue
        data = choose or open_split(config.data, "val", limit=config.val_limit)
        quantiles = QUANTILES if word == "interventions" else ()
        trials = try_interventions(net, partial(batches_of, net, data), quantiles, by="distance")
        found = best_of(trials, by=DATASETS.get(kind, {}).get("by", "worst")).intervention
    return found


def numbers(net: Any, kind: str, tests: Tests, *, points: bool, chosen: str) -> Row:
    """All values of the tables; the worst group as the released code has it where test images
    choose."""
    score = DATASETS.get(kind, {}).get("score", "average")
    found = {name: examine(net, data, match_classes(net, data)) for name, data in tests.items()}
    tables = {name: one.table() for name, one in found.items()}
    worst = found["average"].public_worst(tests["average"].name) if chosen == "test" else {}
    last = tables.get("robust", tables["average"])
    values = {"robust": worst.get("worst_public", last["worst"])}
    values |= {name: table[score] for name, table in tables.items()}
    values |= {"kept": last["kept"], "Fg. mIoU": last.get("miou", math.nan)}
    row = {name: 100 * value for name, value in values.items()}
    row |= {"BG-GAP": row["MS"] - row["MR"]} if "MS" in row else {}
    if points:
        fit = keypoint_fit_data(robust(tests).name)
        apart = key_points(net, open_data(fit), robust(tests)) if fit else {}
        row["Kp"] = apart.get("keypoints", math.nan)
    return row


def without_each(net: Any, kind: str, tests: Tests, line: Row) -> list[Row]:
    """A row without each part, after one with all of them."""
    both = {"average": tests["average"], "robust": robust(tests)}
    scores = {"average": "average", "robust": "worst"}
    scores = dict.fromkeys(both, "auc") if kind == "siim" else scores
    rows = [{**line, "method": f"without part {part}"} for part in range(-1, net.parts)]
    for name, data in both.items():
        found = leave_one_out(net, batches_of(net, data))
        for row, logits in zip(rows, (found.logits, *found.without), strict=True):
            row[name] = 100 * found.numbers(logits)[scores[name]]
    rows[0]["method"] = "all parts"
    return rows


register_published(__name__, globals(), ("Kp", "BG-GAP"))
