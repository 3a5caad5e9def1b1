"""Measured throughput as its publishers wrote it: how long a step of a model takes on GPUs that lie in some way.

Three kinds of file, each recognised by its header: iterations/s by number of GPUs (ElasticFlow), seconds a step by
placement and plan (Rubick), and seconds a step by placement and samples on each GPU (Pollux).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scheduler.documents.csv_table import CsvRow, CsvTable, TraceError, open_table

_GPU_NAMES = {"A100": "a100-80g", "A800": "a800-80g", "T4": "t4"}
"""Our names of the GPUs that the files name; ElasticFlow does not say which A100 it had."""
_DATA_PARALLEL_WORDS = ("ga", "gc", "zero-dp", "zero-offload", "tp")

Placement = tuple[int, ...]
"""GPUs on each node, most first."""


@dataclass(frozen=True, slots=True)
class ExecPlan:
    """What the text of a plan says. A degree of 0 is whatever is left of the GPUs: of the data degree for `ga`, of the
    tensor degree for `tp`."""

    data: int = 0
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    recompute: bool = False
    offload: bool = False

    @property
    def is_data_parallel(self) -> bool:
        """It runs on any number of GPUs, a replica on each."""
        return self.data == 0 and self.tensor == 1


@dataclass(frozen=True, slots=True)
class StepByGpuCount:
    """A step on `gpus` GPUs, however they lie."""

    gpu: str
    model: str
    global_batch: int
    gpus: int
    step_time_s: float


@dataclass(frozen=True, slots=True)
class StepByPlacement:
    """A step on one placement under one plan, at the batch that the model always has."""

    gpu: str
    model: str
    placement: Placement
    plan: ExecPlan
    step_time_s: float


@dataclass(frozen=True, slots=True)
class StepByLocalBatch:
    """A step with `local_batch` samples on each of `gpus` GPUs on `nodes` nodes, `sync_time_s` of it waiting for the
    gradients of others. `placement` is empty where only the two counts are known."""

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
    """The steps of one file that were measured: an empty throughput, or one of 0, stands for a run that failed.

    Raises:
        TraceError: the file cannot be read, its header is of no known form, or a row is refused.
    """
    table = open_table(path)
    if table.header[:3] == ("gpu", "file", "global_batch_size"):
        steps: MeasuredSteps = _require_steps(path, _parse_elasticflow_table(table))
    elif {"model", "exec_plan", "placement", "iter_time"} <= set(table.header):
        steps = _require_steps(path, [_parse_rubick_row(cells) for cells in table.rows if cells.number("iter_time")])
    elif table.header == ("app", "placement", "local_bsz", "step_time", "sync_time"):
        steps = _require_steps(path, [_parse_pollux_placement_row(cells) for cells in table.rows])
    elif table.header == ("app", "num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"):
        steps = _require_steps(path, [_parse_pollux_count_row(cells) for cells in table.rows])
    else:
        known = "those of ElasticFlow's, Rubick's or Pollux's throughput files"
        raise TraceError(f"{path} line 1: columns: got {', '.join(table.header)[:80]!r}; allowed: {known}")
    return steps


def _require_steps(path: Path, steps: list[Step]) -> tuple[Step, ...]:
    if not steps:
        raise TraceError(f"{path}: has no rows; at least one measured step is needed")
    return tuple(steps)


def _parse_elasticflow_table(table: CsvTable) -> list[StepByGpuCount]:
    counts = table.header[3:]
    if bad := [name for name in counts if not name.isdigit() or int(name) < 1]:
        raise TraceError(f"{table.path} line 1: column {bad[0]!r} is unknown; allowed: a number of GPUs")
    return [
        StepByGpuCount(
            gpu=_map_gpu_name(cells.text("gpu")),
            model=cells.text("file").removesuffix(".csv"),
            global_batch=cells.integer("global_batch_size", minimum=1),
            gpus=int(name),
            step_time_s=1.0 / cells.number(name),
        )
        for cells in table.rows
        for name in counts
        if cells.has(name) and cells.number(name)
    ]


def _parse_rubick_row(cells: CsvRow) -> StepByPlacement:
    placement = _parse_placement(cells)
    plan = _parse_exec_plan(cells)
    if plan.data * plan.tensor * plan.pipeline not in (0, sum(placement)):
        raise cells.cell_error("exec_plan", f"degrees whose product is {sum(placement)}, the GPUs of the placement")
    return StepByPlacement(
        gpu=_GPU_NAMES["A800"],
        model=cells.text("model"),
        placement=placement,
        plan=plan,
        step_time_s=cells.number("iter_time", above=0),
    )


def _parse_exec_plan(cells: CsvRow) -> ExecPlan:
    """`224` are the data, tensor and pipeline degree; words stand for what a data-parallel run does besides: `ga`
    accumulates gradients, `gc` computes activations again, `zero-dp` is ZeRO-2, `zero-offload` that with the optimizer
    on the host; `tp` splits tensors over all GPUs instead."""
    text = cells.text("exec_plan")
    if len(text) == 3 and text.isdigit() and "0" not in text:
        data, tensor, pipeline = map(int, text)
        return ExecPlan(data, tensor, pipeline)
    words = text.split("+")
    if not set(words) <= set(_DATA_PARALLEL_WORDS):
        raise cells.cell_error(
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


def _parse_pollux_placement_row(cells: CsvRow) -> StepByLocalBatch:
    placement = _parse_placement(cells)
    return _build_pollux_step(cells, len(placement), sum(placement), placement)


def _parse_pollux_count_row(cells: CsvRow) -> StepByLocalBatch:
    return _build_pollux_step(
        cells, cells.integer("num_nodes", minimum=1), cells.integer("num_replicas", minimum=1), ()
    )


def _build_pollux_step(cells: CsvRow, nodes: int, gpus: int, placement: Placement) -> StepByLocalBatch:
    step_time_s, sync_time_s = cells.number("step_time", above=0), cells.number("sync_time")
    if sync_time_s > step_time_s:
        raise cells.cell_error("sync_time", f"at most step_time, which is {step_time_s:g}")
    return StepByLocalBatch(
        gpu=_GPU_NAMES["T4"],
        model=cells.text("app"),
        nodes=nodes,
        gpus=gpus,
        placement=placement,
        local_batch=cells.integer("local_bsz", minimum=1),
        step_time_s=step_time_s,
        sync_time_s=sync_time_s,
    )


def _parse_placement(cells: CsvRow) -> Placement:
    text = cells.text("placement")
    if not text.isdigit() or "0" in text:
        raise cells.cell_error("placement", "the GPUs on each node, one digit from 1 to 9 a node")
    return tuple(sorted(map(int, text), reverse=True))


def _map_gpu_name(name: str) -> str:
    return _GPU_NAMES.get(name, name.lower())
