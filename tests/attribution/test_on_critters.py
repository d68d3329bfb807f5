"""What CAAP shows on the embedded models, where the truth is known."""

import torch

import seecause as sc
from seecause import critters
from seecause.metrics import localization, paired_difference

CONTROLS = ("random", "center", "sobel")


def scores(count, **options):
    """Localization of CAAP and the controls on test pictures of `clean`."""
    model = sc.load("builtin:critters-vit")
    latents = critters.draw("clean", "test", count, seed=5)
    picture = critters.render(latents)
    images = model.preprocess.normalise(picture.image)
    maps = {"caap": sc.attribute(model, images, latents.label, **options).maps}
    maps |= {name: sc.attribute(model, images, latents.label, name).maps for name in CONTROLS}
    return {name: localization(found, picture.mask) for name, found in maps.items()}


def in_errors(found, control, metric):
    gap = paired_difference(found["caap"][metric], found[control][metric])
    return gap.mean / gap.standard_error


def test_caap_finds_the_creature_better_than_controls():
    found = scores(64)
    for control in CONTROLS:
        assert in_errors(found, control, "aupr1") > 3
        assert in_errors(found, control, "pointing") > 3


def test_maps_of_the_biased_model_lie_more_on_the_background():
    latents = critters.draw("certified", "test", 32, seed=4)
    picture = critters.render(latents)
    share = {}
    for name in ("critters-vit", "critters-biased"):
        model = sc.load(f"builtin:{name}")
        maps = sc.attribute(model, model.preprocess.normalise(picture.image)).maps
        positive = (maps - maps.flatten(1).min(dim=1).values[:, None, None]).clamp_min(0)
        outside = torch.nn.functional.adaptive_avg_pool2d(
            (~picture.mask)[:, None].float(), maps.shape[1:]
        )[:, 0]
        share[name] = float(
            ((positive * outside).sum(dim=(1, 2)) / positive.sum(dim=(1, 2))).mean()
        )
    assert share["critters-biased"] > share["critters-vit"] + 0.1
