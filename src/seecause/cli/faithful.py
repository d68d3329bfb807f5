"""`seecause faithful`: train a classifier that cannot look elsewhere, test it, change what it sees,
and ship it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from seecause.cli.faithful_open import (
    calibrated,
    examined,
    key_points_of,
    need_data,
    open_on,
    pictures_to_test,
)
from seecause.cli.faithful_table import in_words, print_table
from seecause.cli.options import Device, DeviceOption, Out, Overwrite, Quiet
from seecause.errors import BadOption


class Trust(StrEnum):
    distance = "distance"
    dot = "dot"


class Choice(StrEnum):
    auto = "auto"
    worst = "worst"
    auc = "auc"


Network = Annotated[
    str,
    typer.Argument(
        help="The folder of `faithful train --out` or `faithful export`, or builtin:critters-ifam.",
        metavar="NETWORK",
        show_default=False,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Another dataset, with its split, such as waterbird200:PATH.",
        show_default="the test split of its own",
    ),
]
Limit = Annotated[
    int | None, typer.Option(help="Use so many pictures, spread evenly.", min=1, show_default="all")
]
BatchOption = Annotated[int, typer.Option(help="Pictures at once.", min=1)]
Quantiles = Annotated[str, typer.Option(help="Shares of training tokens that are trusted.")]
TrustOption = Annotated[
    Trust,
    typer.Option(
        "--by",
        help=(
            "What tokens are trusted by: distance to their prototype, or the dot product with it,"
            " as the public code has it."
        ),
    ),
]
ChoiceOption = Annotated[
    Choice,
    typer.Option(
        help=(
            "What an intervention is chosen by, on validation: WGA, or AUC; auto takes AUC for two"
            " classes without groups."
        )
    ),
]
LINE_EVERY = 30.0  # seconds between lines of progress where there is no terminal


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help=(
            "A classifier that cannot look elsewhere (iFAM): train it, test it, change what it"
            " sees, ship it."
        ),
    )
    example = (
        "Example: seecause faithful train --data waterbirds:PATH --backbone"
        " timm:vit_base_patch14_reg4_dinov2.lvd142m --parts 8 --out run"
    )
    commands.command(
        "train",
        epilog=f"{example}. Many GPUs: torchrun --nproc_per_node=8 -m seecause faithful train ...",
    )(train)
    commands.command(
        "evaluate",
        epilog=(
            "Example: seecause faithful evaluate run, or: seecause faithful evaluate"
            " builtin:critters-ifam"
        ),
    )(evaluate)
    commands.command(
        "intervene", epilog="Example: seecause faithful intervene run --drop 2,5 --quantile 0.99"
    )(intervene)
    commands.command("parts", epilog="Example: seecause faithful parts run --out parts --limit 12")(
        parts
    )
    commands.command("export", epilog="Example: seecause faithful export run shipped")(export)
    app.add_typer(commands, name="faithful")


def train(
    data: Annotated[
        str | None,
        typer.Option(
            help=(
                "A dataset without its split: waterbirds:PATH, cub:PATH, folder:PATH,"
                " critters:REGIME ..."
            )
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help=(
                "timm:NAME, hf:NAME-OR-FOLDER, builtin:NAME or a saved folder; a plain vision"
                " transformer."
            )
        ),
    ] = None,
    parts_: Annotated[
        int | None,
        typer.Option("--parts", "-k", help="Parts to discover.", min=1, show_default="8"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The run folder; the same command again goes on in it."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML or JSON file with any of these settings; the command line wins."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other setting, such as epochs=30 or options.gradient=none.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, show_default="90")] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Pictures in a step, over all processes.", min=1, show_default="128"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weights of the backbone: a file, or 'random'.", show_default="pretrained"
        ),
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(
            help="Where to compute; auto takes the GPU if there is one.", show_default="auto"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of everything random.", min=0, show_default="0")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train both stages together. The best epoch is chosen on validation; the test split is never
    read."""
    from seecause.cli.options import pick_device
    from seecause.faithful import read_config
    from seecause.faithful import train as train_run

    told: dict[str, Any] = {
        "data": data,
        "backbone": backbone,
        "parts": parts_,
        "out": None if out is None else str(out),
        "epochs": epochs,
        "batch": batch,
    }
    told |= {
        "weights": weights,
        "seed": seed,
        "device": None if device is None else pick_device(device),
        **_settings(option or []),
    }
    found = read_config(config, **told)
    with _training_bar(quiet=quiet) as hear:
        done = train_run(found, hear=hear)
    if _first_process() and not quiet:
        typer.echo(
            f"{done.out}: {done.steps} steps; best {found.select} on validation {done.best:.4f},"
            f" after epoch {done.best_epoch + 1}"
        )


