"""Every loader reads the layout of the public release, and a missing or odd file is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import seecause as sc
from seecause import critters
from seecause.data import IGNORE, Sample, open_data, to_batch
from seecause.data.imagenet import imagenet_classes, imagenet_wnids
from seecause.errors import BadImage, BadOption, DataMissing, UnknownName
from seecause.models.base import ImageModel
from tests.helpers import view
from tests.tiny import tiny


def photo(path: Path, size: tuple[int, int] = (40, 24), seed: int = 0) -> np.ndarray:
    """A noisy picture, width x height, written to `path` without loss whatever its suffix."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")
    return pixels


@pytest.fixture
def model() -> ImageModel:
    return view(tiny("timm_deit3", torch.float32), check=False)  # 32 x 48 pixels


# critters


def test_critters_are_the_worlds_own_samples():
    data = open_data("critters:certified:val", limit=5)
    expected = list(critters.samples("certified", "val", 5))
    assert (
        len(data) == 5
        and data.classes == tuple(critters.CLASSES)
        and data.name == "critters:certified:val"
    )
    assert torch.equal(data[3].image, expected[3].image) and data[-1].id == expected[-1].id
    assert [sample.label for sample in data] == [sample.label for sample in expected]
    assert open_data("critters:clean").name == "critters:clean:test"


def test_the_fingerprint_tells_datasets_apart(tmp_path):
    specs = [
        ("critters:clean", 3),
        ("critters:clean", 4),
        ("critters:clean:val", 3),
        ("critters:certified", 3),
    ]
    assert len({open_data(spec, limit=limit).fingerprint for spec, limit in specs}) == 4
    photo(tmp_path / "a.png")
    before = open_data(f"folder:{tmp_path}").fingerprint
    assert open_data(f"folder:{tmp_path}").fingerprint == before
    photo(tmp_path / "a.png", size=(41, 24))
    assert open_data(f"folder:{tmp_path}").fingerprint != before


# folder


def test_sub_folders_are_classes(tmp_path):
    pixels = photo(tmp_path / "owl" / "b.png")
    photo(tmp_path / "cat" / "a.PNG", seed=1)
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / ".cache").mkdir()
    data = open_data(f"folder:{tmp_path}")
    assert (
        data.classes == ("cat", "owl")
        and [s.label for s in data] == [0, 1]
        and data[1].id == "owl/b.png"
    )
    assert torch.equal(
        (data[1].image * 255).round().byte().permute(1, 2, 0), torch.from_numpy(pixels)
    )


def test_a_flat_folder_has_no_labels(tmp_path):
    photo(tmp_path / "b.png")
    photo(tmp_path / "a.png")
    data = open_data(f"folder:{tmp_path}")
    assert [(s.id, s.label) for s in data] == [
        ("a.png", None),
        ("b.png", None),
    ] and data.classes == ()


