"""`seecause lvlm`: which heads carry the picture into the words of a vision-language model?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.lvlm_open import (
    DEFAULT_LVLM,
    Answer,
    Asking,
    BankFolder,
    Calibration,
    Compile,
    Floor,
    LVLMDtype,
    LVLMName,
    Masks,
    Picture,
    Position,
    Share,
    check_bank,
    check_question,
    open_bank,
    open_engine,
    open_lvlm,
    tell_if_outside,
)
from seecause.cli.options import Device, DeviceOption, Out, Overwrite, Quiet, Seed
from seecause.errors import BadOption

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from seecause.lvlm import HeadTrace, MaskEngine, TokenTrace

HEADS_EXAMPLE = """Examples:

  seecause lvlm heads critters:clean:test#3 --question "What is the name of this creature?"

  seecause lvlm heads cat.jpg --question "What is this?" --model hf:FOLDER --calibration photos/
"""
TOKENS_EXAMPLE = (
    'Example: seecause lvlm tokens critters:clean:test#3 --question "What colour is the tail?"'
)
STUDY_EXAMPLE = (
    'Example: seecause lvlm study critters:clean:test --question "Which critter is this?" --limit'
    " 100 --masks 2000 --out study"
)
BANK_EXAMPLE = (
    "Example: seecause lvlm bank photos/ --model hf:llava-hf/llava-1.5-7b-hf --size 336x336 --out"
    " bank"
)


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Trace a vision-language model's answer: heads, words and image tokens.",
    )
    commands.command("heads", epilog=HEADS_EXAMPLE)(heads)
    commands.command("tokens", epilog=TOKENS_EXAMPLE)(tokens)
    commands.command("study", epilog=STUDY_EXAMPLE)(study)
    commands.command("bank", epilog=BANK_EXAMPLE)(bank)
    app.add_typer(commands, name="lvlm")


def heads(
    image: Picture,
    question: Asking,
    model: LVLMName = DEFAULT_LVLM,
    answer: Answer = None,
    position: Position = 0,
    masks: Masks = 10_000,
    ablated: Share = 0.75,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Stop before --masks once two half fits agree.")
    ] = False,
    floor: Floor = 1.0,
    bank_folder: BankFolder = None,
    calibration: Calibration = None,
    out: Out = Path("traced"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: LVLMDtype = None,
    compile: Compile = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Which heads carry the picture into the answer?

    Writes a page (index.html), the coefficients (heads/), curves and other rankings
    (trace.safetensors) and a manifest.
    """
    from seecause.bench.traces import check_sizes
    from seecause.cli.progress import counting
    from seecause.lvlm import trace_heads
    from seecause.report.folder import check_out

    replaces = check_out(out, overwrite=overwrite)
    where: dict[str, Any] = {
        "bank": bank_folder,
        "calibration": calibration,
        "device": device,
        "dtype": dtype,
    }
    with counting("tracing", 2, quiet=quiet) as advance:
        shown, engine = open_engine(
            image,
            question,
            model,
            **where,
            answer=answer,
            position=position,
            floor=floor,
            compile=compile,
        )
        if not quiet:
            tell_if_outside(model, image)
        check_sizes(engine, masks, seed=seed)
        advance(1)
        found = trace_heads(engine, masks=masks, p=ablated, seed=seed, adaptive=adaptive)
        advance(1)
    _write(engine, shown, image, found, None, out, overwrite)
    if not quiet:
        _say(engine, found, out, replaced=replaces)


