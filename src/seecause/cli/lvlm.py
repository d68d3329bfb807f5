"""`seecause lvlm`: which heads carry the picture into the words of a vision-language model?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.lvlm_options import (
    DEFAULT_LVLM,
    HEADS_HELP,
    OPENING,
    AnswerOption,
    AskedPicture,
    AskedWord,
    BankMode,
    Estimation,
    HeadEdit,
    Length,
    LVLMName,
    LVLMRun,
    Machine,
    open_lvlm,
    read_heads,
    read_size,
)
from seecause.cli.options import Output, Overwrite, Quiet, tell_replaced
from seecause.cli.progress import Facts, counting, spinning
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.lvlm import AnswerTrace, AnswerWords

HEADS_EXAMPLE = """Examples:

  seecause lvlm heads critters:clean:test#3 --question "What is the name of this creature?"

  seecause lvlm heads cat.jpg --question "What is this?" --model hf:FOLDER --calibration photos/
"""
TOKENS_EXAMPLE = (
    'Example: seecause lvlm tokens critters:clean:test#3 --question "What colour is the tail?"'
)
ANSWER_EXAMPLE = """Examples:

  seecause lvlm answer critters:clean:test#3 --question "What colour is the tail?"

  seecause lvlm answer cat.jpg --question "Describe it." --model hf:FOLDER --calibration photos/
