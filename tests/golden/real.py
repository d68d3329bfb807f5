"""A real ViT-Ti on two photographs. Needs SEECAUSE_REAL: a folder with the weights of timm's
vit_tiny_patch16_224 and with photographs of Oxford Pets."""

from functools import cache

import seecause as sc
from tests.golden.record import DEVICE, REAL, Named, golden

METHODS = {
    "caap": {},
    "mosaic": {},
    "gae": {},
    "rollout": {},
    "grad-cam": {},
    "libra-ixg+": {},
    "t-attr": {},
    "integrated-gradients": {"steps": 4},
}


@cache
def setting(dtype):
    weights = REAL / "vit_tiny_patch16_224.safetensors"
    view = sc.load("timm:vit_tiny_patch16_224", weights=weights, device=DEVICE, dtype=dtype)
    pets = sc.data.open_data(f"pets:{REAL / 'pets_small'}", limit=2)
    return view, *sc.data.to_batch(view, [pets[0], pets[1]])


@golden("real", slow=True)
def photographs(dtype) -> Named:
    view, images, _, masks = setting(dtype)
    target = view(images).argmax(dim=1)
    yield "logits", view(images)
    for name, options in METHODS.items():
        found = sc.attribute(view, images, target, method=name, **options).maps
        yield name, found
        if name in ("caap", "mosaic"):
            yield f"{name}/aupr1", sc.metrics.localization(found, masks).aupr1
            curves = sc.metrics.insertion_deletion(view, images, found, target, steps=8)
            yield f"{name}/insertion", curves.insertion
    data = sc.background.LabelledImages(images, masks=masks == 1)
    yield "scores", sc.background.score(view, data, heads=[(3, 1), (11, 2)]).value
