from .cells import Request as Request, prepare as prepare
from .tables import (
    Table as Table,
    read_results as read_results,
    run as run,
    status as status,
    table as table,
)
