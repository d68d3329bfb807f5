"""A CUB folder with bright squares for birds: every key point sits at its own place of the square,
which moves in a box that does not."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from seecause.data.batch import to_batch
from seecause.data.dataset import open_data
from seecause.faithful import IFAM
from tests.faithful.nets import tiny_net
from tests.files import lines

KINDS = ("001.Albatross", "002.Sparrow")
POINTS = 15
SIDE = 20  # of a square, in pixels


def tiny_cub(root: Path, *, each: int = 14, tested: int = 4, visible: bool = True) -> Path:
    """`each` photos of 48 x 40 pixels for each class, the last `tested` of them for testing; the
    Waterbirds folder has the same birds, elsewhere in colour."""
    names = [f"{kind}/{number}.jpg" for kind in KINDS for number in range(each)]
    ids = [str(number + 1) for number in range(len(names))]
    corners = [(4 + 3 * (n % 7), 2 + 4 * (n % 4)) for n in range(len(names))]
    lines(root / "classes.txt", *(f"{number + 1} {kind}" for number, kind in enumerate(KINDS)))
    lines(root / "images.txt", *(f"{i} {name}" for i, name in zip(ids, names, strict=True)))
    lines(root / "image_class_labels.txt", *(f"{i} {1 + n // each}" for n, i in enumerate(ids)))
    lines(
        root / "train_test_split.txt",
        *(f"{i} {int(n % each < each - tested)}" for n, i in enumerate(ids)),
    )
    lines(root / "bounding_boxes.txt", *(f"{i} 2.0 1.0 44.0 38.0" for i in ids))
    marks = [
        f"{i} {part} {x + part}.0 {y + (3 * part) % SIDE}.0"
        f" {int(visible and (int(i) + part) % 5 != 0)}"
        for i, (x, y) in zip(ids, corners, strict=True)
        for part in range(1, POINTS + 1)
    ]
    lines(root / "parts" / "part_locs.txt", *marks)
    draw = np.random.default_rng(0)
    for folder, brightest in (
        (root / "images", 60),
        (root / "waterbird_complete95_forest2water2", 160),
    ):
        for name, (x, y) in zip(names, corners, strict=True):
            pixels = draw.integers(0, brightest, (40, 48, 3), dtype=np.uint8)
            pixels[y : y + SIDE, x : x + SIDE] = 255
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / name, format="PNG")
    return root


@torch.no_grad()
def bird_net(root: Path) -> IFAM:
    """Three parts and a background that split the photos: prototypes are tokens of one of them, on
    the bird and off it."""
    net = tiny_net(classes=KINDS)
    result = net.stage1.tower.features(to_batch(net, [open_data(f"cub:{root}:train")[0]]).images)[0]
    net.stage1.prototypes.copy_(
        result[[7, 8, 14, 29]]
    )  # of a 5 x 6 grid; the bird covers rows 0-2 and columns 0-2
    return net
