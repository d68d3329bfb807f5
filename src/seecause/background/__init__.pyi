from seecause.background.audit import (
    BackgroundAudit as BackgroundAudit,
    missed_limits as missed_limits,
    verdict_of as verdict_of,
)
from seecause.background.discover import Discovery as Discovery, Finding as Finding
from seecause.background.erase import erase as erase
from seecause.background.gains import Gains as Gains, information_gains as information_gains
from seecause.background.gating import Gating as Gating, head_gates as head_gates
from seecause.background.heads import (
    HeadScores as HeadScores,
    ablate as ablate,
    above_noise as above_noise,
    penalised as penalised,
    protected as protected,
    random_sets as random_sets,
    select as select,
    selector as selector,
    selectors as selectors,
)
from seecause.background.images import (
    LabelledImages as LabelledImages,
    Masks as Masks,
    correct_images as correct_images,
    read_images as read_images,
)
from seecause.background.last_layer import (
    LastLayer as LastLayer,
    new_layer as new_layer,
    retrain_last_layer as retrain_last_layer,
)
from seecause.background.masks import discover_masks as discover_masks, iou as iou
from seecause.background.objects import object_masks as object_masks, otsu as otsu
from seecause.background.prune import (
    Curve as Curve,
    Examples as Examples,
    Outcome as Outcome,
    PruneResult as PruneResult,
    ScoredHeads as ScoredHeads,
    background_gaps as background_gaps,
    curve as curve,
    divprune as divprune,
    examples as examples,
    export as export,
    outcomes as outcomes,
    prune_and_test as prune_and_test,
    prune_heads as prune_heads,
    score_heads as score_heads,
)
from seecause.background.repair import (
    REMEDIES as REMEDIES,
    Remedy as Remedy,
    Repair as Repair,
    Repaired as Repaired,
    Splits as Splits,
)
from seecause.background.scoring import (
    Greedy as Greedy,
    Interchange as Interchange,
    greedy as greedy,
    interchange as interchange,
    mediated as mediated,
    score as score,
)
from seecause.background.screening import (
    Screened as Screened,
    first_order as first_order,
    screen as screen,
    second_order as second_order,
)
from seecause.background.transplant import Versions as Versions
