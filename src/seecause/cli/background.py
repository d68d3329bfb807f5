"""`seecause audit`, `repair`, `discover`, `heads score` and `heads prune`: does the model predict
from the background, and what can be done about it?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from seecause.cli.shared import (
    BIASED,
    FAILED,
    TEST,
    TRAIN,
    Data,
    Limit,
    MasksFrom,
    ModelName,
    Out,
    Output,
    Reading,
    Share,
    Values,
    by_name,
    check_out,
    counting,
    ending,
    lead_of,
    names,
    pick_device,
    refuse,
    tell,
    whole_numbers,
)
from seecause.errors import BadOption, DataMissing, NotDefined, UnsupportedModel

if TYPE_CHECKING:
    from seecause.background.discover import Discovery
    from seecause.background.masks import MaskSource
    from seecause.background.prune import PruneResult
    from seecause.models.base import ImageModel

ASKED = "builtin:critters-llava"  # a vision-language model, which is always asked for classes
Classify = Annotated[
    str | None,
    Parameter(
        help="Ask a vision-language model for the class: by the likelihood of each name (name_ll),"
        " or of the letters of listed options (label_token)."
    ),
]
Fill = Annotated[
    Literal["mean", "grey", "blur", "noise", "swap"],
    Parameter(
        help="What replaces the background (the paper: mean); swap: other versions of the images,"
        " of Critters and pairs."
    ),
]
Selector = Annotated[
    str,
    Parameter(
        help="How heads are chosen: cigma, taylor, gating and others (`seecause list selectors`)."
    ),
]
HeadValues = Annotated[
    Values,
    Parameter(
        help="An option of the selector (temperature=2, screen=16, guard=false), of discovery"
        " (masks.steps=100), of the sample of correct images (sample.share=0.4, sample.cap=512), or"
        " question=TEXT with --classify; repeat for more."
    ),
]


def audit(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TEST,
    limit: Limit = 160,
    masks_from: MasksFrom = None,
    max_flips: Share = None,
    max_bir: Share = None,
    min_accuracy: Share = None,
    min_worst_group: Share = None,
    classify: Classify = None,
    option: Values = None,
    out: Out = Path("audit"),
    output: Output = Output(),
) -> int:
    """Does the model predict from the background? Objects are put on other backgrounds, and
    predictions that change are counted, beside those that cutting alone changes.

    Images of your own are in class folders (folder:PATH, with PATH/cat/1.jpg), with masks in
    PATH/masks or --masks-from a network. Writes a page (index.html) with a verdict and the worst
    images, and audit.csv.

    A limit is met if the whole 95 % interval meets it; the exit code is 3 if one is not, and 1 if
    images could not be read.

    For example: seecause audit --model FOLDER --data folder:PATH --max-flips 0.1 --masks-from
    timm:vit_base_patch16_224

    Args:
        max_flips: Limit: share of correct predictions that another background may change, beyond
            what cutting alone changes.
        max_bir: Limit of the background influence (BIR).
        min_accuracy: Limit of the accuracy on plain images.
        min_worst_group: Limit of the accuracy in every group of the data.
        option: per_picture=N transplants of each image, fills=grey,mean, or an option of the masks:
            method=caap, weights=FILE, cache=FOLDER; repeat for more.
    """
    from seecause.background.audit import ENOUGH, audit as audit_model, missed_limits
    from seecause.background.images import model_for
    from seecause.data.batch import take_names
    from seecause.data.registry import open_data
    from seecause.report.background import audit_lines, audit_rows, audit_sections
    from seecause.report.pages import rows_csv

    replaced = check_out(out, overwrite=output.overwrite)
    given = by_name(option)
    masks = given.pop("", {})
    settings = {key: masks.pop(key) for key in ("per_picture", "fills") if key in masks}
    if isinstance(settings.get("fills"), str):
        settings["fills"] = names(settings["fills"])
    refuse(given, "per_picture=N, fills=grey,mean, or an option of the masks")
    if limit < ENOUGH and not output.quiet:  # before minutes are spent
        tell(f'note: {limit} images: the verdict can only be "too few"')
    opened = load_asked(model, reading, data, classify, "", output)
    images = open_data(data, limit=limit)
    take_names(opened, images)
    answering = model_for(opened, images)
    with working_folder(out) as work:
        result = audit_model(
            answering,
            images,
            masks=mask_source(answering, masks_from, masks, work),
            seed=reading.seed,
            progress=output.progress,
            **settings,
        )
    limits = {"max_flips": max_flips, "max_bir": max_bir, "min_accuracy": min_accuracy}
    limits |= {"min_worst_group": min_worst_group}
    limits = {name: value for name, value in limits.items() if value is not None}
    missed = [f"Limit not met: {reason}." for reason in missed_limits(result, **limits)]
    skipped = result.data.skipped
    facts = output.write(
        out,
        {
            "command": "audit",
            "table": "audit.csv",
            "verdict": result.verdict,
            "numbers": result.numbers(),
            "run": result.protocol,
            "limits": limits,
            "limits not met": missed,
        },
        f"Does {Path(opened.name).name} predict from the background?",
        audit_sections(answering, result, limits=missed),
        lead=lead_of(opened, result.data),
        tables={"audit.csv": rows_csv(audit_rows(result, answering.classes))},
        skipped=skipped,
    )
    lines = [*audit_lines(result), *missed, *ending(out, replaced)]
    return output.finish(facts, lines, skipped=skipped, code=FAILED if missed else 0)


def repair(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    test: Data | None = None,
    limit: Limit = 256,
    masks_from: MasksFrom = None,
    remedies: str = "last-layer,directions",
    option: Values = None,
    groups: bool = False,
    force: bool = False,
    out: Out = Path("repaired"),
    output: Output = Output(),
) -> int:
    """Repair a model that predicts from the background, without group labels: remedies learn from
    objects on other backgrounds, and the best on held-out ones is kept.

    Writes OUT/model (a native checkpoint, its card, a page with images before and after). Killed,
    the same command goes on: maps of objects and the state of fine-tuning wait in OUT.work.
    `torchrun --nproc_per_node=8 -m seecause repair ...` fine-tunes on many GPUs.

    For example: seecause repair --model FOLDER --data folder:PATH --masks-from timm:NAME --remedies
    last-layer,fine-tune --out repaired

    Args:
        test: Data to report on. Default: a fifth of --data.
        remedies: What to try: last-layer, directions, heads, fine-tune; with --groups dfr; or all.
        option: An option of a remedy (fine-tune.epochs=3) or of the masks (masks.method=caap,
            masks.weights=FILE), or per_picture=N transplants of each image; repeat for more.
        groups: Use group labels, and choose by the worst group.
        force: Repair also where there is nothing to repair.
    """
    from seecause.background.repair import ASKED_INSTEAD, IN_WORDS, repair as repair_model
    from seecause.data.batch import take_names
    from seecause.data.registry import open_data
    from seecause.faithful.training import join_processes
    from seecause.report.background import repair_sections

    replaced = check_out(out, overwrite=output.overwrite)
    options = by_name(option)
    settings, masks = options.pop("", {}), options.pop("masks", {})
    per_picture = settings.pop("per_picture", 8)
    refuse(
        settings, "REMEDY.KEY=VALUE such as fine-tune.epochs=3, masks.KEY=VALUE or per_picture=N"
    )
    try:
        opened = reading.load(model, quiet=output.quiet)
    except UnsupportedModel:
        raise NotDefined("repair", f"{model} {IN_WORDS}", ASKED_INSTEAD) from None
    images = open_data(data, limit=limit)
    take_names(opened, images)
    work = out.absolute().with_name(f"{out.absolute().name}.work")
    with join_processes(str(opened.device)) as processes:
        result = repair_model(
            opened,
            images,
            masks=mask_source(opened, masks_from, masks, work),
            test=None if test is None else open_data(test, limit=limit),
            remedies=names(remedies),
            options=options,
            groups=groups,
            force=force,
            per_picture=per_picture,
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

    facts = output.write(
        out,
        {"command": "repair", "model": "model", **result.facts()},
        f"{result.original.name}: before and after",
        repair_sections(result),
        lead=result.sentence,
        skipped=result.skipped,
        more=export,
    )
    shutil.rmtree(work, ignore_errors=True)
    shown = () if result.before.masks is None else result.before.masks.notes
    lines = [result.sentence]
    lines += [f"note: {note}" for note in result.record["notes"] if note not in shown]
    for candidate in result.candidates.values():
        numbers = candidate.test
        lines.append(
            f"{candidate.name}: not tried: {candidate.failed}"
            if candidate.failed
            else f"{candidate.name}: transplant-worst {numbers['transplant-worst']:.3f}, flips"
            f" {numbers['flips']:.3f}, accuracy {numbers['accuracy']:.3f}"
        )
    lines += [] if result.remedy == "nothing" else [f"checkpoint: {out / 'model'}"]
    return output.finish(facts, [*lines, *ending(out, replaced)], skipped=result.skipped)


def discover(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    limit: Limit = 64,
    method: str = "caap+mosaic",
    pairs: str = "best",
    option: Values = None,
    out: Out = Path("discovered"),
    output: Output = Output(),
) -> int:
    """Which kinds of patches turn images into which class? Nobody has to name a shortcut first.

    Patches that predictions depend on are sorted into kinds; each is pasted into images that are
    predicted otherwise. Writes a page (index.html), findings.csv, and pairs to repair by.

    For example:

    seecause discover --model hf:FOLDER --data folder:PATH --limit 300 --out kinds

    seecause repair --model hf:FOLDER --data pairs:kinds/pairs/with:kinds/pairs/without

    Args:
        method: What finds evidence: caap+mosaic, caap, mosaic.
        pairs: Findings whose pairs are written, by rank, such as 1,3; or best (the first that is
            not on the object, if masks are known), or none.
        option: layers=3,6,9, kinds=24 (kinds of patches at each layer), trials=32 (pastes of each
            kind) and others, as KEY=VALUE; repeat for more.
    """
    from seecause.background.discover import discover as search
    from seecause.data.registry import open_data
    from seecause.report.background import discover_sections, write_pairs
    from seecause.report.pages import rows_csv

    replaced = check_out(out, overwrite=output.overwrite)
    wanted = whole_numbers("--pairs", pairs) if pairs not in ("best", "none") else None
    given = by_name(option)
    settings = given.pop("", {})
    refuse(given, "KEY=VALUE, such as kinds=24")
    if isinstance(settings.get("layers"), int):
        settings["layers"] = [settings["layers"]]
    opened = reading.load(model, quiet=output.quiet)
    images = open_data(data, limit=limit)
    settings |= {"method": method, "seed": reading.seed}
    result = search(opened, images, progress=output.progress, **settings)
    places = [] if pairs == "none" else _places(result, wanted)
    lines = [f"{rank}. {f.sentence()}" for rank, f in enumerate(result.findings[:5], 1)]
    lines = lines or ["no kind of patch turns images into a class by more than chance"]

    def export(folder: Path) -> None:
        if places:
            count, kinds = write_pairs(result, places, folder / "pairs"), out / "pairs"
            ranks = ", ".join(str(place + 1) for place in places)
            spec = f"pairs:{kinds / 'with'}:{kinds / 'without'}"
            lines.append(f"{count} pairs of finding {ranks} to repair by: --data {spec}")

    manifest = {"command": "discover", "table": "findings.csv", "run": result.protocol}
    facts = output.write(
        out,
        {**manifest, "pairs": [place + 1 for place in places]},
        f"What turns images into another class for {opened.name}?",
        discover_sections(result),
        lead=lead_of(opened, result.data),
        tables={"findings.csv": rows_csv(result.rows())},
        skipped=result.data.skipped,
        more=export,
    )
    lines += ending(out, replaced)
    return output.finish(facts, lines, skipped=result.data.skipped)


def _places(result: Discovery, wanted: list[int] | None) -> list[int]:
    """Places of the findings whose pairs are written."""
    count = len(result.findings)
    if wanted is not None:
        wrong = [rank for rank in wanted if not 1 <= rank <= count]
        if wrong:
            raise BadOption("--pairs", wrong[0], f"ranks from 1 to {count}, best or none")
        return [rank - 1 for rank in wanted]
    return [place for place, kind in enumerate(result.findings) if not kind.is_object][:1]


def score(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    limit: Limit = 64,
    by: Selector = "cigma",
    fill: Fill = "grey",
    masks_from: MasksFrom = None,
    classify: Classify = None,
    option: HeadValues = None,
    out: Out = Path("scores"),
    output: Output = Output(),
) -> int:
    """Score every head. Writes a page with the layer x head grid, and scores.csv with errors and
    what each removal costs.

    For example: seecause heads score --model hf:FOLDER --data waterbirds:PATH:train --limit 600
    """
    from seecause.background import score_heads
    from seecause.data.registry import open_data
    from seecause.report.background import (
        heads_protocol,
        scores_rows,
        scores_section,
        scores_sentence,
    )
    from seecause.report.pages import rows_csv, skipped_section

    replaced = check_out(out, overwrite=output.overwrite)
    settings, masks, question = head_settings(by, fill, option)
    opened = load_asked(model, reading, data, classify, question, output)
    with working_folder(out) as work:
        scores = score_heads(
            opened,
            open_data(data, limit=limit),
            masks=head_masks(opened, masks_from, masks, work),
            seed=reading.seed,
            progress=output.progress,
            **settings,
        )
    images, record = scores.data, scores.protocol["scored"]
    assert images is not None
    manifest = {"command": "heads score", "table": "scores.csv", **record}
    facts = output.write(
        out,
        {**manifest, "run": scores.protocol},
        f"{opened.name}: heads by {by}",
        [
            scores_section(scores, by=by),
            *skipped_section(images.skipped),
            heads_protocol(opened, scores),
        ],
        lead=lead_of(opened, images),
        tables={"scores.csv": rows_csv(scores_rows(scores))},
        skipped=images.skipped,
    )
    best = [f"{head} {float(scores.value[head]):.3g}" for head in scores.order()[:5]]
    highest = f"highest (layer, head): {', '.join(best) or 'no head has a score above 0'}"
    lines = [*filter(None, [scores_sentence(scores)]), highest, *ending(out, replaced)]
    return output.finish(facts, lines, skipped=images.skipped)


def prune(
    *,
    model: ModelName = BIASED,
    reading: Reading = Reading(),
    data: Data = TRAIN,
    test: Data = TEST,
    limit: Limit = 64,
    top: str = "0.1",
    by: Selector = "cigma",
    fill: Fill = "grey",
    masks_from: MasksFrom = None,
    classify: Classify = None,
    option: HeadValues = None,
    out: Out = Path("pruned"),
    output: Output = Output(),
) -> int:
    """Remove the highest heads for good, and measure what that did on other images.

    Heads with a score of 0 or less stay. Writes OUT/model (a checkpoint), a page with numbers
    before and after, scores.csv and curve.csv. With --option form=sliced the checkpoint is smaller
    and loads by sc.load; else it has the same shape and loads in the library the model is of.
    --option draws=20 sets the number of random sets of heads beside the curves.

    For example: seecause heads prune --data waterbirds:PATH:train --test waterbirds:PATH:test

    Args:
        test: Data to measure the result on; not that of --data.
        top: Heads to remove at most: a count such as 16, or a share such as 0.1.
    """
    from seecause.background import prune_and_test
    from seecause.data.registry import open_data
    from seecause.report.background import (
        change_section,
        curves_section,
        heads_protocol,
        scores_rows,
        scores_section,
        scores_sentence,
    )
    from seecause.report.pages import rows_csv, skipped_section

    replaced = check_out(out, overwrite=output.overwrite)
    most = head_limit(top)
    settings, masks, question = head_settings(by, fill, option)
    form = settings["options"].pop("form", "zeroed")
    draws = settings["options"].pop("draws", 20)
    opened = load_asked(model, reading, data, classify, question, output)
    _check_form(opened, form)
    with working_folder(out) as work:
        result = prune_and_test(
            opened,
            open_data(data, limit=limit),
            open_data(test, limit=limit),
            top=most,
            draws=draws,
            masks=head_masks(opened, masks_from, masks, work),
            seed=reading.seed,
            progress=output.progress,
            **settings,
        )
    scores = result.scores
    record = {**scores.protocol["scored"], "form": form}
    outcomes = zip(result.curve.ks, result.curve.chosen, strict=True)
    curve = [{"K": k, **outcome.numbers} for k, outcome in outcomes]
    manifest = {"command": "heads prune", "model": "model", "removed": result.heads, **record}
    facts = output.write(
        out,
        {**manifest, "run": scores.protocol},
        f"{result.model.name} without {len(result.heads)} heads",
        [
            change_section(result.before, result.after, result.test),
            curves_section(result.curve, by=by),
            scores_section(scores, by=by, chosen=result.heads),
            *skipped_section(result.skipped),
            heads_protocol(result.model, scores, form=form),
        ],
        lead=lead_of(result.model, result.test),
        tables={"scores.csv": rows_csv(scores_rows(scores)), "curve.csv": rows_csv(curve)},
        skipped=result.skipped,
        more=lambda folder: _export(result, folder / "model", form),
    )
    lines = [*filter(None, [scores_sentence(scores)])]
    lines += [] if result.heads else ["nothing is removed: no head has a score above 0"]
    lines.append(f"removed {len(result.heads)} heads: {result.heads}")
    for name, (before, after) in result.changes().items():
        if not name.startswith(("FIG", "BIG")):
            lines.append(f"{name}: {before:.3f} -> {after:.3f}")
    lines += [f"checkpoint: {out / 'model'}", *ending(out, replaced)]
    return output.finish(facts, lines, skipped=result.skipped)


def head_settings(
    by: str, fill: str, words: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Keywords of `score_heads` and `prune_and_test`, options of the object masks, and a question
    for a vision-language model."""
    given = by_name(words)
    options, masks, sample = (given.pop(name, {}) for name in ("", "masks", "sample"))
    refuse(given, "KEY=VALUE of the selector, masks.KEY=VALUE or sample.KEY=VALUE")
    question = str(options.pop("question", ""))
    settings = {"selector": by, "options": options, "fill": fill, "sampling": sample}
    return settings, masks, question


