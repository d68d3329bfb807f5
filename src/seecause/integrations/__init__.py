"""Inside other tools: each file is imported on first use and asks for its package by name.

sc.integrations.captum        attribution classes for captum
sc.integrations.quantus       an `explain_func` for Quantus, which is not imported here
sc.integrations.torchmetrics  faithfulness with update, compute and reset
sc.integrations.loggers       maps and numbers to TensorBoard, MLflow or Weights & Biases
sc.integrations.fiftyone      heatmaps, flips and background shares in FiftyOne
sc.integrations.fiftyone_plugin  the same from FiftyOne's app
"""

from seecause._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
