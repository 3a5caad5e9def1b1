"""Measured training runs in the solver's terms, and their CSV form.

The CSV has a header and one run per row. An empty cell counts as an absent column.

    model                   name of a model profile, at `sequence_length` tokens if given; or an architecture:
    layers, hidden, ...     its sizes, family and flags, as in a model's JSON; `ffn` defaults to 4 x hidden
    tensor, data, pipeline, ulysses, ring, expert       parallel degrees, default 1
    interleave              chunks of layers per device of an interleaved 1F1B pipeline, default 1
    zero                    0 (default) to 3, over all replicas
    recompute               none (default), selective or full
    sequence_sharding, offload                          true or false (default)
    attention               kernel of the fused attention core: profile (default), flash-1, flash-2, flash-3 or newest
    loss                    fused (default: what tuned software does) or stored
    expert_imbalance        load of the fullest expert-parallel rank over the mean; by default that of the GPU profile
    tensor_messages         exposed (default), or overlapped with the products (async tensor parallelism)
    micro_batch             samples of a replica in one micro-batch; `global_batch`: samples of an optimizer step
    nodes                   nodes that share the GPUs evenly; by default, full nodes of `gpus_per_node` (8)
    gpus                    if given, must match the degrees
    iteration_time_s        measured; `peak_bytes` of one GPU, if measured
    name, source, notes     ignored
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage
from scheduler.solver.plan_rules import check_plan
from scheduler.solver.profiles.architecture_document import parse_architecture
from scheduler.solver.profiles.catalog import load_model
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.training_software import SOFTWARE_FIELDS, AttentionKernel, LossKernel, parse_software
from scheduler.solver.profiles.transformer import build_transformer_profile
from scheduler.solver.request import SolveRequest

_DEGREES = {"tensor": "tp", "data": "dp", "ulysses": "ulysses", "ring": "ring", "expert": "ep"}
_COUNT_COLUMNS = {*_DEGREES, "pipeline", "interleave", "micro_batch", "global_batch", "nodes", "gpus", "gpus_per_node"}
_RUN_COLUMNS = {
    *_COUNT_COLUMNS,
    "model",
    "zero",
    "recompute",
    "sequence_sharding",
    "offload",
    *SOFTWARE_FIELDS,
    "expert_imbalance",
    "iteration_time_s",
    "peak_bytes",
}
_UNSTATED_SOFTWARE = {"attention": AttentionKernel.PROFILE.value, "loss": LossKernel.FUSED.value}
_IGNORED_COLUMNS = {"name", "source", "notes"}
_BOOLEANS = {"false": False, "true": True}
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One timed run on GPUs of one model.

    `plan` predicts nothing; `peak_bytes` of one GPU is 0 if it was not measured.
    """

    model: ModelProfile
    shape: GpuShape
    plan: ParallelPlan
    iteration_time_s: float
    peak_bytes: int = 0

    def build_request(self, hardware: HardwareProfile) -> SolveRequest:
        """Return the request that `plan` answers, for `evaluate`."""
        return SolveRequest(self.model, (hardware,), self.shape, self.plan.global_batch)


