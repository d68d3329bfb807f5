"""What surrounds a run: its processes, its logs and its folder."""

from __future__ import annotations

import pickle

from seecause.errors import ViewMismatch
from seecause.faithful.run import (
    CsvLog,
)
from tests.faithful.runs import table


def test_a_log_that_is_opened_again_keeps_the_rows_up_to_its_step(tmp_path):
    log = CsvLog(tmp_path / "log.csv", ("step", "total"))
    for step in (1, 2, 3):
        log.add({"step": step, "total": 0.5 * step})
    with log.path.open("a") as file:
        file.write("1")  # a row of step 12, say, that was cut short
    CsvLog(log.path, log.columns, step=2).add({"step": 3, "total": 9.0, "more": 1.0})
    values = [(row["step"], row["total"]) for row in table(log.path)]
    assert values == [("1", "0.5"), ("2", "1.0"), ("3", "9.0")]
    log.add({"step": 4, "total": 0.123456789})
    assert table(log.path)[-1] == {"step": "4", "total": "0.123457"}


def test_errors_survive_the_way_between_processes():
    error = ViewMismatch("probe", "block 3", "off by 1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ViewMismatch and str(again) == str(error) and again.where == "block 3"
