"""`seecause faithful`: train, evaluate, intervene on and export iFAM classifiers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from seecause.cli.shared import (
    Count,
    Device,
    Out,
    Output,
    Printing,
    Seed,
    Values,
    by_name,
    counting,
    names,
    pick_device,
    print_table,
    refuse,
    whole_numbers,
)
from seecause.errors import BadOption

Network = Annotated[
    str,
    Parameter(
        name="NETWORK",
        help="The folder of `faithful train --out` or `faithful export`, or builtin:critters-ifam.",
    ),
]
By = Annotated[
    Literal["distance", "dot"],
    Parameter(
        help="How tokens are compared with their prototype: by distance, or by the dot product (as"
        " in the released code)."
    ),
]
TESTING = ("calibration", "batch", "workers", "keypoints")
TestOption = Annotated[
    Values,
    Parameter(
        help="calibration=N (training images for thresholds and key points; default: all), batch=N"
        " (images at once), workers=N (processes that read images), or keypoints=false; repeat for"
        " more."
    ),
]
TestData = Annotated[
    str | None,
    Parameter(
        help="Another dataset, with its split, such as waterbird200:PATH. Default: the test split"
        " of the dataset that the network was trained on."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training run; None: as the file or the library has them.

    Attributes:
        data: A dataset without its split: waterbirds:PATH, cub:PATH, folder:PATH, critters:REGIME.
        backbone: timm:NAME, hf:NAME-OR-FOLDER, builtin:NAME or a saved folder; a plain vision
            transformer.
        parts: Parts to discover. Default: 8.
        out: The run folder; the same command again continues in it.
        epochs: Default: 90.
        batch: Images in a step, over all processes. Default: 128.
        weights: Weights of the backbone: a file, or 'random'. Default: pretrained.
        device: Where to compute; auto takes the GPU if there is one.
        seed: Seed of all random numbers.
    """

    data: str | None = None
    backbone: str | None = None
    parts: Annotated[Count | None, Parameter(name=["--parts", "-k"])] = None
    out: Annotated[str | None, Parameter(name=["--out", "-o"])] = None
    epochs: Count | None = None
    batch: Count | None = None
    weights: str | None = None
    device: Device | None = None
    seed: Seed | None = None


def train(
    *,
    training_: Training = Training(),
    config: Path | None = None,
    option: Values = None,
    output: Printing = Printing(),
) -> int:
    """Train both stages of iFAM together. The best epoch is chosen on validation; the test split is
    never read.

    For example:

    seecause faithful train --data waterbirds:PATH --backbone
    timm:vit_base_patch14_reg4_dinov2.lvd142m --parts 8 --out run

    torchrun --nproc_per_node=8 -m seecause faithful train ...

    Args:
        config: A TOML or JSON file with any of these settings; flags take precedence.
        option: Any other setting, as KEY=VALUE such as learning_rate=0.01, options.gradient=none or
            losses.class1=0; repeat for more.
    """
    from seecause.faithful import train as train_network
    from seecause.faithful.training import read_config

    given = by_name(option)
    settings = {**asdict(training_), **given.pop("", {})}
    settings |= {table: given.pop(table) for table in ("options", "losses") if table in given}
    refuse(given, "KEY=VALUE, options.KEY=VALUE or losses.KEY=VALUE")
    if training_.device is not None:
        settings["device"] = pick_device(training_.device)
    run = read_config(config, **settings)
    first = os.environ.get("RANK", "0") == "0"  # of many processes the first prints
    with counting("training", 0, quiet=output.quiet or not first) as advance:
        seen = 0

        def on_step(done: int, total: int, losses: str) -> None:
            nonlocal seen
            advance(done - seen, losses, total=total)
            seen = done

        result = train_network(run, on_step=on_step)
    if not first:
        return 0
    facts = {"out": str(result.out), "steps": result.steps, "best": result.best}
    facts |= {"chosen by": run.select, "epoch": result.best_epoch + 1}
    best = f"best {run.select} on validation {result.best:.4f}"
    lines = [f"{result.out}: {result.steps} steps; {best}, after epoch {result.best_epoch + 1}"]
    return output.finish(facts, [*lines, f"next: seecause faithful evaluate {result.out}"])


