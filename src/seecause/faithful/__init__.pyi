from .evaluation import evaluate as evaluate, open_network as open_network
from .interventions import (
    calibrate as calibrate,
    intervene as intervene,
    leave_one_out as leave_one_out,
)
from .losses import LossWeights as LossWeights
from .net import (
    IFAM as IFAM,
    IFAMOptions as IFAMOptions,
    Intervention as Intervention,
    load as load,
)
from .training import TrainConfig as TrainConfig, train as train
