from . import (
    captum as captum,
    loggers as loggers,
    quantus as quantus,
    torchmetrics as torchmetrics,
)
