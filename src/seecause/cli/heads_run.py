"""What the `seecause heads` commands share: pictures and masks, scoring, and what is said about
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.errors import BadOption

if TYPE_CHECKING:
    from pathlib import Path

    from seecause.cli.heads_masks import Search
    from seecause.heads.erase import Baseline, Erasure, Masks
    from seecause.heads.pictures import Pictures
    from seecause.heads.scores import HeadScores
    from seecause.models.base import ImageModel
    from seecause.models.view import VisionModel


class Source(StrEnum):
    auto = "auto"
    discovered = "discovered"
    oracle = "oracle"


class Filling(StrEnum):
    mean = "mean"
    grey = "grey"
    blur = "blur"
    noise = "noise"
    swap = "swap"


class Removal(StrEnum):
    zero = "zero"
    mean = "mean"
    resample = "resample"


class Guard(StrEnum):
    penalty = "penalty"
    protect = "protect"
    none = "none"


KINDS = (
    "critters:REGIME[:SPLIT], waterbirds:PATH, imagenet9:PATH[:VARIANT], folder:PATH and others."
)
AuditData = Annotated[
    str, typer.Option("--data", help=f"Pictures whose answers are audited: {KINDS}")
]
DataOption = Annotated[str, typer.Option("--data", help=f"Pictures to score heads on: {KINDS}")]
TestOption = Annotated[
    str,
    typer.Option(
        "--test", help="Pictures to measure the result on; they should not be those of --data."
    ),
]
Limit = Annotated[int, typer.Option(help="Read so many pictures, spread evenly.", min=1)]
Cap = Annotated[int, typer.Option("--cap", help="Use so many right answers at most.", min=1)]
Share = Annotated[
    float,
    typer.Option(
        help="Use this share of the pictures that are answered right (CIGMA takes 0.4).",
        min=0.0,
        max=1.0,
    ),
]
Stratified = Annotated[bool, typer.Option("--stratified", help="The same number from every class.")]
MaskOption = Annotated[
    Source,
    typer.Option(
        help=(
            "Masks from the data (oracle) or from the model (discovered); auto takes the data's if"
            " it has them."
        )
    ),
]
FillOption = Annotated[
    Filling,
    typer.Option(
        help=(
            "What replaces the background. The paper: mean. swap: exact counterfactuals, Critters"
            " only."
        )
    ),
]
OperatorOption = Annotated[
    Removal, typer.Option(help="What a removed head carries while it is scored.")
]
GuardOption = Annotated[
    Guard,
    typer.Option(
        help=(
            "Subtract what the object loses (penalty), keep heads that cost 5 % of it or a point of"
            " accuracy (protect), or none."
        )
    ),
]
By = Annotated[
    str,
    typer.Option(
        help=(
            "How to choose heads: cigma, greedy, regression, taylor and others; `seecause heads"
            " selectors` lists them."
        )
    ),
]
FLAGS = {
    "steps": "--steps",
    "masks": "--masks",
    "baseline": "--fill",
    "operator": "--operator",
    "guard": "--guard",
    "seed": "--seed",
    "top": "--screen",
}
TAKES = {  # selectors that take masks, and which options of theirs are flags here
    "cigma": tuple(FLAGS),
    "greedy": ("steps", "masks", "baseline", "operator", "guard"),
    "regression": ("steps", "masks", "baseline", "operator", "seed"),
    "contrastive-gating": ("masks", "baseline", "seed"),
    "attention-mass": ("masks",),
}
FREE = ("temperature",)  # options of CIGMA's scores that have no flag
FREE_SCREEN = ("verify", "audit", "at", "by")

OptionPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the selector that has no flag, such as temperature=2; repeat for more.",
        metavar="KEY=VALUE",
    ),
]
Screen = Annotated[
    int | None,
    typer.Option(
        help="Guess first, and measure only the likeliest 4 x N heads.",
        min=1,
        metavar="N",
        show_default="measure all",
    ),
]


def read(model: ImageModel, name: str, limit: int, *, quiet: bool) -> Pictures:
    """A dataset's pictures in the model's frame."""
    from seecause.cli.progress import counting
    from seecause.data.registry import open_data
    from seecause.heads.pictures import read_pictures

    data = open_data(name, limit=limit)
    with counting("reading pictures", len(data), quiet=quiet) as advance:
        return read_pictures(model, data, progress=advance)


def need_view(model: ImageModel) -> VisionModel:
    from seecause.heads.scores import need_heads
    from seecause.models.view import VisionModel

    need_heads(model, "seecause heads")
    assert isinstance(model, VisionModel)
    return model


def masks_for(
    model: ImageModel, cases: Pictures, source: Source, search: Search, *, quiet: bool
) -> Masks:
    """True masks, or the model's own."""
    truth = cases.oracle
    if source is Source.oracle and truth is None:
        raise BadOption(
            "--masks",
            "oracle",
            f"data with a mask for every picture; {cases.name} has none, so give --masks"
            " discovered",
        )
    if truth is not None and source is not Source.discovered:
        search.check_used(False, f"{cases.name} has masks of its own, so give --masks discovered")
        return truth
    return search.masks(model, cases, quiet=quiet)


