"""The trace files of `ebbtide simulate`: JOBS and DEMAND, as CSV or gzipped CSV, checked row by row."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

JOB_COLUMNS = ("job_id", "submit_time_s", "duration_s", "gpus")
JOB_OPTIONAL = ("min_gpus", "max_gpus", "model", "global_batch", "priority", "queue", "deadline_s", "gpu")
DEMAND_COLUMNS = ("time_s", "pool")
DEMAND_AMOUNTS = ("gpus", "load")


class TraceError(ValueError):
    """A trace that is not what it should be; the message names the file, the line, the field, the value and
    what is allowed."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job of a trace: it ran `duration_s` seconds on `gpus` GPUs. `line` is where it stands in its file,
    `deadline_s` a time of the trace."""

    line: int
    job_id: str
    submit_time_s: float
    duration_s: float
    gpus: int
    min_gpus: int | None = None
    max_gpus: int | None = None
    model: str = ""
    global_batch: int = 0
    priority: int = 0
    queue: str = "default"
    deadline_s: float | None = None
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class DemandRow:
    """From `time_s` on the pool needs `amount`: GPUs where `is_load` is false, else any unit of load."""

    line: int
    time_s: float
    pool: str
    amount: float
    is_load: bool


def read_jobs(path: Path) -> tuple[JobRow, ...]:
    """The jobs of a trace, in order of submission.

    Raises:
        TraceError: the file cannot be read, or a row is refused.
    """
    rows: list[JobRow] = []
    seen: dict[str, int] = {}
    for cells in _rows(path, JOB_COLUMNS, JOB_OPTIONAL):
        row = _job(cells)
        if row.job_id in seen:
            raise cells.refused("job_id", f"an id that no other row has (line {seen[row.job_id]} has it)")
        if rows and row.submit_time_s < rows[-1].submit_time_s:
            raise cells.refused("submit_time_s", f"at least {rows[-1].submit_time_s:g}, as in the row before: sort it")
        seen[row.job_id] = row.line
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}: has no rows; at least one job is needed")
    return tuple(rows)


def read_demand(path: Path) -> tuple[DemandRow, ...]:
    """The demand of every pool in a trace, each pool's rows in ascending time.

    Raises:
        TraceError: the file cannot be read, or a row is refused.
    """
    rows: list[DemandRow] = []
    last_s: dict[str, float] = {}
    for cells in _rows(path, DEMAND_COLUMNS, DEMAND_AMOUNTS):
        row = _demand(cells)
        if row.time_s <= last_s.get(row.pool, -math.inf):
            allowed = f"above {last_s[row.pool]:g}, the time of pool {row.pool}'s row before: sorted, each time once"
            raise cells.refused("time_s", allowed)
        last_s[row.pool] = row.time_s
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}: has no rows; at least one demand is needed")
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Cells:
    """One row as text, with the place to name when something in it is wrong."""

    path: Path
    line: int
    texts: Mapping[str, str]

    def refused(self, field: str, allowed: str) -> TraceError:
        value = self.texts.get(field, "")
        return TraceError(f"{self.path} line {self.line}: {field}: got {value[:80]!r}; allowed: {allowed}")

    def has(self, field: str) -> bool:
        return bool(self.texts.get(field))

    def text(self, field: str) -> str:
        if not self.has(field):
            raise self.refused(field, "some text: the field is required")
        return self.texts[field]

    def number(self, field: str, *, above: float | None = None) -> float:
        form = "a finite number of at least 0" if above is None else f"a finite number above {above:g}"
        try:
            value = float(self.texts.get(field, ""))
        except ValueError:
            raise self.refused(field, form) from None
        if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
            raise self.refused(field, form)
        return value

    def whole(self, field: str, *, least: int) -> int:
        form = f"a whole number of at least {least}"
        try:
            value = int(self.texts.get(field, ""))
        except ValueError:
            raise self.refused(field, form) from None
        if value < least:
            raise self.refused(field, form)
        return value


def _job(cells: _Cells) -> JobRow:
    gpus = cells.whole("gpus", least=1)
    low = cells.whole("min_gpus", least=1) if cells.has("min_gpus") else None
    high = cells.whole("max_gpus", least=1) if cells.has("max_gpus") else None
    if low is not None and low > (high if high is not None else gpus):
        raise cells.refused("min_gpus", f"at most max_gpus, which is {high if high is not None else gpus}")
    if high is not None and high < (low if low is not None else gpus):
        raise cells.refused("max_gpus", f"at least min_gpus, which is {low if low is not None else gpus}")
    if cells.has("model") and not cells.has("global_batch"):
        raise cells.refused("global_batch", "a whole number of at least 1: a job with a model needs it")
    submit_time_s = cells.number("submit_time_s")
    deadline_s = cells.number("deadline_s") if cells.has("deadline_s") else None
    if deadline_s is not None and deadline_s <= submit_time_s:
        raise cells.refused("deadline_s", f"above submit_time_s, which is {submit_time_s:g}")
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=submit_time_s,
        duration_s=cells.number("duration_s", above=0),
        gpus=gpus,
        min_gpus=low,
        max_gpus=high,
        model=cells.texts.get("model", ""),
        global_batch=cells.whole("global_batch", least=1) if cells.has("global_batch") else 0,
        priority=cells.whole("priority", least=-1000) if cells.has("priority") else 0,
        queue=cells.texts.get("queue") or "default",
        deadline_s=deadline_s,
        gpu=cells.texts.get("gpu", ""),
    )


def _demand(cells: _Cells) -> DemandRow:
    given = [name for name in DEMAND_AMOUNTS if cells.has(name)]
    if len(given) != 1:
        raise cells.refused("load" if given else "gpus", "either gpus or load, one of them in every row")
    amount = cells.number(given[0])
    return DemandRow(cells.line, cells.number("time_s"), cells.text("pool"), amount, given[0] == "load")


def _rows(path: Path, required: Collection[str], optional: Collection[str]) -> Iterator[_Cells]:
    """Every row, its header checked. Blank lines are skipped."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", newline="") as text
        ):
            reader = csv.reader(text, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, required, optional)
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    raise TraceError(
                        f"{path} line {reader.line_num}: has {len(cells)} cells, allowed is {len(header)} as the header"
                    )
                yield _Cells(path, reader.line_num, dict(zip(header, map(str.strip, cells), strict=True)))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as wrong:
        raise TraceError(f"{path}: cannot be read: {wrong}") from None


def _check_header(path: Path, header: list[str], required: Collection[str], optional: Collection[str]) -> None:
    columns = ", ".join([*required, *optional])
    for name in required:
        if name not in header:
            raise TraceError(f"{path} line 1: column {name!r} is missing; allowed: {columns}")
    for at, name in enumerate(header):
        if name not in required and name not in optional:
            raise TraceError(f"{path} line 1: column {name!r} is unknown; allowed: {columns}")
        if name in header[:at]:
            raise TraceError(f"{path} line 1: column {name!r} stands there twice; each is allowed once")
