"""What insertion starts from: the picture, blurred.

rise       RISE's 11 x 11 kernel (Petsiuk et al. 2018): a point filtered with sigma 5 inside an 11 x
11 window whose borders reflect. The
           mass folds back, so it is nearly a box: 0.0077 to 0.0088. Zeros (the mean colour) beyond
           the edge of the normalised picture.
gaussian   the truncated Gaussian of the same size and sigma: 0.0044 to 0.0120. The picture is
reflected at its edge.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur as truncated_gaussian

from seecause.errors import BadOption

Blur = Literal["rise", "gaussian"]
WINDOW, SIGMA = 11, 5.0


def blurred(images: Tensor, blur: Blur = "rise") -> Tensor:
    """Normalised images [B, C, H, W], blurred in float32 or better, in their own dtype."""
    if blur not in get_args(Blur):
        raise BadOption("blur", blur, f"one of {', '.join(get_args(Blur))}")
    wide = images if images.dtype == torch.float64 else images.float()
    return (rise_blur if blur == "rise" else gaussian_blur)(wide).to(images.dtype)


def rise_kernel() -> Tensor:
    """[11, 11], float64; sums to one."""
    point = np.zeros((WINDOW, WINDOW))
    point[WINDOW // 2, WINDOW // 2] = 1
    return torch.from_numpy(gaussian_filter(point, SIGMA, mode="reflect"))


def rise_blur(images: Tensor) -> Tensor:
    """Each channel of [B, C, H, W] with RISE's kernel."""
    channels = images.shape[1]
    kernel = rise_kernel().to(images).expand(channels, 1, -1, -1)
    return F.conv2d(images, kernel, padding=WINDOW // 2, groups=channels)


def gaussian_blur(images: Tensor) -> Tensor:
    """Each channel of [B, C, H, W] with a truncated Gaussian."""
    return truncated_gaussian(images, [WINDOW, WINDOW], [SIGMA, SIGMA])
