from .base import (
    experiment as experiment,
    experiments as experiments,
    read_table as read_table,
    run as run,
)
