"""Every kind of image is read right, and every bad file is one clear line that names it."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets.folder import pil_loader

from seecause.data.dataset import default_workers, find_images, open_image, read_image
from seecause.errors import BadImage, BadOption
from seecause.models import preprocess
from seecause.models.preprocess import ALPHA, EXIF
from tests.bad_files import REASONS, bad_file, write_huge_header


@pytest.fixture
def photo() -> Image.Image:
    """Red on the left, blue on the right, 40 x 24."""
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:, :20, 0] = pixels[:, 20:, 2] = 255
    return Image.fromarray(pixels)


def colours(image: Image.Image) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The middle of the left and of the right half."""
    assert image.mode == "RGB"
    return tuple(image.getpixel((image.width // 4, image.height // 2))), tuple(
        image.getpixel((3 * image.width // 4, image.height // 2))
    )


def near(seen: tuple[int, ...], expected: tuple[int, ...], by: int = 12) -> bool:
    return all(abs(a - b) <= by for a, b in zip(seen, expected, strict=True))


RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("RGB", "a.png"),
        ("RGB", "a.jpg"),
        ("CMYK", "a.jpg"),
        ("P", "a.gif"),
        ("RGBA", "a.png"),
        ("RGB", "a.webp"),
    ],
)
def test_colour_survives_every_mode(tmp_path, photo, mode, name):
    photo.convert(mode).save(tmp_path / name)
    left, right = colours(read_image(tmp_path / name))
    assert near(left, RED) and near(right, BLUE)


def test_sixteen_bit_grey_keeps_its_steps(tmp_path):
    ramp = np.tile(np.linspace(0, 65535, 32).astype(np.uint16), (8, 1))
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    read = np.asarray(read_image(tmp_path / "deep.png"))[0, :, 0]
    assert read[0] == 0 and read[-1] == 255 and (np.diff(read.astype(int)) > 0).all()


def test_other_images_become_rgb_and_on_white_if_asked(tmp_path, photo, monkeypatch):
    for mode in ("L", "1"):
        photo.convert(mode).save(tmp_path / f"{mode}.png")
        assert read_image(tmp_path / f"{mode}.png").mode == "RGB"
    palette = photo.convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    palette.save(tmp_path / "clear.png", transparency=palette.getpixel((5, 5)))
    Image.new("RGBA", (8, 8), (0, 0, 0, 128)).save(tmp_path / "half.png")
    for name in ("clear.png", "half.png"):  # torchvision's ImageFolder reads the hidden colours
        folder = np.asarray(pil_loader(str(tmp_path / name)))
        assert (np.asarray(read_image(tmp_path / name)) == folder).all()
    monkeypatch.setenv(ALPHA, "1")
    left, right = colours(read_image(tmp_path / "clear.png"))
    assert left == (255, 255, 255) and near(right, BLUE)
    assert near(colours(read_image(tmp_path / "half.png"))[0], (127, 127, 127), by=1)
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert near(colours(read_image(tmp_path / "moving.gif"))[0], RED)


def test_exif_rotation_is_applied_if_asked_and_mentioned_otherwise(
    tmp_path, photo, monkeypatch, caplog
):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side: turn clockwise to see it
    photo.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    monkeypatch.setattr(preprocess, "_MENTIONED", set())
    lying = [np.asarray(read_image(tmp_path / "turned.jpg")) for _ in range(2)]
    assert (lying[0] == np.asarray(pil_loader(str(tmp_path / "turned.jpg")))).all()
    assert caplog.text.count("--input exif=true") == 1
    monkeypatch.setenv(EXIF, "1")
    upright = read_image(tmp_path / "turned.jpg")
    assert upright.size == (24, 40)
    assert near(upright.getpixel((12, 5)), RED) and near(upright.getpixel((12, 35)), BLUE)


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
def test_a_bad_file_is_one_line_with_its_name(tmp_path, kind, reason):
    path = bad_file(tmp_path, kind)
    with pytest.raises(BadImage, match=reason) as caught:
        read_image(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_huge_picture_is_refused_before_it_takes_memory(tmp_path):
    write_huge_header(tmp_path / "bomb.png")
    tracemalloc.start()
    with pytest.raises(BadImage):
        read_image(tmp_path / "bomb.png")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_folders_and_globs_are_expanded_in_order_and_once(tmp_path, photo):
    for name in ("b.png", "a.JPG", "notes.txt"):
        photo.save(tmp_path / name, format="PNG")
    (tmp_path / "sub").mkdir()
    photo.save(tmp_path / "sub" / "c.png")
    (tmp_path / "d.HEIC").write_bytes(b"ftypheic")  # listed, so that it is reported
    found = find_images([tmp_path / "b.png", tmp_path, str(tmp_path / "*.png"), "critters:clean#1"])
    assert [Path(name).name for name in found] == ["b.png", "a.JPG", "d.HEIC", "critters:clean#1"]


def test_nothing_found_is_an_error(tmp_path):
    with pytest.raises(BadImage, match="without images"):
        find_images([tmp_path])
    with pytest.raises(BadImage, match="no file matches"):
        find_images([tmp_path / "*.png"])
    with pytest.raises(BadImage, match="no such file"):
        find_images([tmp_path / "missing.png"])
    for text in ("critters:clean", "critters:clean#a"):
        with pytest.raises(BadOption, match="critters:clean#0"):
            find_images([text])
    with pytest.raises(BadOption, match="an index below 512"):
        open_image("critters:clean#512")


@pytest.mark.parametrize("kind", ["EPS", "DDS", "AVIF", "TGA", "PCX", "ICO", "JPEG2000", "PDF"])
def test_rare_formats_are_refused_whatever_their_name(tmp_path, kind):
    path = tmp_path / "rare.png"
    try:
        Image.new("RGB", (16, 16), "red").save(path, format=kind)
    except (KeyError, OSError):
        pytest.skip(f"this pillow cannot write {kind}")
    with pytest.raises(BadImage, match="not an image"):
        read_image(path)


def test_a_number_of_workers_that_is_none_is_one_line(monkeypatch):
    monkeypatch.setenv("SEECAUSE_WORKERS", "many")
    with pytest.raises(BadOption, match="SEECAUSE_WORKERS"):
        default_workers(10)
