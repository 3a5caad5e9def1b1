"""Decide what to change: the stages of one scheduling cycle, in order."""

from __future__ import annotations

from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.scheduling.stages.allotment import apply_allotment
from scheduler.scheduling.stages.evacuation import evacuate_nodes
from scheduler.scheduling.stages.loans import adjust_loans
from scheduler.scheduling.stages.rebalancing import rearrange_frozen_jobs, rebalance
from scheduler.scheduling.stages.starting import start_pending_jobs
from scheduler.scheduling.stages.user_intents import apply_user_intents


def decide(snapshot: Snapshot, policies: PolicySet) -> TickResult:
    """Return the decisions of one tick. Pure and deterministic: equal arguments give equal results.

    The least disruptive stages come first, and each stage sees the decisions of the earlier ones applied. Lending, and
    moving flexible GPUs between jobs, happen in full passes, once a period. Other ticks only react to arrivals, ends,
    recalls and requests.
    """
    cycle = SchedulingCycle(snapshot, policies)
    intents = apply_user_intents(cycle)  # 1. cancel, suspend and reject jobs
    adjust_loans(cycle)  # 2. return, recall and lend nodes
    evacuation = evacuate_nodes(cycle)  # 3. move, shrink or preempt jobs on nodes that must be vacated
    if policies.allot is not None:
        placement = [apply_allotment(cycle)]  # 4. and 5. in one, for policies that allot GPUs to every job
    else:
        starting = start_pending_jobs(cycle, evacuation)  # 4. start pending jobs in order
        placement = [starting, rebalance(cycle, evacuation, starting)]  # 5. move flexible GPUs to where they gain most
    rearranging = rearrange_frozen_jobs(cycle)  # 6. better plans on the same GPUs for jobs with frozen layers
    return cycle.build_result([intents, evacuation, *placement, rearranging])
