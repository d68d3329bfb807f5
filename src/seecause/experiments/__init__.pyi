from seecause.experiments.base import (
    Experiment as Experiment,
    experiment as experiment,
    experiments as experiments,
    find_experiment as find_experiment,
    read_table as read_table,
    run as run,
)
