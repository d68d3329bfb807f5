"""`seecause demo`: every job on the embedded models, in one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from seecause.cli.options import Device, DeviceOption, Out, Overwrite, Quiet, Seed


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: seecause demo --out demo --open")(demo)


def demo(
    out: Out = Path("demo"),
    overwrite: Overwrite = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser at the end.")
    ] = False,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Run every job on the embedded Critters models and write one page. Needs no download and no
    picture."""
    from seecause.cli.options import pick_device, tell_page
    from seecause.cli.progress import counting
    from seecause.critters.demo import JOBS, DemoSetting, run_job
    from seecause.report.folder import check_out, result_folder
    from seecause.report.page import Section, protocol_section, write_page

    replaces = check_out(out, overwrite=overwrite)
    setting = DemoSetting(device=pick_device(device), seed=seed)
    sections: list[Section] = []
    manifests: list[dict[str, Any]] = []
    lines: list[str] = []
    with counting("running jobs", len(JOBS), quiet=quiet) as advance:
        for chapter in JOBS:
            shown = run_job(chapter, setting)
            sections += shown.sections
            manifests += shown.manifests
            lines += shown.lines
            advance(1)
    manifest = {"command": "demo", "page": "index.html", "runs": manifests}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        lead = (
            "Small generated creatures on textured backgrounds, so that every cause is known and"
            " every answer can be checked."
        )
        write_page(
            folder / "index.html",
            "seecause on Critters",
            [*sections, replace(protocol_section(manifests), chapter="Protocol")],
            lead=lead,
        )
    page = (out / "index.html").absolute()
    if not quiet:
        for line in lines:
            typer.echo(line)
        tell_page(out, replaced=replaces)
    if open_page:
        typer.launch(page.as_uri())
