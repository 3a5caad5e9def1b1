"""The hardware of the fleet that this process plans for: profiles that were set, networks, and memory that is kept.

It is state of the process, because plans are solved in processes of a pool, which get it with each task. A reader of
snapshots replaces it (`scheduler/runtime/fleet_hardware.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from scheduler.domain.hardware import FleetHardware, NodeNetwork
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_current = FleetHardware()


def use_fleet_hardware(hardware: FleetHardware) -> None:
    """Replace the hardware of the fleet in this process."""
    global _current
    _current = hardware


def get_fleet_hardware() -> FleetHardware:
    return _current


@lru_cache(maxsize=256)
def with_slowest_network(profile: HardwareProfile, networks: tuple[NodeNetwork | None, ...]) -> HardwareProfile:
    """Return the profile with the slowest of these networks between nodes; None stands for its own.

    A job may span all of them, so the lowest bandwidth per GPU counts, and the longest latency. Collectives that were
    measured over more GPUs than a node has are dropped, because they were measured on another network.
    """
    named = [each for each in networks if each is not None]
    if not named:
        return profile
    slowest, latency_s = min(named, key=_bytes_per_s_per_gpu), max(each.latency_s for each in named)
    if None in networks:
        own = NodeNetwork(profile.inter_bandwidth_bytes_per_s, profile.inter_latency_s, profile.gpus_per_nic, 0)
        slowest, latency_s = min(slowest, own, key=_bytes_per_s_per_gpu), max(latency_s, own.latency_s)
    node_gpus = max(each.node_gpus for each in named)
    return replace(
        profile,
        inter_bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s,
        inter_latency_s=latency_s,
        gpus_per_nic=slowest.gpus_per_nic,
        collectives=tuple(table for table in profile.collectives if table.ranks <= node_gpus),
    )


@lru_cache(maxsize=256)
def with_kept_memory(profile: HardwareProfile, kept_bytes: int) -> HardwareProfile:
    """Return the profile whose plans leave `kept_bytes` of each GPU's memory to sleeping replicas of inference."""
    return replace(profile, kept_bytes=kept_bytes) if kept_bytes else profile


def _bytes_per_s_per_gpu(network: NodeNetwork) -> float:
    return network.bandwidth_bytes_per_s / network.gpus_per_nic
