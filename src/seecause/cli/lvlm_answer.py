"""`seecause lvlm answer` and `lvlm edit`: what is behind every word of an answer, and what is said
when some heads see something else."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.lvlm_options import (
    OPENING,
    AnswerOption,
    AskedPicture,
    Estimation,
    HeadEdit,
    LVLMRun,
    Machine,
)
from seecause.cli.options import Overwrite, Quiet
from seecause.cli.progress import Facts, counting, spinning
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.lvlm import LVLM, AnswerWords

ANSWER_EXAMPLE = """Examples:

  seecause lvlm answer critters:clean:test#3 --question "What colour is the tail?"

  seecause lvlm answer cat.jpg --question "Describe it." --model hf:FOLDER --calibration photos/
"""
EDIT_EXAMPLE = (
    'Example: seecause lvlm edit critters:clean:test#3 --question "Which critter is this?"'
    ' --heads "(0, 4), (1, 1)" --redirect critters:clean:test#5'
)
HEADS_HELP = "Heads to change, as `lvlm heads` names them: '(0, 4), (1, 1)', or 0.4,1.1."
Length = Annotated[int, typer.Option(help="Tokens of the model's own answer, at most.", min=1)]


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
    from seecause.report.lvlm_answer import answer_manifest, sentence, write_answer

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
    from seecause.data.images import open_picture
    from seecause.lvlm import edited_heads
    from seecause.report.folder import check_out

    if out is not None:
        check_out(out, overwrite=overwrite)
    change.check()
    asked.check(asked.question, bank=change.blind)
    pairs = _read_heads(heads)
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
        prompted = {"image": asked.image, "question": asked.question, "model": asked.model}
        prompted |= {"options": {**asdict(change), "length": length}}
        _write_edit(out, lvlm, {**prompted, **facts}, overwrite=overwrite)
    if not quiet:
        typer.echo(f"before: {facts['before']}\nafter:  {facts['after']}")
    return facts


def _write_edit(out: Path, lvlm: LVLM, facts: Facts, *, overwrite: bool) -> None:
    """A folder with a manifest: what was changed, and what was said before and after."""
    from seecause.models.base import library_versions
    from seecause.report.folder import result_folder

    made = {"model_fingerprint": lvlm.fingerprint(), "versions": library_versions()}
    with result_folder(out, {"command": "lvlm edit", **facts, **made}, overwrite=overwrite):
        pass


def _read_heads(text: str) -> list[tuple[int, int]]:
    """Pairs of (0, 4), (1, 1) or of 0.4,1.1."""
    pairs = []
    for word in re.sub(r"\((\d+),(\d+)\)", r"\1.\2", text.replace(" ", "")).split(","):
        layer, _, head = word.partition(".")
        if not (layer.isdigit() and head.isdigit()):
            raise BadOption("--heads", text, "pairs of layer and head, such as (0, 4), (1, 1)")
        pairs.append((int(layer), int(head)))
    return pairs
