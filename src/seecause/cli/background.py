"""`seecause audit`, `repair`, `discover`, `heads score` and `heads prune`: tests and repairs of
predictions from the background."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt

from seecause.cli.shared import (
    BIASED,
    FAILED,
    TEST,
    TRAIN,
    Data,
    Facts,
    Limit,
    MasksFrom,
    ModelName,
    Out,
    Output,
    Reading,
    Share,
    Values,
    by_name,
    counting,
    lead_of,
    names,
    pick_device,
    refuse,
    tell,
    value_of,
)
from seecause.errors import BadOption, NotDefined

if TYPE_CHECKING:
    from seecause.background.images import MaskSource
    from seecause.lvlm import PromptClassifier
    from seecause.models.base import ImageModel
    from seecause.models.view import VisionModel

SHOWN = ("transplant-worst", "flips", "accuracy", "loss")  # numbers of a remedy
ASKED = "builtin:critters-llava"  # a vision-language model, which is always asked for classes
Classify = Annotated[
    Literal["name_ll", "label_token"] | None,
    Parameter(
        help="Ask a vision-language model for the class: by the likelihood of each name (name_ll),"
        " or of labels of listed options (label_token)."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that an audit is checked against.

    Attributes:
        max_flips: The largest share of correct predictions that another background may change,
            beyond those that cutting alone changes.
        max_bir: The largest background influence (BIR), as a ratio of means over images; the paper
            takes the mean of ratios.
        min_accuracy: The lowest accuracy on plain images.
        min_worst_group: The lowest accuracy in any group of the data.
    """

    max_flips: Share = None
    max_bir: Share = None
    min_accuracy: Share = None
    min_worst_group: Share = None

    def given(self) -> dict[str, float]:
        """The limits that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Options of head scores.

    Attributes:
        by: The selector of heads: cigma, taylor, gating and others (`seecause list selectors`).
        fill: What replaces the background; the paper uses mean. swap uses the second version of
            each image, which Critters and pairs have.
        option: An option of the selector (temperature=2; screen=16 measures 48 heads only; the
            paper has guard=false and floor=false), of discovered masks (masks.steps=100; the paper
            has masks.binarise=percentile), of the sample of correct images (sample.share=0.4,
            sample.cap=512; the paper has no cap), or of heads prune (draws=20); repeat for more.
    """

    by: str = "cigma"
    fill: Literal["mean", "grey", "blur", "noise", "swap"] = "grey"
    masks_from: MasksFrom = None
    option: Values = None

    def settings(self) -> tuple[Facts, Facts]:
        """Options of the selector, and the other keywords of `score_heads` and `prune_and_test`."""
        given = by_name(self.option)
        options, masks, sample = (given.pop(name, {}) for name in ("", "masks", "sample"))
        refuse(given, "KEY=VALUE of the selector, masks.KEY=VALUE or sample.KEY=VALUE")
        return options, {"selector": self.by, "fill": self.fill, "sampling": sample, "masks": masks}

    def masks(self, model: ImageModel, options: Facts, work: Path) -> MaskSource:
        """Object masks; options without a source are those of discovered ones."""
        source = self.masks_from or ("discovered" if options else None)
        return mask_source(model, source, options, work)


