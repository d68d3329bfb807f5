"""`seecause demo`: every job on the embedded models, in one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from seecause.cli.options import Device, DeviceOption, Output, Seed, pick_device


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: seecause demo --out demo --open")(demo)


def demo(
    output: Output = Output(out=Path("demo")),
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser at the end.")
    ] = False,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
) -> None:
    """Run every job on the embedded Critters models and write one page. Needs no download and no
    picture."""
    from seecause.critters.demo import JOBS, DemoSetting, run_job
    from seecause.report.pages import Section, protocol_section

    replaces = output.check()
    setting = DemoSetting(device=pick_device(device), seed=seed)
    sections: list[Section] = []
    manifests: list[dict[str, Any]] = []
    lines: list[str] = []
    with output.counting("running jobs", len(JOBS)) as advance:
        for chapter in JOBS:
            shown = run_job(chapter, setting)
            sections += shown.sections
            manifests += shown.manifests
            lines += shown.lines
            advance(1)
    lead = (
        "Small generated creatures on textured backgrounds, so that every answer can be checked."
        " critters-vit learned the creatures; critters-biased learned their usual backgrounds too."
    )
    sections.append(replace(protocol_section(manifests), chapter="Protocol"))
    manifest = {"command": "demo", "runs": manifests}
    output.write(manifest, "seecause on Critters", sections, lead=lead)
    output.say(lines, replaced=replaces)
    if open_page:
        typer.launch((output.out / "index.html").absolute().as_uri())
