"""Heatmaps, flips and background shares in FiftyOne.

    tool = sc.integrations.fiftyone
    tool.explain(dataset, model)                      # fields caap (Heatmap) and answer
    tool.audit(dataset, model, masks="segmentation")  # fields flips, flips_control, background
    tool.worst(dataset)                               # a view, most flips first; the app has it too
    sc.integrations.fiftyone_plugin.install()         # the same from the app's list of operators

A dataset is one of FiftyOne, or a view. Maps lie on the whole picture: 0 where no model looks.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause._pictures import read_image
from seecause.attribution.attribute import attribute
from seecause.background.audit import BackgroundAudit, audit as run_audit
from seecause.background.objects import MaskSource
from seecause.data.dataset import Sample
from seecause.errors import DataMissing, MissingExtra
from seecause.files import digest
from seecause.loading import as_view
from seecause.models.base import ImageModel

SMALLER = 4  # heatmaps have a quarter of the model's resolution: the app stretches them
WORST = "worst pictures"


def explain(
    dataset: Any,
    model: ImageModel | nn.Module,
    method: str = "caap",
    *,
    batch: int = 16,
    **options: Any,
) -> None:
    """Add a heatmap of each picture under the name of the method, and the model's answer."""
    fiftyone, view = need_fiftyone(), as_view(model)
    samples = list(dataset.iter_samples(progress=False))
    for start in range(0, len(samples), batch):
        part = samples[start : start + batch]
        pictures = [read_image(sample.filepath) for sample in part]
        result = attribute(view, view.prepare(pictures), method=method, **options)
        rows = zip(part, pictures, result.answers, result.pixels(), strict=True)
        for sample, picture, answers, pixels in rows:
            whole = on_picture(view, pixels, picture.height, picture.width)
            most = float(np.abs(whole).max()) or 1.0
            ends = [-most if whole.min() < 0 else 0.0, most]
            sample[field_of(method)] = fiftyone.Heatmap(map=whole, range=ends)
            name, chance = answers[0].name, answers[0].probability
            sample["answer"] = fiftyone.Classification(label=name, confidence=chance)
            sample.save()


def field_of(method: str) -> str:
    """The field of a method's maps: names of methods may hold what names of fields may not."""
    return re.sub(r"\W", "_", method)


def on_picture(model: ImageModel, pixels: Tensor, height: int, width: int) -> np.ndarray:
    """A map [h, w] in the model's frame -> one of the whole picture, at a quarter of that size."""
    corners = torch.tensor([[0.0, 0.0], [width, height]])
    (left, top), (right, bottom) = model.preprocess.points(corners, height, width).round().tolist()
    room = (-left, right - pixels.shape[1], -top, bottom - pixels.shape[0])
    whole = F.pad(pixels.float().cpu()[None, None], [int(side) for side in room])
    size = [max(1, side // SMALLER) for side in whole.shape[-2:]]
    return F.interpolate(whole, size=size, mode="area")[0, 0].numpy()


def audit(
    dataset: Any,
    model: ImageModel | nn.Module,
    *,
    labels: str = "ground_truth",
    masks: str | None = None,
    masks_from: MaskSource = None,
    **options: Any,
) -> BackgroundAudit:
    """`sc.audit` on the dataset. Fields: `flips` and `flips_control`, the shares of a picture's
    versions that are answered otherwise; `background`, BIR of pictures that are answered right.

    `labels`: a field of classifications; `masks`: one of segmentations whose objects are not 0.
    Pictures that cannot be read have no values.
    """
    view, data = as_view(model), FiftyOneData(dataset, labels, masks)
    result = run_audit(view, data, masks=masks_from, **options)
    columns = {"flips": result.judged.flips_of(), "flips_control": result.judged.flips_of(True)}
    if result.gains is not None:
        shares = torch.full_like(columns["flips"], torch.nan)
        shares[result.judged.right] = result.gains.bir.to(shares)
        columns["background"] = shares
    for name, values in columns.items():
        known = [value if value == value else None for value in values.tolist()]
        by_id = dict(zip(result.data.ids, known, strict=True))
        dataset.set_values(name, [by_id.get(id) for id in data.ids])
    return result


def worst(dataset: Any, count: int = 25, *, field: str = "flips") -> Any:
    """A view of the pictures whose answers follow the background most, saved for the app."""
    need_fiftyone()
    if not dataset.has_sample_field(field):
        raise DataMissing(dataset.name, f"no field {field!r}", "run audit on it first")
    view = dataset.exists(field).sort_by(field, reverse=True).limit(count)
    getattr(dataset, "_root_dataset", dataset).save_view(WORST, view, overwrite=True)
    return view


class FiftyOneData:
    """A FiftyOne dataset with labels, and masks if it has them, as `sc.data` knows datasets."""

    def __init__(self, dataset: Any, labels: str, masks: str | None = None):
        if not dataset.has_sample_field(labels):
            raise DataMissing(dataset.name, f"no field {labels!r}", "give labels=FIELD")
        self.samples = list(dataset.iter_samples(progress=False))
        self.field, self.masks, self.name = labels, masks, f"fiftyone:{dataset.name}"
        self.classes = tuple(sorted(dataset.distinct(f"{labels}.label")))
        self.ids = tuple(sample.id for sample in self.samples)
        words = [f"{s.filepath} {s[labels].label if s[labels] else ''}" for s in self.samples]
        self.fingerprint = digest(*words)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        pixels = np.array(read_image(sample.filepath))  # [H, W, 3]
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        label, mask = sample[self.field], None
        if self.masks is not None and sample[self.masks] is not None:
            mask = torch.from_numpy(np.asarray(sample[self.masks].get_mask()) != 0)
            mask = F.interpolate(mask[None, None].float(), size=image.shape[-2:])[0, 0] > 0.5
        known = None if label is None else self.classes.index(label.label)
        return Sample(image, known, mask=mask, id=sample.id)


def need_fiftyone() -> Any:
    """The package, or which one to install."""
    try:
        import fiftyone  # type: ignore[import-not-found]
    except ImportError:
        raise MissingExtra("fiftyone") from None
    return fiftyone
