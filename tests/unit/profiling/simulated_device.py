"""A device whose true constants are known: its kernels, collectives and steps take what the cost model says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler.profiling.measurement_log import DeviceFacts
from scheduler.profiling.reference_model import build_measured_run
from scheduler.profiling.tasks import (
    AttentionTask,
    BandwidthTask,
    CollectiveTask,
    GemmTask,
    HostLinkTask,
    LaunchTask,
    OptimizerTask,
    StepTask,
    Task,
)
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.hardware_profile import HardwareProfile

CONTEXT_BYTES = 900_000_000


def describe(hardware: HardwareProfile, *, kind: str = "cuda", ranks: int = 1) -> DeviceFacts:
    """Return the facts that its ranks would report."""
    precision = hardware.precision.value
    return DeviceFacts(kind, "Simulated", hardware.memory_bytes, precision, "torch 0", ranks, CONTEXT_BYTES)


def measure(tasks: Iterable[Task], hardware: HardwareProfile, *, ranks: int = 1) -> dict[Task, Mapping[str, float]]:
    """Return the figures of each task on a device with the constants of `hardware`."""
    return {task: _measure(task, hardware, ranks) for task in tasks}


def _measure(task: Task, hardware: HardwareProfile, ranks: int) -> Mapping[str, float]:
    match task:
        case GemmTask():
            operands = hardware.precision.value_bytes * (task.m * task.k + task.n * task.k + task.m * task.n)
            rate = hardware.peak_flops_per_s * hardware.efficiency
            product_s = task.flops / rate + operands / hardware.memory_bandwidth_bytes_per_s
            return {"forward_s": product_s, "backward_s": 2 * product_s, "spread": 0.0}
        case AttentionTask():
            core_s = task.flops / hardware.peak_flops_per_s / hardware.attention_efficiency
            return {"forward_s": core_s, "backward_s": 2.5 * core_s, "spread": 0.0}
        case BandwidthTask():
            return {"bytes_per_s": hardware.memory_bandwidth_bytes_per_s}
        case LaunchTask():
            return {"forward_s": hardware.launch_s, "backward_s": 2 * hardware.launch_s}
        case HostLinkTask():
            return {"bytes_per_s": 25e9, "optimizer_s_per_parameter": 1e-9}
        case OptimizerTask():
            return {"time_s": 28 * task.parameters / hardware.memory_bandwidth_bytes_per_s}
        case CollectiveTask():
            alone_s = hardware.intra_latency_s + task.size_bytes / hardware.intra_bandwidth_bytes_per_s
            both_s = hardware.overlap_coefficient * alone_s
            return {"alone_s": alone_s, "compute_s": alone_s, "both_s": both_s}
        case StepTask():
            run = build_measured_run(task, {"step_s": 1.0}, gpu=hardware.gpu, ranks=ranks, precision=hardware.precision)
            judged = evaluate(run.plan, run.build_request(hardware))
            step_s = judged.iteration_time_s
            planned = hardware.plannable_bytes(judged.peak_bytes_per_gpu)
            optimizer_s = sum(stage.parts.other_s for stage in judged.stages) * task.plan.micro_batches
            forward_s = (step_s - optimizer_s) / 3
            figures = {"step_s": step_s, "forward_s": forward_s, "optimizer_s": optimizer_s, "spread": 0.01}
            return figures | {"peak_bytes": 1.1 * planned, "allocated_bytes": float(planned)}
