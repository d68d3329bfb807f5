"""`seecause lvlm`: which heads bring the image into the words of a vision-language model?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, NonNegativeInt
from cyclopts.validators import Number

from seecause.cli.shared import (
    Count,
    Out,
    Output,
    Printing,
    Trusting,
    Values,
    loading,
    only_downloads_have_bars,
    pick_device,
    result_folder,
    tell,
    value_of,
    warn_outside,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from seecause.lvlm import LVLM

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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question about an image, and the average image that ablated heads attend to.

    Attributes:
        question: What to ask about the image.
        bank: A folder that `seecause lvlm bank` wrote.
        calibration: Calibration images (files, folders or quoted globs; repeat for more). Ablated
            heads attend to their average. Default: Critters, for a model of Critters.
    """

    question: str
    model: LVLMName = LLAVA
    bank: ExistingDirectory | None = None
    calibration: Values = None
    where: Trusting = Trusting()

    @property
    def knows_critters(self) -> bool:
        """Whether it is a model of Critters, which needs no calibration images."""
        folder = Path(self.model.removeprefix("hf:"))
        return self.model.startswith("builtin:") or (folder / "card.json").is_file()

    def check(self) -> None:
        """Raises, before a model is loaded, if no bank can be made or opened."""
        from seecause.data.dataset import find_images

        given = (self.bank is not None) + bool(self.calibration)
        if given > 1 or not (given or self.knows_critters):
            expected = (
                "about a hundred images similar to the explained ones (ablated heads attend to"
                " their average), or --bank"
            )
            raise BadOption("--calibration", self.calibration, expected)
        find_images(self.calibration or [])

    def open(
        self, image: str, output: Printing, *, averaged: bool = True
    ) -> tuple[PILImage, LVLM, Any]:
        """The image, the model and, if it is `averaged`, a bank: a saved one, or one made now."""
        from seecause.data.dataset import find_images, open_image
        from seecause.lvlm import MeanBank, calibration_critters, make_bank

        if averaged:
            self.check()
        shown, where, bank = open_image(image), self.where, None
        if self.knows_critters and not output.quiet:
            warn_outside(self.model, [image], suggest="hf:llava-hf/llava-1.5-7b-hf")
        with loading(self.model, quiet=output.quiet):
            lvlm = load_lvlm(self.model, where.device, where.dtype, where.trust_remote_code)
            if averaged and self.bank is not None:
                bank = MeanBank.load(self.bank)
            elif averaged:
                files = find_images(self.calibration or [])
                bank = make_bank(lvlm, [open_image(f) for f in files] or calibration_critters())
        return shown, lvlm, bank


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Masking:
    """Options of the estimates for heads and image tokens.

    Attributes:
        how: How coefficients are estimated. derivative: their mean over masks, in seconds; fit: the
            paper's elastic net, thousands of masks.
        masks: Number of random masks. Default: 64, or 10000 with --how fit, as in the paper.
        p: The probability that a mask ablates a head, or an image token.
    """

    how: Literal["derivative", "fit"] = "derivative"
    masks: Annotated[int | None, Parameter(validator=Number(gte=4))] = None
    p: Annotated[float, Parameter(name="--ablated", validator=Number(gt=0, lt=1))] = 0.75


