"""`seecause heads`: does the model answer from the background, which heads do it, and what if they go?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.heads_run import (
    By,
    DataOption,
    Filling,
    FillOption,
    Guard,
    GuardOption,
    Limit,
    MaskCacheOption,
    MaskOption,
    OperatorOption,
    OptionPairs,
    Removal,
    Screen,
    Share,
    Source,
    Steps,
    Stratified,
    TestOption,
)
from seecause.cli.options import Device, DeviceOption, Dtype, DtypeOption, ModelName, Out, Overwrite, Quiet, Seed, Weights

if TYPE_CHECKING:
    from seecause.heads.cases import Cases
    from seecause.models.view import VisionModel

BIASED = "builtin:critters-biased"
TRAIN, TEST = "critters:certified:train", "critters:balanced:test"

HEADS, OTHERS = "Which heads carry the background?", "Which heads go first?"


class AuditMasks(StrEnum):
    both = "both"
    discovered = "discovered"
    oracle = "oracle"


class Count(StrEnum):
    right = "right"
    all = "all"


class Form(StrEnum):
    zeroed = "zeroed"
    sliced = "sliced"


class Study(StrEnum):
    k = "k"
    fraction = "fraction"
    masks = "masks"
    temperature = "temperature"
    layers = "layers"
    stability = "stability"


def register(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True, help="Does the model answer from the background, which heads do it, and what if they go?")
    commands.command(epilog="Example: seecause heads audit --model hf:FOLDER --data waterbirds:PATH:test --limit 200 --out audit")(audit)
    commands.command(epilog="Example: seecause heads score --model hf:FOLDER --data waterbirds:PATH:train --limit 600 --out scores")(score)
    commands.command(epilog="Example: seecause heads prune --data waterbirds:PATH:train --test waterbirds:PATH:test --top 16 --out repaired")(prune)
    commands.command("ablation-study", epilog="Example: seecause heads ablation-study k --limit 300 --out study")(ablation_study)
    commands.command()(selectors)
    app.add_typer(commands, name="heads")


def audit(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TEST,
    limit: Limit = 32,
    count: Annotated[Count, typer.Option(help="Average over right answers (the paper), or over all, as where there are no labels.")] = Count.right,
    masks: Annotated[AuditMasks, typer.Option(help="Masks from the model (discovered), from the data (oracle), or both.")] = AuditMasks.both,
    steps: Steps = 250,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("audit"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """How much do the answers hang on the background? FIG, BIG and BIR of every picture, by several ways to take the background away.

    Writes a page (index.html) with a verdict and the worst pictures, and audit.csv with a line for each picture.
    """
    from seecause.cli.heads_run import read
    from seecause.cli.options import open_model
    from seecause.cli.progress import counting
    from seecause.heads.audit import audit as run
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import audit_csv, groups_section, verdict_section
    from seecause.report.heads_gallery import audit_gallery
    from seecause.report.page import protocol_section, write_page

    check_out(out, overwrite=overwrite)
    opened = open_model(model, weights=weights, device=device, dtype=dtype, seed=seed)
    cases = read(opened, data, limit, quiet=quiet)
    with counting("searching masks", len(cases) * (masks is not AuditMasks.oracle), quiet=quiet) as advance:
        found = run(opened, cases, masks=masks.value, count=count.value, steps=steps, cache=mask_cache, progress=advance)
    sections = [verdict_section(found), *groups_section(found), audit_gallery(opened, found), protocol_section([found.protocol])]
    manifest = {"command": "heads audit", "page": "index.html", "table": "audit.csv", "verdict": found.verdict(), "run": found.protocol}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        write_page(folder / "index.html", f"Does {opened.name} answer from the background?", sections, lead=_lead(opened, cases))
        (folder / "audit.csv").write_text(audit_csv(found, opened.classes), encoding="utf-8")
    _say([*found.verdict(), f"page: {out / 'index.html'}"], quiet)


def score(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TRAIN,
    limit: Limit = 64,
    share: Share = 0.4,
    stratified: Stratified = False,
    by: By = "cigma",
    option: OptionPairs = None,
    masks: MaskOption = Source.auto,
    fill: FillOption = Filling.grey,
    operator: OperatorOption = Removal.zero,
    guard: GuardOption = Guard.penalty,
    screen: Screen = None,
    steps: Steps = 250,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("scores"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Score every head. Writes a page with the layer x head grid, and scores.csv with errors and what each removal costs."""
    from seecause.cli.heads_run import NEED_LOOKS, look_for, need_view, options_of, read, recorded, scored
    from seecause.cli.options import open_model
    from seecause.heads.cases import right_ones
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import scores_csv, scores_section
    from seecause.report.page import write_page

    check_out(out, overwrite=overwrite)
    options = options_of(by, option or [], operator=operator, guard=guard, screen=screen, fill=fill)
    opened = need_view(open_model(model, weights=weights, device=device, dtype=dtype, seed=seed))
    cases = right_ones(opened, read(opened, data, limit, quiet=quiet), share=share, stratified=stratified, seed=seed)
    look = look_for(opened, cases, masks, fill, steps=steps, cache=mask_cache, quiet=quiet) if by in NEED_LOOKS else None
    found, said = scored(opened, cases, by, look, operator=operator, guard=guard, screen=screen, options=options, seed=seed, quiet=quiet)
    told = {"data": cases.name, "pictures": len(cases), **recorded(by, look, operator=operator, guard=guard), **options}
    manifest = {"command": "heads score", "page": "index.html", "table": "scores.csv", **told, "run": _plain(found.protocol)}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        sections = [scores_section(found, by=by, title=HEADS if by == "cigma" else OTHERS), _settings(opened, told)]
        write_page(folder / "index.html", f"{opened.name}: heads by {by}", sections, lead=_lead(opened, cases))
        (folder / "scores.csv").write_text(scores_csv(found), encoding="utf-8")
    best = ", ".join(f"({layer}, {head}) {float(found.value[layer, head]):.4f}" for layer, head in found.order()[:5])
    _say([*said, f"highest (layer, head): {best or 'no head has a score above 0'}", f"page: {out / 'index.html'}"], quiet)


