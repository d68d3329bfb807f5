"""A method of its own: how much brighter is a patch than the picture?"""

import torch.nn.functional as F

from seecause.attribution.registry import Maps, method


@method("sparkle", forwards="0", needs="logits", class_specific=False)
def sparkle(model, images, target, *, power: float = 1.0):
    """Brightness of each patch above the mean."""
    bright = F.avg_pool2d(images.mean(dim=1, keepdim=True), model.patch).flatten(1)  # [B, N]
    return Maps((bright - bright.mean(dim=1, keepdim=True)).clamp(min=0) ** power, target)