def trace(
    image: Image,
    /,
    *,
    asked: Asked,
    answer: str | None = None,
    position: NonNegativeInt = 0,
    floor: float = 1.0,
    masking: Masking = Masking(),
    heads_only: bool = False,
    out: Out = Path("traced"),
    output: Output = Output(),
) -> int:
    """Trace a word of an answer: from which image tokens, through which heads?

    Writes a page (index.html), every head (heads.csv), the coefficients, curves and other rankings
    (trace.safetensors, trace.json), the maps of image tokens (overlay.png) and a manifest.

    For example:

    seecause lvlm trace critters:clean:test#3 --question "What is the name of this creature?"

    seecause lvlm trace cat.jpg --question "What is this?" --model hf:FOLDER --calibration photos/

    Args:
        answer: The answer to explain. Default: the model's own.
        position: Index of the explained token of the answer, from 0; earlier tokens are given.
        floor: Minimum effect of the image on the answer, in logits; 0 is the paper's.
        heads_only: Compute coefficients of heads only, in half the time.
    """
    from seecause.lvlm import MaskEngine, trace_answer
    from seecause.lvlm.attribute import masked_runs
    from seecause.report.lvlm import needed_text, write_trace

    output.check(out)
    shown, lvlm, average = asked.open(image, output)
    word: dict[str, Any] = {"answer": answer, "position": position, "floor": floor}
    engine = MaskEngine(lvlm, shown, asked.question, average, **word)
    runs = masked_runs(engine, how=masking.how, masks=masking.masks, tokens=not heads_only)
    with output.progress("masked runs", runs) as engine.progress:
        options = {**vars(masking), "tokens": not heads_only, "seed": asked.where.seed}
        result = trace_answer(engine, **options)
    facts = {"command": "lvlm trace", "out": str(out), "page": "index.html", "image": image}
    facts |= {"model": asked.model, "answer": engine.answer, "run": result.heads.protocol}
    with result_folder(out, facts, overwrite=output.overwrite) as folder:
        result.save(folder)
        write_trace(folder, result, shown, name=image)
    for line in () if output.quiet else result.concerns():
        tell(f"note: {line}")
    chosen, tokens = result.chosen, result.tokens
    enough = int(chosen.sum())
    top = f"{', '.join(map(str, result.heads.top(min(enough, 8))))}{' ...' * (enough > 8)}"
    lines = [
        f"answer: {engine.answer}; the image moves its logit by {engine.span:.2f}",
        f"{enough} of {chosen.numel()} heads are enough: {top} (layer, head; R2"
        f" {result.heads.r2:.2f})",
        f"needed? {needed_text(result.left())}",
    ]
    if tokens is not None:
        pairs = zip(engine.prompt.pieces, tokens.rows.tolist(), strict=True)
        words = " ".join(f"'{piece.strip() or 'newline'}'" for piece, kept in pairs if kept)
        alone = f"(alone {tokens.sufficiency:.0%} of the effect of those heads)"
        lines.append(f"words that receive the image: {words} {alone}")
    return output.finish(facts, lines)


def answer(
    image: Image,
    /,
    *,
    asked: Asked,
    answer: str | None = None,
    length: Count = 24,
    masking: Masking = Masking(),
    out: Out = Path("answered"),
    output: Output = Output(),
) -> int:
    """Trace every word of an answer: does it come from the image, through which heads, from where?

    Writes a page (index.html: the sentence; click a word), its numbers (words.safetensors,
    words.json) and a manifest.

    For example:

    seecause lvlm answer critters:clean:test#3 --question "What colour is the tail?"

    seecause lvlm answer cat.jpg --question "Describe it." --model hf:FOLDER --calibration photos/

    Args:
        answer: The answer to explain. Default: the model's own.
        length: The most tokens of the model's own answer.
    """
    from seecause.lvlm import AnswerEngine, trace_words
    from seecause.lvlm.words import masked_runs, word_concerns
    from seecause.report.lvlm import sentence, write_answer

    output.check(out)
    shown, lvlm, average = asked.open(image, output)
    said: dict[str, Any] = {"answer": answer, "length": length}
    engine = AnswerEngine(lvlm, shown, asked.question, average, **said)
    runs = masked_runs(engine, how=masking.how, masks=masking.masks)
    with output.progress("masked runs", runs) as engine.progress:
        words = trace_words(engine, **vars(masking), seed=asked.where.seed)
    rows = words.rows()
    facts = {"command": "lvlm answer", "out": str(out), "page": "index.html", "image": image}
    facts |= {"model": asked.model, "answer": sentence(engine), "words": rows}
    facts |= {"run": words.protocol}
    with result_folder(out, facts, overwrite=output.overwrite) as folder:
        words.save(folder)
        write_answer(folder, engine, words, shown, name=image)
    for line in () if output.quiet else word_concerns(engine, words):
        tell(f"note: {line}")
    lines = [
        f"  {row['word']:<14} {row['source']:<9} {row['probability']:.3f} with the image,"
        f" {row['without']:.3f} without; heads {row['heads']}"
        for row in rows
    ]
    return output.finish(facts, [f"answer: {facts['answer']}", *lines])