def evaluate(
    network: Network,
    /,
    *,
    data: TestData = None,
    quantiles: str = "0.97,0.99",
    by: By = "distance",
    no_interventions: bool = False,
    limit: Count | None = None,
    option: TestOption = None,
    device: Device = "auto",
    output: Printing = Printing(),
) -> int:
    """Measure AA, WGA, AUC, mIoU and Kp on the test split, with and without the intervention that
    is best on validation images.

    If NETWORK is the folder of a run, the numbers are also written to RUN/evaluation.json.

    For example: seecause faithful evaluate builtin:critters-ifam

    Args:
        quantiles: Shares of training tokens to keep in interventions, separated by commas.
        no_interventions: Do not look for interventions.
        limit: Use at most this many images, spread evenly. Default: all.
        device: Where to compute; auto takes the GPU if there is one.
    """
    try:
        shares = [float(word) for word in names(quantiles)]
    except ValueError:
        raise BadOption("--quantiles", quantiles, "numbers with commas between them") from None
    how = {"intervention": None if no_interventions else "best", "quantiles": shares, "by": by}
    return _evaluate(network, device, option, output, data=data, limit=limit, **how)


def intervene(
    network: Network,
    /,
    *,
    data: TestData = None,
    drop: str = "",
    quantile: float | None = None,
    by: By = "distance",
    limit: Count | None = None,
    option: TestOption = None,
    device: Device = "auto",
    output: Printing = Printing(),
) -> int:
    """Test the network with parts removed, with untrusted tokens rejected, or both.

    For example: seecause faithful intervene run --drop 2,5 --quantile 0.99

    Args:
        drop: Parts to remove, such as 2,5.
        quantile: Reject tokens further from their prototype than this share of training tokens.
        limit: Use at most this many images, spread evenly. Default: all.
        device: Where to compute; auto takes the GPU if there is one.
    """
    from seecause.faithful import Intervention

    change = Intervention(tuple(whole_numbers("--drop", drop)), quantile, by)
    option = ["keypoints=false", *(option or [])]
    return _evaluate(network, device, option, output, data=data, limit=limit, intervention=change)


def _evaluate(
    network: str, device: Device, option: Values, output: Printing, **settings: Any
) -> int:
    """Measure a network, and print the numbers as a table."""
    from seecause.faithful import evaluate as evaluate_network, open_network
    from seecause.report.background import known_rows

    given = by_name(option).pop("", {})
    refuse(given.keys() - TESTING, f"one of {', '.join(TESTING)}")
    opened = open_network(network, device=pick_device(device))
    result = evaluate_network(opened, progress=output.progress, **given, **settings)
    columns = {"plain": result.plain}
    if result.changed is not None:
        columns[str(result.intervention)] = result.changed
    if not output.silent:
        title = f"{result.data}, {result.images} images"
        print_table(["", *columns], known_rows(columns), title=title)
    facts = {"data": result.data, "images": result.images, "plain": result.plain}
    return output.finish({**facts, "changed": result.changed, "intervention": [*columns][1:]})


def parts(
    network: Network,
    /,
    *,
    data: TestData = None,
    limit: Count = 12,
    quantile: float | None = None,
    device: Device = "auto",
    out: Out = Path("parts"),
    output: Output = Output(),
) -> int:
    """Write a page with the parts of some images, the patches that stage 2 reads, and the
    prediction without each part.

    For example: seecause faithful parts builtin:critters-ifam --out parts --limit 12

    Args:
        limit: Show this many images, spread evenly.
        quantile: Leave out tokens that are further from their prototype than this share of
            training tokens.
        device: Where to compute; auto takes the GPU if there is one.
    """
    from seecause.faithful import open_network
    from seecause.faithful.evaluation import example_parts, part_sheet
    from seecause.report.background import part_sentences, parts_section

    output.check(out)
    opened = open_network(network, device=pick_device(device))
    name, examples = example_parts(opened, data=data, limit=limit, quantile=quantile)
    raw = opened.net.preprocess.raw(examples.images)
    sheet = part_sheet(raw, examples.output.maps)
    return output.write(
        out,
        {"command": "faithful parts", "network": network, "data": name},
        "What can it look at?",
        [parts_section(examples)],
        part_sentences(examples),
        lead=f"{network}, on {name}",
        more=lambda folder: sheet.save(folder / "parts.png"),
    )


def export(network: Network, folder: Path, /, *, output: Printing = Printing()) -> int:
    """Export the best network as a folder with a card (JSON) and weights (safetensors), which
    sc.load(FOLDER) reads.

    For example: seecause faithful export run shipped

    Args:
        folder: The folder to write, new or empty.
    """
    from seecause.faithful import open_network

    card = open_network(network).export(folder)
    return output.finish({"card": card}, [f"{card}: load it with sc.load({str(folder)!r})"])
