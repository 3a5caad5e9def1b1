"""Decide what to change: the stages of one scheduling cycle, in order."""

from __future__ import annotations

from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.stages.evacuation import evacuate_nodes
from scheduler.scheduling.stages.loans import adjust_loans
from scheduler.scheduling.stages.outdated_plans import replan_outdated_jobs
from scheduler.scheduling.stages.user_intents import apply_user_intents


def decide(snapshot: Snapshot, policies: PolicySet) -> TickResult:
    """Return the decisions of one tick. Pure and deterministic: equal arguments give equal results.

    The least disruptive stages come first, and each stage sees the decisions of the earlier ones applied. Lending, and
    moving flexible GPUs between jobs, happen in full passes, once a period. Other ticks only react to arrivals, ends,
    recalls and requests.
    """
    cycle = SchedulingCycle(snapshot, policies)
    intents = apply_user_intents(cycle)  # 1. cancel, suspend and reject jobs
    loans = adjust_loans(cycle)  # 2. return, recall and lend nodes
    evacuation = evacuate_nodes(cycle)  # 3. move, shrink or preempt jobs on nodes that must be vacated
    assignment = policies.assign_gpus(cycle, evacuation)  # 4. start pending jobs, and move GPUs between jobs
    replanning = replan_outdated_jobs(cycle, assignment)  # 5. better plans, and GPU counts, where a plan is outdated
    return cycle.build_result([intents, loans, evacuation, *assignment, replanning])
