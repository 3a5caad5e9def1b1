"""Rows of job and demand traces, and the published trace formats, recognized by their header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.documents.csv_table import CsvRow, CsvTable


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job of a trace. It ran `duration_s` seconds on `gpus` GPUs and did `iterations` steps (0: not recorded).

    `model` names a model profile or a measured model. `application` is the model's name in a published trace; it has a
    curve only if a measured profile contains it. `duration_s` is 0 in a trace that records iterations only. `line` is
    the row's line in `path`. `deadline_s` is a time of the trace. `user` is the job's owner, in
    exports its id. `gpu` is the required GPU model, and `ran_on` the one that the job ran on in the trace (empty: not
    recorded).
    """

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
    iterations: int = 0
    application: str = ""
    sequence_length: int = 0
    user: str = ""
    ran_on: str = ""
    path: str = field(default="jobs", compare=False)


@dataclass(frozen=True, slots=True)
class DemandRow:
    """Demand of a pool from `time_s` on: a number of GPUs, or if `is_load`, any unit of load.

    `pool` is a pool's name, or a series that the cluster file assigns to a pool. A `shared` row belongs to a file with
    many series: no pool has to use it, and zeros are times without load, not gaps in the recording.
    """

    line: int
    time_s: float
    pool: str
    amount: float
    is_load: bool
    shared: bool = False
    path: str = field(default="demand", compare=False)


JOB_COLUMNS = ("job_id", "submit_time_s", "duration_s", "gpus")
JOB_OPTIONAL_COLUMNS = (
    *("min_gpus", "max_gpus", "model", "global_batch", "sequence_length", "iterations"),
    *("priority", "queue", "user", "deadline_s", "gpu", "ran_on"),
)

POLLUX_ITERATIONS = {
    ("bert", 384): 480,
    ("cifar10", 2048): 3_178,
    ("cifar10", 4096): 2_011,
    ("deepspeech2", 320): 2_264,
    ("deepspeech2", 640): 1_423,
    ("imagenet", 3200): 42_123,
    ("imagenet", 6400): 23_972,
    ("ncf", 32768): 1_548,
    ("yolov3", 64): 14_577,
}
"""Iterations until convergence, by application and global batch.

Source: petuum/adaptdl, branch osdi21-artifact, simulator/traces/<application>/validation-<batch>.csv, last epoch. The
jobs of ElasticFlow's figure 8a have the same numbers."""

RUBICK_BATCHES = {"bert": 32, "gpt2": 16, "llama30": 4, "llama7": 8, "roberta": 64, "t5": 16, "vit": 64}
"""Samples per step. Source: AlibabaPAI/reconfigurable-dl-scheduler, sched/models."""


@dataclass(frozen=True, slots=True)
class JobDialect:
    """A trace format with exactly these columns. `workload_column` divides a file into workloads."""

    columns: tuple[str, ...]
    parse_row: Callable[[CsvRow], JobRow]
    workload_column: str = ""


def detect_dialect(table: CsvTable) -> JobDialect:
    """Return the format with the table's columns, in any order. The default is Ebbtide's own format.

    Raises:
        TraceError: a column of Ebbtide's format is missing or unknown.
    """
    for dialect in _EXTERNAL_DIALECTS:
        if set(dialect.columns) == set(table.header):
            return dialect
    table.check_columns(JOB_COLUMNS, JOB_OPTIONAL_COLUMNS)
    return JobDialect(table.header, _parse_ebbtide_job)


def _parse_ebbtide_job(row: CsvRow) -> JobRow:
    gpus = row.integer("gpus", minimum=1)
    low = row.integer("min_gpus", minimum=1) if row.has("min_gpus") else None
    high = row.integer("max_gpus", minimum=1) if row.has("max_gpus") else None
    if low is not None and low > (high if high is not None else gpus):
        raise row.cell_error("min_gpus", f"at most max_gpus, which is {high if high is not None else gpus}")
    if high is not None and high < (low if low is not None else gpus):
        raise row.cell_error("max_gpus", f"at least min_gpus, which is {low if low is not None else gpus}")
    if row.has("model") and not row.has("global_batch"):
        raise row.cell_error("global_batch", "an integer, 1 or more; a job with a model requires it")
    return JobRow(
        line=row.line,
        job_id=row.text("job_id"),
        submit_time_s=row.number("submit_time_s"),
        duration_s=row.number("duration_s", above=0),
        gpus=gpus,
        min_gpus=low,
        max_gpus=high,
        model=row.texts.get("model", ""),
        global_batch=row.integer("global_batch", minimum=1) if row.has("global_batch") else 0,
        priority=row.integer("priority", minimum=-1000) if row.has("priority") else 0,
        queue=row.texts.get("queue") or "default",
        user=row.texts.get("user", ""),
        deadline_s=_parse_deadline_s(row) if row.has("deadline_s") else None,
        gpu=row.texts.get("gpu", ""),
        ran_on=row.texts.get("ran_on", ""),
        iterations=row.integer("iterations", minimum=0) if row.has("iterations") else 0,
        sequence_length=row.integer("sequence_length", minimum=0) if row.has("sequence_length") else 0,
        path=str(row.path),
    )


