"""Maps and numbers beside the curves of a training: TensorBoard, MLflow, Weights & Biases.

    log = sc.integrations.loggers.MapLogger(SummaryWriter("runs"), model, images, every=100)
    for step, batch in enumerate(loader):
        train(batch)
        log(step)                                  # every 100 steps: maps, answers, their scores
    log.numbers("audit", sc.audit(model, data).numbers(), step)

The first argument is a `SummaryWriter`, the module `mlflow`, or a run of `wandb` (also offline).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import nn

from seecause.attribution.attribute import attribute
from seecause.attribution.result import Attribution
from seecause.errors import BadOption, MissingExtra
from seecause.loading import as_view
from seecause.metrics.curves import insertion_deletion
from seecause.models.base import ImageModel
from seecause.models.preprocess import Pictures, as_images
from seecause.target import Spec, parse

SHOWN = 8  # pictures in one row


class Sink(Protocol):
    """Where pictures and numbers go."""

    def image(self, name: str, picture: Image.Image, step: int) -> None: ...

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...


class _TensorBoard:
    def __init__(self, writer: Any):
        self.writer = writer

    def image(self, name: str, picture: Image.Image, step: int) -> None:
        self.writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)


class _MLflow:
    def __init__(self, mlflow: Any):
        self.mlflow = mlflow

    def image(self, name: str, picture: Image.Image, step: int) -> None:
        self.mlflow.log_image(picture, artifact_file=f"{name}/{step:08d}.png")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.mlflow.log_metric(name, value, step=step)


class _Wandb:
    def __init__(self, run: Any):
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise MissingExtra("wandb") from None
        self.run, self.picture = run, wandb.Image

    def image(self, name: str, picture: Image.Image, step: int) -> None:
        self.run.log({name: self.picture(picture)}, step=step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)


def sink_of(place: Any) -> Sink:
    """Known by what it can do, so that no package is imported to ask."""
    kinds = {"add_image": _TensorBoard, "log_image": _MLflow, "log": _Wandb}
    for ability, kind in kinds.items():
        if callable(getattr(place, ability, None)):
            return kind(place)
    raise BadOption(
        "place", type(place).__name__, "a SummaryWriter, the module mlflow, or a run of wandb"
    )


class MapLogger:
    """Called with a step, it explains the same pictures anew every `every` steps.

    Under `name`: a row of overlays for each method; `confidence`, the mean probability of what is
    explained (`contrast`, the mean difference of two logits, or `score`, the mean of a function,
    where those are); with `faithful` also insertion less deletion. The model stays as it was.
    """

    def __init__(
        self,
        place: Any,
        model: ImageModel | nn.Module,
        images: Pictures,
        *,
        target: Spec = None,
        methods: Sequence[str] = ("caap",),
        every: int = 1,
        faithful: bool = False,
        name: str = "explain",
    ) -> None:
        if every < 1:
            raise BadOption("every", every, "1 or more steps")
        self.sink, self.view = sink_of(place), as_view(model)
        self.images = as_images(self.view, images)
        self.target, self.methods, self.name = target, tuple(methods), name
        self.every, self.faithful = every, faithful

    def __call__(self, step: int) -> bool:
        """Log if this step is due; whether it was."""
        if step % self.every:
            return False
        with self.view.eval_mode(), torch.no_grad():
            logits = self.view(self.images)
        goal = parse(self.view, self.target, len(self.images)).bind(logits)
        kind = (
            "contrast" if goal.against is not None else "score" if goal.function else "confidence"
        )
        values = {kind: float(goal.score(logits, sigmoid=self.view.sigmoid).mean())}
        for method in self.methods:
            result = attribute(self.view, self.images, self.target, method)
            self.sink.image(f"{self.name}/{method}", row(result), step)
            if self.faithful:
                with self.view.eval_mode():
                    curves = insertion_deletion(self.view, self.images, result.maps, self.target)
                values[f"{method}/ins-del"] = float(curves["ins-del"].mean())
        self.numbers(self.name, values, step)
        return True

    def numbers(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Any numbers, such as those of an audit, under `name`, in letters that all tools take."""
        words = {re.sub(r"[,%]", "", key): value for key, value in values.items()}
        plain = {re.sub(r"[^\w./-]", "_", word): value for word, value in words.items()}
        self.sink.scalars({f"{name}/{key}": float(value) for key, value in plain.items()}, step)


def row(result: Attribution) -> Image.Image:
    """The first pictures of a result with their maps, side by side."""
    shown = [result.overlay(place) for place in range(min(len(result), SHOWN))]
    width, height = shown[0].size
    sheet = Image.new("RGB", (width * len(shown), height))
    for place, picture in enumerate(shown):
        sheet.paste(picture.convert("RGB"), (place * width, 0))
    return sheet
