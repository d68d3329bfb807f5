"""`folder:PATH`: images of your own, their masks and their groups."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

import seecause as sc
from seecause.data.dataset import capabilities, find_images, mask_of, open_data, read_mask
from seecause.errors import BadImage, DataMissing
from tests.files import grey, photo

OBJECT = np.zeros((4, 6))
OBJECT[1:3, 2:5] = 1


@pytest.fixture
def pets(tmp_path) -> Path:
    root = tmp_path / "pets"
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/3.jpg"):
        photo(root / name)
    return root


def test_sub_folders_are_classes_and_a_flat_folder_has_none(pets, tmp_path):
    pixels = photo(pets / "owl" / "b.PNG", seed=1)
    (pets / "cat" / "notes.txt").touch()
    (pets / ".cache").mkdir()
    photo(pets / "cat" / "._1.jpg")
    data = open_data(f"folder:{pets}")
    assert data.classes == ("cat", "dog", "owl") and data.labels == (0, 0, 1, 1, 2)
    assert data[4].id == "owl/b.PNG"
    read = (data[4].image * 255).round().byte().permute(1, 2, 0)
    assert torch.equal(read, torch.from_numpy(pixels))
    flat = open_data(f"folder:{pets / 'dog'}")
    assert [(s.id, s.label) for s in flat] == [("1.jpg", None), ("3.jpg", None)]
    assert flat.classes == ()
    assert open_data(f"folder:{pets}", limit=3).ids == ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg")
    before = data.fingerprint
    assert open_data(f"folder:{pets}").fingerprint == before
    photo(pets / "owl" / "b.PNG", size=(41, 24))
    assert open_data(f"folder:{pets}").fingerprint != before
    photo(pets / "loose.png")
    with pytest.raises(DataMissing, match=r"loose\.png"):
        open_data(f"folder:{pets}")


def test_a_broken_photo_is_one_error(pets):
    (pets / "cat" / "2.jpg").write_text("no image")
    data = open_data(f"folder:{pets}")
    assert data[0].id == "cat/1.jpg"
    with pytest.raises(BadImage, match=r"2\.jpg"):
        data[1]


@pytest.mark.parametrize(
    ("value", "mode", "suffix"),
    [(255, "L", "png"), (1, "L", "png"), (3, "P", "png"), (255, "RGB", "png")],
)
def test_masks_of_the_same_stems_come_with_the_images(pets, value, mode, suffix):
    for name in ("cat/1", "dog/1", "dog/3"):
        grey(pets / "masks" / f"{name}.{suffix}", value * OBJECT, mode)
    data = open_data(f"folder:{pets}")
    assert data.classes == ("cat", "dog") and "masks" in capabilities(data)
    by_id = {sample.id: sample.mask for sample in data}
    for name in ("cat/1.jpg", "dog/1.jpg", "dog/3.jpg"):
        assert (by_id[name].numpy() == OBJECT).all()
    assert by_id["cat/2.jpg"] is None
    grey(pets / "masks" / "cat" / "1.png", np.zeros((5, 5)))
    with pytest.raises(BadImage, match=r"cat/1\.png"):
        _ = data[0]


def test_a_class_called_masks_is_a_class(tmp_path):
    for name in ("masks/a.jpg", "faces/b.jpg"):
        photo(tmp_path / name)
    data = open_data(f"folder:{tmp_path}")
    assert data.classes == ("faces", "masks") and "masks" not in capabilities(data)


@pytest.mark.parametrize("file", ["m.jpg", "m.png"])
def test_soft_and_lossy_masks_keep_their_object(tmp_path, file):
    exact = np.zeros((64, 64), np.uint8)
    exact[13:45, 10:51] = 255
    Image.fromarray(exact).save(tmp_path / file, quality=75)
    assert (read_mask(tmp_path / file).numpy() == (exact > 0)).all()
    soft = Image.fromarray(exact).filter(ImageFilter.GaussianBlur(3))
    soft.convert("RGB").save(tmp_path / file)
    assert (read_mask(tmp_path / file).numpy() == (exact > 0)).mean() > 0.99


def test_groups_are_classes_and_backgrounds(pets):
    lines = ["file,background", "cat/1.jpg,grass", "cat/2.jpg,sofa", "dog/1.jpg, grass"]
    (pets / "groups.csv").write_text("\n".join([*lines, "dog/3.jpg,grass"]))
    data = open_data(f"folder:{pets}")
    assert data.places == ("grass", "sofa")
    assert [sample.group for sample in data] == [(0, 0), (0, 1), (1, 0), (1, 0)]
    before = data.fingerprint
    (pets / "groups.csv").write_text("\n".join([*lines, "dog/3.jpg,sofa"]))
    assert open_data(f"folder:{pets}").fingerprint != before
    for text, said in (
        ("file,background\ncat/1.jpg,grass", r"cat/2\.jpg is not listed"),
        ("file,place\ncat/1.jpg,grass", "no column background"),
        ("\n".join([*lines, "dog/3.jpg,sofa", "a.jpg,sofa"]), r"a\.jpg is no image here"),
    ):
        (pets / "groups.csv").write_text(text)
        with pytest.raises(DataMissing, match=said):
            open_data(f"folder:{pets}")


def test_trees_are_walked_for_images_and_not_for_masks(pets):
    grey(pets / "masks" / "cat" / "1.png", OBJECT)
    photo(pets / ".thumbs" / "9.jpg")
    files = [Path(name) for name in find_images([pets])]
    assert [file.relative_to(pets).as_posix() for file in files] == [
        "cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/3.jpg",
    ]  # fmt: skip
    assert mask_of(files[0]) == pets / "masks" / "cat" / "1.png" and mask_of(files[1]) is None


def test_the_fingerprint_of_pairs_knows_how_the_other_version_is_made(pets):
    data = open_data(f"folder:{pets}")
    changes = (lambda image: image.flip(0), lambda image: 1 - image, data)
    pairs = [sc.data.paired(data, change, name="pairs") for change in changes]
    assert len({pair.fingerprint for pair in (data, *pairs)}) == 4
    assert len({pair.digests(0, 1)[0] for pair in pairs}) == 3
    again = sc.data.paired(data, lambda image: 1 - image)
    assert again.fingerprint == pairs[1].fingerprint
    assert sc.data.Subset("one", pairs[0], (2,)).other(0).image.equal(pairs[0].other(2).image)
