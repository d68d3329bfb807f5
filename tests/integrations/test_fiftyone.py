"""FiftyOne itself, where it is installed and has a database; the rest without it."""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import seecause as sc
from seecause.data import to_pil
from seecause.errors import DataMissing, MissingExtra
from seecause.integrations.fiftyone import WORST, FiftyOneData, on_picture
from tests.background.repair_toys import CLASSES, PATCH, SIDE, fitted, scenes


@pytest.fixture(scope="module")
def model():
    return fitted(scenes(64))


def test_maps_lie_where_the_model_looked(model):
    """A wide picture: the model sees its middle, and the map is 0 beside it."""
    pixels = torch.ones(SIDE, SIDE)
    whole = on_picture(model, pixels, SIDE, 2 * SIDE)
    assert whole.shape == (SIDE // 4, SIDE // 2)
    beside = SIDE // 8
    assert whole[:, beside:-beside].min() == 1 and whole[:, :beside].max() == 0
    assert_allclose(on_picture(model, pixels, 3 * SIDE, 3 * SIDE), np.ones((SIDE // 4,) * 2))


def test_without_fiftyone_the_error_names_it(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    with pytest.raises(MissingExtra, match="pip install fiftyone"):
        sc.integrations.fiftyone.explain([], model)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Forty scenes with classes and segmentations."""
    fiftyone = pytest.importorskip("fiftyone", reason="pip install fiftyone")
    root, cases = tmp_path_factory.mktemp("fiftyone"), scenes(60, usual=0.9, seed=1)
    try:
        data = fiftyone.Dataset(f"seecause-{uuid.uuid4().hex[:8]}")
    except fiftyone.core.config.FiftyOneConfigError as missing:
        pytest.skip(f"FiftyOne has no database: {str(missing)[:80]}")
    samples = []
    for place, image in enumerate(cases.images):
        file = root / f"{place}.png"
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(file)
        sample = fiftyone.Sample(filepath=str(file))
        sample["ground_truth"] = fiftyone.Classification(label=CLASSES[int(cases.labels[place])])
        mask = cases.truth[place].numpy().astype(np.uint8)
        sample["objects"] = fiftyone.Segmentation(mask=mask)
        samples.append(sample)
    data.add_samples(samples, progress=False)
    yield data
    data.delete()


def test_heatmaps_and_answers_are_fields(dataset, model):
    tool = sc.integrations.fiftyone
    tool.explain(dataset, model, batch=7)
    first = dataset.first()
    assert first["caap"].map.shape == (SIDE // 4,) * 2
    assert first["answer"].label in CLASSES and 0.5 <= first["answer"].confidence <= 1
    image = model.prepare([sc.data.images.open_picture(first.filepath)])
    patches = sc.attribute(model, image).pixels()[0]
    stored = np.kron(first["caap"].map, np.ones((4, 4)))
    assert np.corrcoef(stored.ravel(), patches.numpy().ravel())[0, 1] > 0.95
    assert first["caap"].range[1] == pytest.approx(np.abs(first["caap"].map).max())


def test_an_audit_fills_fields_and_the_worst_pictures_are_a_view(dataset, model):
    tool = sc.integrations.fiftyone
    result = tool.audit(dataset, model, masks="objects", per_picture=2)
    flips = dataset.values("flips")
    assert_allclose(flips, result.judged.flips_of().numpy())
    right = result.judged.right.tolist()
    shares = dataset.values("background")
    assert [share is not None for share in shares] == right
    view = tool.worst(dataset, 5)
    assert view.values("flips") == sorted(flips, reverse=True)[:5]
    assert WORST in dataset.list_saved_views()


def test_the_data_are_what_seecause_knows(dataset):
    data = FiftyOneData(dataset, "ground_truth", "objects")
    sample = data[3]
    assert data.classes == tuple(sorted(CLASSES)) and len(data) == 60
    assert sample.image.shape == (3, SIDE, SIDE) and sample.mask.sum() == 4 * PATCH**2
    with pytest.raises(DataMissing, match="labels=FIELD"):
        FiftyOneData(dataset, "nothing")
    with pytest.raises(DataMissing, match="audit"):
        sc.integrations.fiftyone.worst(dataset, field="nothing")


def test_the_app_finds_the_operators_and_runs_them(dataset, model, tmp_path, monkeypatch):
    import fiftyone
    import fiftyone.operators as operators
    import fiftyone.plugins as plugins

    monkeypatch.setattr(fiftyone.config, "plugins_dir", str(tmp_path / "plugins"))
    sc.integrations.fiftyone_plugin.install()
    assert "@seecause/maps" in {plugin.name for plugin in plugins.list_plugins()}
    monkeypatch.setattr("seecause.loading.load", {"toy": model}.__getitem__)

    def execute(name, **params):
        done = operators.execute_operator(
            f"@seecause/maps/{name}", {"dataset": dataset, "params": params}
        )
        done = asyncio.run(done) if asyncio.iscoroutine(done) else done
        done.raise_exceptions()
        return done.result

    assert execute("explain_pictures", model="toy", method="rollout") == {"pictures": 60}
    dataset.reload()
    assert dataset.has_sample_field("rollout")
    result = execute("show_worst_pictures", model="toy", masks="objects")
    assert result["verdict"] == "yes" and result["flips"] > 0.3


class Table:
    """What is used of a dataset of FiftyOne, in memory."""

    name = "table"

    def __init__(self, samples):
        self.samples, self.fields = samples, {}

    def iter_samples(self, progress):
        return iter(self.samples)

    def has_sample_field(self, field):
        return field == "ground_truth"

    def distinct(self, field):
        return CLASSES

    def set_values(self, name, values):
        self.fields[name] = values


class Row(dict):
    id = filepath = ""


def test_an_audit_of_pictures_of_which_one_cannot_be_read_keeps_each_number_at_its_picture(
    model, tmp_path
):
    cases, samples = scenes(24, usual=0.9, seed=1), []
    for place, image in enumerate(cases.images):
        row = Row(
            ground_truth=SimpleNamespace(label=CLASSES[int(cases.labels[place])]),
            objects=SimpleNamespace(get_mask=cases.truth[place].numpy),
        )
        row.id, row.filepath = f"id-{place}", str(tmp_path / f"{place}.png")
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(row.filepath)
        samples.append(row)
    Path(samples[2].filepath).write_text("no picture")
    table = Table(samples)
    result = sc.integrations.fiftyone.audit(table, model, masks="objects", per_picture=2)
    flips = result.judged.flips_of().tolist()
    assert len(flips) == 23 and result.pictures.ids[2] == "id-3"
    assert table.fields["flips"] == [*flips[:2], None, *flips[2:]]
    assert {len(values) for values in table.fields.values()} == {24}
