"""decide: one complete snapshot in, everything that should change out. Pure, total, deterministic."""

from __future__ import annotations

from scheduler.core.allotment_stage import settle_allotment
from scheduler.core.course import Course
from scheduler.core.evacuation_stage import evacuate
from scheduler.core.flexing_stage import flex
from scheduler.core.loans_stage import give_up_offers, lend_or_recall, recall_drained, return_empty_nodes
from scheduler.core.owners_stage import honour_owners
from scheduler.core.rearranging_stage import rearrange_frozen
from scheduler.core.starting_stage import start_waiting
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.policies.policy_set import PolicySet


def decide(snapshot: Snapshot, policies: PolicySet) -> TickResult:
    """The decisions of one tick, least disruptive first, each stage seeing the earlier ones applied.

    A full pass, once a period, also lends and moves flexible GPUs; between two of them a tick only reacts to
    arrivals, ends, recalls and what people asked for.
    """
    course = Course(snapshot, policies)
    honour_owners(course)  # 1. stop and suspend what owners asked to
    return_empty_nodes(course)  # 2. hand back recalled nodes that training has left
    recall_drained(course)  # 3. call lent nodes home that an operator drains,
    give_up_offers(course)  #    and those that inference cannot leave,
    lend_or_recall(course)  #    and compare every inference pool's loans with what it can bear
    evacuate(course)  # 4. take jobs off nodes that must be left: shrink, else move, else preempt
    if policies.allot is not None:
        settle_allotment(course)  # 5. and 6. in one, for sets that also say who has to stop
    else:
        start_waiting(course)  # 5. base demand in order, as wide as it pays where nobody waits
        flex(course)  # 6. flexible GPUs, by the gain of the curves
    rearrange_frozen(course)  # 7. other plans on the same GPUs for jobs whose layers froze
    return course.result()
