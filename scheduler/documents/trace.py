"""The trace files of `ebbtide simulate`: jobs and demand, as CSV or gzipped CSV, checked row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from scheduler.documents.csv_table import Cells, CsvTable, TraceError, open_table
from scheduler.documents.job_dialects import dialect_of
from scheduler.documents.trace_rows import DemandRow, JobRow

__all__ = ["DemandRow", "JobRow", "TraceError", "read_demand", "read_jobs"]

TIME_S_MAX = 10 * 365 * 86_400.0
"""No job is longer, and none comes later after the first: nobody would see the end of the simulation."""
DEMAND_COLUMNS = ("time_s", "pool")
DEMAND_AMOUNTS = ("gpus", "load")
_STEPS_MIN, _UNEVEN_SHARE = 4, 0.1
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
        _refuse_endless(row, rows[0].submit_time_s if rows else row.submit_time_s)
        if row.submit_time_s < last_s.get(group, -math.inf):
            raise TraceError(
                f"{path} line {row.line}: submit_time_s: got '{row.submit_time_s:g}'; allowed: at least "
                f"{last_s[group]:g}, as in the row before: sort it"
            )
        seen[row.job_id], last_s[group] = row.line, row.submit_time_s
        if workload in ("", group):
            rows.append(row)
    if not rows:
        if last_s:
            raise TraceError(f"{path}: workload: got {workload!r}; allowed: {', '.join(last_s)}")
        raise TraceError(f"{path} line 1: no row follows the header; at least one job is needed")
    return tuple(sorted(rows, key=lambda row: row.submit_time_s))


def _refuse_endless(row: JobRow, first_s: float) -> None:
    for field, value, most in (
        ("duration_s", row.duration_s, TIME_S_MAX),
        ("submit_time_s", row.submit_time_s, first_s + TIME_S_MAX),
    ):
        if value > most:
            allowed = f"at most {most:g}: no job is longer than ten years, and none comes later after the first"
            raise TraceError(f"{row.path} line {row.line}: {field}: got '{value:g}'; allowed: {allowed}")


def read_demand(path: Path) -> tuple[DemandRow, ...]:
    """The demand of every pool or series in a trace, each one's rows in ascending time.

    Our format has a row a time and pool. In the wide form every column beside `time_s` (or `timestamp`, of which the
    first counts as 0 s) is a series of load.

    Raises:
        TraceError: the file cannot be read, a row is refused, or one is missing between rows at equal distances.
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
        raise TraceError(f"{path} line 1: no row follows the header; at least one demand is needed")
    _refuse_gaps(rows)
    return tuple(rows)


def _refuse_gaps(rows: Iterable[DemandRow]) -> None:
    """Demand is a step function, told at any times. Where almost all are at equal distances it was sampled, though, and
    a longer step is a gap in the recording, of which nobody knows the demand."""
    by_pool: dict[str, list[DemandRow]] = {}
    for row in rows:
        by_pool.setdefault(row.pool, []).append(row)
    for one in by_pool.values():
        steps_s = [later.time_s - earlier.time_s for earlier, later in pairwise(one)]
        typical_s = median(steps_s) if len(steps_s) >= _STEPS_MIN else math.inf
        uneven = sum(not math.isclose(step_s, typical_s) for step_s in steps_s)
        if uneven > max(1.0, _UNEVEN_SHARE * len(steps_s)):
            continue
        for (before, row), step_s in zip(pairwise(one), steps_s, strict=True):
            if step_s > 1.5 * typical_s:
                allowed = f"{before.time_s + typical_s:g}, {typical_s:g} s after the row before like the others"
                raise TraceError(
                    f"{row.path} line {row.line}: time_s: got '{row.time_s:g}'; allowed: {allowed}: there is a gap in "
                    f"what was recorded of {row.pool}"
                )


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
