"""`seecause faithful`: train a classifier that cannot look elsewhere, test it, change what it sees,
and ship it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import (
    Device,
    DeviceOption,
    Output,
    Quiet,
    pick_device,
    value_of,
    whole_numbers,
)
from seecause.cli.progress import counting, training
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.faithful.evaluation import TrainedNetwork


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
Quantiles = Annotated[str, typer.Option(help="Shares of training tokens that are trusted.")]
ChoiceOption = Annotated[
    Choice,
    typer.Option(
        help=(
            "What an intervention is chosen by, on validation: WGA, or AUC; auto takes AUC for two"
            " classes without groups."
        )
    ),
]
Interventions = Annotated[
    bool, typer.Option(help="Also find, on validation, what to leave out, and test that.")
]
KeyPoints = Annotated[
    bool,
    typer.Option(
        help="Also find key points from parts, where the photos have some (cub, waterbird200)."
    ),
]
RandomCuts = Annotated[
    bool,
    typer.Option(
        "--random-cuts",
        help="Also measure mIoU on random cuts with some object, as the public code does.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Settings of a run that have an option of their own; None: as the file or the library has
    them."""

    data: Annotated[
        str | None,
        typer.Option(
            help=(
                "A dataset without its split: waterbirds:PATH, cub:PATH, folder:PATH,"
                " critters:REGIME ..."
            )
        ),
    ] = None
    backbone: Annotated[
        str | None,
        typer.Option(
            help=(
                "timm:NAME, hf:NAME-OR-FOLDER, builtin:NAME or a saved folder; a plain vision"
                " transformer."
            )
        ),
    ] = None
    parts: Annotated[
        int | None,
        typer.Option("--parts", "-k", help="Parts to discover.", min=1, show_default="8"),
    ] = None
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="The run folder; the same command again goes on in it."),
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, show_default="90")] = None
    batch: Annotated[
        int | None,
        typer.Option(help="Pictures in a step, over all processes.", min=1, show_default="128"),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weights of the backbone: a file, or 'random'.", show_default="pretrained"
        ),
    ] = None
    device: Annotated[
        Device | None,
        typer.Option(
            help="Where to compute; auto takes the GPU if there is one.", show_default="auto"
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of everything random.", min=0, show_default="0")
    ] = None

    def made(self) -> dict[str, Any]:
        device = None if self.device is None else pick_device(self.device)
        return {**asdict(self), "device": device}


@dataclass(frozen=True, kw_only=True)
class TestedNetwork:
    """A network, and the pictures it is tested on."""

    network: Network
    data: DataOption = None
    calibration: Annotated[
        int | None,
        typer.Option(
            help="Training pictures for thresholds and key points.", min=1, show_default="all"
        ),
    ] = None
    by: Annotated[
        Trust,
        typer.Option(
            "--by",
            help=(
                "What tokens are trusted by: distance to their prototype, or the dot product with"
                " it, as the public code has it."
            ),
        ),
    ] = Trust.distance
    limit: Annotated[
        int | None,
        typer.Option(help="Use so many pictures, spread evenly.", min=1, show_default="all"),
    ] = None
    batch: Annotated[int, typer.Option(help="Pictures at once.", min=1)] = 32
    device: DeviceOption = Device.auto
    quiet: Quiet = False

    def open(self) -> TrainedNetwork:
        from seecause.faithful import open_network

        return open_network(self.network, device=pick_device(self.device))

    def made(self) -> dict[str, Any]:
        """As `evaluate` and `evaluate_intervention` take them."""
        return {
            "data": self.data,
            "calibration": self.calibration,
            "by": self.by.value,
            "limit": self.limit,
            "batch": self.batch,
            "progress": partial(counting, quiet=self.quiet),
        }


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help=(
            "A classifier that cannot look elsewhere (iFAM): train it, test it, change what it"
            " sees, ship it."
        ),
    )
    backbone = "timm:vit_base_patch14_reg4_dinov2.lvd142m"
    examples = {
        train: (
            f"train --data waterbirds:PATH --backbone {backbone} --parts 8 --out run. Many GPUs:"
            " torchrun --nproc_per_node=8 -m seecause faithful train ..."
        ),
        evaluate: "evaluate run, or: seecause faithful evaluate builtin:critters-ifam",
        intervene: "intervene run --drop 2,5 --quantile 0.99",
        parts: "parts run --out parts --limit 12",
        export: "export run shipped",
    }
    for function, example in examples.items():
        epilog = f"Example: seecause faithful {example}"
        commands.command(function.__name__, epilog=epilog)(function)
    app.add_typer(commands, name="faithful")