def test_a_broken_photo_is_one_hole(tmp_path):
    photo(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    data = open_data(f"folder:{tmp_path}")
    assert data[0].id == "a.png"
    with pytest.raises(BadImage, match=r"b\.png"):
        data[1]


def test_a_limit_is_spread_over_the_classes(tmp_path):
    for name in ("a", "b", "c"):
        for i in range(4):
            photo(tmp_path / name / f"{i}.png", size=(2, 2))
    assert [p.id for p in open_data(f"folder:{tmp_path}", limit=3)] == [
        "a/0.png",
        "b/0.png",
        "c/0.png",
    ]
    assert len(open_data(f"folder:{tmp_path}", limit=99)) == 12
    with pytest.raises(BadOption, match="limit"):
        open_data(f"folder:{tmp_path}", limit=0)


# imagenet


def test_imagenet_labels_follow_the_sorted_wnids(tmp_path):
    assert imagenet_wnids() == tuple(sorted(imagenet_wnids())) and len(imagenet_wnids()) == 1000
    photo(tmp_path / "val" / "n02123045" / "ILSVRC2012_val_00000001.JPEG")
    photo(tmp_path / "val" / "n01440764" / "ILSVRC2012_val_00000002.JPEG")
    data = open_data(f"imagenet:{tmp_path}")
    assert [s.label for s in data] == [0, 281] and data.classes[281].startswith("tabby")


def test_what_is_not_imagenet_is_named(tmp_path):
    with pytest.raises(DataMissing, match="val"):
        open_data(f"imagenet:{tmp_path}")
    photo(tmp_path / "val" / "n99999999" / "a.JPEG")
    with pytest.raises(DataMissing, match="n99999999"):
        open_data(f"imagenet:{tmp_path}")


# pets


@pytest.fixture
def pets(tmp_path) -> Path:
    lines = ["#Image CLASS-ID SPECIES BREED ID"]
    for name, breed, species in (
        ("Abyssinian_1", 1, 1),
        ("american_bulldog_7", 2, 2),
        ("pug_3", 4, 2),
    ):
        photo(tmp_path / "images" / f"{name}.jpg", size=(6, 4))
        trimap = np.tile(np.array([1, 1, 3, 2, 2, 2], np.uint8), (4, 1))
        (tmp_path / "annotations" / "trimaps").mkdir(parents=True, exist_ok=True)
        Image.fromarray(trimap).save(tmp_path / "annotations" / "trimaps" / f"{name}.png")
        lines.append(f"{name} {breed} {species} 1")
    (tmp_path / "annotations" / "test.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "annotations" / "trainval.txt").write_text(lines[-1])
    return tmp_path


def test_pets_have_breeds_and_masks_without_their_border(pets):
    data = open_data(f"pets:{pets}")
    assert data.classes == ("Abyssinian", "american_bulldog", "breed 3", "pug") and [
        s.label for s in data
    ] == [0, 1, 3]
    assert (
        data[1].mask[0].tolist() == [1, 1, IGNORE, 0, 0, 0] and data[1].id == "american_bulldog_7"
    )
    assert [s.id for s in open_data(f"pets:{pets}:trainval")] == ["pug_3"]


def test_pets_take_imagenet_labels_from_a_table(pets, caplog):
    (pets / "imagenet_labels.csv").write_text(
        "image,breed,imagenet_index,wnid\npug_3,pug,254,n02110958\n"
    )
    data = open_data(f"pets:{pets}")
    assert [(s.id, s.label) for s in data] == [
        ("pug_3", 254)
    ] and data.classes == imagenet_classes()
    assert "2 photos" in caplog.text


@pytest.mark.parametrize("missing", ["images/pug_3.jpg", "annotations/trimaps/pug_3.png"])
def test_a_missing_file_of_a_pet_is_named(pets, missing):
    (pets / missing).unlink()
    data = open_data(f"pets:{pets}")
    assert data[0].mask is not None and len(data.fingerprint) == 16
    with pytest.raises(BadImage, match=Path(missing).name):
        data[2]


@pytest.mark.parametrize(
    ("trimap", "message"),
    [
        (np.zeros((4, 6), np.uint8), "values 0 to 0"),
        (np.ones((4, 5), np.uint8), r"\[4, 5\] pixels for a photo of \[4, 6\]"),
        (np.ones((4, 6, 3), np.uint8), "colour"),
    ],
)
def test_an_odd_trimap_is_named(pets, trimap, message):
    Image.fromarray(trimap).save(pets / "annotations" / "trimaps" / "pug_3.png")
    with pytest.raises(BadImage):
        open_data(f"pets:{pets}")[2]


def test_odd_lists_and_tables_are_named(pets):
    with pytest.raises(DataMissing, match=r"annotations/test\.txt"):
        open_data(f"pets:{pets / 'images'}")
    (pets / "imagenet_labels.csv").write_text("breed,index\npug,254\n")
    with pytest.raises(DataMissing, match="imagenet_index"):
        open_data(f"pets:{pets}")
    (pets / "annotations" / "test.txt").write_text("pug_3 4 2 1\npug_4 four 2 1\n")
    with pytest.raises(DataMissing, match=r"line 2.*four"):
        open_data(f"pets:{pets}")


def test_unknown_datasets_are_refused():
    for spec in ("pets", "cats:here", "critters:"):
        with pytest.raises(UnknownName, match="folder:PATH"):
            open_data(spec)
    with pytest.raises(UnknownName, match="certified"):
        open_data("critters:certifed")
    with pytest.raises(UnknownName, match="train"):
        open_data("critters:clean:trian")


# into the model's frame


def test_pictures_of_the_models_size_keep_every_pixel(model):
    image, mask = torch.rand(3, 32, 48), torch.rand(32, 48) > 0.5
    batch = to_batch(model, [Sample(image, 3, mask=mask)])
    assert torch.equal(batch.images, model.preprocess.normalise(image[None]))
    assert torch.equal(batch.masks[0], mask.int()) and batch.labels.tolist() == [3]


def test_photos_and_masks_are_cut_alike(model, tmp_path):
    """The object is where the picture is white; after resizing both, it still is."""
    pixels = np.zeros((90, 200, 3), np.uint8)
    pixels[20:70, 60:130] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    read = open_data(f"folder:{tmp_path}")[0]
    ids = torch.from_numpy((pixels[..., 0] == 255).astype(np.uint8))
    images, labels, masks = to_batch(model, [Sample(read.image, None, mask=ids)])
    assert images.shape == (1, 3, 32, 48) and labels is None
    assert_close(images, model.preprocess(Image.fromarray(pixels)), atol=0, rtol=0)
    white = model.preprocess.raw(images)[0, 0] > 0.5
    assert 0.2 < white.float().mean() < 0.8 and (white != masks[0].bool()).float().mean() < 0.05


def test_samples_without_masks_or_labels(model):
    plain, masked = (
        Sample(torch.rand(3, 32, 48), None, id="x"),
        Sample(torch.rand(3, 32, 48), None, mask=torch.ones(32, 48, dtype=torch.bool)),
    )
    assert to_batch(model, [plain]).masks is None
    assert (to_batch(model, [plain, masked]).masks[0] == IGNORE).all()
    with pytest.raises(BadOption, match="x without a label"):
        to_batch(model, [plain, Sample(torch.rand(3, 32, 48), 1)])


# the real files


@pytest.fixture
def real() -> Path:
    folder = os.environ.get("SEECAUSE_REAL")
    if not folder:
        pytest.skip("set SEECAUSE_REAL to the folder with real weights and photos")
    return Path(folder)


@pytest.mark.real
def test_a_real_model_knows_the_real_photos(real):
    """Wrong labels, a wrong crop or swapped channels would all show as accuracy near chance."""
    model = sc.load("timm:vit_tiny_patch16_224", weights=real / "vit_tiny_patch16_224.safetensors")
    for spec in (f"imagenet:{real / 'imagenet'}", f"pets:{real / 'pets'}"):
        data = open_data(spec, limit=40)
        images, labels, masks = to_batch(model, list(data))
        with torch.no_grad():
            assert (model(images).argmax(dim=-1) == labels).float().mean() > 0.6, spec
    assert set(masks.unique().tolist()) == {0, 1, IGNORE}
    centre = sc.attribute(model, images, method="center").maps
    result = sc.metrics.localization(centre, masks)
    assert result.skipped == 0 and sc.metrics.summarise(result.pointing).mean > 0.6
