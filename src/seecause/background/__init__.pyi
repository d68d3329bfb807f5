from ._export import export as export, prune_heads as prune_heads
from .audit import missed_limits as missed_limits
from .gains import erase as erase, information_gains as information_gains
from .heads import (
    HeadScores as HeadScores,
    ablate as ablate,
    divprune as divprune,
    penalised as penalised,
    prune_and_test as prune_and_test,
    score_heads as score_heads,
    select as select,
    selector as selector,
    selectors as selectors,
)
from .images import (
    LabelledImages as LabelledImages,
    Masks as Masks,
    read_images as read_images,
)
from .masks import (
    discover_masks as discover_masks,
    object_masks as object_masks,
)
from .repair import REMEDIES as REMEDIES
from .scoring import (
    interchange as interchange,
    mediated as mediated,
    score as score,
    screen as screen,
)
