"""Photos of drawn animals in the layout of Oxford-IIIT Pet."""

import numpy as np
from PIL import Image


def drawn_pets(root):
    """Two breeds of discs (cats) and two of squares (dogs), on grey, with a border; one photo whose
    trimap has no animal."""
    for folder in ("images", "annotations/trimaps"):
        (root / folder).mkdir(parents=True)
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:40, :40]
    for split, each in (("trainval", 8), ("test", 3)):
        lines = []
        for breed, number in np.ndindex(4, each):
            name, species = f"breed{breed}_{split}{number}", 1 + breed // 2
            disc, square = np.hypot(x - 20, y - 18), np.maximum(abs(x - 20), abs(y - 18))
            far = disc if species == 1 else square
            ids = np.where(far < 10, 1, np.where(far < 13, 3, 2)).astype(np.uint8)
            pixels = np.where((far < 12)[..., None], generator.integers(60, 250, 3), 128)
            if (split, breed, number) == ("test", 3, 2):
                ids = np.full_like(ids, 2)
            Image.fromarray(ids).save(root / "annotations/trimaps" / f"{name}.png")
            Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{name}.jpg")
            lines.append(f"{name} {breed + 1} {species} 1")
        (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root
