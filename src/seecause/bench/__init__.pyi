from seecause.bench.cells import Request as Request, prepare as prepare
from seecause.bench.runner import Status as Status, run as run, status as status
from seecause.bench.tables import (
    Results as Results,
    Table as Table,
    read_results as read_results,
    table as table,
)
