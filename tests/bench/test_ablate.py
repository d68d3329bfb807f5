"""An ablation is a run whose methods are the settings; its first is the default."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

import seecause as sc
from seecause.attribution.caap import make_plan as caap_plan
from seecause.bench.ablate import (
    STUDIES,
    Depth,
    agreement_of,
    attention_by_depth,
    read_depth,
    save_depth,
    settings,
    sweep_layers,
    why_no_depth,
    with_settings,
)
from seecause.bench.evaluate import PreparedRun
from seecause.bench.plan import Store, make_plan
from seecause.bench.results import read_results
from seecause.bench.runner import run
from seecause.data.batch import to_batch
from seecause.data.registry import open_data
from seecause.engine.blanks import Blank
from seecause.engine.sweep import SweepPlan
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import rank_correlation
from tests.bench.toy import REQUEST, model
from tests.helpers import view
from tests.reference.depth import attention_by_depth as slow_depth
from tests.tiny import pictures, tiny


def ablation(study: str, **changes) -> PreparedRun:
    asked = {"limit": 2, "metrics": ("aupr1",), "measures": {}, **changes}
    request = with_settings(replace(REQUEST, methods={"caap": {}}, study=study, **asked), model())
    data = open_data(request.data, limit=request.limit)
    return PreparedRun(make_plan(request, model(), data), model(), data)


@pytest.mark.parametrize("study", STUDIES)
def test_the_first_setting_is_the_default_and_every_setting_can_be_run(study):
    found = settings(study, model(), {})
    default = sc.attribute(model(), torch.zeros(1, 3, 96, 96), 0).manifest
    first = sc.attribute(
        model(), torch.zeros(1, 3, 96, 96), 0, **next(iter(found.values()))
    ).manifest
    assert (
        first["used"] == default["used"]
        and {**first["options"], "layers": None, "tail": None} == default["options"]
    )
    for options in found.values():
        caap_plan(model(), model().layout, tail=options.get("tail"), layers=options.get("layers"))


def test_a_setting_that_a_readout_does_not_define_is_left_out():
    assert "blank" in settings("tail", model(), {})
    mean = view(tiny("timm_mean"), check=False)
    assert (
        "blank" not in settings("tail", mean, {})
        and next(iter(settings("tail", mean, {}))) == "patched"
    )


def test_deep_models_are_swept_in_steps():
    deep = sweep_layers(24, SweepPlan("source", 0, 24, (0,)))
    assert "from 0" in deep and "to 24" in deep and len(deep) <= 26


def test_another_tail_is_swept_as_it_is_and_to_its_own_last_layer():
    found = settings("layers", model(), {"tail": "all"})
    last = caap_plan(model(), model().layout, tail="all", layers=None).stop
    assert {options["tail"] for options in found.values()} == {
        "all"
    } and f"from {last + 1}" not in found
    assert all(
        options["layers"][1] == last for name, options in found.items() if name.startswith("from")
    )


@pytest.mark.parametrize(
    ("family", "swept"), [("timm_mean", False), ("timm_map", False), ("timm_mean_with_class", True)]
)
def test_the_first_layer_is_swept_only_where_it_has_an_effect(family, swept):
    native = tiny(family)
    shown, images = view(native, check=False), pictures(native)
    found = settings("layers", shown, {})
    default, first, late = (
        sc.attribute(shown, images, 1, **options).maps
        for options in ({}, next(iter(found.values())), {"layers": (2, None)})
    )
    torch.testing.assert_close(first, default, rtol=0, atol=1e-12)
    assert (
        any(name.startswith("from") for name in found)
        == swept
        == bool((late - default).abs().max() > 1e-9)
    )


def test_the_studied_option_cannot_be_fixed_and_every_setting_is_checked_first():
    with pytest.raises(BadOption, match="what this study changes"):
        with_settings(replace(REQUEST, methods={"caap": {"tail": "all"}}, study="tail"), model())
    with pytest.raises(BadOption, match="tail=source"):  # which cannot have these layers
        request = with_settings(
            replace(REQUEST, methods={"caap": {"layers": (0, 2)}}, study="tail", limit=2), model()
        )
        make_plan(request, model(), open_data(request.data, limit=2))


def test_unknown_studies_and_architectures_are_refused():
    with pytest.raises(UnknownName, match="blank"):
        settings("colour", model(), {})
    conv = sc.load("torchvision:resnet18", weights="random")
    with pytest.raises(NotDefined, match="layers"):
        with_settings(replace(REQUEST, methods={"caap": {}}, study="layers"), conv)


def test_maps_under_settings_are_compared_by_rank(tmp_path):
    work, store = ablation("blank"), Store(tmp_path)
    assert run(store, work).complete
    assert store.plan().request.called == dict.fromkeys(get_args(Blank), "caap")
    assert '"method":"caap"' in store.rows(work.plan).to_pylist()[0]["options"]
    found = agreement_of(read_results(store, work.plan).maps)
    batch = to_batch(model(), [work.data[0], work.data[1]])
    white, black = (
        sc.attribute(model(), batch.images, batch.labels, blank=blank).maps
        for blank in ("white", "black")
    )
    assert found.names[:2] == ("white", "black") and found.images == 2
    torch.testing.assert_close(
        found.mean[0, 1], rank_correlation(white, black).mean(), rtol=1e-3, atol=1e-3
    )
    assert torch.equal(found.mean, found.mean.T) and found.mean.diagonal().eq(1).all()


def test_attention_by_depth_equals_the_slow_twin():
    native = tiny("timm_registers")
    shown, images = view(native, check=False), pictures(native)
    height, width = images.shape[-2:]
    masks = torch.zeros(len(images), height, width, dtype=torch.int32)
    masks[:, : height // 2, : width // 3] = 1
    masks[:, -3:] = 255
    fast = attention_by_depth(shown, images, masks)
    slow = slow_depth(
        native.module, images, masks, prefix=shown.layout.prefix, grid=shown.layout.grid
    )
    torch.testing.assert_close(
        torch.stack([fast.on_object, fast.on_background], dim=1), slow, rtol=0, atol=1e-10
    )


def test_a_picture_without_an_object_has_no_curve():
    native = tiny("timm_registers")
    images = pictures(native)
    found = attention_by_depth(
        view(native, check=False),
        images,
        torch.zeros(len(images), *images.shape[-2:], dtype=torch.int32),
    )
    assert found.on_object.isnan().all() and found.on_background.isfinite().all()


def test_the_curve_is_kept_in_the_run_folder_or_its_absence_has_a_reason(tmp_path):
    work, store = ablation("layers"), Store(tmp_path)
    save_depth(store, work)
    kept = read_depth(store)
    assert isinstance(kept, Depth) and kept.on_object.shape == (2, model().n_layers)
    assert (kept.on_object > kept.on_background).all()  # critters-vit looks at the creature
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(b"")
    blind = replace(work, data=open_data(f"folder:{tmp_path / 'data'}"))
    save_depth(store, blind)
    assert "masks" in why_no_depth(blind) and read_depth(store) is None
