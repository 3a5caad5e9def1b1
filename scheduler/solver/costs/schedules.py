"""Micro-batches that a device of a pipeline holds at once, by schedule."""

from __future__ import annotations

from scheduler.domain.parallel_plan import Schedule, ScheduleName


def in_flight(schedule: Schedule, *, micro_batches: int, devices: int, position: int) -> float:
    """Micro-batches whose activations the device at `position` (from 0) holds at its peak.

    GPipe holds all. Under 1F1B the last device runs backward at once and holds one; each device before it holds one
    more (Narayanan et al., SC'21, section 2.2). Interleaved over v chunks a device, each chunk is 1/v of it, and the
    warm-up is (v - 1) x P + 2 (P - position - 1) chunks (the same, and Korthikanti et al., arXiv 2205.05198, section
    4.2.3, where the first stage comes to 1 + (P - 1) / (P v) times that of 1F1B).
    """
    if schedule.name is ScheduleName.GPIPE:
        return micro_batches
    if schedule.name is ScheduleName.ONE_F_ONE_B:
        return min(micro_batches, devices - position)
    chunks = schedule.interleave
    warm_up = (chunks - 1) * devices + 2 * (devices - position - 1)
    return min(micro_batches * chunks, warm_up + 1) / chunks
