"""The CSV form of measured runs: a header, then one run a row. An empty cell counts as an absent column.

model                   a shipped model's name, at `sequence_length` tokens if that is given; or else an architecture:
layers, hidden, ...     its sizes, and family and flags, as in a model's JSON; `ffn` is 4 x hidden unless given
tensor, data, pipeline, ulysses, ring, expert       parallel degrees; 1 unless given
interleave              chunks of layers on each device of an interleaved 1F1B pipeline; 1 unless given
zero                    0 (unless given) to 3, over all replicas
recompute               none (unless given), selective or full
sequence_sharding, offload                          true or false (unless given)
micro_batch             samples of a replica in one micro-batch; `global_batch` of an optimizer step over all GPUs
nodes                   that share the GPUs evenly; unless given, nodes of `gpus_per_node` (8), full but for the last
gpus                    checked against the degrees where it is given
iteration_time_s        measured seconds of an optimizer step; `peak_bytes` of one GPU's memory, where it was measured
name, source, notes     not looked at
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from math import isfinite
from typing import Any

from scheduler.domain.gpu_shape import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.calibrate.measured_run import MeasuredRun, even_plan
from scheduler.solver.plan_rules import check_plan
from scheduler.solver.profiles.architecture_document import read_architecture
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.profiles.shipped import load_model
from scheduler.solver.profiles.transformer import transformer_profile

_DEGREES = {"tensor": "tp", "data": "dp", "ulysses": "ulysses", "ring": "ring", "expert": "ep"}
_COUNTS = {*_DEGREES, "pipeline", "interleave", "micro_batch", "global_batch", "nodes", "gpus", "gpus_per_node"}
_OWN = {*_COUNTS, "model", "zero", "recompute", "sequence_sharding", "offload", "iteration_time_s", "peak_bytes"}
_IGNORED = {"name", "source", "notes"}
_TRUTH = {"false": False, "true": True}
GPUS_PER_NODE = 8


class RunError(ValueError):
    """A file of measured runs that cannot be used; the message names row, column, value and what is allowed."""


def read_runs(csv_text: str, hardware: HardwareProfile) -> tuple[MeasuredRun, ...]:
    """The runs of a CSV, all on GPUs like `hardware`.

    Raises:
        RunError: a column is missing or unknown, a value cannot be, or a row's plan is none for its model or GPUs.
    """
    reader = csv.DictReader(csv_text.splitlines())
    for column in ("micro_batch", "global_batch", "iteration_time_s"):
        if column not in (reader.fieldnames or ()):
            raise RunError(f"column {column!r} is missing")
    runs = []
    for cells in reader:
        if None in cells:
            raise RunError(f"row {reader.line_num}: has more cells than the header")
        given = {column: cell.strip() for column, cell in cells.items() if cell and cell.strip()}
        try:
            runs.append(_run(given, hardware))
        except ValueError as wrong:
            raise RunError(f"row {reader.line_num}: {wrong}") from None
    if not runs:
        raise RunError("there are no runs; at least one row is needed below the header")
    return tuple(runs)


def _run(cells: Mapping[str, str], hardware: HardwareProfile) -> MeasuredRun:
    counts = {column: _whole(cells, column, least=1) for column in sorted(_COUNTS & set(cells))}
    for column in ("micro_batch", "global_batch"):
        if column not in counts:
            raise ValueError(f"{column} is empty; it must be a whole number of at least 1")
    model, strategy = _model(cells), _strategy(cells, counts)
    pipeline, interleave = counts.get("pipeline", 1), counts.get("interleave", 1)
    if pipeline * interleave > model.layer_count:
        allowed = f"it must be at most the {model.layer_count} layers of the model"
        raise ValueError(f"pipeline x interleave is {pipeline * interleave}; {allowed}")
    batch, replica_batch = counts["global_batch"], counts["micro_batch"] * strategy.dp
    if batch % replica_batch:
        raise ValueError(f"micro_batch x data is {replica_batch}; it must divide global_batch, which is {batch}")
    run = MeasuredRun(
        model=model,
        shape=_shape(counts, strategy.gpus * pipeline, hardware.gpu),
        plan=even_plan(
            strategy,
            layers=model.layer_count,
            gpu=hardware.gpu,
            pipeline=pipeline,
            interleave=interleave,
            micro_batches=batch // replica_batch,
            samples=counts["micro_batch"],
        ),
        iteration_time_s=_seconds(cells),
        peak_bytes=_whole(cells, "peak_bytes", least=1) if "peak_bytes" in cells else 0,
    )
    check_plan(run.plan, run.request(hardware))
    return run


def _model(cells: Mapping[str, str]) -> ModelProfile:
    sizes = {column: cell for column, cell in cells.items() if column not in _OWN | _IGNORED}
    if "model" in cells:
        length = _whole(cells, "sequence_length", least=1) if "sequence_length" in cells else 0
        for column in sorted(sizes.keys() - {"sequence_length"}):
            raise ValueError(f"{column} is {cells[column]!r}; it must be empty beside model ({cells['model']!r})")
        return load_model(cells["model"], length)
    given = {column: _plain(cell) for column, cell in sizes.items()}
    if isinstance(given.get("hidden"), float):
        given.setdefault("ffn", 4 * given["hidden"])
    return transformer_profile("measured", read_architecture(given, "architecture", 0))


def _plain(cell: str) -> Any:
    """A number, true or false, or else a word."""
    try:
        return _TRUTH[cell] if cell in _TRUTH else float(cell)
    except ValueError:
        return cell


def _strategy(cells: Mapping[str, str], counts: Mapping[str, int]) -> LayerStrategy:
    degrees = {degree: counts.get(column, 1) for column, degree in _DEGREES.items()}
    zero = _whole(cells, "zero") if "zero" in cells else 0
    return LayerStrategy(
        layers=1,
        **degrees,
        zero=zero,
        shard_group=degrees["dp"] * degrees["ulysses"] * degrees["ring"] if zero else 1,
        recompute=_choice(cells, "recompute", {kind.value: kind for kind in Recompute}),
        sequence_sharding=_choice(cells, "sequence_sharding", _TRUTH),
        offload=_choice(cells, "offload", _TRUTH),
    )


def _shape(counts: Mapping[str, int], gpus: int, gpu: str) -> GpuShape:
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


def _whole(cells: Mapping[str, str], column: str, *, least: int = 0) -> int:
    text = cells[column]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value == int(value) and least <= value <= 2**53):
        raise ValueError(f"{column} is {text!r}; it must be a whole number of at least {least}")
    return int(value)


def _seconds(cells: Mapping[str, str]) -> float:
    text = cells.get("iteration_time_s", "")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise ValueError(f"iteration_time_s is {text!r}; it must be a finite number above 0")
    return value


def _choice(cells: Mapping[str, str], column: str, allowed: Mapping[str, Any]) -> Any:
    """What the cell's word stands for; an empty one is the first of `allowed`."""
    text = cells.get(column, next(iter(allowed)))
    if text not in allowed:
        raise ValueError(f"{column} is {text!r}; allowed are {', '.join(allowed)}")
    return allowed[text]
