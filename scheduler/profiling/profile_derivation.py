"""A GPU profile from measurements: figures of single kernels first, then a fit to the probe steps.

A kernel's figure says what the device can do. The cost model's formulas leave out some work of a real step, such as
casts and small kernels, so the constants are then fitted to short steps, starting at the kernels' figures. The steps of
a validation are of another model and take no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any, TypeVar

from scheduler.profiling.measurement_log import DeviceFacts
from scheduler.profiling.reference_model import build_measured_run
from scheduler.profiling.tasks import (
    AttentionTask,
    BandwidthTask,
    CollectiveTask,
    GemmTask,
    HostLinkTask,
    LaunchTask,
    StepTask,
    Task,
)
from scheduler.solver.calibration.constant_fit import ConstantFit, fit_constants
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.evaluate import evaluate
from scheduler.solver.profiles.hardware_profile import Collective, CollectiveTable, HardwareProfile, Precision

Figures = Mapping[Task, Mapping[str, float]]

_FUSED_BACKWARD = 2.5
"""Operations of the backward pass of a fused attention core over those of its forward pass (arXiv 2307.08691)."""

_HEADROOM = 1.02
"""Peak over the fastest measured product, where no datasheet tells the peak."""

_FITTED = (
    "efficiency",
    "attention_efficiency",
    "memory_bandwidth_bytes_per_s",
    "launch_s",
    "iteration_overhead_s",
)
_FITTED_BETWEEN_RANKS = ("overlap_coefficient", "intra_bandwidth_bytes_per_s", "intra_latency_s")
_LAUNCH_S_MIN, _OVERHEAD_S = 1e-6, 1e-3
_OVERLAP_MAX = 3.0
_RATIO_MAX = 0.5
_LARGE_STEP_SHARE = 0.5
"""Steps that plan a smaller share of the largest one's bytes do not determine the allocator's reserve.

The allocator reserves whole segments, which are much of a small model's memory and little of a real one's.
"""

_SMALLEST_SHARE = 0.2
"""Products that take a smaller share of the largest one's operations do not determine the efficiency."""


@dataclass(frozen=True, slots=True)
class DerivedProfile:
    """A profile with the source of each figure, the fit, and the probes that it was fitted to."""

    hardware: HardwareProfile
    sources: Mapping[str, str]
    fit: ConstantFit | None
    probes: tuple[MeasuredRun, ...]