def look_for(
    model: ImageModel,
    cases: Pictures,
    source: Source,
    fill: Filling,
    search: Search,
    *,
    quiet: bool,
) -> Erasure:
    """How the background is taken away: masks and a fill, or exact swaps."""
    from seecause.heads.erase import Erasure

    if fill is Filling.swap:
        if cases.swapped is None:
            raise BadOption(
                "--fill",
                "swap",
                f"mean, grey, blur or noise: {cases.name} has no exact counterfactuals, only"
                " Critters have",
            )
        return Erasure(None, cases.swapped)
    return Erasure(masks_for(model, cases, source, search, quiet=quiet), fill.value)  # type: ignore[arg-type]


def options_of(
    by: str,
    pairs: Sequence[str],
    *,
    operator: Removal,
    guard: Guard,
    screen: int | None,
    fill: Filling | None = None,
) -> dict[str, Any]:
    """Everything that was asked of a selector, checked before any mask is searched. `fill`: None
    where it serves other ends too."""
    from seecause._options import check_options
    from seecause.cli.heads_masks import pairs_of
    from seecause.errors import UnknownName
    from seecause.heads import score, selectors
    from seecause.heads.cigma import screen as screened

    known = selectors()
    if by not in known:
        raise UnknownName("head selector", by, known)
    options = pairs_of("--option", pairs, "temperature=2")
    own, flags = by == "cigma", TAKES.get(by, ("seed",))
    free = (
        [*FREE, *(FREE_SCREEN if screen is not None else ())]
        if own
        else [name for name in known[by].options if name not in (*flags, "suppress")]
    )
    for name, value in options.items():
        if name in flags:
            raise BadOption(
                "--option", f"{name}={value}", f"{FLAGS[name]}, which is a flag of its own"
            )
        if name not in free:
            raise BadOption(
                f"option {name!r} of {by}", value, f"one of {', '.join(free) or 'no options'}"
            )
    if own:
        check_options(by, score, {name: value for name, value in options.items() if name in FREE})
        check_options(
            by, screened, {name: value for name, value in options.items() if name in FREE_SCREEN}
        )
        return options
    check_options(by, known[by].run, options)
    for name, given, usual in (
        ("operator", operator, Removal.zero),
        ("guard", guard, Guard.penalty),
        ("screen", screen, None),
    ):
        if given is not usual and name not in flags:
            having = " or ".join(
                other
                for other, taken in TAKES.items()
                if name in taken or (name == "screen" and other == "cigma")
            )
            raise BadOption(
                f"--{name}",
                getattr(given, "value", given),
                f"--by {having}: choosing heads by {by} has no {name}",
            )
    if guard is Guard.protect and "guard" not in flags:
        raise BadOption(
            "--guard",
            "protect",
            f"penalty or none with --by {by}" if "guard" in flags else "--by cigma",
        )
    if fill not in (None, Filling.grey) and "baseline" not in flags:
        raise BadOption(
            "--fill",
            fill.value if fill else None,
            f"--by cigma: choosing heads by {by} fills no background",
        )
    return options


def recorded(by: str, look: Erasure | None, *, operator: Removal, guard: Guard) -> dict[str, Any]:
    """What decided the scores, and nothing else."""
    flags = TAKES.get(by, ())
    if look is None or "baseline" not in flags:
        return {
            "by": by,
            **({} if look is None or look.masks is None else {"masks": look.masks.source}),
        }
    told = {"operator": operator.value, "guard": guard.value}
    return {
        "by": by,
        "background": look.name,
        **{name: value for name, value in told.items() if name in flags},
    }


