from seecause.faithful.evaluation import evaluate as evaluate, open_network as open_network
from seecause.faithful.interventions import (
    calibrate as calibrate,
    intervene as intervene,
    leave_one_out as leave_one_out,
)
from seecause.faithful.losses import LossWeights as LossWeights
from seecause.faithful.net import (
    IFAM as IFAM,
    IFAMOptions as IFAMOptions,
    Intervention as Intervention,
    load as load,
)
from seecause.faithful.training import TrainConfig as TrainConfig, train as train
