"""`seecause lvlm`: which heads bring the image into the words of a vision-language model?"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from seecause.cli.shared import (
    Count,
    Out,
    Output,
    Values,
    Where,
    by_name,
    loading,
    only_downloads_have_bars,
    pick_device,
    refuse,
    result_folder,
    tell,
    warn_outside,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.lvlm import LVLM, AnswerTrace, MeanBank

LLAVA = "builtin:critters-llava"
LVLMName = Annotated[
    str,
    Parameter(
        name=["--model", "-m"],
        help="builtin:critters-llava, hf:NAME-OR-FOLDER, or a folder that transformers wrote.",
    ),
]
Image = Annotated[
    str, Parameter(name="IMAGE", help="An image, or one of a dataset: critters:clean:test#3.")
]
Question = Annotated[str, Parameter(help="What to ask about the image.")]
Answer = Annotated[str | None, Parameter(help="The answer to explain. Default: the model's own.")]
How = Annotated[
    Literal["derivative", "fit"],
    Parameter(
        help="How coefficients are estimated. derivative: its mean over masks, in seconds; fit: the"
        " paper's elastic net, thousands of masks."
    ),
]
Masks = Annotated[
    int | None,
    Parameter(
        validator=Number(gte=4),
        help="Masks. Default: 64; with fit 10000.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Bank:
    """What heads see that may not see the image.

    Attributes:
        bank: A folder that `seecause lvlm bank` wrote.
        calibration: Calibration images, folders or quoted globs, whose average such heads see;
            repeat for more. Default: Critters, for a model of Critters.
    """

    bank: Path | None = None
    calibration: Values = None

    def check(self, model: str) -> None:
        """Refuse, before a model is loaded, what no bank can be made of."""
        from seecause.data.images import find_images

        if self.bank is not None and self.calibration:
            raise BadOption("--calibration", self.calibration[0], "--bank or --calibration")
        if self.bank is None and not self.calibration and not knows_critters(model):
            expected = (
                "about a hundred images like those the model is asked about (or --bank), whose"
                " average ablated heads see"
            )
            raise BadOption("--calibration", None, expected)
        if self.bank is not None and not self.bank.is_dir():
            raise BadOption("--bank", str(self.bank), "a folder that `seecause lvlm bank` wrote")
        find_images(self.calibration or [])

    def load(self, lvlm: LVLM) -> MeanBank:
        """A saved bank, or one made now."""
        from seecause.data.images import find_images, open_image
        from seecause.lvlm import MeanBank, calibration_critters, make_bank

        if self.bank is not None:
            return MeanBank.load(self.bank)
        if not self.calibration:
            return make_bank(lvlm, calibration_critters())
        return make_bank(lvlm, [open_image(f) for f in find_images(self.calibration)])


def trace(
    image: Image,
    /,
    *,
    question: Question,
    model: LVLMName = LLAVA,
    bank: Bank = Bank(),
    answer: Answer = None,
    position: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    how: How = "derivative",
    masks: Masks = None,
    heads_only: bool = False,
    option: Values = None,
    where: Where = Where(),
    out: Out = Path("traced"),
    output: Output = Output(),
) -> int:
    """From where in the image, through which heads, into which words?

    Writes a page (index.html), the coefficients, curves and other rankings (trace.safetensors,
    trace.json), the maps of image tokens (overlay.png) and a manifest.

    For example:

    seecause lvlm trace critters:clean:test#3 --question "What is the name of this creature?"

    seecause lvlm trace cat.jpg --question "What is this?" --model hf:FOLDER --calibration photos/

    Args:
        position: Which token of the answer, from 0 on; those before it are taken as said.
        heads_only: Leave out words and image tokens, which takes half the time.
        option: ablated=0.75 (share of heads, or image tokens, that a mask ablates) or floor=1 (the
            least the image must move the answer, in logits); repeat for more.
    """
    from seecause.data.images import open_image
    from seecause.lvlm import MaskEngine, trace_answer
    from seecause.lvlm.attribute import masked_runs
    from seecause.report.lvlm import write_trace

    output.check(out)
    given = _settings(option, ablated=0.75, floor=1.0)
    check_question(question)
    bank.check(model)
    with loading(model, quiet=output.quiet):
        picture, lvlm = open_image(image), load_lvlm(model, where.device, where.dtype)
        word = {"answer": answer, "position": position, "floor": given["floor"]}
        engine = MaskEngine(lvlm, picture, question, bank.load(lvlm), **word)
    _warn(model, image, output)
    count: dict[str, Any] = {"how": how, "masks": masks, "tokens": not heads_only}
    with output.progress("masked runs", masked_runs(engine, **count)) as engine.progress:
        result = trace_answer(engine, **count, p=given["ablated"], seed=where.seed)
    facts = {"command": "lvlm trace", "out": str(out), "page": "index.html", "image": image}
    facts |= {"model": model, "answer": engine.answer, "run": result.heads.protocol}
    with result_folder(out, facts, overwrite=output.overwrite) as folder:
        result.save(folder)
        write_trace(folder, result, picture, name=image)
    for line in () if output.quiet else result.concerns():
        tell(f"note: {line}")
    return output.finish(facts, [*_trace_lines(result)])


def _trace_lines(trace: AnswerTrace) -> list[str]:
    from seecause.report.lvlm import needed_text

    engine, chosen, tokens = trace.engine, trace.chosen, trace.tokens
    fit, enough = trace.heads, int(chosen.sum())
    top = f"{', '.join(map(str, fit.top(min(enough, 8))))}{' ...' * (enough > 8)}"
    lines = [
        f"answer: {engine.answer}; the image moves its logit by {engine.span:.2f}",
        f"{enough} of {chosen.numel()} heads are enough: {top} (layer, head; R2 {fit.r2:.2f},"
        f" standard error {float(fit.standard_error.median()):.4f})",
        f"needed? {needed_text(trace.left())}",
    ]
    if tokens is not None:
        pairs = zip(engine.prompt.pieces, tokens.rows.tolist(), strict=True)
        words = " ".join(f"'{piece.strip() or 'newline'}'" for piece, kept in pairs if kept)
        alone = f"(alone {tokens.sufficiency:.0%} of the effect of those heads)"
        lines.append(f"words that receive the image: {words} {alone}")
    return lines


def answer(
    image: Image,
    /,
    *,
    question: Question,
    model: LVLMName = LLAVA,
    bank: Bank = Bank(),
    answer: Answer = None,
    length: Count = 24,
    how: How = "derivative",
    masks: Masks = None,
    option: Values = None,
    where: Where = Where(),
    out: Out = Path("answered"),
    output: Output = Output(),
) -> int:
    """Every word of an answer: does it come from the image, through which heads, from where?

    Writes a page (index.html: the sentence; click a word), its numbers (words.safetensors,
    words.json) and a manifest.

    For example:

    seecause lvlm answer critters:clean:test#3 --question "What colour is the tail?"

    seecause lvlm answer cat.jpg --question "Describe it." --model hf:FOLDER --calibration photos/

    Args:
        length: Tokens of the model's own answer, at most.
        option: ablated=0.75, the share of heads (or image tokens) that a mask ablates.
    """
    from seecause.data.images import open_image
    from seecause.lvlm import AnswerEngine, trace_words
    from seecause.lvlm.words import masked_runs, word_concerns
    from seecause.report.lvlm import sentence, write_answer

    output.check(out)
    given = _settings(option, ablated=0.75)
    check_question(question)
    bank.check(model)
    with loading(model, quiet=output.quiet):
        picture, lvlm = open_image(image), load_lvlm(model, where.device, where.dtype)
        said: dict[str, Any] = {"answer": answer, "length": length}
        engine = AnswerEngine(lvlm, picture, question, bank.load(lvlm), **said)
    _warn(model, image, output)
    count: dict[str, Any] = {"how": how, "masks": masks}
    with output.progress("masked runs", masked_runs(engine, **count)) as engine.progress:
        words = trace_words(engine, **count, p=given["ablated"], seed=where.seed)
    facts = {"command": "lvlm answer", "out": str(out), "page": "index.html", "image": image}
    facts |= {"model": model, "answer": sentence(engine), "words": words.rows()}
    facts |= {"run": words.protocol}
    with result_folder(out, facts, overwrite=output.overwrite) as folder:
        words.save(folder)
        write_answer(folder, engine, words, picture, name=image)
    for line in () if output.quiet else word_concerns(engine, words):
        tell(f"note: {line}")
    lines = [
        f"  {row['word']:<14} {row['source']:<9} {row['probability']:.3f} with the image,"
        f" {row['without']:.3f} without; heads {row['heads']}"
        for row in facts["words"]
    ]
    return output.finish(facts, [f"answer: {facts['answer']}", *lines])


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Change:
    """What some heads see instead.

    Attributes:
        blind: These heads see the average image.
        redirect: They see this image.
    """

    blind: bool = False
    redirect: str | None = None


def edit(
    image: Image,
    /,
    *,
    question: Question,
    heads: str,
    change: Change = Change(),
    model: LVLMName = LLAVA,
    bank: Bank = Bank(),
    length: Count = 24,
    where: Where = Where(),
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    output: Output = Output(),
) -> int:
    """What does the model say when some heads see something else? The edit lasts through its own
    `generate`.

    For example: seecause lvlm edit critters:clean:test#3 --question "What is it?" --heads
    "(0, 4), (1, 1)" --redirect critters:clean:test#5

    Args:
        heads: Heads to change, as `lvlm trace` names them: '(0, 4), (1, 1)', or 0.4,1.1.
        length: Tokens of the model's own answer, at most.
        out: Folder for a manifest: what was changed and said.
    """
    from seecause.data.images import open_image
    from seecause.lvlm import edited_heads
    from seecause.models.base import library_versions

    if out is not None:
        output.check(out)
    asked = asdict(change)
    flags = [
        f"--{name}" for name, value in asked.items() if value is not None and value is not False
    ]
    if len(flags) != 1:
        expected = "one of --blind and --redirect"
        raise BadOption("edit", " ".join(flags) or None, expected)
    check_question(question)
    if change.blind:
        bank.check(model)
    pairs = read_heads(heads)
    with output.progress("generating", 2) as progress:
        picture, lvlm = open_image(image), load_lvlm(model, where.device, where.dtype)
        average = bank.load(lvlm) if change.blind else None
        other = None if change.redirect is None else open_image(change.redirect)
        prompt = lvlm.prompt(picture, question)
        before = lvlm.speak(prompt, length)
        progress(1)
        with edited_heads(lvlm, pairs, blind=average, redirect=other, image=picture):
            after = lvlm.speak(prompt, length)
        progress(1)
    decode = lvlm.processor.tokenizer.decode
    facts = {"command": "lvlm edit", "image": image, "question": question, "model": model}
    facts |= {"before": decode(before).strip(), "after": decode(after).strip(), "heads": pairs}
    facts |= {"options": {**asked, "length": length}, "model_fingerprint": lvlm.fingerprint()}
    facts |= {"versions": library_versions()}
    if out is not None:
        with result_folder(out, facts, overwrite=output.overwrite):
            pass
    return output.finish(facts, [f"before: {facts['before']}", f"after:  {facts['after']}"])


def bank(
    *images: Annotated[str, Parameter(name="IMAGE")],
    model: LVLMName = LLAVA,
    size: Values = None,
    where: Where = Where(),
    out: Out = Path("bank"),
    output: Output = Output(),
) -> int:
    """Average calibration images once, for --bank of the other commands: what a head sees that may
    not see the image.

    For example: seecause lvlm bank photos/ --model hf:llava-hf/llava-1.5-7b-hf --size 336x336

    Args:
        images: Calibration images, folders or quoted globs.
        size: HEIGHTxWIDTH of images to be asked about; repeat for more. Default: the most frequent.
    """
    from seecause.data.images import find_images, open_image
    from seecause.lvlm import make_bank

    output.check(out)
    if not images:
        raise BadOption("IMAGES", None, "at least one image or folder")
    sizes = [read_size(text) for text in size or []]
    files = find_images(list(images))
    with output.progress("averaging", len(files)) as progress:
        pictures = [open_image(file) for file in files]
        shapes = Counter((picture.height, picture.width) for picture in pictures)
        sizes = sizes or [shapes.most_common(1)[0][0]]
        lvlm = load_lvlm(model, where.device, where.dtype)
        result = make_bank(lvlm, pictures, sizes=sizes)
        progress(len(files))
    facts = {"command": "lvlm bank", "out": str(out), "model": model, "images": len(files)}
    with result_folder(out, facts, overwrite=output.overwrite) as folder:
        result.save(folder)
    return output.finish(facts, [f"bank: {out} ({result!r})"])


def _settings(words: list[str] | None, **usual: Any) -> dict[str, Any]:
    """Options that have no flag, on top of their defaults."""
    options = by_name(words)
    given = options.pop("", {})
    known = ", ".join(f"{key}=..." for key in usual)
    refuse({**options, **{key: v for key, v in given.items() if key not in usual}}, known)
    return {**usual, **given}


def check_question(question: str) -> None:
    if not question.strip():
        raise BadOption("--question", question, "a question about the image")


def knows_critters(model: str) -> bool:
    """A builtin model, or a folder that its training wrote: it needs no calibration images."""
    folder = Path(model.removeprefix("hf:"))
    return model.startswith("builtin:") or (folder / "card.json").is_file()


def _warn(model: str, image: str, output: Output) -> None:
    if knows_critters(model) and not output.quiet:
        warn_outside(model, [image], suggest="hf:llava-hf/llava-1.5-7b-hf")


def load_lvlm(name: str, device: Any, dtype: str | None) -> LVLM:
    """Load and verify a vision-language model."""
    from seecause.lvlm import load

    only_downloads_have_bars()
    picked = pick_device(device) if device in ("auto", "cuda") else device
    default = "float32" if picked == "cpu" else None  # half precision is slow on a CPU
    return load(name, device=picked, dtype=default if dtype is None else dtype)


def read_size(text: str) -> tuple[int, int]:
    """(height, width) of HEIGHTxWIDTH."""
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise BadOption("--size", text, "HEIGHTxWIDTH, such as 336x336")
    return int(height), int(width)


def read_heads(text: str) -> list[tuple[int, int]]:
    """Pairs of (0, 4), (1, 1) or of 0.4,1.1."""
    pairs = []
    for word in re.sub(r"\((\d+),(\d+)\)", r"\1.\2", text.replace(" ", "")).split(","):
        layer, _, head = word.partition(".")
        if not (layer.isdigit() and head.isdigit()):
            raise BadOption("--heads", text, "pairs of layer and head, such as (0, 4), (1, 1)")
        pairs.append((int(layer), int(head)))
    return pairs
