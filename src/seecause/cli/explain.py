"""`seecause explain`: which patches caused the prediction?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from seecause.cli.shared import (
    VIT,
    Facts,
    ModelName,
    Out,
    Output,
    Reading,
    Values,
    Workers,
    by_name,
    check_methods,
    loading,
    names,
    result_folder,
    tell,
    warn_outside,
)
from seecause.errors import BadOption
from seecause.options import with_options

if TYPE_CHECKING:
    from seecause.data.dataset import SkippedImage
    from seecause.models.base import ImageModel


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the page shows, and how it is written.

    Attributes:
        evidence: Also show the patches that are enough for the prediction, and those it needs.
        interactions: Also show pairs of regions with the strongest interaction (their joint effect
            differs from the sum of their single effects).
        overlays: Also write each image with its maps drawn over it, at full size (PNG).
        one_file: Write one HTML file that contains everything, so that it can be sent. Otherwise
            images and data are files beside the page.
    """

    evidence: bool = False
    interactions: bool = False
    overlays: bool = False
    one_file: bool = False


def explain(
    *images: str,
    model: ModelName = VIT,
    reading: Reading = Reading(),
    class_: Annotated[str | None, Parameter(name=["--class", "-c"])] = None,
    method: str | None = None,
    option: Values = None,
    without: Path | None = None,
    shown: Shown = Shown(),
    workers: Workers = None,
    out: Out = Path("explained"),
    output: Output = Output(),
) -> int:
    """Which patches of each image caused the model's prediction?

    Writes a page (index.html), the raw maps (safetensors) and a manifest. Images that cannot be
    read are skipped and listed; the exit code is then 1.

    For example:

    seecause explain cat.jpg --model timm:deit3_small_patch16_224

    seecause explain critters:clean:test#3 --evidence --interactions

    seecause explain photos/ --model timm:vit_base_patch16_224 --class tabby --method caap,sobel

    seecause explain marked/ --without clean/ --out marks

    seecause explain street.jpg --model hf:facebook/detr-resnet-50 --class box:3

    Args:
        images: Images, folders (also of class folders), quoted globs, or samples of a dataset:
            critters:clean:test#3. For a video model: folders of frames, animations or arrays
            (.npy).
        class_: The class to explain, by name or index. Of a detector, a box by the number of its
            query: box:3, or box:3:cat for one class. Of a segmentation model, pixels: two corners
            region:X0,Y0,X1,Y1 or one point region:X,Y, both with :CLASS if wanted. Default: the
            predicted class, the box with the highest score, the pixels of the largest class.
        method: Attribution methods, separated by commas. Default: caap,mosaic; caap alone if
            --option is given or the model has no gradients.
        option: An option of the methods that have it, as KEY=VALUE such as tail=patched, or of one
            method, as METHOD.KEY=VALUE; repeat for more.
        without: A folder with another version of each image under the same name, for example
            without a mark. The maps then show which part of the difference caused the prediction.
            Samples of pairs:WITH:WITHOUT need no folder.
    """
    with loading("libraries", quiet=output.quiet):
        from seecause.data.dataset import default_workers, find_images, second_versions

    output.check(out)
    chosen = () if method is None else names(method)
    if not images:
        raise BadOption("IMAGES", None, "at least one image, folder or sample of a dataset")
    files = find_images(list(images))
    others, titles = second_versions(files, without), short_names(files)
    check_methods(chosen)
    given = by_name(option)
    opened = reading.load(model, output)
    with loading("methods", quiet=output.quiet):
        from seecause.attribution.attribute import default_methods, explain_batches
        from seecause.report.explain import prediction_text, write_explanations

        methods = chosen or (("caap",) if option else default_methods(opened))
        options = method_options(methods, given, reading.seed, opened)
        target = target_of(opened, class_)
    inputs = opened.preprocess.inputs(files)
    if inputs != list(files):  # frames, by the film they are of
        files = inputs
        others, titles = second_versions(files, without), short_names(files)
    if not output.quiet:
        from seecause.critters.world import CLASSES

        if tuple(opened.classes) == tuple(CLASSES):  # it knows the generated world, nothing else
            warn_outside(model, files, suggest="timm:deit3_small_patch16_224")
    if not opened.classes and not output.quiet:
        tell(f"note: {model} has no class names here; --classes FILE names them")
    also: Any = [name for name in ("evidence", "interactions") if getattr(shown, name)]
    if workers is None:
        workers = default_workers(len(files))
    skipped: list[SkippedImage] = []
    facts: Facts = {"command": "explain", "out": str(out), "page": "index.html"}
    with output.progress(f"explaining with {', '.join(methods)}", len(files)) as progress:
        parts = explain_batches(
            opened, files, names=titles, methods=methods, target=target, others=others,
            options=options, also=also, skipped=skipped, workers=workers,
        )  # fmt: skip
        with result_folder(out, facts, overwrite=output.overwrite) as folder:
            rows = write_explanations(
                folder, parts, titles, skipped=skipped, progress=progress,
                one_file=shown.one_file, drawn=shown.overlays, workers=workers,
            )  # fmt: skip
            facts["maps"] = {name: f"maps/{name}" for name in methods}
            reasons = {image.name: image.reason for image in skipped}
            facts["images"] = [
                {"file": file, "name": name, **rows.get(place, {"error": reasons.get(name)})}
                for place, (file, name) in enumerate(zip(files, titles, strict=True))
            ]
    for image in skipped:
        tell(f"skipped: {image.reason}")
    random = f"{opened.name} has random weights: its predictions mean nothing"
    lines = [random] if opened.random_weights else []
    for row in facts["images"]:
        if "answers" in row:
            lines.append(f"{row['name']}: {prediction_text(row)}")
        for box in row.get("boxes", ()):
            named = f"{box['name']}, probability {box['probability']:.3f}"
            lines.append(f"  box {box['index']}: {named}")
    return output.finish(facts, lines, skipped=skipped)


def target_of(model: ImageModel, text: str | None) -> Any:
    """The target that --class names; regions are in pixels of the files."""
    from seecause.attribution.attribute import FileRegion
    from seecause.target import Region, parse_row

    row = None if text is None else parse_row(text)
    if isinstance(row, Region):
        return FileRegion(row, model.preprocess)
    if row is not None or text is None:
        return row
    return model.class_index(text) if model.aimed else text


def method_options(
    methods: Sequence[str], given: Mapping[str, Mapping[str, Any]], seed: int, model: ImageModel
) -> dict[str, Facts]:
    """Options by method; one that no method has is refused."""
    from seecause.attribution.registry import find

    known = {method: find(method, model.architecture).options for method in methods}
    seeds = {method: {"seed": seed} for method, options in known.items() if "seed" in options}
    return with_options(seeds, given, known)


def short_names(files: Sequence[str]) -> list[str]:
    """File names, with their folders where two are equal; samples of datasets keep theirs."""
    from seecause.data.dataset import sample_of

    short = [file if sample_of(file) else Path(file).name for file in files]
    return short if len(set(short)) == len(short) else list(files)
