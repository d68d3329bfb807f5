from seecause.faithful.config import TrainConfig as TrainConfig, read_config as read_config
from seecause.faithful.evaluation import (
    Evaluation as Evaluation,
    TrainedNetwork as TrainedNetwork,
    evaluate as evaluate,
    evaluate_intervention as evaluate_intervention,
    example_parts as example_parts,
    open_network as open_network,
    part_examples as part_examples,
)
from seecause.faithful.interventions import (
    LeaveOneOut as LeaveOneOut,
    calibrate as calibrate,
    intervene as intervene,
    leave_one_out as leave_one_out,
)
from seecause.faithful.losses import (
    Affine as Affine,
    LossWeights as LossWeights,
    objective as objective,
    parameter_groups as parameter_groups,
)
from seecause.faithful.net import (
    IFAM as IFAM,
    IFAMOptions as IFAMOptions,
    IFAMOutput as IFAMOutput,
    Intervention as Intervention,
    Thresholds as Thresholds,
)
from seecause.faithful.parts import Noise as Noise
from seecause.faithful.run import load as load, open_run as open_run
from seecause.faithful.training import TrainResult as TrainResult, train as train
