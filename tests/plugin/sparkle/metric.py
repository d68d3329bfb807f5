"""A metric of its own: does the highest patch lie on the object?"""

import torch.nn.functional as F

from seecause.metrics import higher, metric


@metric("on-sparkle", columns={"on-sparkle": higher("share of maps whose peak is on the object")})
def on_sparkle(maps, masks, *, floor: float = 0.5):
    """[B]: 1 where the patch of the peak is covered by the object."""
    covered = F.adaptive_avg_pool2d((masks == 1).double(), maps.shape[1:]).flatten(1)
    peak = maps.flatten(1).argmax(dim=1, keepdim=True).to(covered.device)
    return (covered.gather(1, peak)[:, 0] > floor).double().cpu()