def audit(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TEST,
    limit: Limit = 160,
    masks_from: MasksFrom = None,
    limits: Limits = Limits(),
    classify: Classify = None,
    option: Values = None,
    out: Out = Path("audit"),
    output: Output = Output(),
) -> int:
    """Does the model predict from the background? Objects are put on other backgrounds, and
    predictions that change are counted, less those that cutting alone changes.

    Images of your own are in class folders (folder:PATH, with PATH/cat/1.jpg), with masks in
    PATH/masks or --masks-from a network. Writes a page (index.html) with a verdict and the worst
    images, and audit.csv.

    The exit code is 3 if a limit is not met (the whole 95 % interval must meet it), and 1 if an
    image could not be read.

    For example: seecause audit --model FOLDER --data folder:PATH --max-flips 0.1 --masks-from
    timm:vit_base_patch16_224

    Args:
        option: per_image=N transplants of each image, fills=grey,mean, or an option of the masks
            (masks.method=caap, masks.weights=FILE, masks.cache=FOLDER); repeat for more.
    """
    from seecause.background.audit import ENOUGH, audit as audit_model, missed_limits
    from seecause.background.images import model_for
    from seecause.data.batch import take_names
    from seecause.data.dataset import open_data
    from seecause.report import rows_csv
    from seecause.report.background import audit_lines, audit_rows, audit_sections

    output.check(out)
    given = by_name(option)
    masks = given.pop("", {}) | given.pop("masks", {})
    settings = {key: masks.pop(key) for key in ("per_image", "fills") if key in masks}
    if isinstance(settings.get("fills"), str):
        settings["fills"] = names(settings["fills"])
    refuse(given, "per_image=N, fills=grey,mean, or masks.KEY=VALUE")
    if limit < ENOUGH and not output.quiet:  # before minutes are spent
        tell(f'note: {limit} images: the verdict can only be "too few"')
    opened = load_asked(model, reading, data, classify, output)
    images = open_data(data, limit=limit)
    take_names(opened, images)
    answering = model_for(opened, images)
    with working_folder(out) as work:
        found = mask_source(answering, masks_from, masks, work)
        result = audit_model(
            answering,
            images,
            masks=found,
            seed=reading.seed,
            progress=output.progress,
            **settings,
        )
    missed = [f"Limit not met: {reason}." for reason in missed_limits(result, **limits.given())]
    return output.write(
        out,
        {
            "command": "audit",
            "verdict": result.verdict,
            "numbers": result.numbers(),
            "run": result.protocol,
            "limits": limits.given(),
            "limits not met": missed,
        },
        f"Does {Path(opened.name).name} predict from the"
        f" {'change between the versions' if result.paired else 'background'}?",
        audit_sections(answering, result, limits=missed, places=getattr(images, "places", ())),
        [*audit_lines(result), *missed],
        lead=lead_of(opened, result.data),
        tables={"audit.csv": rows_csv(audit_rows(result, answering.classes))},
        skipped=result.data.skipped,
        code=FAILED if missed else 0,
    )


