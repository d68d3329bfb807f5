"""`seecause heads ablation-study`: what decides CIGMA's result?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from seecause.cli.heads_masks import MaskCacheOption, Steps
from seecause.cli.heads_open import (
    BIASED,
    TEST,
    TRAIN,
    ClassifyOption,
    DtypeOption,
    QuestionOption,
    ScopeOption,
)
from seecause.cli.heads_run import (
    Cap,
    DataOption,
    Filling,
    FillOption,
    Guard,
    GuardOption,
    Limit,
    MaskOption,
    Share,
    Source,
    TestOption,
)
from seecause.cli.options import (
    Device,
    DeviceOption,
    ModelName,
    Out,
    Overwrite,
    Quiet,
    Seed,
    Weights,
)
from seecause.errors import BadOption


class Study(StrEnum):
    k = "k"
    fraction = "fraction"
    masks = "masks"
    temperature = "temperature"
    layers = "layers"
    stability = "stability"


def ablation_study(
    study: Annotated[
        Study, typer.Argument(help="Which setting of CIGMA to change.", show_default=False)
    ],
    model: ModelName = BIASED,
    weights: Weights = None,
    data: DataOption = TRAIN,
    limit: Limit = 64,
    classify: ClassifyOption = None,
    scope: ScopeOption = None,
    question: QuestionOption = None,
    share: Share = 0.4,
    cap: Cap = 512,
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
    dtype: DtypeOption = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Change one setting of CIGMA at a time: how many heads, pictures, which masks, temperature,
    layers, and other pictures.

    Writes index.html (table and charts) and table.csv.
    """
    from seecause.cli.heads_masks import Search
    from seecause.cli.heads_open import fitted, open_asked
    from seecause.cli.heads_run import (
        check_top,
        lead,
        look_for,
        masks_for,
        need_view,
        read,
        say,
        settings,
    )
    from seecause.cli.progress import counting
    from seecause.heads.ablation_study import StudySetup, ablation_study
    from seecause.heads.pictures import answered_right
    from seecause.report.folder import check_out, result_folder
    from seecause.report.heads import rows_csv, study_section
    from seecause.report.page import write_page

    replaces = check_out(out, overwrite=overwrite)
    if fill is Filling.swap or guard is Guard.protect:
        raise BadOption(
            "--fill, --guard",
            f"{fill.value}, {guard.value}",
            "a fill other than swap, and penalty or none: studies compare masks",
        )
    opened = need_view(
        open_asked(
            model,
            data,
            weights=weights,
            device=device,
            dtype=dtype,
            seed=seed,
            classify=classify,
            scope=scope,
            question=question,
        )
    )
    check_top(opened, top, None)
    opened = fitted(opened, data)
    every = (
        1.0 if study is Study.fraction else share
    )  # that study takes shares of all right answers itself
    cases = answered_right(
        opened, read(opened, data, limit, quiet=quiet), share=every, cap=cap, seed=seed
    )
    tested = read(opened, test, test_limit, quiet=quiet)
    search = Search(steps, mask_cache)
    found_masks = masks_for(opened, cases, masks, search, quiet=quiet)
    looks = [look_for(opened, tested, masks, fill, search, quiet=quiet)]
    looks += (
        [look_for(opened, tested, masks, Filling.swap, search, quiet=quiet)]
        if tested.swapped is not None
        else []
    )
    setup = StudySetup(
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
        found = ablation_study(study.value, setup)
        advance(1)
    told = {
        "data": cases.name,
        "pictures": len(cases),
        "test": tested.name,
        "top": top,
        "masks": found_masks.source,
        "fill": fill.value,
        "guard": guard.value,
    }
    manifest = {
        "command": "heads ablation-study",
        "study": study.value,
        "page": "index.html",
        "table": "table.csv",
        **told,
    }
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        write_page(
            folder / "index.html",
            f"CIGMA on {opened.name}: study {study.value}",
            [study_section(found), settings(opened, told)],
            lead=lead(opened, tested),
        )
        (folder / "table.csv").write_text(rows_csv(found.rows), encoding="utf-8")
    say([f"{len(found.rows)} settings"], out, replaced=replaces, quiet=quiet)
