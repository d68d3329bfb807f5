"""What a logger writes is read back from the files of each tool."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import seecause as sc
from seecause.errors import BadOption, MissingExtra
from seecause.integrations.loggers import MapLogger, row
from tests.helpers import view
from tests.tiny import pictures, tiny


@pytest.fixture(scope="module")
def case():
    native = tiny("timm_registers", dtype=torch.float32)
    return view(native), pictures(native, batch=2)


def expected(model, images):
    """The picture and the confidence that should be logged."""
    result = sc.attribute(model, images, target=1)
    confidence = float(model(images).softmax(dim=1)[:, 1].mean())
    return np.asarray(row(result)), confidence


def test_tensorboard_holds_maps_and_numbers(case, tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'seecause[tools]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, images = case
    with SummaryWriter(str(tmp_path)) as writer:
        log = MapLogger(writer, model, images, target=1, every=2, faithful=True)
        assert [log(step) for step in range(3)] == [True, False, True]
        log.numbers("audit", {"flips, control": 0.25, "low 95%": 0.5}, 2)
    events = EventAccumulator(str(tmp_path)).Reload()
    picture, confidence = expected(model, images)
    assert [event.step for event in events.Images("explain/caap")] == [0, 2]
    shown = events.Images("explain/caap")[0]
    assert (shown.height, shown.width) == picture.shape[:2]
    assert events.Scalars("explain/confidence")[1].value == pytest.approx(confidence, abs=1e-6)
    assert events.Scalars("audit/flips_control")[0].value == 0.25
    assert {"explain/caap/ins-del", "audit/low_95"} <= set(events.Tags()["scalars"])


def test_mlflow_holds_them_as_artifacts_and_metrics(case, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    from PIL import Image

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("maps")
    model, images = case
    with mlflow.start_run() as run:
        MapLogger(mlflow, model, images, target=1)(3)
    picture, confidence = expected(model, images)
    (file,) = tmp_path.rglob(f"{run.info.run_id}/artifacts/explain/caap/00000003.png")
    assert np.array_equal(np.asarray(Image.open(file).convert("RGB")), picture)
    (file,) = tmp_path.rglob(f"{run.info.run_id}/metrics/explain/confidence")
    _, value, step = file.read_text().split()[:3]
    assert float(value) == pytest.approx(confidence, abs=1e-6) and step == "3"


def test_wandb_holds_them_offline(case, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    from PIL import Image

    monkeypatch.setenv("WANDB_SILENT", "true")
    model, images = case
    run = wandb.init(mode="offline", dir=str(tmp_path), project="maps")
    MapLogger(run, model, images, target=1)(0)
    run.finish()
    wandb.teardown()  # writes what is still held
    picture, confidence = expected(model, images)
    (file,) = tmp_path.rglob("run-*.wandb")  # what `wandb sync` uploads
    assert logged_offline(file.read_bytes(), "explain/confidence") == pytest.approx(
        confidence, abs=1e-6
    )
    (file,) = tmp_path.rglob("files/media/images/explain/caap_0_*.png")
    assert np.array_equal(np.asarray(Image.open(file).convert("RGB")), picture)


def logged_offline(file, name):
    """The first value of that name in a file of wandb: keys and values are there as text, the value
    behind the tag and length of its field."""
    match = re.search(
        re.escape(name.encode()) + rb"[^0-9]*?\x82\x01.(-?[0-9][0-9.e-]*)", file, re.S
    )
    return float(match[1])


def test_a_training_goes_on_as_if_nobody_had_looked(case):
    _, images = case
    native = tiny("timm_registers", dtype=torch.float32)
    module = native.module
    model = sc.wrap(module, **native.options)
    module.train().requires_grad_(True)
    places: list[str] = []
    place = SimpleNamespace(
        log_image=lambda picture, artifact_file: places.append(artifact_file),
        log_metric=lambda name, value, step: places.append(name),
    )
    log = MapLogger(place, model, images)
    before = torch.random.get_rng_state()
    log(0)
    assert places == ["explain/caap/00000000.png", "explain/confidence"]
    assert module.training and all(p.requires_grad for p in module.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)
    module(images).sum().backward()
    weight = next(p for p in module.parameters() if p.grad is not None)
    with torch.no_grad():
        weight.add_(1.0)
    log(1)
    assert len(places) == 4


def test_a_place_that_is_none_of_them_and_a_missing_package_are_named(case, monkeypatch):
    model, images = case
    with pytest.raises(BadOption, match="SummaryWriter"):
        MapLogger("runs", model, images)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match="pip install wandb"):
        MapLogger(SimpleNamespace(log=print), model, images)


@pytest.mark.parametrize(
    ("target", "key"), [((1, 2), "contrast"), (lambda logits: logits[:, 1], "score")]
)
def test_what_is_no_probability_is_not_called_confidence(case, target, key):
    model, images = case
    logged = {}
    place = SimpleNamespace(
        add_image=print, add_scalar=lambda name, value, step: logged.update({name: value})
    )
    log = MapLogger(place, model, images, target=target, methods=())
    assert log(0) and [*logged] == [f"explain/{key}"]
    logits = model(images)
    against = logits[:, 2] if key == "contrast" else 0
    assert logged[f"explain/{key}"] == pytest.approx(float((logits[:, 1] - against).mean()))


def test_names_of_numbers_are_those_that_mlflow_takes(case):
    """A method may have a plus in its name; two of them stay two."""
    model, images = case
    metrics = {}

    def log_metric(name, value, step):
        assert re.fullmatch(r"[/\w.\- ]*", name)
        metrics[name] = value

    mlflow = SimpleNamespace(log_image=lambda *_, **__: None, log_metric=log_metric)
    MapLogger(mlflow, model, images, methods=("ixg", "ixg+"), faithful=True)(0)
    assert set(metrics) == {"explain/confidence", "explain/ixg/ins-del", "explain/ixg_/ins-del"}
