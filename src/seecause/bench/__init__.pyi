from seecause.bench.pieces import resumable as resumable
from seecause.bench.plan import Plan as Plan, Request as Request, Store as Store
from seecause.bench.runner import Status as Status, prepare as prepare, run as run, status as status
from seecause.bench.store import ShardStore as ShardStore
from seecause.bench.tables import Table as Table, table as table
from seecause.bench.workers import Workers as Workers
