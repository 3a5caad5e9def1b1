"""Checks of all receipts of a simulation against the decisions that the store recorded."""

from __future__ import annotations

from itertools import pairwise

from scheduler.domain.decisions import CancelRecall, RecallNode
from scheduler.domain.recall_receipts import RecallOutcome, RecallReceipt
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Page

_ALL = 10**9


def check_receipts(store: MemoryStore, last: Snapshot) -> tuple[RecallReceipt, ...]:
    """Check that each recall has exactly one receipt, with times in order, and return the receipts.

    A receipt is late exactly if the node was freed after the deadline.
    """
    decided = store.list_decisions(Page(limit=_ALL))
    receipts = (*store.lending.receipts, *last.recalls.values())
    recalls = sorted((each.at_s, each.decision.node) for each in decided if isinstance(each.decision, RecallNode))
    assert sorted((each.asked_at_s, each.node) for each in receipts) == recalls
    assert len({receipt.id for receipt in receipts}) == len(receipts)
    cancelled = [each for each in receipts if each.outcome is RecallOutcome.CANCELLED]
    assert len(cancelled) == sum(isinstance(each.decision, CancelRecall) for each in decided)
    for receipt in receipts:
        _check_receipt(receipt)
    return receipts


def _check_receipt(receipt: RecallReceipt) -> None:
    times_s = (receipt.asked_at_s, receipt.freed_at_s, receipt.settled_at_s, receipt.serving_at_s, receipt.closed_at_s)
    known_s = [at_s for at_s in times_s if at_s is not None]
    assert all(first <= second for first, second in pairwise(known_s)), receipt
    if receipt.returned_at_s is not None:
        assert receipt.freed_at_s is not None
        assert (receipt.outcome is RecallOutcome.LATE) == (receipt.freed_at_s > receipt.return_by_s), receipt
        assert all(job.left_at_s is not None and job.exit is not None for job in receipt.jobs), receipt
    for job in receipt.jobs:
        steps_s = (receipt.asked_at_s, job.decided_at_s, job.acknowledged_at_s, job.left_at_s, receipt.settled_at_s)
        reached_s = [at_s for at_s in steps_s if at_s is not None]
        assert all(first <= second for first, second in pairwise(reached_s)), receipt
        assert job.lost_gpu_s >= 0.0
        assert job.gpus >= 1
