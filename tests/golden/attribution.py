"""Attribution maps of every method, mosaic, evidence, interactions and patching."""

import seecause as sc
from seecause.attribution.registry import methods as known_methods
from tests.golden.record import Named, batch, golden, model

FEWER = {  # so that the expensive methods stay cheap
    "rise": {"masks": 64},
    "tis": {"masks": 32},
    "mda": {"candidates": 6},
    "integrated-gradients": {"steps": 8},
    "smoothgrad": {"samples": 6},
    "tam": {"steps": 6},
    "bt": {"steps": 6},
}
COSTLY = {"mda", "simple-insertion", "simple-deletion", "atman", "vit-cx", "mutex", "tis", "rise"}


def maps(dtype, names: set[str] | None, count: int) -> Named:
    view = model("critters-vit", dtype)
    images, labels, _ = batch("critters-vit", dtype)
    for name in sorted(known_methods()):
        if (name in COSTLY) if names is None else (name in names):
            found = sc.attribute(
                view, images[:count], labels[:count], method=name, **FEWER.get(name, {})
            )
            yield name, found.maps


@golden("attribution")
def methods(dtype) -> Named:
    """Maps of 8 images by the cheap methods."""
    yield "logits", model("critters-vit", dtype)(batch("critters-vit", dtype)[0])
    yield from maps(dtype, set(known_methods()) - COSTLY, 8)


@golden("attribution", slow=True)
def costly_methods(dtype) -> Named:
    """Maps of one image by methods that need many forwards."""
    yield from maps(dtype, COSTLY, 1)


CAAP = {
    "patched": {"tail": "patched"},
    "blank": {"tail": "blank", "score": "logit"},
    "all": {"tail": "all", "score": "logprob"},
    "delete": {"direction": "delete"},
    "layers": {"layers": (1, None), "blank": "mean"},
    "layers-patched": {"layers": (1, 4), "tail": "patched"},
    "e-caap": {"approx": "e-caap"},
}


@golden("attribution")
def caap_options(dtype) -> Named:
    view = model("critters-vit", dtype)
    images, labels, _ = batch("critters-vit", dtype)
    for name, options in CAAP.items():
        yield name, sc.attribute(view, images[:4], labels[:4], **options).maps
    both = sc.attribute(view, images[:4], (1, 2), tail="source", score="logit")
    yield "difference", both.maps


@golden("attribution")
def evidence(dtype) -> Named:
    images, labels, _ = batch("critters-vit", dtype)
    found = sc.evidence(model("critters-vit", dtype), images, labels, method="caap")
    yield "enough", found.enough.count
    yield "needed", found.needed.count
    yield "probability", found.probability


@golden("attribution")
def interactions(dtype) -> Named:
    images, labels, _ = batch("critters-vit", dtype)
    found = sc.interactions(model("critters-vit", dtype), images[:2], labels[:2], regions=4)
    yield "values", found.values
    yield "singles", found.singles


@golden("attribution")
def patching(dtype) -> Named:
    view = model("critters-vit", dtype)
    images, _, _ = batch("critters-vit", dtype)
    sites = [[sc.Site(3, "heads", heads=[1])], [sc.Site(2, "kv", tokens=[3, 4])], [sc.Site(1)]]
    for number, site in enumerate(sites):
        yield f"sites-{number}", sc.patch(view, images, images.flip(0), [site])
    yield "run", sc.run(view, images)[0]
