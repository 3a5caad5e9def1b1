"""The trace files of `ebbtide simulate`: jobs and demand, as CSV or gzipped CSV, checked row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from scheduler.documents.csv_table import Cells, CsvTable, TraceError, open_table
from scheduler.documents.job_dialects import dialect_of
from scheduler.documents.trace_rows import DemandRow, JobRow

__all__ = ["DemandRow", "JobRow", "TraceError", "read_demand", "read_jobs"]

DEMAND_COLUMNS = ("time_s", "pool")
DEMAND_AMOUNTS = ("gpus", "load")
WIDE_TIMES = ("time_s", "timestamp")


def read_jobs(path: Path, *, workload: str = "") -> tuple[JobRow, ...]:
    """The jobs of a trace in order of submission: in our format or as Muri, ElasticFlow, Pollux or Rubick wrote theirs.

    `workload` picks one of the workloads of a file that has several; empty takes them all, side by side.

    Raises:
        TraceError: the file cannot be read, has no such workload, or a row is refused.
    """
    table = open_table(path)
    dialect = dialect_of(table)
    if workload and not dialect.workload:
        raise TraceError(f"{path}: workload: got {workload!r}; allowed: none, the file is one workload")
    rows: list[JobRow] = []
    seen: dict[str, int] = {}
    last_s: dict[str, float] = {}
    for cells in table.rows:
        row, group = dialect.job(cells), cells.texts.get(dialect.workload, "")
        if row.job_id in seen:
            raise TraceError(
                f"{path} line {row.line}: job_id: got {row.job_id[:80]!r}; allowed: an id that no other row has "
                f"(line {seen[row.job_id]} has it)"
            )
        if row.submit_time_s < last_s.get(group, -math.inf):
            raise TraceError(
                f"{path} line {row.line}: submit_time_s: got '{row.submit_time_s:g}'; allowed: at least "
                f"{last_s[group]:g}, as in the row before: sort it"
            )
        seen[row.job_id], last_s[group] = row.line, row.submit_time_s
        if workload in ("", group):
            rows.append(row)
    if not rows:
        known = f"allowed: {', '.join(last_s)}" if last_s else "at least one job is needed"
        raise TraceError(f"{path}: has no rows{f' of workload {workload!r}' if workload else ''}; {known}")
    return tuple(sorted(rows, key=lambda row: row.submit_time_s))


def read_demand(path: Path) -> tuple[DemandRow, ...]:
    """The demand of every pool or series in a trace, each one's rows in ascending time.

    Our format has a row a time and pool. In the wide form every column beside `time_s` (or `timestamp`, of which the
    first counts as 0 s) is a series of load.

    Raises:
        TraceError: the file cannot be read, or a row is refused.
    """
    table = open_table(path)
    rows: list[DemandRow] = []
    last_s: dict[str, float] = {}
    for cells, row in _demand_rows(table):
        if row.time_s <= last_s.get(row.pool, -math.inf):
            allowed = f"above {last_s[row.pool]:g}, the time of pool {row.pool}'s row before: sorted, each time once"
            raise cells.refused(table.header[0] if row.shared else "time_s", allowed)
        last_s[row.pool] = row.time_s
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}: has no rows; at least one demand is needed")
    return tuple(rows)


def _demand_rows(table: CsvTable) -> Iterator[tuple[Cells, DemandRow]]:
    header = table.header
    ours = {"pool", *DEMAND_AMOUNTS} & {*header}
    if ours or len(header) < 2 or header[0] not in WIDE_TIMES:
        table.require(DEMAND_COLUMNS, DEMAND_AMOUNTS)
        for cells in table.rows:
            yield cells, _demand(cells)
        return
    time_s = _seconds if header[0] == "time_s" else _since_first()
    for cells in table.rows:
        at_s = time_s(cells)
        for name in header[1:]:
            yield cells, DemandRow(cells.line, at_s, name, cells.number(name), True, True, str(cells.path))


def _demand(cells: Cells) -> DemandRow:
    given = [name for name in DEMAND_AMOUNTS if cells.has(name)]
    if len(given) != 1:
        raise cells.refused("load" if given else "gpus", "either gpus or load, one of them in every row")
    amount, pool = cells.number(given[0]), cells.text("pool")
    return DemandRow(cells.line, cells.number("time_s"), pool, amount, given[0] == "load", path=str(cells.path))


def _seconds(cells: Cells) -> float:
    return cells.number("time_s")


def _since_first() -> Callable[[Cells], float]:
    """Seconds since the first timestamp that it is asked about. A timestamp without a zone is UTC."""
    first: list[datetime] = []

    def seconds(cells: Cells) -> float:
        try:
            at = datetime.fromisoformat(cells.texts["timestamp"])
        except ValueError:
            raise cells.refused("timestamp", "a time such as 2015-02-26 21:40:00") from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        if not first:
            first.append(at)
        return (at - first[0]).total_seconds()

    return seconds