def build_even_plan(
    strategy: LayerStrategy,
    *,
    layers: int,
    gpu: str,
    pipeline: int,
    interleave: int,
    micro_batches: int,
    samples_per_replica: int,
) -> ParallelPlan:
    """Return a plan of all `layers` under `strategy`, in `pipeline` x `interleave` stages as even as possible.

    Its predictions are zero.

    Args:
        samples_per_replica: micro-batch of one data-parallel replica.
    """
    stages = pipeline * interleave
    borders = [number * layers // stages for number in range(stages + 1)]
    schedule = Schedule(ScheduleName.INTERLEAVED, interleave) if interleave > 1 else Schedule()
    return ParallelPlan(
        schedule=schedule,
        micro_batches=micro_batches,
        micro_batch_size=samples_per_replica * strategy.dp,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=tuple(
            Stage(first, end - 1, gpu, strategy.gpus, (replace(strategy, layers=end - first),))
            for first, end in pairwise(borders)
        ),
    )


class MeasuredRunError(ValueError):
    """An invalid file of measured runs. The message names row, column, value and the accepted values."""


def parse_measured_runs(csv_text: str, hardware: HardwareProfile) -> tuple[MeasuredRun, ...]:
    """Parse the runs of a CSV text, all on GPUs like `hardware`.

    Raises:
        MeasuredRunError: a column is missing or unknown, a value is invalid, or a row's plan does not fit its model or
            GPUs.
    """
    runs = []
    for row, outcome in parse_rows(csv_text, hardware):
        if isinstance(outcome, MeasuredRunError):
            raise MeasuredRunError(f"row {row}: {outcome}")
        runs.append(outcome)
    return tuple(runs)


def parse_rows(csv_text: str, hardware: HardwareProfile) -> Iterator[tuple[int, MeasuredRun | MeasuredRunError]]:
    """Yield the line number of each row with its run, or with the error that makes it unusable.

    Raises:
        MeasuredRunError: a required column is missing, or there are no rows.
    """
    reader = csv.DictReader(csv_text.splitlines())
    for column in ("micro_batch", "global_batch", "iteration_time_s"):
        if column not in (reader.fieldnames or ()):
            raise MeasuredRunError(f"column {column!r} is missing")
    has_rows = False
    for cells in reader:
        has_rows = True
        try:
            if None in cells:
                raise ValueError("has more cells than the header")
            given = {column: cell.strip() for column, cell in cells.items() if cell and cell.strip()}
            yield reader.line_num, _parse_run(given, hardware)
        except ValueError as error:
            yield reader.line_num, MeasuredRunError(str(error))
    if not has_rows:
        raise MeasuredRunError("there are no runs; at least one row is needed below the header")


def _parse_run(cells: Mapping[str, str], hardware: HardwareProfile) -> MeasuredRun:
    counts = {column: _parse_int(cells, column, minimum=1) for column in sorted(_COUNT_COLUMNS & set(cells))}
    for column in ("micro_batch", "global_batch"):
        if column not in counts:
            raise ValueError(f"{column} is empty; it must be a whole number of at least 1")
    model, strategy = _parse_model(cells), _parse_strategy(cells, counts)
    pipeline, interleave = counts.get("pipeline", 1), counts.get("interleave", 1)
    if pipeline * interleave > model.layer_count:
        allowed = f"it must be at most the {model.layer_count} layers of the model"
        raise ValueError(f"pipeline x interleave is {pipeline * interleave}; {allowed}")
    batch, replica_batch = counts["global_batch"], counts["micro_batch"] * strategy.dp
    if batch % replica_batch:
        raise ValueError(f"micro_batch x data is {replica_batch}; it must divide global_batch, which is {batch}")
    run = MeasuredRun(
        model=model,
        shape=_parse_shape(counts, strategy.gpus * pipeline, hardware.gpu),
        plan=build_even_plan(
            strategy,
            layers=model.layer_count,
            gpu=hardware.gpu,
            pipeline=pipeline,
            interleave=interleave,
            micro_batches=batch // replica_batch,
            samples_per_replica=counts["micro_batch"],
        ),
        iteration_time_s=_parse_number(cells, "iteration_time_s"),
        peak_bytes=_parse_int(cells, "peak_bytes", minimum=1) if "peak_bytes" in cells else 0,
    )
    check_plan(run.plan, run.build_request(hardware))
    return run


def _parse_model(cells: Mapping[str, str]) -> ModelProfile:
    sizes = {column: cell for column, cell in cells.items() if column not in _RUN_COLUMNS | _IGNORED_COLUMNS}
    software = parse_software({**_UNSTATED_SOFTWARE, **{key: cells[key] for key in SOFTWARE_FIELDS if key in cells}})
    imbalance = _parse_number(cells, "expert_imbalance") if "expert_imbalance" in cells else 0.0
    if "model" in cells:
        length = _parse_int(cells, "sequence_length", minimum=1) if "sequence_length" in cells else 0
        for column in sorted(sizes.keys() - {"sequence_length"}):
            raise ValueError(f"{column} is {cells[column]!r}; it must be empty beside model ({cells['model']!r})")
        return replace(load_model(cells["model"], length), software=software, expert_imbalance=imbalance)
    given = {column: _parse_cell(cell) for column, cell in sizes.items()}
    if isinstance(given.get("hidden"), float):
        given.setdefault("ffn", 4 * given["hidden"])
    model = build_transformer_profile("measured", parse_architecture(given, "architecture", 0))
    return replace(model, software=software, expert_imbalance=imbalance)


def _parse_cell(cell: str) -> Any:
    """Return a number, a boolean, or else the text itself."""
    try:
        return _BOOLEANS[cell] if cell in _BOOLEANS else float(cell)
    except ValueError:
        return cell


def _parse_strategy(cells: Mapping[str, str], counts: Mapping[str, int]) -> LayerStrategy:
    degrees: dict[str, Any] = {degree: counts.get(column, 1) for column, degree in _DEGREES.items()}
    zero = _parse_int(cells, "zero") if "zero" in cells else 0
    return LayerStrategy(
        layers=1,
        **degrees,
        zero=zero,
        shard_group=degrees["dp"] * degrees["ulysses"] * degrees["ring"] if zero else 1,
        recompute=_parse_choice(cells, "recompute", {kind.value: kind for kind in Recompute}),
        sequence_sharding=_parse_choice(cells, "sequence_sharding", _BOOLEANS),
        offload=_parse_choice(cells, "offload", _BOOLEANS),
    )


def _parse_shape(counts: Mapping[str, int], gpus: int, gpu: str) -> GpuShape:
    if counts.get("gpus", gpus) != gpus:
        raise ValueError(f"gpus is {counts['gpus']}; the degrees multiply to {gpus}")
    if "nodes" not in counts:
        return GpuShape.packed(gpu, gpus, counts.get("gpus_per_node", GPUS_PER_NODE))
    nodes = counts["nodes"]
    if gpus % nodes:
        raise ValueError(f"nodes is {nodes}; it must divide the {gpus} GPUs")
    if counts.get("gpus_per_node", gpus // nodes) != gpus // nodes:
        raise ValueError(
            f"gpus_per_node is {counts['gpus_per_node']}; {gpus} GPUs on {nodes} nodes are {gpus // nodes}"
        )
    return GpuShape((GpuGroup(gpu, nodes, gpus // nodes),))


def _parse_int(cells: Mapping[str, str], column: str, *, minimum: int = 0) -> int:
    text = cells[column]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value == int(value) and minimum <= value <= 2**53):
        raise ValueError(f"{column} is {text!r}; it must be a whole number of at least {minimum}")
    return int(value)


def _parse_number(cells: Mapping[str, str], column: str) -> float:
    text = cells.get(column, "")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{column} is {text!r}; it must be a finite number above 0")
    return value


def _parse_choice(cells: Mapping[str, str], column: str, allowed: Mapping[str, Any]) -> Any:
    """Return the value of the cell's word; an empty cell means the first of `allowed`."""
    text = cells.get(column, next(iter(allowed)))
    if text not in allowed:
        raise ValueError(f"{column} is {text!r}; allowed are {', '.join(allowed)}")
    return allowed[text]