"""
EDIT_EXAMPLE = (
    'Example: seecause lvlm edit critters:clean:test#3 --question "Which critter is this?"'
    ' --heads "(0, 4), (1, 1)" --redirect critters:clean:test#5'
)
BANK_EXAMPLE = (
    "Example: seecause lvlm bank photos/ --model hf:llava-hf/llava-1.5-7b-hf --size 336x336"
    " --out bank"
)


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Trace a vision-language model's answer: heads, words and image tokens.",
    )
    commands.command("heads", epilog=HEADS_EXAMPLE)(heads)
    commands.command("tokens", epilog=TOKENS_EXAMPLE)(tokens)
    commands.command("answer", epilog=ANSWER_EXAMPLE)(answer)
    commands.command("edit", epilog=EDIT_EXAMPLE)(edit)
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
    from seecause.lvlm import trace_answer
    from seecause.lvlm.trace import concerns, masked_runs
    from seecause.report.lvlm import trace_manifest, write_trace

    replaced = run.check()
    kind = "lvlm tokens" if "token_masks" in fit else "lvlm heads"
    with spinning(OPENING, quiet=run.quiet):
        picture, engine = asked.engine(run)
    asked.warn(quiet=run.quiet)
    token_masks = fit.get("token_masks", 0)
    runs = masked_runs(engine, how=fit["how"], masks=fit["masks"], token_masks=token_masks)
    with run.counting("masked runs", runs) as engine.progress:
        trace = trace_answer(engine, **fit)
    manifest = {"command": kind, "page": "index.html", "image": asked.image}
    manifest |= {"answer": engine.answer, "run": trace_manifest(trace)}
    with run.folder(manifest) as folder:
        trace.save(folder)
        write_trace(folder, trace, picture, name=asked.image)
    if not run.quiet:
        for line in concerns(trace):
            typer.echo(f"note: {line}", err=True)
    run.say(_lines(trace), replaced=replaced)


def _lines(trace: AnswerTrace) -> list[str]:
    from seecause.report.lvlm import needed_text

    engine, chosen, tokens = trace.engine, trace.heads.chosen, trace.tokens
    fit, enough = trace.heads.heads, int(chosen.sum())
    top = f"{', '.join(map(str, fit.top(min(enough, 8))))}{' ...' * (enough > 8)}"
    lines = [
        f"answer: {engine.answer}; the picture moves its logit by {engine.span:.2f}",
        f"{enough} of {chosen.numel()} heads are enough: {top} (layer, head; R2 {fit.r2:.2f},"
        f" standard error {float(fit.standard_error.median()):.4f})",
        f"needed? {needed_text(trace.heads.left())}",
    ]
    if tokens is not None:
        pairs = zip(tokens.effects.pieces, tokens.text.tolist(), strict=True)
        words = " ".join(f"'{piece.strip() or 'newline'}'" for piece, receives in pairs if receives)
        lines.append(
            f"words that receive the picture: {words}"
            f" (alone {tokens.sufficiency:.0%} of the effect of those heads)"
        )
    return lines


def answer(
    asked: AskedPicture,
    answer: AnswerOption = None,
    length: Length = 24,
    estimation: Estimation = Estimation(),
    run: LVLMRun = LVLMRun(out=Path("answered")),
) -> None:
    """Every word of an answer: does it come from the picture, through which heads, from where?

    Writes a page (index.html: the sentence; touch a word), its numbers (words.safetensors,
    words.json) and a manifest.
    """
    from seecause.data.images import open_picture
    from seecause.lvlm import AnswerEngine, trace_words
    from seecause.lvlm.words import masked_runs, word_concerns
    from seecause.report.lvlm import answer_manifest, sentence, write_answer

    replaced, image = run.check(), asked.image
    asked.check(asked.question)
    with spinning(OPENING, quiet=run.quiet):
        picture, lvlm = open_picture(image), asked.open(run)
        bank, question = asked.bank(lvlm), asked.question
        engine = AnswerEngine(lvlm, picture, question, bank, answer=answer, length=length)
    asked.warn(quiet=run.quiet)
    fit = estimation.made(run.seed)
    runs = masked_runs(engine, how=fit["how"], masks=fit["masks"])
    with run.counting("masked runs", runs) as engine.progress:
        words = trace_words(engine, **fit)
    facts = {"image": image, "answer": sentence(engine), "words": _facts(words)}
    manifest = {"command": "lvlm answer", "page": "index.html", **facts}
    with run.folder({**manifest, "run": answer_manifest(words)}) as folder:
        words.save(folder)
        write_answer(folder, engine, words, picture, name=image)
    if not run.quiet:
        for line in word_concerns(engine, words):
            typer.echo(f"note: {line}", err=True)
    lines = [
        f"  {row['word']:<14} {row['source']:<9} {row['probability']:.3f} with the picture,"
        f" {row['without']:.3f} without; heads {row['heads']}"
        for row in facts["words"]
    ]
    run.say([f"answer: {facts['answer']}", *lines], replaced=replaced)


def _facts(words: AnswerWords) -> list[dict[str, Any]]:
    """One row for each word."""
    chances = zip(words.log_seen.exp().tolist(), words.log_unseen.exp().tolist(), strict=True)
    return [
        {
            "word": words.pieces[word].strip(),
            "source": source,
            "probability": seen,
            "without": unseen,
            "heads": ", ".join(map(str, words.top(word, 3))),
        }
        for word, (source, (seen, unseen)) in enumerate(zip(words.sources(), chances, strict=True))
    ]


def edit(
    asked: AskedPicture,
    heads: Annotated[str, typer.Option("--heads", help=HEADS_HELP, show_default=False)],
    change: HeadEdit = HeadEdit(),
    length: Length = 24,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder for a manifest: what was changed and said.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    where: Machine = Machine(),
    quiet: Quiet = False,
) -> Facts:
    """What does the model say when some heads see something else? The edit lasts through its own
    `generate`."""
    from seecause.cli.shared import check_out, result_folder
    from seecause.data.images import open_picture
    from seecause.lvlm import edited_heads
    from seecause.models.base import library_versions

    if out is not None:
        check_out(out, overwrite=overwrite)
    change.check()
    asked.check(asked.question, bank=change.blind)
    pairs = read_heads(heads)
    with counting("speaking", 2, quiet=quiet) as advance:
        picture, lvlm = open_picture(asked.image), asked.open(where)
        seen, bank = picture, None
        if change.blind:
            bank = asked.bank(lvlm)
            seen = bank.resized(picture)
        other = None if change.redirect is None else open_picture(change.redirect)
        prompt = lvlm.prompt(seen, asked.question)
        before = lvlm.speak(prompt, length)
        advance(1)
        about = {"size": (seen.height, seen.width), "picture": picture}
        with edited_heads(lvlm, pairs, blind=bank, redirect=other, boost=change.boost, **about):
            after = lvlm.speak(prompt, length)
        advance(1)
    decode = lvlm.processor.tokenizer.decode
    facts = {"before": decode(before).strip(), "after": decode(after).strip(), "heads": pairs}
    if out is not None:
        manifest = {"command": "lvlm edit", "image": asked.image, "question": asked.question}
        manifest |= {"model": asked.model, "options": {**asdict(change), "length": length}, **facts}
        manifest |= {"model_fingerprint": lvlm.fingerprint(), "versions": library_versions()}
        with result_folder(out, manifest, overwrite=overwrite):
            pass
    if not quiet:
        typer.echo(f"before: {facts['before']}\nafter:  {facts['after']}")
    return facts


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
    output: Output = Output(out=Path("bank")),
    where: Machine = Machine(),
) -> None:
    """Average calibration pictures once, for `--bank` of the other commands: what a head sees that
    may not see the picture."""
    from seecause.data.images import find_images, read_image
    from seecause.lvlm import make_bank

    replaced = output.check()
    sizes = [read_size(text) for text in size or []]
    if (mode == "mean" and sizes) or (mode in ("fixed", "grid") and len(sizes) > 1):
        expected = f"{'none' if mode == 'mean' else 'one'} with --mode {mode}"
        raise BadOption("--size", " ".join(size or []), expected)
    files = find_images(images, deep=True)
    with output.counting("averaging", len(files)) as advance:
        pictures = [read_image(file) for file in files]
        shapes = Counter((picture.height, picture.width) for picture in pictures)
        sizes = sizes or [shapes.most_common(1)[0][0]]
        options: dict[str, Any] = {"sizes": sizes} if mode == "shape" else {}
        if mode in ("fixed", "grid"):
            options = {"size": sizes[0]}
        result = make_bank(
            open_lvlm(model, where.device, where.dtype), pictures, mode=mode.value, **options
        )
        advance(len(files))
    manifest = {"command": "lvlm bank", "model": model, "pictures": len(files), "mode": mode.value}
    with output.folder(manifest) as folder:
        result.save(folder)
    if not output.quiet:
        tell_replaced(output.out, replaced)
        typer.echo(f"bank: {output.out} ({result!r})")
