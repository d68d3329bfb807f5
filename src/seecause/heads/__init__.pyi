from seecause.heads._audit import Audit as Audit, audit as audit
from seecause.heads._export import export as export, prune as prune
from seecause.heads._interchange import (
    Interchange as Interchange,
    interchange as interchange,
    mediated as mediated,
)
from seecause.heads._outcomes import (
    Curve as Curve,
    Examples as Examples,
    Outcome as Outcome,
    curve as curve,
    examples as examples,
    outcomes as outcomes,
)
from seecause.heads._pruning import (
    Background as Background,
    PruneResult as PruneResult,
    ScoredHeads as ScoredHeads,
    prune_and_test as prune_and_test,
    score_heads as score_heads,
)
from seecause.heads._score import score as score
from seecause.heads._screen import (
    Screened as Screened,
    first_order as first_order,
    screen as screen,
    second_order as second_order,
)
from seecause.heads.baselines import divprune as divprune, retrain_last_layer as retrain_last_layer
from seecause.heads.cigma import (
    Greedy as Greedy,
    Screening as Screening,
    additivity as additivity,
    greedy as greedy,
    joint_effect as joint_effect,
    regress as regress,
)
from seecause.heads.erase import Erasure as Erasure, Masks as Masks, Swapped as Swapped
from seecause.heads.gains import Gains as Gains, information_gains as information_gains
from seecause.heads.gating import Gating as Gating, head_gates as head_gates
from seecause.heads.masks import discover_masks as discover_masks, iou as iou
from seecause.heads.pictures import (
    AnswerSampling as AnswerSampling,
    Pictures as Pictures,
    answered_right as answered_right,
    read_pictures as read_pictures,
)
from seecause.heads.scores import (
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
from seecause.heads.studies import StudyTable as StudyTable, ablation_study as ablation_study