def prune(
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TRAIN,
    limit: Limit = 64,
    share: Share = 0.4,
    stratified: Stratified = False,
    test: TestOption = TEST,
    test_limit: Annotated[int, typer.Option(help="Read so many pictures of --test.", min=1)] = 64,
    by: By = "cigma",
    top: Annotated[str, typer.Option(help="Heads to remove at most: a count such as 16, or a share such as 0.1.", metavar="K|SHARE")] = "0.1",
    option: OptionPairs = None,
    masks: MaskOption = Source.auto,
    fill: FillOption = Filling.grey,
    operator: OperatorOption = Removal.zero,
    guard: GuardOption = Guard.penalty,
    screen: Screen = None,
    form: Annotated[Form, typer.Option(help="zeroed: loads without seecause; sliced: smaller, loads by sc.load.")] = Form.zeroed,
    draws: Annotated[int, typer.Option(help="Random sets of heads for the band beside the curves.", min=1)] = 20,
    steps: Steps = 250,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("repaired"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Remove the highest heads for good, and measure what that did on other pictures.

    Heads with a score of 0 or less stay. Writes OUT/model (a checkpoint), a page with numbers before and after, scores.csv and curve.csv.
    """
    from seecause.cli.heads_run import NEED_LOOKS, check_top, count_of, look_for, need_view, options_of, read, recorded, scored
    from seecause.cli.options import open_model
    from seecause.cli.progress import counting
    from seecause.heads.cases import right_ones
    from seecause.heads.export import check_form, export
    from seecause.heads.removal import curve
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import change_section, curves_section, rows_csv, scores_csv, scores_section
    from seecause.report.heads_gallery import SHOWN, repair_gallery
    from seecause.report.page import write_page

    check_out(out, overwrite=overwrite)
    k = count_of(top)
    options = options_of(by, option or [], operator=operator, guard=guard, screen=screen)
    opened = need_view(open_model(model, weights=weights, device=device, dtype=dtype, seed=seed))
    check_top(opened, k, screen)
    check_form(opened, form.value)
    cases = right_ones(opened, read(opened, data, limit, quiet=quiet), share=share, stratified=stratified, seed=seed)
    look = look_for(opened, cases, masks, fill, steps=steps, cache=mask_cache, quiet=quiet) if by in NEED_LOOKS else None
    found, said = scored(opened, cases, by, look, operator=operator, guard=guard, screen=screen, options=options, seed=seed, quiet=quiet)
    heads = found.top(k)
    said += [] if heads else ["nothing is removed: no head was asked for, or none has a score above 0"]
    tested = read(opened, test, test_limit, quiet=quiet)
    looks = [look_for(opened, tested, masks, Filling.grey if fill is Filling.swap else fill, steps=steps, cache=mask_cache, quiet=quiet)]
    looks += [look_for(opened, tested, masks, Filling.swap, steps=steps, cache=mask_cache, quiet=quiet)] if tested.swapped is not None else []
    ks = sorted({0, *(max(1, len(heads) * part // 4) for part in (1, 2, 4, 8) if len(heads) * part // 4 <= found.value.isfinite().sum()), len(heads)})
    with counting("measuring", len(tested), quiet=quiet) as advance:
        line = curve(opened, tested, found, ks, looks, draws=draws, seed=seed, progress=advance)
    before, after = line.chosen[0], line.chosen[ks.index(len(heads))]
    told = {"data": cases.name, "pictures": len(cases), **recorded(by, look, operator=operator, guard=guard), **options, "form": form.value}
    manifest = {"command": "heads prune", "page": "index.html", "model": "model", "removed": heads, **told, "run": _plain(found.protocol)}
    note = f"Heads were chosen by {by} on {len(cases)} pictures of {cases.name}: the {len(heads)} highest scores."
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        export(opened, heads, folder / "model", form=form.value, note=note)
        sections = [
            change_section(before, after, name=tested.name),
            curves_section(line, by=by),
            scores_section(found, by=by, chosen=heads, title=HEADS if by == "cigma" else OTHERS),
            repair_gallery(opened, tested.take(_spread(len(tested), SHOWN)), heads, looks[0].take(_spread(len(tested), SHOWN))),
            _settings(opened, told),
        ]
        write_page(folder / "index.html", f"{opened.name} without {len(heads)} heads", sections, lead=_lead(opened, tested))
        (folder / "scores.csv").write_text(scores_csv(found), encoding="utf-8")
        rows = [{"K": k, **one.numbers()} for k, one in zip(line.ks, line.chosen, strict=True)]
        (folder / "curve.csv").write_text(rows_csv(rows), encoding="utf-8")
    first, second = before.numbers(), after.numbers()
    changes = [
        f"{name}: {first[name]:.3f} -> {second[name]:.3f}" for name in first if name in second and name != "removed" and not name.startswith(("FIG", "BIG"))
    ]
    _say([*said, f"removed {len(heads)} heads: {heads}", *changes, f"checkpoint: {out / 'model'}", f"page: {out / 'index.html'}"], quiet)


def ablation_study(
    study: Annotated[Study, typer.Argument(help="Which setting of CIGMA to change.", show_default=False)],
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TRAIN,
    limit: Limit = 64,
    share: Share = 0.4,
    test: TestOption = TEST,
    test_limit: Annotated[int, typer.Option(help="Read so many pictures of --test.", min=1)] = 64,
    top: Annotated[int, typer.Option(help="Heads to remove at most.", min=1)] = 4,
    masks: MaskOption = Source.auto,
    fill: FillOption = Filling.grey,
    guard: GuardOption = Guard.penalty,
    draws: Annotated[int, typer.Option(help="Random sets of heads (study k).", min=1)] = 20,
    steps: Steps = 250,
    mask_cache: MaskCacheOption = None,
    out: Out = Path("study"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Change one setting of CIGMA at a time: how many heads, pictures, which masks, temperature, layers, and other pictures.

    Writes index.html (table and charts) and table.csv.
    """
    from seecause.cli.heads_run import look_for, masks_for, need_view, read
    from seecause.cli.options import open_model
    from seecause.cli.progress import counting
    from seecause.errors import BadOption
    from seecause.heads.cases import right_ones
    from seecause.heads.studies import Setup, run_study
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import rows_csv, study_section
    from seecause.report.page import write_page

    check_out(out, overwrite=overwrite)
    if fill is Filling.swap or guard is Guard.protect:
        raise BadOption("--fill, --guard", f"{fill.value}, {guard.value}", "a fill other than swap, and penalty or none: studies compare masks")
    opened = need_view(open_model(model, weights=weights, device=device, dtype=dtype, seed=seed))
    every = 1.0 if study is Study.fraction else share  # that study takes shares of all right answers itself
    cases = right_ones(opened, read(opened, data, limit, quiet=quiet), share=every, seed=seed)
    tested = read(opened, test, test_limit, quiet=quiet)
    found_masks = masks_for(opened, cases, masks, steps=steps, cache=mask_cache, quiet=quiet)
    looks = [look_for(opened, tested, masks, fill, steps=steps, cache=mask_cache, quiet=quiet)]
    looks += [look_for(opened, tested, masks, Filling.swap, steps=steps, cache=mask_cache, quiet=quiet)] if tested.swapped is not None else []
    setup = Setup(
        model=opened,
        train=cases,
        test=tested,
        masks=found_masks,
        looks=tuple(looks),
        top=top,
        fill=fill.value,  # type: ignore[arg-type]
        guard=guard is Guard.penalty,
        draws=draws,
        steps=steps,
        cache=mask_cache,
        seed=seed,
    )
    with counting(f"study {study.value}", 1, quiet=quiet) as advance:
        found = run_study(study.value, setup)
        advance(1)
    told = {"data": cases.name, "pictures": len(cases), "test": tested.name, "top": top, "masks": found_masks.source, "fill": fill.value, "guard": guard.value}
    manifest = {"command": "heads ablation-study", "study": study.value, "page": "index.html", "table": "table.csv", **told}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        write_page(
            folder / "index.html", f"CIGMA on {opened.name}: study {study.value}", [study_section(found), _settings(opened, told)], lead=_lead(opened, tested)
        )
        (folder / "table.csv").write_text(rows_csv(found.rows), encoding="utf-8")
    _say([f"{len(found.rows)} settings", f"page: {out / 'index.html'}"], quiet)


def selectors() -> None:
    """The ways to choose heads, what each needs and what it costs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from seecause.heads.registry import selectors as known

    table = Table("name", "needs", "cost for one picture", "what it scores", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, entry in sorted(known().items()):
        table.add_row(name, entry.needs, entry.cost, entry.summary)
    Console(highlight=False).print(table)


def _lead(model: Any, cases: Cases) -> str:
    random = " The model has random weights: its answers mean nothing." if model.random_weights else ""
    return f"{len(cases)} pictures of {cases.name}.{random}"


def _settings(model: VisionModel, told: dict[str, Any]) -> Any:
    """Everything needed to get the same numbers again."""
    from seecause import __version__
    from seecause.report.heads import table
    from seecause.report.page import Section

    about = {"model": model.name, "fingerprint": model.fingerprint(), **told, "device, dtype": f"{model.device}, {model.dtype}", "seecause": __version__}
    return Section("Protocol", table([(key, str(value)) for key, value in about.items() if value is not None]))


def _plain(protocol: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold."""
    return {key: value if isinstance(value, str | int | float | bool | list | dict | None) else str(value) for key, value in protocol.items()}


def _spread(total: int, count: int) -> Any:
    """`count` places over all of them."""
    import torch

    return torch.linspace(0, total - 1, min(count, total)).round().long()


def _say(lines: list[str], quiet: bool) -> None:
    for line in [] if quiet else lines:
        typer.echo(line)
