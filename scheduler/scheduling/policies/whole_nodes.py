"""Whole nodes: how many nodes other jobs are moved off for a pending job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from scheduler.domain.job import Job
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.backfill import CountStartingGpus
from scheduler.scheduling.policies.speed import gpu_model


class CountWholeNodes(Protocol):
    """Count the whole nodes that are vacated for a pending job, in a fleet with nodes of these sizes."""

    def __call__(
        self, snapshot: Snapshot, job: Job, sizes: Mapping[str, int], *, starting_gpus: CountStartingGpus
    ) -> int: ...


def count_no_whole_nodes(
    snapshot: Snapshot, job: Job, sizes: Mapping[str, int], *, starting_gpus: CountStartingGpus
) -> int:
    """Vacate no nodes."""
    return 0


def count_required_whole_nodes(
    snapshot: Snapshot, job: Job, sizes: Mapping[str, int], *, starting_gpus: CountStartingGpus
) -> int:
    """Return how many whole nodes the job starts on, or 0 if other distributions may be feasible too."""
    curve = snapshot.curve(job)
    if isinstance(curve, LinearCurve) or not curve.infeasible:
        return 0
    gpu = gpu_model(snapshot, job, sizes)
    size = sizes[gpu] if gpu else 0
    need = starting_gpus(snapshot, job, sizes, gpu) if size else 0
    return need // size if need and need % size == 0 and curve.has_infeasible_shape(need) else 0