def train(
    options: TrainOptions = TrainOptions(),
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
    quiet: Quiet = False,
) -> None:
    """Train both stages together. The best epoch is chosen on validation; the test split is never
    read."""
    from seecause.faithful import read_config, train as train_run

    run = read_config(config, **{**options.made(), **_settings(option or [])})
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # of many processes the first speaks
    with training(quiet=quiet) as on_step:
        result = train_run(run, on_step=on_step)
    if not quiet:
        best = f"best {run.select} on validation {result.best:.4f}"
        typer.echo(
            f"{result.out}: {result.steps} steps; {best}, after epoch {result.best_epoch + 1}"
        )
        typer.echo(f"next: seecause faithful evaluate {result.out}")


def evaluate(
    tested: TestedNetwork,
    interventions: Interventions = True,
    quantiles: Quantiles = "0.97,0.99",
    choose: ChoiceOption = Choice.auto,
    keypoints: KeyPoints = True,
    random_cuts: RandomCuts = False,
) -> None:
    """AA, WGA, AUC, mIoU and Kp on the test split, plain and with the intervention that validation
    recommends.

    A run also gets RUN/evaluation.json, with an entry for each dataset it was tested on.
    """
    from seecause.cli.progress import print_rows
    from seecause.faithful import evaluate as evaluate_network
    from seecause.report.faithful import evaluation_table

    shares = _numbers("--quantiles", quantiles) if interventions else []
    evaluation = evaluate_network(
        tested.open(),
        interventions=interventions,
        quantiles=shares,
        choose=choose.value,
        keypoints=keypoints,
        random_cuts=random_cuts,
        **tested.made(),
    )
    titles, rows, notes = evaluation_table(evaluation)
    print_rows(titles, rows)
    for note in notes:
        typer.echo(note)


def intervene(
    tested: TestedNetwork,
    drop: Annotated[str, typer.Option(help="Parts to leave out, such as 2,5.")] = "",
    quantile: Annotated[
        float | None,
        typer.Option(
            help="Reject tokens further from their prototype than this share of training tokens."
        ),
    ] = None,
) -> None:
    """Test the network with parts left out, with untrusted tokens rejected, or both."""
    from seecause.cli.progress import print_rows
    from seecause.faithful import evaluate_intervention
    from seecause.report.faithful import evaluation_table

    dropped = whole_numbers("--drop", drop) if drop.strip() else []
    titles, rows, notes = evaluation_table(
        evaluate_intervention(tested.open(), drop_parts=dropped, quantile=quantile, **tested.made())
    )
    print_rows(titles, rows)
    for note in notes:
        typer.echo(note)


def parts(
    network: Network,
    output: Output = Output(out=Path("parts")),
    data: DataOption = None,
    limit: Annotated[int, typer.Option(help="So many pictures, spread evenly.", min=1)] = 12,
    device: DeviceOption = Device.auto,
) -> None:
    """A page with the parts of some pictures, what stage 2 sees, and the answer without each
    part."""
    from seecause.faithful import example_parts, open_network
    from seecause.report.faithful import part_lines, write_parts

    replaces = output.check()
    opened = open_network(network, device=pick_device(device))
    name, examples = example_parts(opened, data=data, limit=limit)
    with output.folder({"command": "faithful parts", "network": network, "data": name}) as folder:
        write_parts(folder, examples, lead=f"{network}, on {name}")
    output.say(part_lines(name, examples), replaced=replaces)


def export(
    network: Network,
    folder: Annotated[Path, typer.Argument(help="Where to; new or empty.", show_default=False)],
) -> None:
    """The best network in a plain folder: a card (JSON) and weights (safetensors), which
    sc.load(FOLDER) reads."""
    from seecause.faithful import open_network

    card = open_network(network).export(folder)
    typer.echo(f"{card}: load it with sc.load({str(folder)!r})")


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise BadOption(flag, text, "numbers with commas between them") from None


def _settings(words: list[str]) -> dict[str, Any]:
    """`epochs=30`, `options.gradient=none`, `losses.class1=0` -> settings."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            expected = "KEY=VALUE, such as epochs=30 or options.gradient=none"
            raise BadOption("--option", word, expected)
        table, _, name = key.rpartition(".")
        if table not in ("", "options", "losses"):
            raise BadOption("--option", word, "a setting, or options.NAME or losses.NAME")
        target = settings.setdefault(table, {}) if table else settings
        target[name] = value_of(text)
    return settings