def evaluate(
    network: Network,
    data: DataOption = None,
    interventions: Annotated[
        bool, typer.Option(help="Also find, on validation, what to leave out, and test that.")
    ] = True,
    quantiles: Quantiles = "0.97,0.99",
    calibration: Annotated[
        int | None,
        typer.Option(
            help="Training pictures for thresholds and key points.", min=1, show_default="all"
        ),
    ] = None,
    by: TrustOption = Trust.distance,
    choose: ChoiceOption = Choice.auto,
    keypoints: Annotated[
        bool,
        typer.Option(
            help="Also find key points from parts, where the photos have some (cub, waterbird200)."
        ),
    ] = True,
    random_cuts: Annotated[
        bool,
        typer.Option(
            "--random-cuts",
            help="Also measure mIoU on random cuts with some object, as the public code does.",
        ),
    ] = False,
    limit: Limit = None,
    batch: BatchOption = 32,
    device: DeviceOption = Device.auto,
    quiet: Quiet = False,
) -> None:
    """AA, WGA, AUC, mIoU and Kp on the test split, plain and with the intervention that validation
    recommends.

    A run also gets RUN/evaluation.json, with an entry for each dataset it was tested on.
    """
    from dataclasses import asdict

    from seecause.faithful import intervene as change
    from seecause.faithful.evaluate import (
        best_of,
        labelled_batches,
        sensible_choice,
        try_interventions,
    )
    from seecause.faithful.snapshot import keep_evaluation, read_evaluations

    wanted = (
        _checked_shares("--quantiles", *_numbers("--quantiles", quantiles)) if interventions else []
    )
    opened = open_on(network, device)
    net = opened.net
    if interventions:
        need_data(
            opened, "--no-interventions: they are chosen by pictures like those it was trained on"
        )
        if choose is Choice.auc and net.classes != 2:
            raise BadOption(
                "--choose",
                choose.value,
                f"worst, or auto: AUC needs two classes, and {network} has {net.classes}",
            )
    if opened.run is not None:
        read_evaluations(opened.run)  # a broken file is said now, not when all is done
    test, mapping = pictures_to_test(opened, data, limit)
    located = key_points_of(opened, test, batch, calibration, quiet=quiet) if keypoints else {}
    plain = examined(opened, test, batch, mapping, quiet=quiet, cuts=random_cuts) | located
    asked = (
        test.name if limit is None else f"{test.name} --limit {limit}"
    )  # a quick look does not replace a whole test
    found: dict[str, Any] = {"data": asked, "pictures": len(test), "plain": plain}
    rows = {"plain": plain}
    if interventions:
        calibrated(opened, wanted, batch, calibration, by=by.value, quiet=quiet)
        val = opened.val_pictures()
        tried = try_interventions(
            net,
            lambda: labelled_batches(net, val, batch=batch, workers=opened.workers),
            wanted,
            by=by.value,
        )
        chosen_by = (
            sensible_choice(tried, val)
            if choose is Choice.auto
            else "auc"
            if choose is Choice.auc
            else "worst"
        )
        best = best_of(tried, chosen_by)
        changed = plain
        if best.drop or best.quantile is not None:
            with change(net, drop_parts=best.drop, quantile=best.quantile, by=best.by):
                if (
                    located and best.quantile is not None
                ):  # parts left out of the mask stay in the maps
                    located = key_points_of(opened, test, batch, calibration, quiet=quiet)
                changed = (
                    examined(opened, test, batch, mapping, quiet=quiet, cuts=random_cuts) | located
                )
        found |= {
            "chosen_on": val.name,
            "chosen_by": chosen_by,
            "chosen": asdict(best),
            "tried": [asdict(one) for one in tried],
            "changed": changed,
        }
        rows[in_words(best.drop, best.quantile, best.by)] = changed
    if opened.run is not None:
        keep_evaluation(opened.run, found)
    print_table(rows, title=f"{test.name}, {len(test)} pictures")


def intervene(
    network: Network,
    drop: Annotated[str, typer.Option(help="Parts to leave out, such as 2,5.")] = "",
    quantile: Annotated[
        float | None,
        typer.Option(
            help="Reject tokens further from their prototype than this share of training tokens."
        ),
    ] = None,
    by: TrustOption = Trust.distance,
    data: DataOption = None,
    calibration: Annotated[
        int | None,
        typer.Option(help="Training pictures for thresholds.", min=1, show_default="all"),
    ] = None,
    limit: Limit = None,
    batch: BatchOption = 32,
    device: DeviceOption = Device.auto,
    quiet: Quiet = False,
) -> None:
    """Test the network with parts left out, with untrusted tokens rejected, or both."""
    from seecause.faithful import intervene as change

    dropped = _parts("--drop", drop)
    shares = [] if quantile is None else _checked_shares("--quantile", quantile)
    if not dropped and not shares:
        raise BadOption(
            "--drop",
            drop,
            "parts to leave out, such as 2,5, or a --quantile, or both: nothing would be changed",
        )
    opened = open_on(network, device)
    if any(part >= opened.net.parts for part in dropped):
        raise BadOption(
            "--drop",
            drop,
            f"parts 0-{opened.net.parts - 1} of {network}; `seecause faithful parts {network}`"
            " shows them",
        )
    if shares:
        calibrated(opened, shares, batch, calibration, by=by.value, quiet=quiet)
    test, mapping = pictures_to_test(opened, data, limit)
    rows = {"plain": examined(opened, test, batch, mapping, quiet=quiet)}
    with change(opened.net, drop_parts=dropped, quantile=quantile, by=by.value):
        rows[in_words(dropped, quantile, by.value)] = examined(
            opened, test, batch, mapping, quiet=quiet
        )
    print_table(rows, title=f"{test.name}, {len(test)} pictures")