def repair(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    test: str | None = None,
    limit: Limit = 256,
    masks_from: MasksFrom = None,
    remedies: str | None = None,
    keep: str | None = None,
    max_loss: Share = None,
    option: Values = None,
    force: bool = False,
    out: Out = Path("repaired"),
    output: Output = Output(),
) -> int:
    """Repair a model that predicts from the background, without group labels.

    Remedies learn from objects on other backgrounds, and the one that is best on held-out images is
    taken. Pairs of images (pairs:WITH:WITHOUT) need no labels and no classes. Writes OUT/model (a
    native checkpoint and its card) and a page with images before and after. If the command is
    killed, the same command continues from the object masks and training states in OUT.work.
    `torchrun --nproc_per_node=8 -m seecause repair ...` fine-tunes on many GPUs.

    For example: seecause repair --model FOLDER --data folder:PATH --masks-from timm:NAME --remedies
    last-layer,fine-tune --out repaired

    Args:
        test: Dataset to report on. Default: a fifth of --data.
        remedies: What to try, separated by commas: directions, least-squares, last-layer, heads,
            fine-tune, dfr (needs --option groups=true), or all. Default: the first three, for
            pairs the first four, and fine-tune if these are not enough and there are few images.
        keep: Plain images that show what a remedy costs, such as images of all classes
            (imagenet:PATH). Default: the plain images of --data.
        max_loss: The most accuracy on plain images that a remedy may lose. Default: 0.01, and no
            limit where the plain images share the shortcut.
        option: An option of a remedy (fine-tune.epochs=3) or of the masks (masks.method=caap,
            masks.weights=FILE), per_image=N transplants of each image, or groups=true to use group
            labels and choose by the worst group; repeat for more.
        force: Apply remedies even if the audit finds no dependence on the background.
    """
    from seecause.background._export import load_line
    from seecause.background.repair import ASKED_INSTEAD, IN_WORDS, repair as repair_model
    from seecause.data.batch import take_names
    from seecause.data.dataset import open_data
    from seecause.faithful.training import join_processes
    from seecause.loading import LanguageModel
    from seecause.report.background import repair_sections

    output.check(out)
    options = by_name(option)
    settings, masks = options.pop("", {}), options.pop("masks", {})
    per_image, groups = settings.pop("per_image", 8), settings.pop("groups", False)
    refuse(settings, "REMEDY.KEY=VALUE such as fine-tune.epochs=3, masks.KEY=VALUE, per_image=N")
    try:
        opened = reading.load(model, output)
    except LanguageModel:
        raise NotDefined("repair", f"{model} {IN_WORDS}", ASKED_INSTEAD) from None
    images = open_data(data, limit=limit)
    take_names(opened, images)
    with working_folder(out) as work, join_processes(str(opened.device)) as processes:
        result = repair_model(
            opened,
            images,
            masks=mask_source(opened, masks_from, masks, work),
            test=None if test is None else open_data(test, limit=limit),
            remedies=None if remedies is None else names(remedies),
            keep=None if keep is None else open_data(keep, limit=limit),
            max_loss=max_loss,
            options=options,
            groups=groups,
            force=force,
            per_image=per_image,
            seed=reading.seed,
            cache=work,
            progress=partial(counting, quiet=output.quiet or not processes.first),
        )
        processes.from_first(None)  # waits, before the others' files are removed
    if not processes.first:
        return 0

    def export(folder: Path) -> None:
        if result.remedy != "nothing":
            result.export(folder / "model")

    shown = () if result.before.masks is None else result.before.masks.notes
    lines = [result.sentence]
    lines += [f"note: {note}" for note in result.record["notes"] if note not in shown]
    for candidate in result.candidates.values():
        numbers = [f"{n} {v:.3f}" for n, v in candidate.test.items() if n in SHOWN]
        reason = f"not tried: {candidate.failed}"
        lines.append(f"{candidate.name}: {reason if candidate.failed else ', '.join(numbers)}")
    if result.remedy != "nothing":
        lines += [f"checkpoint: {out / 'model'}", load_line(result.model, out / "model")]
    return output.write(
        out,
        {"command": "repair", "model": "model", **result.facts()},
        f"{result.original.name}: before and after",
        repair_sections(result),
        lines,
        lead=result.sentence,
        skipped=result.skipped,
        more=export,
    )


def discover(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    limit: Limit = 64,
    method: str = "caap+mosaic",
    pairs: NonNegativeInt = 0,
    option: Values = None,
    out: Out = Path("discovered"),
    output: Output = Output(),
) -> int:
    """Find kinds of patches that turn images into another class: shortcuts that nobody has named.

    Patches that predictions depend on are clustered into kinds; each kind is pasted into images
    with another prediction. Writes a page (index.html), findings.csv, and pairs to repair by.

    For example:

    seecause discover --model hf:FOLDER --data folder:PATH --limit 300 --out kinds

    seecause repair --model hf:FOLDER --data pairs:kinds/pairs/with:kinds/pairs/without

    Args:
        method: Attribution method that selects patches: caap+mosaic, caap or mosaic.
        pairs: The rank of the finding whose pairs are written. Default: the first that is not on
            the object, if masks are known.
        option: layers=3,6,9, kinds=24 (kinds of patches at each layer), trials=32 (pastes of each
            kind) and others, as KEY=VALUE; repeat for more.
    """
    from seecause.background.discover import discover as search
    from seecause.data.dataset import open_data
    from seecause.report import rows_csv
    from seecause.report.background import discover_sections, write_pairs

    output.check(out)
    given = by_name(option)
    settings = given.pop("", {})
    refuse(given, "KEY=VALUE, such as kinds=24")
    if isinstance(settings.get("layers"), int):
        settings["layers"] = [settings["layers"]]
    opened = reading.load(model, output)
    images = open_data(data, limit=limit)
    settings |= {"method": method, "seed": reading.seed}
    with working_folder(out):
        result = search(opened, images, progress=output.progress, **settings)
    if pairs > len(result.findings):
        raise BadOption("--pairs", pairs, f"a rank from 1 to {len(result.findings)}")
    off = [place for place, kind in enumerate(result.findings) if not kind.is_object]
    places = [pairs - 1] if pairs else off[:1]
    lines = [f"{rank}. {f.sentence()}" for rank, f in enumerate(result.findings[:5], 1)]
    lines = lines or ["no kind of patch turns images into a class by more than chance"]

    def export(folder: Path) -> None:
        if places:
            count, kinds = write_pairs(result, places, folder / "pairs"), out / "pairs"
            spec = f"pairs:{kinds / 'with'}:{kinds / 'without'}"
            finding = f"{count} pairs of finding {places[0] + 1}"
            lines.append(f"{finding} to repair by: --data {spec}")

    manifest = {"command": "discover", "table": "findings.csv", "run": result.protocol}
    return output.write(
        out,
        {**manifest, "pairs": [place + 1 for place in places]},
        f"What turns images into another class for {opened.name}?",
        discover_sections(result),
        lines,
        lead=lead_of(opened, result.data),
        tables={"findings.csv": rows_csv(result.rows())},
        skipped=result.data.skipped,
        more=export,
    )


