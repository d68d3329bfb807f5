from seecause.background._export import export as export, prune_heads as prune_heads
from seecause.background._heads_audit import Audit as Audit, heads_audit as heads_audit
from seecause.background._interchange import (
    Interchange as Interchange,
    interchange as interchange,
    mediated as mediated,
)
from seecause.background._outcomes import (
    Curve as Curve,
    Examples as Examples,
    Outcome as Outcome,
    curve as curve,
    examples as examples,
    outcomes as outcomes,
)
from seecause.background._remedies import (
    Lesson as Lesson,
    Mended as Mended,
    remedies as remedies,
    remedy as remedy,
)
from seecause.background._score import score as score
from seecause.background._screen import (
    Screened as Screened,
    first_order as first_order,
    screen as screen,
    second_order as second_order,
)
from seecause.background.audit import (
    BackgroundAudit as BackgroundAudit,
    missed_limits as missed_limits,
    verdict_of as verdict_of,
)
from seecause.background.baselines import (
    divprune as divprune,
    retrain_last_layer as retrain_last_layer,
)
from seecause.background.cigma import (
    Greedy as Greedy,
    Screening as Screening,
    additivity as additivity,
    greedy as greedy,
    joint_effect as joint_effect,
    regress as regress,
)
from seecause.background.discover import Discovery as Discovery, Finding as Finding
from seecause.background.erase import Erasure as Erasure, Masks as Masks, Swapped as Swapped
from seecause.background.gains import Gains as Gains, information_gains as information_gains
from seecause.background.gating import Gating as Gating, head_gates as head_gates
from seecause.background.heads import (
    Head as Head,
    HeadScores as HeadScores,
    ablate as ablate,
    above_noise as above_noise,
    penalised as penalised,
    protected as protected,
    random_sets as random_sets,
    select as select,
    selectors as selectors,
)
from seecause.background.images import (
    AnswerSampling as AnswerSampling,
    Pictures as Pictures,
    answered_right as answered_right,
    read_pictures as read_pictures,
)
from seecause.background.last_layer import LastLayer as LastLayer, new_layer as new_layer
from seecause.background.masks import discover_masks as discover_masks, iou as iou
from seecause.background.objects import Eye as Eye, EyeMasks as EyeMasks, otsu as otsu
from seecause.background.prune import (
    Background as Background,
    PruneResult as PruneResult,
    ScoredHeads as ScoredHeads,
    prune_and_test as prune_and_test,
    score_heads as score_heads,
)
from seecause.background.result import Repair as Repair
from seecause.background.studies import StudyTable as StudyTable, ablation_study as ablation_study
from seecause.background.transplant import (
    Pairs as Pairs,
    Transplants as Transplants,
    pairs_of as pairs_of,
    transplant_pairs as transplant_pairs,
)
