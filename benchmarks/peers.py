"""Other libraries doing the work of one of our methods, each at the batch size that suits it best.
One that is not installed is left out.

captum is pure Python: for a machine that cannot install it, `pip install --no-deps --target
carry/site captum tqdm` elsewhere, bring the folder, and put it on PYTHONPATH. pytorch-grad-cam and
Quantus work through numpy and OpenCV and are compared on a CPU only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.timing import fastest

Run = Callable[[], object]


@dataclass(frozen=True)
class Entry:
    """Something to time. `whole` is how often the timed work fits into the usual work; `like` is
    our entry that does the same."""

    run: Run
    whole: float = 1.0
    like: str = ""


def captum(
    module: nn.Module, images: Tensor, classes: Tensor, *, copies: int, usual: int, sizes: list[int]
) -> dict[str, Callable[[], Entry]]:
    """Gradients with `copies` steps or samples (usually `usual`), and one patch removed at a time.
    Each entry, when made, tries `sizes` of pictures in one forward and keeps the fastest."""
    if _absent("captum.attr"):
        return {}
    from captum import attr

    # that it asks for gradients itself
    warnings.filterwarnings("ignore", "Input Tensor", UserWarning)
    where, batch, whole = images.device, len(images), usual / copies
    each = sorted({max(1, size // batch) for size in sizes})  # copies of the batch in one forward
    path, ablation = attr.IntegratedGradients(module), attr.FeatureAblation(module)
    saliency = attr.Saliency(lambda pictures: module(pictures.to(images.dtype)))
    noise = attr.NoiseTunnel(saliency)  # it draws float32
    patches = _patches(images.shape[-1], 16).to(where)

    def integrated(size: int) -> Run:
        return lambda: path.attribute(
            images, target=classes, n_steps=copies, internal_batch_size=size * batch
        )

    def smooth(size: int) -> Run:
        options = {"nt_samples": copies, "nt_samples_batch_size": min(size, copies)}
        return lambda: noise.attribute(images, target=classes, stdevs=0.3, **options)

    def removed(size: int) -> Run:
        return torch.no_grad()(
            lambda: ablation.attribute(
                images, target=classes, feature_mask=patches, perturbations_per_eval=size
            )
        )

    tried = each if images.is_cuda else each[-1:]  # a call takes minutes on a CPU
    return {
        "captum IntegratedGradients": lambda: Entry(
            integrated(fastest(integrated, each, where)), whole, "integrated-gradients"
        ),
        "captum NoiseTunnel(Saliency)": lambda: Entry(
            smooth(fastest(smooth, each, where)), whole, "smoothgrad"
        ),
        "captum FeatureAblation": lambda: Entry(
            removed(fastest(removed, tried, where)), like="simple-deletion (one patch)"
        ),
    }


def grad_cam(module: nn.Module, images: Tensor, classes: Tensor) -> dict[str, Callable[[], Entry]]:
    """pytorch-grad-cam with the ViT settings of its README. It also enlarges its maps to pixels."""
    if images.is_cuda or _absent("pytorch_grad_cam"):
        return {}
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    side = images.shape[-1] // 16
    layer = module.get_submodule("blocks")[-1].norm1  # type: ignore[index]

    def grid(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)

    def run() -> object:
        with GradCAM(
            model=module, target_layers=[layer], reshape_transform=grid
        ) as cam:  # its hooks slow every forward while they are there
            return cam(
                input_tensor=images, targets=[ClassifierOutputTarget(int(c)) for c in classes]
            )

    return {"pytorch-grad-cam GradCAM": lambda: Entry(run, like="grad-cam")}


def quantus_regions(
    module: nn.Module, images: Tensor, maps: Tensor, classes: Tensor, *, sizes: list[int]
) -> Run | None:
    """Region perturbation, most and least important first, of maps [B, n, n]: n * n steps each,
    with the fastest of `sizes` images in one forward."""
    if images.is_cuda or _absent("quantus"):
        return None
    import quantus

    cells, side = maps[0].numel(), images.shape[-1] // maps.shape[-1]
    pixels = maps.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, None].numpy()
    common = {
        "patch_size": side,
        "regions_evaluation": cells,
        "normalise": False,
        "perturb_baseline": 0.0,
        "disable_warnings": True,
    }
    metrics = [quantus.RegionPerturbation(order=order, **common) for order in ("morf", "lerf")]
    data = {
        "model": module,
        "x_batch": images.numpy(),
        "y_batch": classes.numpy(),
        "a_batch": pixels,
        "softmax": True,
        "device": "cpu",
    }

    def run(size: int) -> Run:
        return lambda: [np.array(metric(**data, batch_size=size)) for metric in metrics]

    return run(fastest(run, sizes, images.device))


@cache
def _absent(library: str) -> bool:
    """Whether a library cannot be used here; said once."""
    try:
        import_module(library)
    except ImportError as reason:
        print(f"{library} is left out: {reason}\n")
        return True
    return False


def _patches(side: int, patch: int) -> Tensor:
    """The patch each pixel belongs to, [1, 1, H, W]."""
    place = torch.arange(side) // patch
    return (place[:, None] * (side // patch) + place)[None, None]
