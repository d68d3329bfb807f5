"""`seecause lvlm`: which heads carry the picture into the words of a vision-language model?"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.lvlm_answer import ANSWER_EXAMPLE, EDIT_EXAMPLE, answer, edit
from seecause.cli.lvlm_open import (
    DEFAULT_LVLM,
    OPENING,
    open_lvlm,
    read_size,
    tell_if_outside,
)
from seecause.cli.lvlm_options import (
    AskedWord,
    CalibratedModel,
    Estimation,
    Floor,
    LVLMDtype,
    LVLMName,
    LVLMRun,
    Machine,
    Question,
    StudyEstimation,
    StudyFolder,
    StudySamples,
    StudyWork,
    Variations,
)
from seecause.cli.options import (
    Device,
    DeviceOption,
    Out,
    Overwrite,
    Quiet,
    Seed,
    grouped,
    tell_page,
    tell_replaced,
)
from seecause.cli.workers import with_workers
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.lvlm import AnswerTrace

HEADS_EXAMPLE = """Examples:

  seecause lvlm heads critters:clean:test#3 --question "What is the name of this creature?"

  seecause lvlm heads cat.jpg --question "What is this?" --model hf:FOLDER --calibration photos/
"""
TOKENS_EXAMPLE = (
    'Example: seecause lvlm tokens critters:clean:test#3 --question "What colour is the tail?"'
)
STUDY_EXAMPLE = (
    'Example: seecause lvlm study critters:clean:test --question "Which critter is this?"'
    ' --wording "What is this creature?" --limit 100 --out study'
)
BANK_EXAMPLE = (
    "Example: seecause lvlm bank photos/ --model hf:llava-hf/llava-1.5-7b-hf --size 336x336"
    " --out bank"
)


class BankMode(StrEnum):
    shape = "shape"
    fixed = "fixed"
    mean = "mean"
    grid = "grid"


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Trace a vision-language model's answer: heads, words and image tokens.",
    )
    commands.command("heads", epilog=HEADS_EXAMPLE)(grouped(heads))
    commands.command("tokens", epilog=TOKENS_EXAMPLE)(grouped(tokens))
    commands.command("answer", epilog=ANSWER_EXAMPLE)(grouped(answer))
    commands.command("edit", epilog=EDIT_EXAMPLE)(grouped(edit))
    commands.command("study", epilog=STUDY_EXAMPLE)(with_workers(grouped(study)))
    commands.command("bank", epilog=BANK_EXAMPLE)(bank)
    app.add_typer(commands, name="lvlm")


def heads(
    asked: AskedWord,
    estimation: Estimation = Estimation(),
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Stop a fit before --masks once two halves agree.")
    ] = False,
    run: LVLMRun = LVLMRun(out=Path("traced")),
) -> None:
    """Which heads carry the picture into the answer?

    Writes a page (index.html), the coefficients (heads/), curves and other rankings
    (trace.safetensors) and a manifest.
    """
    _trace(asked, {**estimation.made(run.seed), "adaptive": adaptive}, run)


def tokens(
    asked: AskedWord,
    estimation: Estimation = Estimation(),
    token_masks: Annotated[
        int | None,
        typer.Option(
            help="Masked runs for image tokens.", min=4, show_default="as many as --masks"
        ),
    ] = None,
    run: LVLMRun = LVLMRun(out=Path("traced")),
) -> None:
    """From where in the picture, through which heads, into which words?

    Does what `lvlm heads` does, then words and image tokens: also writes an overlay (overlay.png)
    and their numbers (tokens.safetensors).
    """
    fit = {**estimation.made(run.seed), "token_masks": token_masks or estimation.masks}
    _trace(asked, fit, run)


def _trace(asked: AskedWord, fit: dict[str, Any], run: LVLMRun) -> None:
    """Open the engine, trace with `fit`, write the folder."""
    from seecause.cli.progress import spinning
    from seecause.lvlm import trace_answer
    from seecause.lvlm.masks import MASKS
    from seecause.lvlm.trace import masked_runs
    from seecause.report.lvlm import trace_manifest, write_trace

    replaced = run.check()
    kind = "lvlm tokens" if "token_masks" in fit else "lvlm heads"
    with spinning(OPENING, quiet=run.quiet):
        picture, engine = asked.engine(run)
    if not run.quiet:
        tell_if_outside(asked.model, asked.image)
    how, token_masks = fit["how"], fit.get("token_masks", 0)
    token_masks = MASKS[how] if token_masks is None else token_masks
    runs = masked_runs(engine, how=how, masks=fit["masks"], token_masks=token_masks)
    with run.counting("masked runs", runs) as engine.progress:
        trace = trace_answer(engine, **fit)
    manifest = {"command": kind, "page": "index.html", "image": asked.image}
    manifest |= {"answer": engine.answer, "run": trace_manifest(trace)}
    with run.folder(manifest) as folder:
        trace.save(folder)
        write_trace(folder, trace, picture, name=asked.image)
    if not run.quiet:
        _tell(trace)
        tell_page(run.out, replaced=replaced)


def _tell(trace: AnswerTrace) -> None:
    from seecause.lvlm.trace import concerns
    from seecause.report.lvlm import needed_text

    for line in concerns(trace):
        typer.echo(f"note: {line}", err=True)
    engine, chosen, tokens = trace.engine, trace.heads.chosen, trace.tokens
    enough = int(chosen.sum())
    top = ", ".join(f"{layer}.{head}" for layer, head in trace.heads.heads.top(min(enough, 8)))
    typer.echo(f"answer: {engine.answer}; the picture moves its logit by {engine.span:.2f}")
    typer.echo(
        f"{enough} of {chosen.numel()} heads are enough: {top}{' ...' * (enough > 8)}"
        f" (layer.head; R2 {trace.heads.heads.r2:.2f}, standard error"
        f" {float(trace.heads.heads.standard_error.median()):.4f})"
    )
    typer.echo(f"needed? {needed_text(trace.heads.left())}")
    if tokens is not None:
        pairs = zip(tokens.effects.pieces, tokens.text.tolist(), strict=True)
        words = " ".join(f"'{piece.strip() or 'newline'}'" for piece, receives in pairs if receives)
        typer.echo(
            f"words that receive the picture: {words}"
            f" (alone {tokens.sufficiency:.0%} of the effect of those heads)"
        )


def study(
    samples: StudySamples,
    question: Question,
    asked: CalibratedModel = CalibratedModel(),
    estimation: StudyEstimation = StudyEstimation(),
    varied: Variations = Variations(),
    floor: Floor = 1.0,
    out: StudyFolder = Path("study"),
    work: StudyWork = None,
    workers: Any = None,
    where: Machine = Machine(),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """One question about many pictures: which heads are used, how often, and for what? With
    --wording and --ratio: do other words, or another share of ablated heads, change that? Can be
    stopped and continued.

    Writes OUT/index.html and samples.csv. Samples that cannot be traced stay in both with the
    reason.
    """
    from seecause.bench.lvlm_study import StudyOptions, run_lvlm_study, study_store
    from seecause.cli.progress import counting
    from seecause.data import open_data
    from seecause.lvlm.trace import engine_concerns
    from seecause.report.lvlm_study import write_study

    store, variations = work or out, varied.made()
    study_store(store).check()
    asked.check(question, *variations["wordings"])
    pictures, lvlm = open_data(samples.data, limit=samples.limit), asked.open(where)
    masks, count = estimation.counts()
    shares, right_only = (estimation.ablated, floor), samples.right_only
    options = StudyOptions(
        question, masks, count, *shares, right_only, seed, how=estimation.how.value, **variations
    )
    parts = 1 + bool(count) + options.varies
    with counting("parts of samples", len(pictures) * parts, quiet=quiet) as advance:
        means = asked.bank(lvlm)
        result = run_lvlm_study(
            lvlm, means, pictures, options, store, workers=workers, advance=advance
        )
    out.mkdir(parents=True, exist_ok=True)
    notes = [*engine_concerns(lvlm, question, len(means)), *result.concerns()]
    about: dict[str, Any] = {"question": question, "data": pictures, "notes": notes}
    pages = write_study(out, result, lvlm=lvlm, wordings=options.wordings, **about)
    holes = Counter(sample.hole for sample in result.samples if sample.hole)
    for reason, times in holes.items():
        typer.echo(f"{times} of {len(result.samples)} samples have holes: {reason}", err=True)
    if not quiet:
        for line in notes:
            typer.echo(f"note: {line}", err=True)
        for page in pages:
            typer.echo(str(page))


def bank(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Calibration pictures, folders or quoted globs.",
            metavar="IMAGE",
            show_default=False,
        ),
    ],
    model: LVLMName = DEFAULT_LVLM,
    mode: Annotated[
        BankMode, typer.Option(help="How pictures of different shapes are averaged.")
    ] = BankMode.shape,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="Sizes of pictures to be asked about; repeat for more (one for fixed and grid).",
            metavar="HxW",
            show_default="the most frequent",
        ),
    ] = None,
    out: Out = Path("bank"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: LVLMDtype = None,
    quiet: Quiet = False,
) -> None:
    """Average calibration pictures once, for `--bank` of the other commands: what a head sees that
    may not see the picture."""
    from seecause.cli.progress import counting
    from seecause.data.images import find_images, read_image
    from seecause.lvlm import make_bank
    from seecause.report.folder import check_out, result_folder

    replaced = check_out(out, overwrite=overwrite)
    sizes = [read_size(text) for text in size or []]
    if (mode == "mean" and sizes) or (mode in ("fixed", "grid") and len(sizes) > 1):
        expected = f"{'none' if mode == 'mean' else 'one'} with --mode {mode}"
        raise BadOption("--size", " ".join(size or []), expected)
    files = find_images(images)
    with counting("averaging", len(files), quiet=quiet) as advance:
        pictures = [read_image(file) for file in files]
        shapes = Counter((picture.height, picture.width) for picture in pictures)
        sizes = sizes or [shapes.most_common(1)[0][0]]
        options: dict[str, Any] = {"sizes": sizes} if mode == "shape" else {}
        if mode in ("fixed", "grid"):
            options = {"size": sizes[0]}
        result = make_bank(open_lvlm(model, device, dtype), pictures, mode=mode.value, **options)
        advance(len(files))
    manifest = {"command": "lvlm bank", "model": model, "pictures": len(files), "mode": mode.value}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        result.save(folder)
    if not quiet:
        tell_replaced(out, replaced)
        typer.echo(f"bank: {out} ({result!r})")
