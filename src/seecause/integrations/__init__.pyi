from . import (
    captum as captum,
    fiftyone as fiftyone,
    loggers as loggers,
    quantus as quantus,
    torchmetrics as torchmetrics,
)