def parts(
    network: Network,
    out: Out = Path("parts"),
    overwrite: Overwrite = False,
    data: DataOption = None,
    limit: Annotated[int, typer.Option(help="So many pictures, spread evenly.", min=1)] = 12,
    device: DeviceOption = Device.auto,
    quiet: Quiet = False,
) -> None:
    """A page with the parts of some pictures, what stage 2 sees, and the answer without each
    part."""
    from seecause.cli.options import tell_page
    from seecause.faithful.evaluate import batches_of
    from seecause.report.faithful import note_of, part_cards, parts_section
    from seecause.report.folder import check_out, result_folder
    from seecause.report.page import write_page

    replaces = check_out(out, overwrite=overwrite)
    opened = open_on(network, device)
    net = opened.net
    test, _ = pictures_to_test(opened, data, limit)
    images, labels, _, _ = next(batches_of(net, test, batch=len(test)))
    titles = [
        f"{place + 1}: {test.classes[label] if test.classes else label}"
        for place, label in enumerate(labels.tolist())
    ]
    cards = part_cards(net, images, titles=titles)
    with result_folder(
        out,
        {"command": "faithful parts", "network": network, "data": test.name},
        overwrite=overwrite,
    ) as folder:
        section = parts_section(cards, net.parts, title="Parts", note=note_of(net))
        write_page(
            folder / "index.html",
            "What can it look at?",
            [section],
            lead=f"{network}, on {test.name}",
        )
    if not quiet:
        tell_page(out, replaced=replaces)


def export(
    network: Network,
    folder: Annotated[Path, typer.Argument(help="Where to; new or empty.", show_default=False)],
) -> None:
    """The best network in a plain folder: a card (JSON) and weights (safetensors), which
    sc.load(FOLDER) reads."""
    from seecause.faithful.opened import open_network

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadOption("folder", str(folder), "a new or empty folder")
    opened = open_network(network)
    card = opened.net.save(folder, **opened.told(), parts_found=opened.net.parts)
    typer.echo(f"{card}: load it with sc.load({str(folder)!r})")


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise BadOption(flag, text, "numbers with commas between them") from None


def _checked_shares(flag: str, *values: float) -> list[float]:
    if not values or not all(0 < value <= 1 for value in values):
        raise BadOption(
            flag,
            ",".join(f"{value:g}" for value in values),
            "shares above 0 and up to 1, such as 0.99",
        )
    return list(values)


def _parts(flag: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise BadOption(flag, text, "numbers of parts with commas between them, such as 2,5")
    return [int(word) for word in words]


def _settings(words: list[str]) -> dict[str, Any]:
    """`epochs=30`, `options.gradient=none`, `losses.class1=0` -> settings."""
    from seecause.cli.options import value_of

    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise BadOption(
                "--option", word, "KEY=VALUE, such as epochs=30 or options.gradient=none"
            )
        table, _, name = key.rpartition(".")
        if table not in ("", "options", "losses"):
            raise BadOption("--option", word, "a setting, or options.NAME or losses.NAME")
        (found.setdefault(table, {}) if table else found)[name] = value_of(text)
    return found


def _first_process() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _training_bar(*, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the last losses on a terminal, a line now and then elsewhere; in the first process
    only."""
    import time

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console, heard = Console(stderr=True), time.monotonic()
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )
    silent = quiet or not _first_process()
    with Progress(
        *columns, console=console, transient=True, disable=silent or not console.is_terminal
    ) as bar:
        task = bar.add_task("training", total=None, said="")

        def hear(done: int, total: int, said: str) -> None:
            nonlocal heard
            bar.update(task, completed=done, total=total)
            if said:
                bar.update(task, said=said)
            if (
                said
                and not silent
                and not console.is_terminal
                and (done == total or time.monotonic() - heard >= LINE_EVERY)
            ):
                heard = time.monotonic()
                typer.echo(f"step {done} of {total}, {said}", err=True)

        yield hear
