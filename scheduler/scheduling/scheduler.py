"""decide: one complete snapshot in, everything that should change out. Pure, total, deterministic."""

from __future__ import annotations

from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.scheduling.stages.allotment import apply_allotment
from scheduler.scheduling.stages.evacuation import evacuate_nodes
from scheduler.scheduling.stages.loans import (
    adjust_loans,
    recall_draining_nodes,
    return_empty_nodes,
    withdraw_expired_offers,
)
from scheduler.scheduling.stages.rebalancing import rearrange_frozen_jobs, rebalance
from scheduler.scheduling.stages.starting import start_pending_jobs
from scheduler.scheduling.stages.user_intents import apply_user_intents


def decide(snapshot: Snapshot, policies: PolicySet) -> TickResult:
    """The decisions of one tick, least disruptive first, each stage seeing the earlier ones applied.

    A full pass, once a period, also lends and moves flexible GPUs; between two of them a tick only reacts to
    arrivals, ends, recalls and what people asked for.
    """
    course = SchedulingCycle(snapshot, policies)
    apply_user_intents(course)  # 1. stop and suspend what owners asked to
    return_empty_nodes(course)  # 2. hand back recalled nodes that training has left
    recall_draining_nodes(course)  # 3. call lent nodes home that an operator drains,
    withdraw_expired_offers(course)  #    and those that inference cannot leave,
    adjust_loans(course)  #    and compare every inference pool's loans with what it can bear
    evacuate_nodes(course)  # 4. take jobs off nodes that must be left: shrink, else move, else preempt
    if policies.allot is not None:
        apply_allotment(course)  # 5. and 6. in one, for sets that also say who has to stop
    else:
        start_pending_jobs(course)  # 5. base demand in order, as wide as it pays where nobody waits
        rebalance(course)  # 6. flexible GPUs, by the gain of the curves
    rearrange_frozen_jobs(course)  # 7. other plans on the same GPUs for jobs whose layers froze
    return course.build_result()