def score(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    limit: Limit = 64,
    scoring: Scoring = Scoring(),
    classify: Classify = None,
    out: Out = Path("scores"),
    output: Output = Output(),
) -> int:
    """Score every head. Writes a page with the layer x head grid, and scores.csv with errors and
    the effects of removing each head.

    For example: seecause heads score --model hf:FOLDER --data waterbirds:PATH:train --limit 600
    """
    from seecause.background import score_heads
    from seecause.data.dataset import open_data
    from seecause.report import rows_csv, skipped_section
    from seecause.report.background import heads_protocol, scores_rows, scores_section

    output.check(out)
    options, settings = scoring.settings()
    opened = load_asked(model, reading, data, classify, output)
    with working_folder(out) as work:
        settings["masks"] = scoring.masks(opened, settings["masks"], work)
        settings |= {"seed": reading.seed, "progress": output.progress}
        scores = score_heads(opened, open_data(data, limit=limit), options=options, **settings)
    images = scores.data
    assert images is not None
    section = scores_section(scores, by=scoring.by)
    best = [f"{head} {float(scores.value[head]):.3g}" for head in scores.order()[:5]]
    highest = f"highest (layer, head): {', '.join(best) or 'no head has a score above 0'}"
    return output.write(
        out,
        {"command": "heads score", **scores.protocol["scored"], "run": scores.protocol},
        f"{opened.name}: heads by {scoring.by}",
        [section, *skipped_section(images.skipped), heads_protocol(opened, scores)],
        [section.note, highest],
        lead=lead_of(opened, images),
        tables={"scores.csv": rows_csv(scores_rows(scores))},
        skipped=images.skipped,
    )