def tokens(
    image: Picture,
    question: Asking,
    model: LVLMName = DEFAULT_LVLM,
    answer: Answer = None,
    position: Position = 0,
    masks: Masks = 10_000,
    token_masks: Annotated[
        int | None,
        typer.Option(
            help="Masked runs for image tokens.", min=2, show_default="as many as --masks"
        ),
    ] = None,
    ablated: Share = 0.75,
    floor: Floor = 1.0,
    bank_folder: BankFolder = None,
    calibration: Calibration = None,
    out: Out = Path("traced"),
    overwrite: Overwrite = False,
    device: DeviceOption = Device.auto,
    dtype: LVLMDtype = None,
    compile: Compile = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """From where in the picture, through which heads, into which words?

    Does what `lvlm heads` does, then words and image tokens: also writes an overlay (overlay.png)
    and their numbers (tokens.safetensors).
    """
    from seecause.bench.traces import check_sizes
    from seecause.cli.progress import counting
    from seecause.lvlm import trace_heads, trace_tokens
    from seecause.report.folder import check_out

    replaces = check_out(out, overwrite=overwrite)
    where: dict[str, Any] = {
        "bank": bank_folder,
        "calibration": calibration,
        "device": device,
        "dtype": dtype,
    }
    with counting("tracing", 3, quiet=quiet) as advance:
        shown, engine = open_engine(
            image,
            question,
            model,
            **where,
            answer=answer,
            position=position,
            floor=floor,
            compile=compile,
        )
        if not quiet:
            tell_if_outside(model, image)
        check_sizes(engine, masks, token_masks or masks, seed=seed)
        advance(1)
        found = trace_heads(engine, masks=masks, p=ablated, seed=seed)
        advance(1)
        traced = trace_tokens(
            engine,
            found.heads.coefficients,
            found.chosen,
            masks=token_masks or masks,
            p=ablated,
            seed=seed,
        )
        advance(1)
    _write(engine, shown, image, found, traced, out, overwrite)
    if not quiet:
        kept = [
            f"'{piece.strip() or 'newline'}'"
            for piece, keep in zip(traced.effects.pieces, traced.text.tolist(), strict=True)
            if keep
        ]
        words = (
            f"words that receive the picture: {' '.join(kept)} (alone {traced.sufficiency:.0%} of"
            " the effect of those heads)"
        )
        _say(engine, found, out, words, replaced=replaces)


def study(
    data: Annotated[
        str,
        typer.Argument(
            help="critters:REGIME[:SPLIT], folder:PATH and others.",
            metavar="DATA",
            show_default=False,
        ),
    ],
    question: Asking,
    model: LVLMName = DEFAULT_LVLM,
    limit: Annotated[int, typer.Option(help="Use so many samples, spread evenly.", min=1)] = 100,
    masks: Masks = 10_000,
    token_masks: Annotated[
        int | None,
        typer.Option(
            help="Masked runs for image tokens; 0 leaves them out.",
            min=0,
            show_default="as many as --masks",
        ),
    ] = None,
    ablated: Share = 0.75,
    right_only: Annotated[
        bool,
        typer.Option(
            "--right-only", help="Leave out samples whose answer is not the name of their class."
        ),
    ] = False,
    floor: Floor = 1.0,
    bank_folder: BankFolder = None,
    calibration: Calibration = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="The folder of the study; the same command again continues in it."
        ),
    ] = Path("study"),
    device: DeviceOption = Device.auto,
    dtype: LVLMDtype = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """One question about many pictures: which heads are used, how often, and for what? Can be
    stopped and continued.

    Writes OUT/report.html and samples.csv. Samples that cannot be traced stay in both with the
    reason.
    """
    from seecause.bench.traces import Asked, check_folder, run_study
    from seecause.cli.progress import counting
    from seecause.data import open_data
    from seecause.data.images import to_pil
    from seecause.report.lvlm_study import write_study

    check_folder(out)
    check_question(question)
    check_bank(model, bank_folder, calibration)
    samples = open_data(data, limit=limit)
    opened = open_lvlm(model, device, dtype)
    asked = Asked(
        question,
        masks,
        masks if token_masks is None else token_masks,
        ablated,
        floor,
        right_only,
        seed,
    )
    with counting(
        "samples", len(samples) * (2 if asked.token_masks else 1), quiet=quiet
    ) as advance:
        found = run_study(
            opened,
            open_bank(opened, bank_folder, calibration),
            samples,
            asked,
            out,
            advance=advance,
        )
    pages = write_study(
        out,
        found,
        lvlm=opened,
        question=question,
        data=samples.name,
        picture_of=lambda sample: to_pil(samples[sample.index].image),
    )
    holes = Counter(sample.hole for sample in found.samples if sample.hole)
    for reason, count in holes.items():
        typer.echo(f"{count} of {len(found.samples)} samples have holes: {reason}", err=True)
    if not quiet:
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
        str,
        typer.Option(
            help="How pictures of different shapes are averaged: shape, fixed, mean or grid."
        ),
    ] = "shape",
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
    from seecause.cli.options import tell_replaced
    from seecause.cli.progress import counting
    from seecause.data.images import find_images, read_image
    from seecause.lvlm import make_bank
    from seecause.report.folder import check_out, result_folder

    replaces = check_out(out, overwrite=overwrite)
    given = [_size(text) for text in size or []]
    if (mode == "mean" and given) or (mode in ("fixed", "grid") and len(given) > 1):
        raise BadOption(
            "--size",
            " ".join(size or []),
            f"{'none' if mode == 'mean' else 'one'} with --mode {mode}",
        )
    files = find_images(images)
    with counting("averaging", len(files), quiet=quiet) as advance:
        pictures = [read_image(file) for file in files]
        sizes = given or [
            Counter((picture.height, picture.width) for picture in pictures).most_common(1)[0][0]
        ]
        options: dict[str, Any] = (
            {"sizes": sizes}
            if mode == "shape"
            else {"size": sizes[0]}
            if mode in ("fixed", "grid")
            else {}
        )
        made = make_bank(open_lvlm(model, device, dtype), pictures, mode=mode, **options)  # type: ignore[arg-type]
        advance(len(files))
    with result_folder(
        out,
        {"command": "lvlm bank", "model": model, "pictures": len(files), "mode": mode},
        overwrite=overwrite,
    ) as folder:
        made.save(folder)
    if not quiet:
        tell_replaced(out, replaces)
        typer.echo(f"bank: {out} ({made!r})")