def head_masks(
    model: ImageModel, masks_from: str | None, options: dict[str, Any], work: Path
) -> MaskSource:
    """Options without a source are those of discovered masks."""
    return mask_source(model, masks_from or ("discovered" if options else None), options, work)


def mask_source(
    model: ImageModel, masks_from: str | None, options: dict[str, Any], work: Path
) -> MaskSource:
    """What `sc.audit` and `sc.repair` take as `masks`; maps are kept in `work`."""
    from seecause.background.masks import object_masks
    from seecause.loading import load

    if masks_from in (None, "given"):
        refuse(options, "--masks-from NAME of a network beside it")
        return masks_from
    found: Any = masks_from
    options = {"cache": work / "masks", **options}
    if masks_from not in ("own", "discovered"):
        weights = options.pop("weights", None)
        try:
            found = load(masks_from, weights=weights, device=model.device)
        except DataMissing as missing:
            if weights is not None:
                raise
            expected = "a network whose weights are here or can be fetched, or weights=FILE"
            reason = f"{expected} as an option of the masks: {missing.reason}"
            raise BadOption("--masks-from", masks_from, reason) from None
    return partial(object_masks, model, source=found, **options)


@contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """OUT.work, which is removed when the block ends well: killed, the same command goes on."""
    out = out.absolute()
    if not out.name:
        raise BadOption("--out", str(out), "a folder with a name; this is the root of a disk")
    work = out.with_name(f"{out.name}.work")
    yield work
    shutil.rmtree(work, ignore_errors=True)


