"""`seecause explain`: which patches caused the prediction?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from seecause.cli.shared import (
    VIT,
    ModelName,
    Out,
    Output,
    Reading,
    Values,
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
class Asked:
    """What is explained.

    Attributes:
        class_: The class to explain, by name or index. Default: the predicted one.
        box: For a detector: which box, by the number of its query. Explained is the score of its
            class, or of --class. Default: the surest box, or that of --class.
        region: For segmentation: where, in pixels of the image: two corners X0,Y0,X1,Y1 or one
            place X,Y. Default: the pixels of the largest class.
    """

    class_: Annotated[str | None, Parameter(name=["--class", "-c"])] = None
    box: Annotated[int | None, Parameter(validator=Number(gte=0))] = None
    region: str | None = None

    def target(self, model: ImageModel) -> Any:
        """The target that --class, --box and --region name together."""
        from seecause.attribution.attribute import FileRegion
        from seecause.target import Box, Region

        if self.box is not None and self.region is not None:
            raise BadOption("--region", self.region, "--box or --region, not both")
        if self.box is not None:
            return Box(self.box, self.class_)
        if self.region is not None:
            region = Region.parse(f"region:{self.region}")
            return FileRegion(Region(region.where, self.class_ or region.label), model.preprocess)
        by_index = model.aimed and self.class_ is not None
        return model.class_index(self.class_) if by_index else self.class_


def explain(
    *images: str,
    model: ModelName = VIT,
    reading: Reading = Reading(),
    asked: Asked = Asked(),
    method: str | None = None,
    option: Values = None,
    without: Path | None = None,
    evidence: bool = False,
    interactions: bool = False,
    out: Out = Path("explained"),
    output: Output = Output(),
) -> int:
    """Which patches of each image caused the model's prediction?

    Writes a page (index.html), overlays (PNG), the raw maps (safetensors) and a manifest. Images
    that cannot be read are skipped and named; the exit code is 1 then.

    For example:

    seecause explain cat.jpg --model timm:deit3_small_patch16_224

    seecause explain critters:clean:test#3 --evidence --interactions

    seecause explain photos/ --model timm:vit_base_patch16_224 --class tabby --method caap,sobel

    seecause explain marked/ --without clean/ --out marks

    seecause explain street.jpg --model hf:facebook/detr-resnet-50 --box 3

    Args:
        images: Images, folders (also of class folders), quoted globs, or samples of a dataset:
            critters:clean:test#3. For a video model: folders of frames, animations or arrays
            (.npy).
        method: Attribution methods, separated by commas. Default: caap,mosaic; caap where no
            gradient passes, and with --option.
        option: An option of the methods that have it, as KEY=VALUE such as tail=patched, or of one
            method, as METHOD.KEY=VALUE; repeat for more.
        without: A folder with another version of each image under the same name (without a mark,
            for one): the maps show what of the difference caused the prediction. Samples of
            pairs:WITH:WITHOUT need no folder.
        evidence: Also show the patches that are enough for the prediction, and those it needs.
        interactions: Also show the pairs of regions that cause together what neither causes alone.
    """
    with loading("libraries", quiet=output.quiet):
        from seecause.data.dataset import find_images, second_versions

    output.check(out)
    chosen = () if method is None else names(method)
    if method is not None and not chosen:
        raise BadOption("--method", method, "at least one method (see `seecause list methods`)")
    if not images:
        raise BadOption("IMAGES", None, "at least one image, folder or sample of a dataset")
    files = find_images(list(images))
    others, shown = second_versions(files, without), short_names(files)
    check_methods(chosen)
    given = by_name(option)
    opened = reading.load(model, quiet=output.quiet)
    with loading("methods", quiet=output.quiet):
        from seecause.attribution.attribute import default_methods, explain_batches
        from seecause.report.explain import write_explanations

        methods = chosen or (("caap",) if option else default_methods(opened))
        options = method_options(methods, given, reading.seed, opened)
        target = asked.target(opened)
    inputs = opened.preprocess.inputs(files)
    if inputs != list(files):  # frames, by the film they are of
        files = inputs
        others, shown = second_versions(files, without), short_names(files)
    if not output.quiet:
        _warn(opened, model, files)
    also = [*(["evidence"] * evidence), *(["interactions"] * interactions)]
    skipped: list[SkippedImage] = []
    facts: dict[str, Any] = {"command": "explain", "out": str(out), "page": "index.html"}
    with output.progress(f"explaining with {', '.join(methods)}", len(files)) as progress:
        parts = explain_batches(
            opened, files, names=shown, methods=methods, target=target, others=others,
            options=options, also=also, skipped=skipped,
        )  # fmt: skip
        with result_folder(out, facts, overwrite=output.overwrite) as folder:
            rows = write_explanations(folder, parts, shown, skipped=skipped, progress=progress)
            facts["maps"] = {name: f"maps/{name}" for name in methods}
            reasons = {image.name: image.reason for image in skipped}
            facts["images"] = [
                {"file": file, "name": name, **rows.get(place, {"error": reasons.get(name)})}
                for place, (file, name) in enumerate(zip(files, shown, strict=True))
            ]
    for image in skipped:
        tell(f"skipped: {image.reason}")
    lines = [*_lines(facts["images"], opened)]
    return output.finish(facts, lines, skipped=skipped)


def method_options(
    methods: Sequence[str], given: Mapping[str, Mapping[str, Any]], seed: int, model: ImageModel
) -> dict[str, dict[str, Any]]:
    """Options by method; one that no method has is refused."""
    from seecause.attribution.registry import find

    known = {method: find(method, model.architecture).options for method in methods}
    seeds = {method: {"seed": seed} for method, options in known.items() if "seed" in options}
    return with_options(seeds, given, known)


def _warn(opened: ImageModel, model: str, files: Sequence[str]) -> None:
    """Warn about images outside the model's domain and about missing class names."""
    from seecause.critters.world import CLASSES

    if tuple(opened.classes) == tuple(CLASSES):  # it knows the generated world, and nothing else
        warn_outside(model, files, suggest="timm:deit3_small_patch16_224")
    if not opened.classes:
        tell(f"note: {model} has no class names here; --classes FILE names them")


def _lines(rows: Sequence[Mapping[str, Any]], model: ImageModel) -> list[str]:
    """The prediction for each image that could be read, and the boxes that a detector is sure
    of."""
    from seecause.report.explain import prediction_text

    random = f"{model.name} has random weights: its predictions mean nothing"
    lines = [random] if model.random_weights else []
    for row in rows:
        if "answers" in row:
            lines.append(f"{row['name']}: {prediction_text(row)}")
        for box in row.get("boxes", ()):
            named = f"{box['name']}, probability {box['probability']:.3f}"
            lines.append(f"  box {box['index']}: {named}")
    return lines


def short_names(files: Sequence[str]) -> list[str]:
    """File names, with their folders where two are equal; samples of datasets keep theirs."""
    from seecause.data.dataset import sample_of

    short = [file if sample_of(file) else Path(file).name for file in files]
    return short if len(set(short)) == len(short) else list(files)
