"""Mechanisms that assign GPUs: start pending jobs, and move GPUs between jobs. A policy set names one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.policies.allotment import Allot
from scheduler.scheduling.stages.allotment import apply_allotment
from scheduler.scheduling.stages.rebalancing import rebalance
from scheduler.scheduling.stages.starting import start_pending_jobs

AssignGpus = Callable[[SchedulingCycle, StageReport], Sequence[StageReport]]
"""Assign GPUs to jobs, given the report of the evacuation. Return the reports of the stages that ran, in order."""


def assign_by_queue(cycle: SchedulingCycle, evacuation: StageReport) -> Sequence[StageReport]:
    """Start pending jobs in order, then move flexible GPUs to where they gain most. `scale` decides how many."""
    starting = start_pending_jobs(cycle, evacuation)
    return starting, rebalance(cycle, evacuation, starting)


@dataclass(frozen=True, slots=True)
class AssignByAllotment:
    """Bring every job, pending or running, to its allotment. Ignores `order`, `scale` and `shrink`.

    It serves no demands of the evacuation, so a policy set composes it without `find_eviction_victims`.
    """

    allot: Allot

    def __call__(self, cycle: SchedulingCycle, evacuation: StageReport) -> Sequence[StageReport]:
        return (apply_allotment(cycle, self.allot),)
