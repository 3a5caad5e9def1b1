"""GPU profiles corrected by factors on the causes of a step, learned from measured steps or hidden in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.domain.parallel_plan import STEP_TERMS
from scheduler.solver.profiles.hardware_profile import CollectiveTable, HardwareProfile


def adjust_profile(hardware: HardwareProfile, factors: Sequence[float], node_gpus: int) -> HardwareProfile:
    """Return the profile of a GPU on which each of ADJUSTABLE_TERMS takes its factor as long.

    Args:
        factors: one for each of STEP_TERMS, above 0; those of other terms are ignored.
        node_gpus: GPUs of a node, by which a measured collective counts as one within a node or between nodes.
    """
    named = dict(zip(STEP_TERMS, factors, strict=True))
    compute, links, network = named["compute"], named["node_links"], named["network"]
    return replace(
        hardware,
        peak_flops_per_s=hardware.peak_flops_per_s / compute,
        memory_bandwidth_bytes_per_s=hardware.memory_bandwidth_bytes_per_s / compute,
        launch_s=hardware.launch_s * compute,
        intra_bandwidth_bytes_per_s=hardware.intra_bandwidth_bytes_per_s / links,
        intra_latency_s=hardware.intra_latency_s * links,
        intra_hop_s=hardware.intra_hop_s * links,
        inter_bandwidth_bytes_per_s=hardware.inter_bandwidth_bytes_per_s / network,
        inter_latency_s=hardware.inter_latency_s * network,
        inter_hop_s=hardware.inter_hop_s * network,
        iteration_overhead_s=hardware.iteration_overhead_s * named["fixed"],
        collectives=tuple(
            _slow_down(table, network if table.ranks > node_gpus else links) for table in hardware.collectives
        ),
    )


def _slow_down(table: CollectiveTable, factor: float) -> CollectiveTable:
    return replace(table, points=tuple((size_bytes, factor * time_s) for size_bytes, time_s in table.points))