def _parse_muri_job(row: CsvRow) -> JobRow:
    """Parse a row of Rivendile/Muri.

    Its `priority` (0 guaranteed, 1 opportunistic, drawn evenly) applies to its AntMan baseline only and is ignored.
    """
    row.integer("priority", minimum=0)
    return JobRow(
        line=row.line,
        job_id=row.text("job_id"),
        submit_time_s=row.number("submit_time_s"),
        duration_s=row.number("duration_s", above=0),
        gpus=row.integer("gpus", minimum=1),
        global_batch=row.integer("batch_size", minimum=1),
        iterations=row.integer("iterations", minimum=1),
        application=row.text("model"),
        path=str(row.path),
    )


def _parse_elasticflow_job(row: CsvRow) -> JobRow:
    """Parse a row of pkusys/ElasticFlow. `deadline_s` is a time of the trace."""
    return JobRow(
        line=row.line,
        job_id=row.text("job_id"),
        submit_time_s=row.number("submit_time_s"),
        duration_s=row.number("duration_s", above=0),
        gpus=row.integer("gpus", minimum=1),
        global_batch=row.integer("batch_size", minimum=1),
        deadline_s=_parse_deadline_s(row),
        iterations=row.integer("iterations", minimum=1),
        application=row.text("model"),
        path=str(row.path),
    )


def _parse_pollux_job(row: CsvRow) -> JobRow:
    """Parse a row of petuum/adaptdl. Run times follow from the iterations and a measured profile."""
    application, batch = row.text("application"), row.integer("batch_size", minimum=1)
    if (application, batch) not in POLLUX_ITERATIONS:
        known = ", ".join(f"{name} at {size}" for name, size in POLLUX_ITERATIONS)
        raise row.cell_error("application", f"one with known iterations at batch {batch}: {known}")
    return JobRow(
        line=row.line,
        job_id=f"{row.text('workload')}-{row.text('name')}",
        submit_time_s=row.number("submit_time_s"),
        duration_s=0.0,
        gpus=row.integer("num_gpu_user", minimum=1),
        global_batch=batch,
        iterations=POLLUX_ITERATIONS[application, batch],
        application=application,
        path=str(row.path),
    )


def _parse_rubick_job(row: CsvRow) -> JobRow:
    """Parse a row of AlibabaPAI/reconfigurable-dl-scheduler.

    A job with a service level (`is_sla`) belongs to queue `sla`. Its plan, CPUs and bandwidth are ignored, because a
    job runs under the best plan for its placement.
    """
    application = row.text("application")
    if application not in RUBICK_BATCHES:
        raise row.cell_error("application", f"one of {', '.join(RUBICK_BATCHES)}")
    return JobRow(
        line=row.line,
        job_id=row.text("name"),
        submit_time_s=row.number("submission_time"),
        duration_s=row.number("duration", above=0),
        gpus=row.integer("num_gpus", minimum=1),
        global_batch=RUBICK_BATCHES[application],
        queue="sla" if row.integer("is_sla", minimum=0) else "default",
        iterations=row.integer("steps", minimum=1),
        application=application,
        path=str(row.path),
    )


def _parse_deadline_s(row: CsvRow) -> float:
    submit_time_s, deadline_s = row.number("submit_time_s"), row.number("deadline_s")
    if deadline_s <= submit_time_s:
        raise row.cell_error("deadline_s", f"above submit_time_s, which is {submit_time_s:g}")
    return deadline_s


_EXTERNAL_DIALECTS = (
    JobDialect((*JOB_COLUMNS, "model", "batch_size", "iterations", "priority"), _parse_muri_job),
    JobDialect((*JOB_COLUMNS, "model", "batch_size", "iterations", "deadline_s"), _parse_elasticflow_job),
    JobDialect(
        ("workload", "name", "submit_time_s", "application", "num_gpu_user", "batch_size"),
        _parse_pollux_job,
        "workload",
    ),
    JobDialect(
        (
            *("name", "submission_time", "duration", "application", "num_gpus", "num_cpus"),
            *("bandwidth", "exec_plan", "steps", "is_sla"),
        ),
        _parse_rubick_job,
    ),
)
