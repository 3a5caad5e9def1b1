"""`python -m tests.benchmarks.profiled_gpu LOG FILE DATE`: what `ebbtide profile` measured, in the columns of the
measured data in tests/data/measured.

LOG is the log of a profile and its validation on one device. `read_profiled_gpu` reads FILE again.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.profiling.measurement_log import DeviceFacts, MeasurementLog, merge_rounds
from scheduler.profiling.tasks import (
    AttentionTask,
    BandwidthTask,
    GemmTask,
    GptShape,
    LaunchTask,
    OptimizerTask,
    StepTask,
    Task,
)
from scheduler.solver.calibration.measured_runs import build_even_plan
from tests.benchmarks.measured_runs import FOLDER

H100_FILE = FOLDER / "gpu_steps_h100.csv"
_GIB = 2**30
_SUM_ARRAYS = 3
_PASSES = ("forward", "backward")


def write_profiled_gpu(log: MeasurementLog, file: Path, *, date: str) -> None:
    """Write one row per measured figure."""
    assert log.device is not None, "the log is of a device"
    device = log.device
    fixed = {
        "source": f"measured with ebbtide profile, {date}",
        "hardware": device.name,
        "gpus": 1,
        "precision": device.precision,
    }
    with (FOLDER / "gpu_steps_h200.csv").open(encoding="utf-8", newline="") as example:
        columns = next(csv.reader(example))
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for task, values in merge_rounds(log.measurements).items():
            for row in _list_rows(task, values, device):
                cells = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
                writer.writerow(fixed | {"notes": device.software} | cells)


def _list_rows(task: Task, values: Mapping[str, float], device: DeviceFacts) -> Iterator[dict[str, Any]]:
    match task:
        case GemmTask():
            for name in _PASSES:
                sizes = {"kind": "gemm", "m": task.m, "n": task.n, "k": task.k}
                yield {**sizes, "pass": name, "iter_time_s": values[f"{name}_s"]}
        case AttentionTask():
            for name in _PASSES:
                sizes = {"kind": "attention", "micro_batch": task.samples, "heads": task.heads, "seq": task.tokens}
                hidden = task.heads * task.width
                yield {**sizes, "hidden": hidden, "pass": name, "iter_time_s": values[f"{name}_s"]}
        case BandwidthTask():
            moved = _SUM_ARRAYS * task.size_bytes
            yield {"kind": "sum", "allocated_bytes": moved, "iter_time_s": moved / values["bytes_per_s"]}
        case LaunchTask():
            yield {"kind": "launch", "hidden": task.hidden, "pass": "forward", "iter_time_s": values["forward_s"]}
        case OptimizerTask():
            yield {"kind": "optimizer", "params_b": task.parameters / 1e9, "iter_time_s": values["time_s"]}
        case StepTask():
            yield _describe_step(task, values, device)
        case _:
            return


def _describe_step(task: StepTask, values: Mapping[str, float], device: DeviceFacts) -> dict[str, Any]:
    plan, shape = task.plan, task.shape
    return {
        "kind": task.purpose,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "seq": shape.sequence,
        "vocab": shape.vocabulary,
        "micro_batch": plan.micro_batch_size,
        "global_batch": plan.global_batch,
        "recompute": plan.stages[0].strategies[0].recompute.value,
        "iter_time_s": values["step_s"],
        "memory_gib": f"{(values['peak_bytes'] + device.context_bytes) / _GIB:.6f}",
        "reserved_bytes": round(values["peak_bytes"]),
        "allocated_bytes": round(values["allocated_bytes"]),
    }


def read_profiled_gpu(file: Path, *, memory_bytes: int) -> tuple[DeviceFacts, dict[Task, Mapping[str, float]]]:
    """Return the device, whose memory the file lacks, and the figures of each task."""
    figures: dict[Task, dict[str, float]] = {}
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    for row in rows:
        if (task := _parse_task(row)) is not None:
            figures.setdefault(task, {}).update(_parse_figures(task, row))
    step = next(row for row in rows if row["reserved_bytes"])
    context_bytes = round(float(step["memory_gib"]) * _GIB) - int(step["reserved_bytes"])
    facts = DeviceFacts(
        "cuda", step["hardware"], memory_bytes, step["precision"], step["notes"], ranks=1, context_bytes=context_bytes
    )
    return facts, {**figures}


def _parse_task(row: Mapping[str, str]) -> Task | None:
    number = {name: int(value) for name, value in row.items() if value.isdecimal()}
    match row["kind"]:
        case "gemm":
            return GemmTask(number["m"], number["n"], number["k"])
        case "attention":
            width = number["hidden"] // number["heads"]
            return AttentionTask(number["micro_batch"], number["heads"], number["seq"], width)
        case "sum":
            return BandwidthTask(number["allocated_bytes"] // _SUM_ARRAYS)
        case "launch":
            return LaunchTask(number["hidden"])
        case "probe" | "validation":
            shape = GptShape(number["layers"], number["hidden"], number["heads"], number["vocab"], number["seq"])
            plan = build_even_plan(
                LayerStrategy(layers=1, recompute=Recompute(row["recompute"])),
                layers=shape.layers,
                gpu="device",
                pipeline=1,
                interleave=1,
                micro_batches=number["global_batch"] // number["micro_batch"],
                samples_per_replica=number["micro_batch"],
            )
            return StepTask(row["kind"], shape, plan)
        case _:
            return None


def _parse_figures(task: Task, row: Mapping[str, str]) -> dict[str, float]:
    time_s = float(row["iter_time_s"])
    if isinstance(task, StepTask):
        return {"step_s": time_s, "peak_bytes": float(row["reserved_bytes"])}
    if isinstance(task, BandwidthTask):
        return {"bytes_per_s": float(row["allocated_bytes"]) / time_s}
    return {f"{row['pass']}_s": time_s}


if __name__ == "__main__":
    write_profiled_gpu(MeasurementLog(Path(sys.argv[1])), Path(sys.argv[2]), date=sys.argv[3])
