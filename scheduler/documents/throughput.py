"""Published measurements of throughput: the step time of a model on GPUs with some placement.

Three file formats are recognized by their header: iterations per second by number of GPUs (ElasticFlow), seconds per
step by placement and plan (Rubick), and seconds per step by placement and local batch (Pollux).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scheduler.documents.csv_table import CsvRow, CsvTable, TraceError, open_table

_GPU_NAMES = {"A100": "a100-80g", "A800": "a800-80g", "T4": "t4"}
"""GPU profile by name in the files. ElasticFlow does not state the memory of its A100."""
_DATA_PARALLEL_WORDS = ("ga", "gc", "zero-dp", "zero-offload", "tp")

Placement = tuple[int, ...]
"""GPUs on each node, largest first."""


@dataclass(frozen=True, slots=True)
class ExecPlan:
    """A parsed plan. A degree of 0 takes the GPUs that remain: the data degree for `ga`, the tensor degree for `tp`."""

    data: int = 0
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    recompute: bool = False
    offload: bool = False

    @property
    def is_data_parallel(self) -> bool:
        """Whether the plan runs on any number of GPUs, with one replica on each."""
        return self.data == 0 and self.tensor == 1


@dataclass(frozen=True, slots=True)
class StepByGpuCount:
    """A step on `gpus` GPUs with any placement."""

    gpu: str
    model: str
    global_batch: int
    gpus: int
    step_time_s: float


@dataclass(frozen=True, slots=True)
class StepByPlacement:
    """A step on one placement under one plan, at the model's fixed batch."""

    gpu: str
    model: str
    placement: Placement
    plan: ExecPlan
    step_time_s: float


@dataclass(frozen=True, slots=True)
class StepByLocalBatch:
    """A step with `local_batch` samples on each of `gpus` GPUs on `nodes` nodes.

    `sync_time_s` is the part of it that synchronizes gradients. `placement` is empty if only the counts are known.
    """

    gpu: str
    model: str
    nodes: int
    gpus: int
    placement: Placement
    local_batch: int
    step_time_s: float
    sync_time_s: float


Step = TypeVar("Step", StepByGpuCount, StepByPlacement, StepByLocalBatch)
MeasuredSteps = tuple[StepByGpuCount, ...] | tuple[StepByPlacement, ...] | tuple[StepByLocalBatch, ...]


def read_throughput(path: Path) -> MeasuredSteps:
    """Read the measured steps of a file. An empty throughput, or one of 0, is a failed run and is skipped.

    Raises:
        TraceError: the file cannot be read, its format is unknown, or a row is invalid.
    """
    table = open_table(path)
    if table.header[:3] == ("gpu", "file", "global_batch_size"):
        steps: MeasuredSteps = _require_steps(path, _parse_elasticflow_table(table))
    elif {"model", "exec_plan", "placement", "iter_time"} <= set(table.header):
        steps = _require_steps(path, [_parse_rubick_row(row) for row in table.rows if row.number("iter_time")])
    elif table.header == ("app", "placement", "local_bsz", "step_time", "sync_time"):
        steps = _require_steps(path, [_parse_pollux_placement_row(row) for row in table.rows])
    elif table.header == ("app", "num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"):
        steps = _require_steps(path, [_parse_pollux_count_row(row) for row in table.rows])
    else:
        known = "the columns of a throughput file of ElasticFlow, Rubick or Pollux"
        raise TraceError(f"{path} line 1: columns: got {', '.join(table.header)[:80]!r}; allowed: {known}")
    return steps


def _require_steps(path: Path, steps: list[Step]) -> tuple[Step, ...]:
    if not steps:
        raise TraceError(f"{path}: has no measured steps; add at least one")
    return tuple(steps)


def _parse_elasticflow_table(table: CsvTable) -> list[StepByGpuCount]:
    counts = table.header[3:]
    if bad := [name for name in counts if not name.isdigit() or int(name) < 1]:
        raise TraceError(f"{table.path} line 1: column {bad[0]!r} is unknown; allowed: a number of GPUs")
    return [
        StepByGpuCount(
            gpu=_map_gpu_name(row.text("gpu")),
            model=row.text("file").removesuffix(".csv"),
            global_batch=row.integer("global_batch_size", minimum=1),
            gpus=int(name),
            step_time_s=1.0 / row.number(name),
        )
        for row in table.rows
        for name in counts
        if row.has(name) and row.number(name)
    ]


def _parse_rubick_row(row: CsvRow) -> StepByPlacement:
    placement = _parse_placement(row)
    plan = _parse_exec_plan(row)
    if plan.data * plan.tensor * plan.pipeline not in (0, sum(placement)):
        raise row.cell_error("exec_plan", f"degrees with the product {sum(placement)}, the GPUs of the placement")
    return StepByPlacement(
        gpu=_GPU_NAMES["A800"],
        model=row.text("model"),
        placement=placement,
        plan=plan,
        step_time_s=row.number("iter_time", above=0),
    )


def _parse_exec_plan(row: CsvRow) -> ExecPlan:
    """Parse a plan.

    `224` are the data, tensor and pipeline degrees. Words describe a data-parallel plan: `ga` accumulates gradients,
    `gc` recomputes activations, `zero-dp` is ZeRO-2, and `zero-offload` is ZeRO-2 with the optimizer on the host. `tp`
    splits tensors over all GPUs instead.
    """
    text = row.text("exec_plan")
    if len(text) == 3 and text.isdigit() and "0" not in text:
        data, tensor, pipeline = map(int, text)
        return ExecPlan(data, tensor, pipeline)
    words = text.split("+")
    if not set(words) <= set(_DATA_PARALLEL_WORDS):
        raise row.cell_error(
            "exec_plan", f"three degrees from 1 to 9, or {', '.join(_DATA_PARALLEL_WORDS)} joined by +"
        )
    zero = any(word.startswith("zero") for word in words)
    return ExecPlan(
        data=int("tp" in words),
        tensor=int("tp" not in words),
        zero=2 * zero,
        recompute="gc" in words,
        offload="zero-offload" in words,
    )


def _parse_pollux_placement_row(row: CsvRow) -> StepByLocalBatch:
    placement = _parse_placement(row)
    return _build_pollux_step(row, len(placement), sum(placement), placement)


def _parse_pollux_count_row(row: CsvRow) -> StepByLocalBatch:
    return _build_pollux_step(row, row.integer("num_nodes", minimum=1), row.integer("num_replicas", minimum=1), ())


def _build_pollux_step(row: CsvRow, nodes: int, gpus: int, placement: Placement) -> StepByLocalBatch:
    step_time_s, sync_time_s = row.number("step_time", above=0), row.number("sync_time")
    if sync_time_s > step_time_s:
        raise row.cell_error("sync_time", f"at most step_time, which is {step_time_s:g}")
    return StepByLocalBatch(
        gpu=_GPU_NAMES["T4"],
        model=row.text("app"),
        nodes=nodes,
        gpus=gpus,
        placement=placement,
        local_batch=row.integer("local_bsz", minimum=1),
        step_time_s=step_time_s,
        sync_time_s=sync_time_s,
    )


def _parse_placement(row: CsvRow) -> Placement:
    text = row.text("placement")
    if not text.isdigit() or "0" in text:
        raise row.cell_error("placement", "the GPUs of each node, as one digit from 1 to 9 per node")
    return tuple(sorted(map(int, text), reverse=True))


def _map_gpu_name(name: str) -> str:
    return _GPU_NAMES.get(name, name.lower())
