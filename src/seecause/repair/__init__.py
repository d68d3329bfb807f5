"""From "it looks at the background" to a mended model, without a group label.

    eye = sc.eye("timm:NAME", model=model)      # masks of the object, from another network
    pictures = sc.heads.read_pictures(model, data)
    seen = eye.masks(pictures)                  # EyeMasks: masks [n, gh, gw], confidence [n]
    moved = sc.transplant(pictures.images, seen.masks, pictures.labels)
    for batch in moved.batches(64): ...         # the same objects on other backgrounds

`sc.eye`         masks of objects, by trust: given, another network's, the model's own
`sc.transplant`  objects on other pictures' backgrounds, made when they are asked for
`pairs`          two versions of a picture that should be answered alike, whatever they differ in:
               `pairs_of(model, data)` of data with a second version (`pairs:WITH:WITHOUT`,
               `sc.data.paired(data, change)`, Critters), `transplant_pairs(moved)`
`sc.discover`    kinds of patches that turn pictures into a class; their trials are pairs

    mended = sc.repair(model, data, eye=eye)    # remedies side by side, the best of them
    mended.before.flips, mended.after.flips; mended.export(folder)

`sc.audit`       does the model answer from the background? flips, FIG / BIG / BIR, a verdict
`sc.repair`      this package, and called, the repair itself (`_repair`)
"""

import sys
from types import ModuleType
from typing import Any

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)


class _Callable(ModuleType):
    """`sc.repair(...)`: Python makes a package an attribute of the one above it, so the function of
    the same name has to be the package, called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from seecause.repair._repair import repair

        return repair(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
