from . import (
    captum as captum,
    fiftyone as fiftyone,
    fiftyone_plugin as fiftyone_plugin,
    loggers as loggers,
    quantus as quantus,
    torchmetrics as torchmetrics,
)
