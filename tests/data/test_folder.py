"""`folder:PATH`: pictures of your own, their masks and their groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

import seecause as sc
from seecause.data.dataset import capabilities
from seecause.data.images import find_pictures, mask_of, read_mask
from seecause.data.registry import open_data
from seecause.errors import BadImage, BadOption, DataMissing


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 8), (200, 30, 30)).save(path)
    return path


def mask(path: Path, value: int = 255, mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((8, 12), np.uint8)
    pixels[2:5, 3:9] = value
    Image.fromarray(pixels).convert(mode).save(path)
    return path


EXPECTED = torch.zeros(8, 12, dtype=torch.bool)
EXPECTED[2:5, 3:9] = True


@pytest.fixture
def pets(tmp_path) -> Path:
    root = tmp_path / "pets"
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/3.jpg"):
        picture(root / name)
    return root


@pytest.mark.parametrize("place", ["inside", "beside"])
@pytest.mark.parametrize(
    ("value", "mode", "suffix"),
    [(255, "L", "png"), (1, "L", "png"), (3, "P", "png"), (255, "RGB", "png"), (255, "L", "jpg")],
)
def test_masks_of_the_same_stems_come_with_the_pictures(pets, place, value, mode, suffix):
    masks = (pets if place == "inside" else pets.parent) / "masks"
    for name in ("cat/1", "dog/1", "3"):
        mask(masks / f"{name}.{suffix}", value, mode)
    data = open_data(f"folder:{pets}")
    assert data.classes == ("cat", "dog") and "masks" in capabilities(data)
    by_id = {sample.id: sample.mask for sample in data}
    for name in ("cat/1.jpg", "dog/1.jpg", "dog/3.jpg"):
        assert (by_id[name] != EXPECTED).float().mean() < (0.15 if suffix == "jpg" else 1e-9)
    assert by_id["cat/2.jpg"] is None


def test_a_flat_mask_that_two_pictures_could_have_is_nobodys(pets):
    mask(pets / "masks" / "1.png")
    mask(pets / "masks" / "3.png")
    masks = {sample.id: sample.mask is not None for sample in open_data(f"folder:{pets}")}
    assert masks == {"cat/1.jpg": False, "cat/2.jpg": False, "dog/1.jpg": False, "dog/3.jpg": True}


def test_a_class_called_masks_is_a_class(tmp_path):
    for name in ("masks/a.jpg", "faces/b.jpg"):
        picture(tmp_path / name)
    data = open_data(f"folder:{tmp_path}")
    assert data.classes == ("faces", "masks") and "masks" not in capabilities(data)


def test_a_mask_of_another_size_names_itself(pets):
    mask(pets / "masks" / "cat" / "1.png")
    Image.new("L", (5, 5)).save(pets / "masks" / "cat" / "1.png")
    with pytest.raises(BadImage):
        _ = open_data(f"folder:{pets}")[0]


def test_groups_are_classes_and_backgrounds(pets):
    lines = ["file,background", "cat/1.jpg,grass", "cat/2.jpg,sofa", "dog/1.jpg, grass"]
    (pets / "groups.csv").write_text("\n".join([*lines, "dog/3.jpg,grass"]))
    data = open_data(f"folder:{pets}")
    assert data.places == ("grass", "sofa") and "groups" in capabilities(data)
    assert [sample.group for sample in data] == [(0, 0), (0, 1), (1, 0), (1, 0)]
    before = data.fingerprint
    (pets / "groups.csv").write_text("\n".join([*lines, "dog/3.jpg,sofa"]))
    assert open_data(f"folder:{pets}").fingerprint != before


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("file,background\ncat/1.jpg,grass", "cat/2.jpg is not listed"),
        ("file,place\ncat/1.jpg,grass", "no column background"),
        ("file,background\ncat/1.jpg,", "names no background"),
        (
            "file,background\n../x.jpg,a\ncat/1.jpg,a\ncat/2.jpg,a\ndog/1.jpg,a\ndog/3.jpg,a",
            "../x.jpg is no picture here",
        ),
    ],
)
def test_a_wrong_list_of_groups_is_refused_in_words(pets, lines, words):
    (pets / "groups.csv").write_text(lines)
    with pytest.raises(DataMissing):
        open_data(f"folder:{pets}")


def test_a_plain_folder_where_data_are_expected_is_told_its_name(pets):
    with pytest.raises(BadOption, match=f"give folder:{pets}"):
        open_data(str(pets))


def test_trees_are_walked_for_pictures_and_not_for_masks(pets):
    mask(pets / "masks" / "cat" / "1.png")
    picture(pets / ".thumbs" / "9.jpg")
    files = [Path(name) for name in find_pictures([str(pets)])]
    assert [file.relative_to(pets).as_posix() for file in files] == [
        "cat/1.jpg",
        "cat/2.jpg",
        "dog/1.jpg",
        "dog/3.jpg",
    ]
    assert mask_of(files[0]) == pets / "masks" / "cat" / "1.png" and mask_of(files[1]) is None
    (pets / "empty").mkdir()
    with pytest.raises(BadImage, match="a folder without images"):
        find_pictures([str(pets / "empty")])


def test_an_audit_reads_masks_of_your_own(pets):
    """From a folder to what needs masks, without another word."""
    critters = sc.data.open_data("critters:clean:test", limit=4)
    root = pets.parent / "critters"
    for sample in critters:
        name = f"{critters.classes[sample.label]}/{sample.id.replace(':', '-')}.png"
        for folder in (root / name, root / "masks" / name):
            folder.parent.mkdir(parents=True, exist_ok=True)
        sc.data.to_pil(sample.image).save(root / name)
        Image.fromarray(sample.mask.numpy().astype(np.uint8) * 255).save(root / "masks" / name)
    model = sc.load("builtin:critters-vit")
    batch = sc.data.to_batch(model, list(open_data(f"folder:{root}")))
    assert batch.masks is not None and batch.masks.float().mean() > 0.02


@pytest.mark.parametrize("quality", [75, 90, 98])
def test_a_mask_saved_as_jpeg_does_not_grow(tmp_path, quality):
    exact = np.zeros((64, 64), bool)
    exact[13:45, 10:51] = True
    Image.fromarray(exact.astype(np.uint8) * 255).save(tmp_path / "m.jpg", quality=quality)
    assert (read_mask(tmp_path / "m.jpg").numpy() == exact).all()


@pytest.mark.parametrize("file", ["m.jpg", "m.png"])
def test_a_soft_mask_saved_in_colour_keeps_its_object(tmp_path, file):
    """Its brightness is read in bytes, of which twice 255 is 254."""
    exact = np.zeros((64, 64), np.uint8)
    exact[13:45, 10:51] = 255
    soft = Image.fromarray(exact).filter(ImageFilter.GaussianBlur(3))
    soft.convert("RGB").save(tmp_path / file)
    assert (read_mask(tmp_path / file).numpy() == (exact > 0)).mean() > 0.99


def test_the_fingerprint_of_pairs_knows_how_the_other_version_is_made(pets):
    data = open_data(f"folder:{pets}")
    changes = (lambda image: image.flip(0), lambda image: 1 - image, data)
    pairs = [sc.data.paired(data, change, name="pairs") for change in changes]
    assert len({pair.fingerprint for pair in (data, *pairs)}) == 4
    assert len({pair.digests(0, 1)[0] for pair in pairs}) == 3
    again = sc.data.paired(data, lambda image: 1 - image)
    assert again.fingerprint == pairs[1].fingerprint
