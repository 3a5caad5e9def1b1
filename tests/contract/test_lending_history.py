"""Contract of all stores for the history of lending: receipts of recalls and the loans of a pool."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import ReasonCode, RecallChoice
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.recall_receipts import JobExit, LeavingJob, RecallOutcome, RecallReceipt
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import ApiStore
from scheduler.store.lending_history import ReceiptQuery, get_receipt_sort_key
from scheduler.store.protocol import Commit
from tests.contract.store_records import OpenStore, commit_next, make_next_snapshot

JOB = LeavingJob("a", "ada", "id-ada", "web", 4, exit=JobExit.MOVED, acknowledged_at_s=12.0, saved=True)
RECEIPT = RecallReceipt(
    id="i0-3-7",
    loan_id="i0-3",
    node="i0",
    pool="serve",
    gpus=8,
    code=ReasonCode.INFERENCE_NEEDS_NODE,
    detail="demand rose",
    asked_at_s=10.0,
    return_by_s=310.0,
    jobs=(JOB,),
    choice=RecallChoice(1.5, 2, 3),
    freed_at_s=40.0,
    settled_at_s=40.0,
    closed_at_s=50.0,
    outcome=RecallOutcome.IN_TIME,
)


def test_open_receipts_are_live_state(open_store: OpenStore) -> None:
    store = open_store()
    receipt = replace(RECEIPT, outcome=None, settled_at_s=None, closed_at_s=None)
    committed = commit_next(store, recalls={"i0": receipt})
    assert store.load().snapshot.recalls == {"i0": receipt}
    assert commit_next(store, recalls={}).generation == committed.generation + 1
    assert store.load().snapshot.recalls == {}


def test_receipts_are_paged_newest_first_and_filtered(store: ApiStore) -> None:
    receipts = [
        replace(RECEIPT, id=f"r{at}", asked_at_s=float(at // 2), pool=f"p{at % 3}", loan_id=f"l{at % 4}")
        for at in range(12)
    ]
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, receipts=tuple(receipts)))
    queries = (ReceiptQuery(), ReceiptQuery("p1"), ReceiptQuery("p1", 1.0, 4.0), ReceiptQuery(since_s=2.0))
    for query in queries:
        listed = sorted(filter(query.matches, receipts), key=get_receipt_sort_key, reverse=True)
        assert store.lending.find_receipts(query, after=None, limit=99) == tuple(listed)
        after = get_receipt_sort_key(listed[0])
        assert store.lending.find_receipts(query, after=after, limit=2) == tuple(listed[1:3])
    found = store.lending.find_loan_receipts(["l0", "l3", "unknown", *(f"x{at}" for at in range(1200))])
    assert found == {"l0": receipts[8], "l3": receipts[11]}
    assert store.lending.find_loan_receipts([]) == {}


def test_loans_of_a_pool_that_overlap_a_time_span(store: ApiStore) -> None:
    loans = tuple(
        Loan(f"l{at}", "i0", pool, LoanState.RETURNED, offered_s, ended_s)
        for at, (pool, offered_s, ended_s) in enumerate(
            [("a", 0.0, 9.0), ("a", 5.0, 10.0), ("a", 2.0, 30.0), ("b", 5.0, 15.0), ("a", 20.0, 25.0)]
        )
    )
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, ended_loans=loans))
    found = store.lending.list_pool_loans("a", ended_since_s=10.0, offered_before_s=20.0)
    assert [loan.id for loan in found] == ["l2", "l1"]