def load_asked(
    model: str, reading: Reading, data: str, classify: str | None, question: str, output: Output
) -> ImageModel:
    """A classifier, or a vision-language model that is asked for the classes of `data`."""
    if classify is None and model != ASKED:
        refuse({"question": question} if question else {}, "--classify beside a question")
        try:
            return reading.load(model, quiet=output.quiet)
        except UnsupportedModel as wrong:
            if "vision-language" not in str(wrong):
                raise
            expected = "a classifier, or --classify name_ll beside a vision-language model"
            raise BadOption("--model", model, expected) from None
    from seecause.cli.lvlm import load_lvlm
    from seecause.critters.questions import wordings
    from seecause.data.registry import open_data
    from seecause.lvlm import classifier

    if reading.weights is not None:
        expected = "none: a vision-language model brings its own"
        raise BadOption("--weights", reading.weights, expected)
    classes = open_data(data, limit=1).classes
    if not classes:
        raise BadOption("--data", data, "data with class names, which the model is asked for")
    usual = wordings("creature")[0] if data.startswith("critters:") else "What is in the picture?"
    way = classify or "name_ll"
    if way not in ("name_ll", "label_token"):
        raise BadOption("--classify", classify, "name_ll or label_token")
    lvlm = load_lvlm(model, pick_device(reading.device), reading.dtype)
    return classifier(lvlm, classes, question=question or usual, by=cast(Any, way))


def head_limit(text: str) -> int | float:
    """`16` is a count, `0.1` a share."""
    try:
        top = float(text) if "." in text else int(text)
    except ValueError:
        top = 0
    if not 0 < top <= (1 if isinstance(top, float) else top):
        expected = "a count such as 16, or a share above 0.0 and up to 1.0 such as 0.1"
        raise BadOption("--top", text, expected)
    return top


def _check_form(model: ImageModel, form: str) -> None:
    """Refuse, before anything is measured, a form that the model cannot be written in."""
    from seecause.background._export import check_form
    from seecause.models.view import VisionModel

    if model.architecture == "prompt" and form != "zeroed":
        expected = "form=zeroed: a vision-language model keeps its architecture"
        raise BadOption("--option", f"form={form}", expected)
    if isinstance(model, VisionModel) and model.architecture != "prompt":
        check_form(model, form)


def _export(result: PruneResult, folder: Path, form: Any) -> None:
    """A checkpoint of the model without the heads, whatever kind of model it is."""
    if result.model.architecture != "prompt":
        result.export(folder, form=form)
        return
    from seecause.lvlm import PromptClassifier

    cast(PromptClassifier, result.model).export(result.heads, folder, note=result.note)
