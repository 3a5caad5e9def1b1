"""What the rows of a trace say, whatever its columns are called.

Job traces as their publishers wrote them, each recognised by its header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.documents.csv_table import CsvRow, CsvTable


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job of a trace: it ran `duration_s` seconds on `gpus` GPUs and did `iterations` steps (0: not recorded).

    `model` names a preset of the solver or a measured model; `application` is the name that a trace of somebody else's
    gives, which has a curve only where a measured profile knows it. `duration_s` is 0 in a trace that gives
    iterations alone. `line` is where the row stands in `path`, `deadline_s` a time of the trace, `user` the
    job's owner.
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
    path: str = field(default="jobs", compare=False)


@dataclass(frozen=True, slots=True)
class DemandRow:
    """From `time_s` on the pool needs `amount`: GPUs where `is_load` is false, else any unit of load.

    `pool` is a pool's name, or a series that the cluster file gives to one. A `shared` row is of a file with many
    series: nobody has to take it, and its zeros are quiet times, not gaps in the recording.
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
    *("priority", "queue", "user", "deadline_s", "gpu"),
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
"""Iterations that each application needs to reach its goal at a global batch: petuum/adaptdl, branch osdi21-artifact,
simulator/traces/<application>/validation-<batch>.csv at the application's last epoch. The jobs of ElasticFlow's
figure 8a have the same numbers."""

RUBICK_BATCHES = {"bert": 32, "gpt2": 16, "llama30": 4, "llama7": 8, "roberta": 64, "t5": 16, "vit": 64}
"""Samples a step: AlibabaPAI/reconfigurable-dl-scheduler, sched/models."""


@dataclass(frozen=True, slots=True)
class JobDialect:
    """`columns` are all there are. `workload` is the column that splits a file into workloads of their own."""

    columns: tuple[str, ...]
    parse_row: Callable[[CsvRow], JobRow]
    workload_column: str = ""


def detect_dialect(table: CsvTable) -> JobDialect:
    """The dialect with the table's columns, in any order; ours where nobody else's fits.

    Raises:
        TraceError: it is to be ours, and a column is missing or unknown.
    """
    for dialect in _EXTERNAL_DIALECTS:
        if set(dialect.columns) == set(table.header):
            return dialect
    table.check_columns(JOB_COLUMNS, JOB_OPTIONAL_COLUMNS)
    return JobDialect(table.header, _parse_ebbtide_job)


def _parse_ebbtide_job(cells: CsvRow) -> JobRow:
    gpus = cells.integer("gpus", minimum=1)
    low = cells.integer("min_gpus", minimum=1) if cells.has("min_gpus") else None
    high = cells.integer("max_gpus", minimum=1) if cells.has("max_gpus") else None
    if low is not None and low > (high if high is not None else gpus):
        raise cells.cell_error("min_gpus", f"at most max_gpus, which is {high if high is not None else gpus}")
    if high is not None and high < (low if low is not None else gpus):
        raise cells.cell_error("max_gpus", f"at least min_gpus, which is {low if low is not None else gpus}")
    if cells.has("model") and not cells.has("global_batch"):
        raise cells.cell_error("global_batch", "a whole number of at least 1: a job with a model needs it")
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=cells.number("submit_time_s"),
        duration_s=cells.number("duration_s", above=0),
        gpus=gpus,
        min_gpus=low,
        max_gpus=high,
        model=cells.texts.get("model", ""),
        global_batch=cells.integer("global_batch", minimum=1) if cells.has("global_batch") else 0,
        priority=cells.integer("priority", minimum=-1000) if cells.has("priority") else 0,
        queue=cells.texts.get("queue") or "default",
        user=cells.texts.get("user", ""),
        deadline_s=_parse_deadline_s(cells) if cells.has("deadline_s") else None,
        gpu=cells.texts.get("gpu", ""),
        iterations=cells.integer("iterations", minimum=0) if cells.has("iterations") else 0,
        sequence_length=cells.integer("sequence_length", minimum=0) if cells.has("sequence_length") else 0,
        path=str(cells.path),
    )


def _parse_muri_job(cells: CsvRow) -> JobRow:
    """Rivendile/Muri. Its `priority` (0 guaranteed, 1 opportunistic, drawn evenly) is for its AntMan baseline alone, so
    it is none of ours."""
    cells.integer("priority", minimum=0)
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=cells.number("submit_time_s"),
        duration_s=cells.number("duration_s", above=0),
        gpus=cells.integer("gpus", minimum=1),
        global_batch=cells.integer("batch_size", minimum=1),
        iterations=cells.integer("iterations", minimum=1),
        application=cells.text("model"),
        path=str(cells.path),
    )


def _parse_elasticflow_job(cells: CsvRow) -> JobRow:
    """pkusys/ElasticFlow. `deadline_s` is a time of the trace, as ours."""
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=cells.number("submit_time_s"),
        duration_s=cells.number("duration_s", above=0),
        gpus=cells.integer("gpus", minimum=1),
        global_batch=cells.integer("batch_size", minimum=1),
        deadline_s=_parse_deadline_s(cells),
        iterations=cells.integer("iterations", minimum=1),
        application=cells.text("model"),
        path=str(cells.path),
    )


def _parse_pollux_job(cells: CsvRow) -> JobRow:
    """petuum/adaptdl. The trace knows no lengths: they are iterations at the curve of a measured profile."""
    application, batch = cells.text("application"), cells.integer("batch_size", minimum=1)
    if (application, batch) not in POLLUX_ITERATIONS:
        known = ", ".join(f"{name} at {size}" for name, size in POLLUX_ITERATIONS)
        raise cells.cell_error("application", f"one whose iterations at batch {batch} are known: {known}")
    return JobRow(
        line=cells.line,
        job_id=f"{cells.text('workload')}-{cells.text('name')}",
        submit_time_s=cells.number("submit_time_s"),
        duration_s=0.0,
        gpus=cells.integer("num_gpu_user", minimum=1),
        global_batch=batch,
        iterations=POLLUX_ITERATIONS[application, batch],
        application=application,
        path=str(cells.path),
    )


def _parse_rubick_job(cells: CsvRow) -> JobRow:
    """AlibabaPAI/reconfigurable-dl-scheduler. A job with a service level (`is_sla`) is of the queue `sla`. Its plan is
    not read: a job runs under the best plan of its placement; neither are CPUs and bandwidth."""
    application = cells.text("application")
    if application not in RUBICK_BATCHES:
        raise cells.cell_error("application", f"one of {', '.join(RUBICK_BATCHES)}")
    return JobRow(
        line=cells.line,
        job_id=cells.text("name"),
        submit_time_s=cells.number("submission_time"),
        duration_s=cells.number("duration", above=0),
        gpus=cells.integer("num_gpus", minimum=1),
        global_batch=RUBICK_BATCHES[application],
        queue="sla" if cells.integer("is_sla", minimum=0) else "default",
        iterations=cells.integer("steps", minimum=1),
        application=application,
        path=str(cells.path),
    )


def _parse_deadline_s(cells: CsvRow) -> float:
    submit_time_s, deadline_s = cells.number("submit_time_s"), cells.number("deadline_s")
    if deadline_s <= submit_time_s:
        raise cells.cell_error("deadline_s", f"above submit_time_s, which is {submit_time_s:g}")
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