def prune(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    test: str = TEST,
    limit: Limit = 64,
    top: str = "0.1",
    scoring: Scoring = Scoring(),
    classify: Classify = None,
    out: Out = Path("pruned"),
    output: Output = Output(),
) -> int:
    """Remove the highest heads permanently, and measure the effect on other images.

    Heads with a score of 0 or less are kept. Writes OUT/model (a checkpoint), a page with numbers
    before and after, scores.csv and curve.csv. The model's library loads the checkpoint.
    --option draws=20 sets the number of random sets of heads beside the curves (default: 5). If the
    model is worse without the heads, page, README and output say so.

    For example: seecause heads prune --data waterbirds:PATH:train --test waterbirds:PATH:test

    Args:
        test: Dataset to measure the pruned model on; its images must differ from those of --data.
        top: The most heads to remove: a count such as 16, or a share such as 0.1. (The paper
            removes 16, also with scores of 0 or less.)
    """
    from seecause.background import prune_and_test
    from seecause.background._export import check_exportable, load_line
    from seecause.background.heads import DRAWS
    from seecause.data.dataset import open_data
    from seecause.report import Section, rows_csv, skipped_section, warnings
    from seecause.report.background import (
        change_section,
        curves_section,
        heads_protocol,
        scores_rows,
        scores_section,
    )

    output.check(out)
    most = value_of(top)
    if not isinstance(most, int | float):
        raise BadOption("--top", top, "a count such as 16, or a share such as 0.1")
    options, settings = scoring.settings()
    draws = options.pop("draws", DRAWS)
    opened = load_asked(model, reading, data, classify, output)
    if opened.architecture != "prompt":
        check_exportable(cast("VisionModel", opened))  # before anything is measured
    with working_folder(out) as work:
        settings["masks"] = scoring.masks(opened, settings["masks"], work)
        settings |= {"seed": reading.seed, "progress": output.progress, "options": options}
        images = [open_data(name, limit=limit) for name in (data, test)]
        result = prune_and_test(opened, *images, top=most, draws=draws, **settings)

    def export(folder: Path) -> None:
        if result.model.architecture != "prompt":
            result.export(folder / "model")
            return
        asked = cast("PromptClassifier", result.model)
        asked.export(result.heads, folder / "model", note=result.note)

    asks = result.model.architecture == "prompt"
    loads = [] if asks else [load_line(cast("VisionModel", result.model), out / "model")]
    scores, section = result.scores, change_section(result.before, result.after, result.test)
    outcomes = zip(result.curve.ks, result.curve.chosen, strict=True)
    curve = [{"K": k, "removed": len(one.heads), **one.numbers} for k, one in outcomes]
    shown = {n: c for n, c in result.changes().items() if not n.startswith(("FIG", "BIG"))}
    lines = [*filter(None, [result.warning]), section.note]
    lines += [f"{n}: {a:.3f} -> {b:.3f}" for n, (a, b) in shown.items()]
    return output.write(
        out,
        {
            "command": "heads prune",
            "removed": result.heads,
            **scores.protocol["scored"],
            "run": scores.protocol,
        },
        f"{result.model.name} without {len(result.heads)} heads",
        [
            *([Section("Is it worse?", warnings([result.warning]))] if result.warning else []),
            section,
            curves_section(result.curve, by=scoring.by),
            scores_section(scores, by=scoring.by, chosen=result.heads),
            *skipped_section(result.skipped),
            heads_protocol(result.model, scores),
        ],
        [*lines, f"checkpoint: {out / 'model'}", *loads],
        lead=lead_of(result.model, result.test),
        tables={"scores.csv": rows_csv(scores_rows(scores)), "curve.csv": rows_csv(curve)},
        skipped=result.skipped,
        more=export,
    )


def mask_source(
    model: ImageModel, masks_from: str | None, options: Facts, work: Path
) -> MaskSource:
    """The `masks` argument of library functions; maps are cached in `work`."""
    if masks_from in (None, "given"):
        refuse(options, "--masks-from NAME of a network beside it")
        return masks_from
    from seecause.background.masks import object_masks
    from seecause.loading import load

    source: Any = masks_from
    if weights := options.pop("weights", None):
        source = load(masks_from, weights=weights, device=model.device)
    return partial(object_masks, model, source=source, **{"cache": work / "masks", **options})


@contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """Yields the folder OUT.work and removes it on success. If the command is killed, running it
    again resumes from this folder. Images are read inside by worker processes."""
    from seecause.data.dataset import reading_with

    work = out.absolute().with_name(f"{out.absolute().name}.work")
    with reading_with(None):
        yield work
    shutil.rmtree(work, ignore_errors=True)


def load_asked(
    model: str, reading: Reading, data: str, classify: str | None, output: Output
) -> ImageModel:
    """A classifier, or a vision-language model that is asked for the classes of `data`."""
    if classify is None and model != ASKED:
        return reading.load(model, output)
    from seecause.cli.lvlm import load_lvlm
    from seecause.critters.world import QUESTION
    from seecause.data.dataset import open_data
    from seecause.lvlm import classifier

    if reading.weights is not None:
        expected = "none: a vision-language model brings its own"
        raise BadOption("--weights", reading.weights, expected)
    classes = open_data(data, limit=1).classes
    if not classes:
        raise BadOption("--data", data, "data with class names, which the model is asked for")
    usual: Facts = {"question": QUESTION} if data.startswith("critters:") else {}
    lvlm = load_lvlm(model, pick_device(reading.device), reading.dtype)
    return classifier(lvlm, classes, by=cast(Any, classify or "name_ll"), **usual)