def _size(text: str) -> tuple[int, int]:
    height, sign, width = text.partition("x")
    if not sign or not height.isdigit() or not width.isdigit() or not int(height) or not int(width):
        raise BadOption("--size", text, "HEIGHTxWIDTH, such as 336x336")
    return int(height), int(width)


def _write(
    engine: MaskEngine,
    shown: Image.Image,
    name: str,
    found: HeadTrace,
    traced: TokenTrace | None,
    out: Path,
    overwrite: bool,
) -> None:
    from safetensors.torch import save

    from seecause.lvlm import head_words
    from seecause.report.folder import result_folder
    from seecause.report.lvlm import (
        curves_section,
        heads_section,
        one_answer_counts,
        tokens_panel,
        tokens_section,
        trace_manifest,
        words_section,
    )
    from seecause.report.page import protocol_section, write_page

    fits = [found] if traced is None else [found, traced.tokens]
    told = trace_manifest(engine, *fits)
    manifest = {
        "command": "lvlm heads" if traced is None else "lvlm tokens",
        "page": "index.html",
        "image": name,
        "answer": engine.answer,
        "run": told,
    }
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        found.heads.save(folder / "heads")
        (folder / "trace.safetensors").write_bytes(save(_tensors(found)))
        sections = [
            heads_section(engine, found),
            curves_section(found.curves, one_answer_counts(found)),
            words_section(head_words(engine, found.heads)),
        ]
        if traced is not None:
            kept = {
                "coefficients": traced.tokens.coefficients,
                "weighted": traced.weighted,
                "deltas": traced.effects.deltas,
                "text": traced.text,
            }
            (folder / "tokens.safetensors").write_bytes(
                save({key: value.contiguous() for key, value in kept.items()})
            )
            tokens_panel(engine, traced, shown).save(folder / "overlay.png")
            sections.insert(0, tokens_section(engine, traced, shown, name=name))
        lead = f"{name}: {engine.question} The explained word of the answer is {engine.answer!r}."
        write_page(
            folder / "index.html",
            f"What makes {engine.lvlm.name} say {engine.answer}",
            [*sections, protocol_section([told])],
            lead=lead,
        )


def _tensors(found: HeadTrace) -> dict[str, Tensor]:
    curves = {
        f"{kind}.{name}": getattr(c, kind)
        for name, c in found.curves.items()
        for kind in ("faithfulness", "completeness")
    }
    named = {"attention": found.attention, "causal": found.causal, "chosen": found.chosen, **curves}
    return {name: tensor.contiguous() for name, tensor in named.items()}


def _say(engine: MaskEngine, found: HeadTrace, out: Path, *more: str, replaced: bool) -> None:
    from seecause.cli.options import tell_page

    enough = int(found.chosen.sum())
    top = ", ".join(f"{layer}.{head}" for layer, head in found.heads.top(min(enough, 8)))
    typer.echo(f"answer: {engine.answer}; the picture moves its logit by {engine.span:.2f}")
    typer.echo(
        f"{enough} of {found.chosen.numel()} heads are enough: {top}{' ...' * (enough > 8)}"
        f" (layer.head; R2 {found.heads.r2:.2f})"
    )
    for line in more:
        typer.echo(line)
    tell_page(out, replaced=replaced)
