"""Object masks: from the data, from another network, from the model itself."""

from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, Masks, discover_masks, masks, object_masks
from seecause.background.masks import harden, network_maps, otsu
from seecause.data.dataset import IGNORE
from seecause.engine.chunks import budget
from seecause.errors import BadImage, BadOption, NotDefined
from seecause.metrics.annotations import iou
from tests.background.repair_toys import fitted, scenes
from tests.helpers import view
from tests.reference import cigma as reference, transplant as twin
from tests.tiny import pictures, tiny

OPTIONS = {"steps": 6, "grid": 6, "rate": 0.05}


def case(batch=3, family="timm_registers"):
    native = tiny(family)
    return native, view(native, check=False), pictures(native, batch)


def test_discovered_masks_are_those_of_a_plain_optimiser():
    native, model, images = case()
    weights = (1.0, 0.3, 0.1)
    result = discover_masks(model, images, weights=weights, **OPTIONS)
    for image, soft in zip(images, result.soft, strict=True):
        expected = reference.mask(native.forward, image, weights=weights, init=0.5, **OPTIONS)
        assert_close(soft, expected, atol=1e-9, rtol=0)
    assert result.soft.std() > 0.01 and result.kind == "discovered"
    assert result.protocol["rho"] == 0.35 and result.protocol["fill"] == "mean"


def test_a_mask_keeps_the_prediction_at_its_temperature():
    _, model, images = case(1)
    warm = discover_masks(model, images, temperature=3.0, **OPTIONS)
    model.module.head.weight /= 3
    model.module.head.bias /= 3
    assert_close(warm.soft, discover_masks(model, images, **OPTIONS).soft, atol=1e-9, rtol=0)


def test_a_strict_percentile_keeps_none_where_too_many_are_equal():
    soft = torch.zeros(1, 8, 8)
    soft[:, :, :4] = 1  # half of the pixels saturate
    assert not harden(soft, (64, 64), rho=0.25, rule="percentile").any()
    ramp = torch.rand(1, 64, 64, generator=torch.Generator().manual_seed(1))
    kept = harden(ramp, (64, 64), rho=0.25, rule="percentile")
    level = torch.quantile((ramp * 1e6).round().double() / 1e6, 0.75)
    assert torch.equal(kept, ramp > level) and kept.float().mean() == pytest.approx(0.25, abs=1e-3)


def test_pixels_are_kept_by_value_then_by_neighbourhood_then_row_by_row():
    """The rule written out, pixel by pixel, on a flat mask and on one with many ties."""
    high, wide, rho = 12, 18, 0.35
    steps = torch.randint(0, 3, (1, 4, 4), generator=torch.Generator().manual_seed(2)) / 2
    for soft in (torch.full((1, 4, 4), 0.3), steps):
        large = masks.enlarge(soft.double(), (high, wide))[0]
        values = [[round(float(x), 6) for x in row] for row in large]

        def near(row, column, values=values):
            rows = range(max(0, row - 2), min(high, row + 3))
            columns = range(max(0, column - 2), min(wide, column + 3))
            around = [values[r][c] for r in rows for c in columns]
            return round(sum(around) / len(around), 6)

        places = [(row, column) for row in range(high) for column in range(wide)]
        order = sorted(places, key=lambda at: (-values[at[0]][at[1]], -near(*at), at))
        expected = torch.zeros(high, wide, dtype=torch.bool)
        for row, column in order[: round(rho * high * wide)]:
            expected[row, column] = True
        assert torch.equal(harden(soft, (high, wide), rho=rho)[0], expected)


