"""Receipts of recalls: why a lent node was recalled, what its jobs did, and when inference had it back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from scheduler.domain.decisions import ReasonCode, RecallChoice

SERVING_WAIT_S = 86_400.0
"""Time after the return in which a receipt stays open for inference to use the node again."""


class RecallOutcome(StrEnum):
    """How a recall ended.

    IN_TIME: no rank was on the node at its deadline. LATE: ranks were still there. CANCELLED: the node stayed lent.
    LOST: the node went down before it was returned.
    """

    IN_TIME = "in_time"
    LATE = "late"
    CANCELLED = "cancelled"
    LOST = "lost"


RETURNED_OUTCOMES = frozenset({RecallOutcome.IN_TIME, RecallOutcome.LATE})


class JobExit(StrEnum):
    """How a job leaves a recalled node.

    MOVED: it keeps its number of GPUs, on other nodes. SHRANK: it goes on with fewer. PREEMPTED: it waits for other
    GPUs. ENDED: it ended, failed or was stopped by its owner. LEAVING: it was already leaving before the recall.
    """

    MOVED = "moved"
    SHRANK = "shrank"
    PREEMPTED = "preempted"
    ENDED = "ended"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class LeavingJob:
    """A job on a recalled node.

    Args:
        gpus: GPUs of the node that it held when the recall was made.
        checkpoint_steps: steps that its newest checkpoint covered at that time.
        exit: None until it was decided.
        order_generation: the generation of the snapshot that tells its ranks to leave; 0 if none does.
        acknowledged_at_s: when that snapshot was first observed in effect, or ranks were first observed leaving.
        saved: whether a checkpoint with more steps was observed before it left.
        lost_gpu_s: work lost by leaving, in GPU-seconds. If a job leaves several recalled nodes, each receipt has the
            share of its GPUs there.
        left_at_s: when it was first observed to hold no GPU of the node.
    """

    job_id: str
    owner: str
    owner_id: str
    queue: str
    gpus: int
    checkpoint_steps: float = 0.0
    exit: JobExit | None = None
    decided_at_s: float | None = None
    order_generation: int = 0
    acknowledged_at_s: float | None = None
    saved: bool = False
    lost_steps: float = 0.0
    lost_gpu_s: float = 0.0
    left_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class RecallReceipt:
    """The record of one recall of one lent node.

    It is open until the recall has ended and, if the node was returned, until inference uses it again, training gets
    it again, the node is removed, or `SERVING_WAIT_S` have passed. All times are those of the ticks that observed.

    Args:
        gpus: GPUs of the node.
        code: code of the recall's reason, and `detail` its sentence.
        return_by_s: the deadline.
        choice: why this node was chosen; None if the reason names the node.
        freed_at_s: when no job held GPUs of the node any more.
        settled_at_s: when `outcome` was known: the node was returned, or lost, or its recall was cancelled.
        serving_at_s: when inference next used the node.
        closed_at_s: when the receipt was complete.
    """

    id: str
    loan_id: str
    node: str
    pool: str
    gpus: int
    code: ReasonCode
    detail: str
    asked_at_s: float
    return_by_s: float
    jobs: tuple[LeavingJob, ...] = ()
    choice: RecallChoice | None = None
    freed_at_s: float | None = None
    settled_at_s: float | None = None
    serving_at_s: float | None = None
    closed_at_s: float | None = None
    outcome: RecallOutcome | None = None

    @property
    def returned_at_s(self) -> float | None:
        return self.settled_at_s if self.outcome in RETURNED_OUTCOMES else None

    @property
    def return_s(self) -> float | None:
        """Seconds from the recall to the return, or None if the node was not returned."""
        return None if self.returned_at_s is None else self.returned_at_s - self.asked_at_s

    @property
    def acknowledged_at_s(self) -> float | None:
        """When the last of the jobs that were told to leave had been told, or None while one of them was not."""
        told = [job.acknowledged_at_s for job in self.jobs if job.order_generation]
        times_s = [at_s for at_s in told if at_s is not None]
        return max(times_s) if times_s and len(times_s) == len(told) else None

    @property
    def lost_gpu_s(self) -> float:
        return sum(job.lost_gpu_s for job in self.jobs)

    @property
    def lost_steps(self) -> float:
        return sum(job.lost_steps for job in self.jobs)

    def settle(self, outcome: RecallOutcome, now_s: float) -> RecallReceipt:
        return replace(self, outcome=outcome, settled_at_s=now_s)

    def settle_return(self, now_s: float) -> RecallReceipt:
        """Return the receipt of a node that goes back now: late if jobs held GPUs of it after the deadline."""
        freed_at_s = now_s if self.freed_at_s is None else self.freed_at_s
        outcome = RecallOutcome.LATE if freed_at_s > self.return_by_s else RecallOutcome.IN_TIME
        return replace(self, freed_at_s=freed_at_s, outcome=outcome, settled_at_s=now_s)

    def close(self, now_s: float, *, serving_at_s: float | None = None) -> RecallReceipt:
        return replace(self, closed_at_s=now_s, serving_at_s=serving_at_s)

    def count_exits(self) -> dict[JobExit, int]:
        """Return the number of jobs by exit, without exits that no job has."""
        exits = [job.exit for job in self.jobs]
        return {each: count for each in JobExit if (count := exits.count(each))}


def count_outcomes(receipts: Iterable[RecallReceipt]) -> dict[RecallOutcome, int]:
    """Return the number of settled receipts by outcome; every outcome is a key."""
    counts = dict.fromkeys(RecallOutcome, 0)
    for receipt in receipts:
        if receipt.outcome is not None:
            counts[receipt.outcome] += 1
    return counts