def scored(
    model: VisionModel,
    cases: Pictures,
    by: str,
    look: Erasure | None,
    *,
    operator: Removal = Removal.zero,
    guard: Guard = Guard.penalty,
    screen: int | None = None,
    options: Mapping[str, Any],
    seed: int = 0,
    quiet: bool = False,
) -> tuple[HeadScores, list[str]]:
    """Scores by a selector, and what is to be said about them. `options` are those of `options_of`.

    CIGMA has more here than in the list of selectors: a screen, another guard, and a noise floor
    below which scores are 0.
    """
    from seecause.cli.progress import counting
    from seecause.heads import (
        above_noise,
        information_gains,
        penalised,
        protected,
        score,
        select,
        selectors,
    )
    from seecause.heads.cigma import screen as screened
    from seecause.heads.pictures import logits_of
    from seecause.heads.scores import all_heads

    if by != "cigma":
        entry = selectors()[by]
        if cases.labels is None and "labels" in entry.needs:
            raise BadOption("--data", cases.name, f"data with labels: {by} needs them")
        flags: dict[str, Any] = {
            "seed": seed,
            "operator": operator.value,
            "guard": guard.value,
        }
        flags |= {} if look is None else {"masks": look.masks, "baseline": look.baseline}
        given = {
            name: value
            for name, value in flags.items()
            if name in entry.options and (name == "seed" or name in TAKES.get(by, ()))
        }
        labels = (
            cases.labels
            if cases.labels is not None
            else logits_of(model, cases.images).argmax(dim=1)
        )
        return select(by, model, cases.images, labels, **{**given, **options}), []
    if look is None:
        raise BadOption("--by", by, "masks or counterfactuals")
    baseline: Baseline = look.baseline
    given = {
        "target": cases.labels,
        "operator": operator.value,
        "baseline": baseline,
        "guard": True,
        "seed": seed,
        **options,
    }
    said = []
    if screen is None:
        with counting("scoring heads", len(cases) * len(all_heads(model)), quiet=quiet) as advance:
            found = score(model, cases.images, look.masks, progress=advance, **given)
    else:
        guess = screened(model, cases.images, look.masks, top=screen, **given)
        found = guess.scores
        said.append(f"{guess!r}")
    floor = information_gains(model, cases.images, look.masks, baseline=baseline).noise_floor
    found = above_noise(found, floor)
    found = (
        penalised(found)
        if guard is Guard.penalty
        else protected(found)
        if guard is Guard.protect
        else found
    )
    return found, said


def count_of(text: str) -> int | float:
    """`16` is a count, `0.1` a share. What no model could do is refused here."""
    try:
        k = float(text) if "." in text else int(text)
    except ValueError:
        k = 0
    if k <= 0 or (isinstance(k, float) and k > 1):
        raise BadOption(
            "--top",
            text,
            "a count from 1 on such as 16, or a share above 0.0 and up to 1.0 such as 0.1",
        )
    return k


def check_top(model: VisionModel, k: int | float, screen: int | None) -> int:
    """How many heads may go, checked before any mask is searched."""
    from seecause.heads.scores import all_heads, head_count

    total = len(all_heads(model))
    count = head_count(k, total) if isinstance(k, float) else k
    if not 1 <= count <= total:
        raise BadOption(
            "--top",
            k,
            f"a count from 1 to {total}, as many heads as {model.name} has, or a share of them from"
            f" {1 / total:.2g} to 1.0",
        )
    check_screen(model, screen)
    if screen is not None and count > screen:
        raise BadOption(
            "--screen",
            screen,
            f"{count} or more, the number of heads that --top may remove: a screen looks for its"
            " best N only",
        )
    return count


def check_screen(model: VisionModel, screen: int | None) -> None:
    """A screen cannot look for more heads than there are."""
    from seecause.heads.scores import all_heads

    total = len(all_heads(model))
    if screen is not None and screen > total:
        raise BadOption(
            "--screen",
            screen,
            f"1 to {total}, as many heads as {model.name} has, or no --screen to measure all",
        )


def lead(model: Any, cases: Pictures) -> str:
    random = (
        " The model has random weights: its answers mean nothing." if model.random_weights else ""
    )
    return f"{len(cases)} pictures of {cases.name}.{random}"


def settings(model: VisionModel, told: dict[str, Any]) -> Any:
    """Everything needed to get the same numbers again."""
    from seecause import __version__
    from seecause.report.page import Section, fragment

    about = {
        "model": model.name,
        "fingerprint": model.fingerprint(),
        "readout": model.readout_name,
        **told,
        "device, dtype": f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
        "seecause": __version__,
    }
    rows = [(key, str(value)) for key, value in about.items() if value is not None]
    return Section(
        "Protocol",
        fragment("protocol.html.j2", tables=[rows], shared=False),
        "Everything needed to get the same numbers again.",
    )


def plain(protocol: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold."""
    return {
        key: (
            value
            if isinstance(value, str | int | float | bool | list | dict | None)
            else str(value)
        )
        for key, value in protocol.items()
    }


def spread(total: int, count: int) -> Any:
    """`count` places over all of them."""
    import torch

    return torch.linspace(0, total - 1, min(count, total)).round().long()


def say(lines: list[str], out: Path, *, replaced: bool, quiet: bool) -> None:
    """What was found, then where the page is."""
    from seecause.cli.options import tell_page

    if not quiet:
        for line in lines:
            typer.echo(line)
        tell_page(out, replaced=replaced)