def test_discovered_masks_are_kept_by_weights_pixels_and_options(tmp_path, monkeypatch):
    native, model, images = case(2)
    folder, done = tmp_path / "kept" / "masks", []  # made with what is above it
    first = discover_masks(model, images, cache=folder, progress=done.append, **OPTIONS)
    (file,) = folder.iterdir()

    def files_after(**changes):
        given = changes.pop("images", images)
        discover_masks(model, given, cache=folder, **{**OPTIONS, **changes})
        return len(list(folder.iterdir()))

    strict = discover_masks(model, images, cache=folder, rho=0.2, binarise="percentile", **OPTIONS)
    hard = harden(first.soft, tuple(images.shape[-2:]), rho=0.2, rule="percentile")
    assert done == [2] and torch.equal(strict.hard, hard)  # the soft mask is the same
    assert len(list(folder.iterdir())) == 1 and strict.protocol["binarise"] == "percentile"
    file.write_bytes(file.read_bytes()[:50])  # a damaged file is written again
    assert torch.equal(discover_masks(model, images, cache=folder, **OPTIONS).soft, first.soft)
    with budget(1):
        assert files_after() == 3  # one image at a time
    assert files_after(steps=3) == 4
    assert files_after(images=images + 0.1) == 5
    with model.gated(torch.full((4, 3), 0.5)):
        assert files_after() == 6
    with torch.no_grad():
        native.module.head.bias += torch.arange(7)
    assert files_after() == 7
    assert files_after(fill="grey") == 8
    monkeypatch.setattr("seecause._software.versions", lambda: {"torch": "another"})
    assert files_after() == 9


def test_masks_work_without_gradients_and_for_convolutional_models():
    from tests.families.conv import OPTIONS as CONV, tiny_conv

    native = tiny_conv("timm_resnet")
    model = sc.wrap(native.module, check=False, **CONV)
    with torch.inference_mode():
        result = discover_masks(
            model, torch.randn(1, 3, *model.preprocess.size, dtype=torch.float64), steps=2, grid=4
        )
    assert result.hard.shape == (1, *model.preprocess.size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"weights": (1.0, -1.0, 0.0)}, "three numbers"),
        ({"rho": 1.0}, "between 0 and 1"),
        ({"grid": 1}, "at least 2 cells"),
        ({"rate": 0.0}, "a number above 0"),
        ({"binarise": "otsu"}, "topk, percentile"),
        ({"fill": "white"}, "mean, grey, blur, noise"),
    ],
)
def test_impossible_searches_are_refused(options, message):
    _, model, images = case(1)
    with pytest.raises(BadOption, match=message):
        discover_masks(model, images, **options)


def test_no_images_and_independent_classes_are_refused():
    _, model, images = case(1)
    with pytest.raises(BadImage, match="at least one image"):
        discover_masks(model, images[:0])
    model.sigmoid = True
    with pytest.raises(NotDefined, match="sigmoid=False"):
        discover_masks(model, images)


@pytest.fixture(scope="module")
def biased():
    return sc.load("builtin:critters-biased")


@pytest.fixture(scope="module")
def data(biased):
    return sc.background.read_images(biased, sc.data.open_data("critters:certified:test", limit=6))


@pytest.fixture(scope="module")
def toy():
    return fitted(scenes(64))


def test_otsu_equals_the_slow_twin():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(20, 5, 7, generator=generator, dtype=torch.float64).exp()
    maps[10:] = maps[10:].round()  # ties
    maps[19] = 2.5  # constant
    found = otsu(maps)
    for own, scores in zip(found, maps, strict=True):
        assert own.equal(twin.otsu(scores))
    assert not found[19].any() and found[:19].flatten(1).any(dim=1).all()


def test_given_masks_come_with_the_data(biased, data):
    found = object_masks(biased, data, "given")
    share = data.truth.hard.float().unflatten(2, (12, 8)).unflatten(1, (12, 8)).mean(dim=(2, 4))
    assert found.on_patches((12, 12)).equal(share >= 0.5) and found.hard.equal(data.truth.hard)
    assert found.kind == "given" and not found.notes


def test_another_network_is_compared_with_given_masks(biased, data):
    found = object_masks(biased, data, "builtin:critters-vit")
    truth = data.truth.hard.int()
    assert found.kind == "network" and "critters-vit" in found.source and not found.notes
    assert torch.equal(found.overlap, iou(found.hard, truth)) and found.overlap.mean() > 0.3
    assert found.hard.shape == (6, 96, 96)
    truth[3:] = IGNORE  # of images without a mask, the overlap is not known
    some = object_masks(biased, replace(data, truth=Masks.given(truth)), "builtin:critters-vit")
    assert some.overlap[3:].isnan().all() and not some.overlap[:3].isnan().any()
    other = partial(object_masks, biased, source="builtin:critters-vit", method="rollout")
    assert "rollout" in object_masks(biased, data, other).source  # a function of the images