def derive_profile(device: DeviceFacts, figures: Figures, base: HardwareProfile, name: str) -> DerivedProfile:
    """Return the profile of `device`.

    Args:
        figures: medians over rounds; a figure that was not measured keeps the value of `base`.
        base: profile of the same or a similar device, which also has the datasheet's peak.
        name: of the GPU in the new profile.

    Raises:
        ValueError: no matrix product was measured.
    """
    precision = Precision.FP32 if device.precision == "fp32" else Precision.BF16
    direct = _Figures({"memory_bytes": device.memory_bytes, "precision": precision}, {"memory_bytes": "as reported"})
    direct.sources["precision"] = f"what the measured steps used: {device.precision}"
    _derive_rates(figures, base, direct, knows_peak=device.kind != "cpu")
    _derive_communication(figures, direct)
    hardware = replace(base, gpu=name, estimated=False, reserve_ratio=0.0, **direct.values)
    hardware = replace(hardware, reserve_bytes=min(device.context_bytes, hardware.memory_bytes // 2))
    direct.sources["reserve_bytes"] = "measured: memory of the process and of communication without tensors"
    runs = _build_probe_runs(figures, device.ranks, hardware)
    fit = None
    if runs:
        names = [*_FITTED, *(_FITTED_BETWEEN_RANKS if device.ranks > 1 else ())]
        fit = fit_constants(runs, hardware, tuple(each for each in names if getattr(hardware, each)))
        for constant in fit.constants:
            before = direct.sources.get(constant.name, "as in the profile it is based on")
            direct.sources[constant.name] = (
                f"fitted to {len(runs)} measured steps, from {constant.before:.4g} ({before})"
            )
        hardware = _fit_memory(figures, device, fit.hardware, direct.sources)
    origin = f"{device.name}, {device.software}, {device.ranks} ranks"
    return DerivedProfile(hardware, {each: f"{text}; {origin}" for each, text in direct.sources.items()}, fit, runs)


@dataclass(slots=True)
class _Figures:
    """Values of profile fields with their sources, while they are collected."""

    values: dict[str, Any]
    sources: dict[str, str]

    def set(self, name: str, value: Any, source: str) -> None:
        self.values[name], self.sources[name] = value, source


T = TypeVar("T")


def _select(figures: Figures, kind: type[T]) -> list[tuple[T, Mapping[str, float]]]:
    return [(task, values) for task, values in figures.items() if isinstance(task, kind)]


def _derive_rates(figures: Figures, base: HardwareProfile, direct: _Figures, *, knows_peak: bool) -> None:
    gemms = _select(figures, GemmTask)
    if not gemms:
        raise ValueError("no matrix product was measured, so there is no profile. Measure again.")
    for_bandwidth = [values["bytes_per_s"] for _, values in _select(figures, BandwidthTask)]
    bandwidth = min(for_bandwidth, default=base.memory_bandwidth_bytes_per_s)
    if for_bandwidth:
        direct.set("memory_bandwidth_bytes_per_s", bandwidth, f"measured: sums of {len(for_bandwidth)} sizes")
    largest = max(task.flops for task, _ in gemms)
    value_bytes = direct.values["precision"].value_bytes
    rates = [
        _compute_product_rate(task, values, bandwidth, value_bytes)
        for task, values in gemms
        if task.flops >= _SMALLEST_SHARE * largest
    ]
    fastest = max(max(rates), *(task.flops / values["forward_s"] for task, values in gemms))
    peak = max(base.peak_flops_per_s, fastest) if knows_peak else fastest * _HEADROOM
    source = "as in the profile it is based on" if peak == base.peak_flops_per_s else "measured: the fastest product"
    direct.set("peak_flops_per_s", peak, source)
    count = f"{len(rates)} of {len(gemms)} matrix products, forward and backward, apart from their operands"
    direct.set("efficiency", min(1.0, median(rates) / peak), f"measured: median of {count}")
    attentions = [
        (1 + _FUSED_BACKWARD) * task.flops / (values["forward_s"] + values["backward_s"])
        for task, values in _select(figures, AttentionTask)
    ]
    if attentions:
        count = f"{len(attentions)} attention cores, forward and backward"
        direct.set("attention_efficiency", min(1.0, median(attentions) / peak), f"measured: median of {count}")
    for _, values in _select(figures, LaunchTask):
        launch_s = max(values["forward_s"], _LAUNCH_S_MIN)
        direct.set("launch_s", launch_s, "measured: a layer's forward pass over two tokens")
    direct.set("iteration_overhead_s", base.iteration_overhead_s or _OVERHEAD_S, "as in the profile it is based on")
    for _, values in _select(figures, HostLinkTask):
        direct.set("host_bandwidth_bytes_per_s", values["bytes_per_s"], "measured: copies in both directions")
        each_s = values["optimizer_s_per_parameter"]
        direct.set("host_optimizer_s_per_parameter", each_s, "measured: AdamW on the host")


def _compute_product_rate(task: GemmTask, values: Mapping[str, float], bandwidth: float, value_bytes: int) -> float:
    """Return flop/s of the three products of both passes, apart from the time to move their operands."""
    operands = 3 * value_bytes * (task.m * task.k + task.n * task.k + task.m * task.n)
    seconds = values["forward_s"] + values["backward_s"]
    return 3 * task.flops / max(seconds - operands / bandwidth, seconds / 2)


def _derive_communication(figures: Figures, direct: _Figures) -> None:
    measured = _select(figures, CollectiveTask)
    tables = tuple(
        table
        for collective in Collective
        for ranks in sorted({task.ranks for task, _ in measured})
        if (table := _build_table(collective, ranks, measured)) is not None
    )
    if tables:
        direct.set("collectives", tables, "measured: all groups of a size at the same time")
    sends = {task.size_bytes: values["alone_s"] for task, values in measured if task.collective == "send"}
    if len(sends) > 1:
        small, large = min(sends), max(sends)
        slope_s = max(sends[large] - sends[small], sends[large] / 10) / (large - small)
        direct.set("intra_bandwidth_bytes_per_s", 1 / slope_s, "measured: messages in a ring of two")
        latency_s = max(sends[small] - small * slope_s, sends[small] / 10)
        direct.set("intra_latency_s", latency_s, "measured: the smallest message")
    if overlaps := [each for _, values in measured if (each := _compute_overlap(values)) is not None]:
        coefficient = min(max(median(overlaps), 1.0), _OVERLAP_MAX)
        direct.set("overlap_coefficient", coefficient, f"measured: {len(overlaps)} collectives during products")


def _build_table(
    collective: Collective, ranks: int, measured: Sequence[tuple[CollectiveTask, Mapping[str, float]]]
) -> CollectiveTable | None:
    """Return the rising times of a collective over `ranks`, or None if fewer than two sizes were measured."""
    times_s = {
        float(task.size_bytes): values["alone_s"]
        for task, values in measured
        if (task.collective, task.ranks) == (collective.value, ranks)
    }
    if len(times_s) < 2:
        return None
    points, slowest_s = [], 0.0
    for size, time_s in sorted(times_s.items()):
        slowest_s = max(slowest_s, time_s)
        points.append((size, slowest_s))
    return CollectiveTable(collective, ranks, tuple(points))


def _compute_overlap(values: Mapping[str, float]) -> float | None:
    """Return how much a collective and computation that last about as long slow each other down."""
    shorter, longer = sorted((values["alone_s"], values["compute_s"]))
    if shorter < longer / 3:
        return None
    return 1 + (values["both_s"] - longer) / shorter


def _build_probe_runs(figures: Figures, ranks: int, hardware: HardwareProfile) -> tuple[MeasuredRun, ...]:
    return tuple(
        build_measured_run(task, values, gpu=hardware.gpu, ranks=ranks, precision=hardware.precision)
        for task, values in _select(figures, StepTask)
        if task.purpose == "probe"
    )


def _fit_memory(
    figures: Figures, device: DeviceFacts, hardware: HardwareProfile, sources: dict[str, str]
) -> HardwareProfile:
    """Return the profile with the reserve that the probes' peaks show.

    What the allocator of an accelerator reserved is compared with what the steps plan; its context is known. Of a
    process on a CPU only the resident memory is known, which grows with the planned bytes from what it takes itself.
    """
    points = [
        (_plan_bytes(task, values, device.ranks, hardware), values["peak_bytes"])
        for task, values in _select(figures, StepTask)
        if task.purpose == "probe" and "peak_bytes" in values
    ]
    if not points:
        return hardware
    if device.kind != "cpu":
        largest = max(planned for planned, _ in points)
        ratios = [peak / planned for planned, peak in points if planned >= _LARGE_STEP_SHARE * largest]
        ratio = median(ratios) - 1
        count = f"{len(ratios)} of {len(points)} steps, the largest"
        sources["reserve_ratio"] = f"measured: median over {count}, of reserved over planned bytes"
        return replace(hardware, reserve_ratio=min(max(ratio, 0.0), _RATIO_MAX))
    ratio = min(max(_median_slope(points) - 1, 0.0), _RATIO_MAX)
    own = median(peak - planned * (1 + ratio) for planned, peak in points)
    sources["reserve_ratio"] = f"measured: median slope of the resident memory of {len(points)} steps"
    sources["reserve_bytes"] = f"measured: resident memory of {len(points)} steps beyond what they plan"
    return replace(hardware, reserve_ratio=ratio, reserve_bytes=round(max(own, 0.0)))


def _plan_bytes(task: StepTask, values: Mapping[str, float], ranks: int, hardware: HardwareProfile) -> int:
    run = build_measured_run(task, values, gpu=hardware.gpu, ranks=ranks, precision=hardware.precision)
    return hardware.plannable_bytes(evaluate(run.plan, run.build_request(hardware)).peak_bytes_per_gpu)


def _median_slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the median slope between pairs of points (Theil and Sen); 1 if all lie above each other."""
    slopes = [(y - v) / (x - u) for (u, v), (x, y) in combinations(points, 2) if x != u]
    return median(slopes) if slopes else 1.0
