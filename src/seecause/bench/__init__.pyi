from seecause.bench.cells import Request as Request, prepare as prepare
from seecause.bench.tables import (
    Table as Table,
    read_results as read_results,
    run as run,
    status as status,
    table as table,
)