def test_masks_of_a_network_are_its_enlarged_maps_above_otsus_threshold(biased, data, monkeypatch):
    images = data.images[:3]
    maps = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0)) - 0.5
    maps[2] = 0.3  # knows nothing
    monkeypatch.setattr(masks, "network_maps", lambda *_: maps)
    found = object_masks(biased, LabelledImages(images), "own").hard
    for mask, values in zip(found[:2], maps[:2], strict=True):
        large = F.interpolate(values[None, None], (96, 96), mode="bicubic")[0]
        assert (mask != otsu(large)[0]).double().mean() < 1e-3  # but for values at the threshold
        cells = mask.double().unflatten(1, (6, 16)).unflatten(0, (6, 16)).mean(dim=(1, 3))
        assert ((cells > 0) & (cells < 1)).any()  # outlines cross patches
    assert not found[2].any()


def test_maps_are_kept_apart_by_the_preprocessing_of_the_network(biased, data, tmp_path):
    network = sc.load("builtin:critters-vit")
    other = replace(network, preprocess=replace(network.preprocess, mean=(0.2, 0.5, 0.9)))
    for each in (network, other):
        object_masks(biased, LabelledImages(data.images), each, cache=tmp_path)
    assert len([*tmp_path.iterdir()]) == 2


def test_the_models_own_maps_come_with_a_warning(biased, data, caplog):
    for source in ("own", biased, "builtin:critters-biased"):  # the same weights, read again
        found = object_masks(biased, LabelledImages(data.images), source)
        assert found.kind == "own" and "marks the background" in found.notes[0]
    assert "marks the background" in caplog.text and found.overlap is None


@pytest.mark.parametrize("side", [16, 32])
def test_a_network_gets_the_images_in_its_own_frame(toy, side, monkeypatch):
    module = timm.models.VisionTransformer(
        img_size=side, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=2
    ).eval()
    network = sc.wrap(module, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    images, seen, real = 1.5 * scenes(3).images, [], masks.attribute
    monkeypatch.setattr(masks, "attribute", lambda m, x, **o: seen.append(x) or real(m, x, **o))
    found = network_maps(toy, network, images, "rollout", {})
    raw = (0.5 + 0.5 * images).clamp(0, 1)
    smooth = {"mode": "bilinear", "antialias": True, "align_corners": False}
    raw = raw if side == 32 else F.interpolate(raw, (16, 16), **smooth)
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert_close(seen[0], (raw - mean) / std)
    assert_close(found, sc.attribute(network, seen[0], method="rollout").maps)


def test_maps_are_kept_by_content(biased, data, tmp_path, monkeypatch):
    def find(**options):
        return object_masks(biased, data, "builtin:critters-vit", cache=tmp_path, **options)

    first = find()
    monkeypatch.setattr(masks, "attribute", None)  # computing would fail
    again = find()
    assert again.hard.equal(first.hard)
    monkeypatch.undo()
    for changes in ({"score": "prob"}, {"method": "rollout"}):
        find(**changes)
    brighter = LabelledImages(data.images + 0.1)
    object_masks(biased, brighter, "builtin:critters-vit", cache=tmp_path)
    other = replace(biased, preprocess=replace(biased.preprocess, mean=(0.4, 0.4, 0.4)))
    object_masks(other, data, "builtin:critters-vit", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {}, r"has none.*another network"),
        (torch.ones(6, 40, 40), {}, "a mask for each image"),
        (torch.ones(2, 96, 96), {}, "a mask for each image"),
        ("given", {"score": "prob"}, "no method"),
        ("given", {"method": "rollout"}, "no method"),
        ("own", {"nonsense": 1}, "caap option nonsense"),
        ("nonsense", {}, "'nonsense' not found"),
    ],
)
def test_bad_sources_are_refused(biased, data, source, options, message):
    with pytest.raises(sc.SeecauseError, match=message):
        object_masks(biased, LabelledImages(data.images), source, **options)
