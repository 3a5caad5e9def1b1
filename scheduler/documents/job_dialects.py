"""Job traces as their publishers wrote them, each recognised by its header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.documents.csv_table import Cells, CsvTable
from scheduler.documents.trace_rows import JobRow

JOB_COLUMNS = ("job_id", "submit_time_s", "duration_s", "gpus")
JOB_OPTIONAL = (
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
    job: Callable[[Cells], JobRow]
    workload: str = ""


def dialect_of(table: CsvTable) -> JobDialect:
    """The dialect with the table's columns, in any order; ours where nobody else's fits.

    Raises:
        TraceError: it is to be ours, and a column is missing or unknown.
    """
    for dialect in _FOREIGN:
        if set(dialect.columns) == set(table.header):
            return dialect
    table.require(JOB_COLUMNS, JOB_OPTIONAL)
    return JobDialect(table.header, _own_job)


def _own_job(cells: Cells) -> JobRow:
    gpus = cells.whole("gpus", least=1)
    low = cells.whole("min_gpus", least=1) if cells.has("min_gpus") else None
    high = cells.whole("max_gpus", least=1) if cells.has("max_gpus") else None
    if low is not None and low > (high if high is not None else gpus):
        raise cells.refused("min_gpus", f"at most max_gpus, which is {high if high is not None else gpus}")
    if high is not None and high < (low if low is not None else gpus):
        raise cells.refused("max_gpus", f"at least min_gpus, which is {low if low is not None else gpus}")
    if cells.has("model") and not cells.has("global_batch"):
        raise cells.refused("global_batch", "a whole number of at least 1: a job with a model needs it")
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=cells.number("submit_time_s"),
        duration_s=cells.number("duration_s", above=0),
        gpus=gpus,
        min_gpus=low,
        max_gpus=high,
        model=cells.texts.get("model", ""),
        global_batch=cells.whole("global_batch", least=1) if cells.has("global_batch") else 0,
        priority=cells.whole("priority", least=-1000) if cells.has("priority") else 0,
        queue=cells.texts.get("queue") or "default",
        user=cells.texts.get("user", ""),
        deadline_s=_deadline_s(cells) if cells.has("deadline_s") else None,
        gpu=cells.texts.get("gpu", ""),
        iterations=cells.whole("iterations", least=0) if cells.has("iterations") else 0,
        sequence_length=cells.whole("sequence_length", least=0) if cells.has("sequence_length") else 0,
        path=str(cells.path),
    )


def _muri_job(cells: Cells) -> JobRow:
    """Rivendile/Muri. Its `priority` (0 guaranteed, 1 opportunistic, drawn evenly) is for its AntMan baseline alone, so
    it is none of ours."""
    cells.whole("priority", least=0)
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=cells.number("submit_time_s"),
        duration_s=cells.number("duration_s", above=0),
        gpus=cells.whole("gpus", least=1),
        global_batch=cells.whole("batch_size", least=1),
        iterations=cells.whole("iterations", least=1),
        application=cells.text("model"),
        path=str(cells.path),
    )


def _elasticflow_job(cells: Cells) -> JobRow:
    """pkusys/ElasticFlow. `deadline_s` is a time of the trace, as ours."""
    return JobRow(
        line=cells.line,
        job_id=cells.text("job_id"),
        submit_time_s=cells.number("submit_time_s"),
        duration_s=cells.number("duration_s", above=0),
        gpus=cells.whole("gpus", least=1),
        global_batch=cells.whole("batch_size", least=1),
        deadline_s=_deadline_s(cells),
        iterations=cells.whole("iterations", least=1),
        application=cells.text("model"),
        path=str(cells.path),
    )


def _pollux_job(cells: Cells) -> JobRow:
    """petuum/adaptdl. The trace knows no lengths: they are iterations at the curve of a measured profile."""
    application, batch = cells.text("application"), cells.whole("batch_size", least=1)
    if (application, batch) not in POLLUX_ITERATIONS:
        known = ", ".join(f"{name} at {size}" for name, size in POLLUX_ITERATIONS)
        raise cells.refused("application", f"one whose iterations at batch {batch} are known: {known}")
    return JobRow(
        line=cells.line,
        job_id=f"{cells.text('workload')}-{cells.text('name')}",
        submit_time_s=cells.number("submit_time_s"),
        duration_s=0.0,
        gpus=cells.whole("num_gpu_user", least=1),
        global_batch=batch,
        iterations=POLLUX_ITERATIONS[application, batch],
        application=application,
        path=str(cells.path),
    )


def _rubick_job(cells: Cells) -> JobRow:
    """AlibabaPAI/reconfigurable-dl-scheduler. A job with a service level (`is_sla`) is of the queue `sla`. Its plan is
    not read: a job runs under the best plan of its placement; neither are CPUs and bandwidth."""
    application = cells.text("application")
    if application not in RUBICK_BATCHES:
        raise cells.refused("application", f"one of {', '.join(RUBICK_BATCHES)}")
    return JobRow(
        line=cells.line,
        job_id=cells.text("name"),
        submit_time_s=cells.number("submission_time"),
        duration_s=cells.number("duration", above=0),
        gpus=cells.whole("num_gpus", least=1),
        global_batch=RUBICK_BATCHES[application],
        queue="sla" if cells.whole("is_sla", least=0) else "default",
        iterations=cells.whole("steps", least=1),
        application=application,
        path=str(cells.path),
    )


def _deadline_s(cells: Cells) -> float:
    submit_time_s, deadline_s = cells.number("submit_time_s"), cells.number("deadline_s")
    if deadline_s <= submit_time_s:
        raise cells.refused("deadline_s", f"above submit_time_s, which is {submit_time_s:g}")
    return deadline_s


_FOREIGN = (
    JobDialect((*JOB_COLUMNS, "model", "batch_size", "iterations", "priority"), _muri_job),
    JobDialect((*JOB_COLUMNS, "model", "batch_size", "iterations", "deadline_s"), _elasticflow_job),
    JobDialect(
        ("workload", "name", "submit_time_s", "application", "num_gpu_user", "batch_size"), _pollux_job, "workload"
    ),
    JobDialect(
        (
            *("name", "submission_time", "duration", "application", "num_gpus", "num_cpus"),
            *("bandwidth", "exec_plan", "steps", "is_sla"),
        ),
        _rubick_job,
    ),
)
