"""`seecause explain`: which patches caused the prediction?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from seecause.cli.shared import (
    VIT,
    ModelName,
    Out,
    Output,
    Reading,
    Values,
    by_name,
    check_methods,
    check_out,
    ending,
    loading,
    names,
    refuse,
    result_folder,
    tell,
    warn_outside,
)
from seecause.errors import BadImage, BadOption

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
        region: For segmentation: where, in pixels of the image: two corners X0,Y0,X1,Y1, one place
            X,Y, or a mask file. Default: the pixels of the largest class.
    """

    class_: Annotated[str | None, Parameter(name=["--class", "-c"])] = None
    box: str | None = None
    region: str | None = None

    def target(self, model: ImageModel) -> Any:
        """The target that --class, --box and --region name together."""
        from seecause._pictures import read_grey
        from seecause.attribution.explain import FileRegion
        from seecause.models.dense import Box, Region

        if self.box is not None and self.region is not None:
            raise BadOption("--region", self.region, "--box or --region, not both")
        if self.box is not None:
            named = Box.parse(f"box:{self.box}")
            return Box(named.index, self._label("--box", named.label))
        if self.region is None:
            by_index = model.aimed and self.class_ is not None
            return model.class_index(self.class_) if by_index else self.class_
        if Path(self.region).is_file():
            import torch

            where = Region(torch.from_numpy(read_grey(self.region)), self.class_)
        else:
            where = Region.parse(f"region:{self.region}")
            where = Region(where.where, self._label("--region", where.label))
        return FileRegion(where, model.preprocess)

    def _label(self, flag: str, named: str | int | None) -> str | int | None:
        """The class of --class, or the one that `flag` names beside a place."""
        if self.class_ is not None and named is not None:
            raise BadOption("--class", self.class_, f"no value: {flag} names {named} already")
        return named if self.class_ is None else self.class_


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
        option: An option of the method, as KEY=VALUE such as tail=patched; repeat for more.
        without: A folder with another version of each image under the same name (without a mark,
            for one): the maps show what of the difference caused the prediction. Samples of
            pairs:WITH:WITHOUT need no folder.
        evidence: Also show the patches that are enough for the prediction, and those it needs.
        interactions: Also show the pairs of regions that cause together what neither causes alone.
    """
    from seecause.data.images import find_images, second_versions

    replaced = check_out(out, overwrite=output.overwrite)
    if method is not None and not names(method):
        raise BadOption("--method", method, "at least one method (see `seecause list methods`)")
    if not images:
        raise BadOption("IMAGES", None, "at least one image, folder or sample of a dataset")
    files = find_images(list(images))
    others, shown = second_versions(files, without), short_names(files)
    check_methods(names(method or ""))
    opened = reading.load(model, quiet=output.quiet)
    with loading("methods", quiet=output.quiet):
        from seecause.attribution.explain import default_methods, explain_batches
        from seecause.report.explain import write_explanations

        if method is not None:
            methods: Sequence[str] = names(method)
        else:
            methods = ["caap"] if option else list(default_methods(opened))
        options = method_options(methods, option, reading.seed, opened)
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
            maps = sorted(path.name for path in (folder / "maps").iterdir())
            facts["maps"] = {name: f"maps/{name}" for name in maps}
            reasons = {hole.name: hole.reason for hole in skipped}
            facts["images"] = [
                {"file": file, "name": name, **rows.get(place, {"error": reasons.get(name)})}
                for place, (file, name) in enumerate(zip(files, shown, strict=True))
            ]
    for hole in skipped:
        tell(f"skipped: {hole.reason}")
    lines = [*_lines(facts["images"], opened), *ending(out, replaced)]
    return output.finish(facts, lines, skipped=skipped)


def method_options(
    methods: Sequence[str], words: Sequence[str] | None, seed: int, model: ImageModel
) -> dict[str, dict[str, Any]]:
    """Options by method: each goes to every method that has it; one that none has is refused."""
    from seecause.attribution.registry import find

    entries = {method: find(method, model.architecture) for method in methods}
    options: dict[str, dict[str, Any]] = {
        method: {"seed": seed} if "seed" in entry.options else {}
        for method, entry in entries.items()
    }
    given = by_name(words)
    for key, value in given.pop("", {}).items():
        takers = [method for method, entry in entries.items() if key in entry.options]
        if not takers:
            known = sorted({option for entry in entries.values() for option in entry.options})
            listed = f"an option of {', '.join(methods)}: {', '.join(known) or 'there are none'}"
            raise BadOption("--option", f"{key}={value}", listed)
        for method in takers:
            options[method][key] = value
    refuse(given, "KEY=VALUE, such as tail=patched or layers=1,8")
    return options


def _warn(opened: ImageModel, model: str, files: Sequence[str]) -> None:
    """Warn about images outside the model's domain and about missing class names."""
    from seecause.critters import CLASSES

    if tuple(opened.classes) == tuple(CLASSES):  # it knows the generated world, and nothing else
        warn_outside(model, files, suggest="timm:deit3_small_patch16_224")
    if not opened.classes:
        tell(f"note: {model} has no class names here; --classes FILE names them")


def _lines(rows: Sequence[Mapping[str, Any]], model: ImageModel) -> list[str]:
    """The prediction for each image that could be read."""
    from seecause.report.explain import prediction_text

    random = f"{model.name} has random weights: its predictions mean nothing"
    lines = [random] if model.random_weights else []
    for row in rows:
        if "row" in row or "answers" in row:
            lines.append(f"{row['name']}: {prediction_text(row)}")
            lines += [
                f"  box {box['index']}: {box['name']}, probability {box['probability']:.3f}"
                for box in row.get("boxes", ())
            ]
    return lines


def short_names(files: Sequence[str]) -> list[str]:
    """File names, with as much of their folders as tells them apart; samples of datasets keep
    theirs. A name that no page can hold is refused."""
    from seecause.data.images import sample_of

    for file in files:
        if any("\ud800" <= character <= "\udfff" for character in file):
            raise BadImage(ascii(file), "its name is not UTF-8", "rename it, or its folder")
    places = {
        file: Path(os.path.normpath(Path(file).absolute())) for file in files if not sample_of(file)
    }
    short = {file: place.name for file, place in places.items()}
    if len(set(short.values())) < len(short):
        shared = os.path.commonpath([place.parent for place in places.values()])
        short = {file: place.relative_to(shared).as_posix() for file, place in places.items()}
    return [short.get(file, file) for file in files]