def edit(
    image: Image,
    /,
    *,
    asked: Asked,
    heads: str,
    blind: bool = False,
    redirect: str | None = None,
    length: Count = 24,
    output: Printing = Printing(),
) -> int:
    """Generate an answer while selected heads attend to the average image (--blind) or to another
    image (--redirect). The edit stays in place during the model's own `generate`.

    For example: seecause lvlm edit critters:clean:test#3 --question "What is it?" --heads
    "(0, 4), (1, 1)" --redirect critters:clean:test#5

    Args:
        heads: Heads to change, as `lvlm trace` names them: '(0, 4), (1, 1)'.
        blind: The heads attend to the average image.
        redirect: The heads attend to this image: a file, or one of a dataset.
        length: The most tokens of the model's own answer.
    """
    from seecause.data.dataset import open_image
    from seecause.lvlm import edited_heads

    if blind == (redirect is not None):
        raise BadOption("--redirect", redirect, "one of --blind and --redirect IMAGE")
    pairs = value_of(f"[{heads}]")
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise BadOption("--heads", heads, "pairs of layer and head, such as (0, 4), (1, 1)")
    other = None if redirect is None else open_image(redirect)
    shown, lvlm, average = asked.open(image, output, averaged=blind)
    prompt = lvlm.prompt(shown, asked.question)
    before = lvlm.speak(prompt, length)
    with edited_heads(lvlm, pairs, blind=average, redirect=other, image=shown):
        after = lvlm.speak(prompt, length)
    decode = lvlm.processor.tokenizer.decode
    facts = {"command": "lvlm edit", "image": image, **asdict(asked), "heads": pairs}
    facts |= {"blind": blind, "redirect": redirect, "model_fingerprint": lvlm.fingerprint()}
    facts |= {"before": decode(before).strip(), "after": decode(after).strip()}
    return output.finish(facts, [f"before: {facts['before']}", f"after:  {facts['after']}"])


def bank(
    *images: Annotated[str, Parameter(name="IMAGE")],
    model: LVLMName = LLAVA,
    size: Annotated[list[tuple[int, int]] | None, Parameter(consume_multiple=False)] = None,
    where: Trusting = Trusting(),
    out: Out = Path("bank"),
    output: Output = Output(),
) -> int:
    """Average calibration images once, for --bank of the other commands: the image that ablated
    heads attend to.

    For example: seecause lvlm bank photos/ --model hf:llava-hf/llava-1.5-7b-hf --size 336 336

    Args:
        images: Calibration images, folders or quoted globs.
        size: Height and width of the images to explain; repeat for more. Default: the most
            frequent.
    """
    from seecause.data.dataset import find_images, open_image
    from seecause.lvlm import make_bank

    output.check(out)
    if not images:
        raise BadOption("IMAGES", None, "at least one image or folder")
    files = find_images(list(images))
    with loading(model, quiet=output.quiet):
        shown = [open_image(file) for file in files]
        shapes = Counter((each.height, each.width) for each in shown)
        lvlm = load_lvlm(model, where.device, where.dtype, where.trust_remote_code)
        result = make_bank(lvlm, shown, sizes=size or [shapes.most_common(1)[0][0]])
    facts = {"command": "lvlm bank", "out": str(out), "model": model, "images": len(files)}
    with result_folder(out, facts, overwrite=output.overwrite) as folder:
        result.save(folder)
    return output.finish(facts, [f"bank: {out} ({result!r})"])


def load_lvlm(
    name: str, device: Any, dtype: str | None, trust: bool = False, *, check: bool = True
) -> LVLM:
    """Load a vision-language model; `check` verifies its view."""
    from seecause.lvlm import load

    only_downloads_have_bars()
    picked = pick_device(device) if device in ("auto", "cuda") else device
    default = "float32" if picked == "cpu" else None  # half precision is slow on a CPU
    dtype = default if dtype is None else dtype
    return load(name, device=picked, dtype=dtype, trust_remote_code=trust, check=check)
