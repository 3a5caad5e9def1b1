"""Contract of all stores for allocation spans: begin, end, filters, pages, and retention of ended ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scheduler.domain.allocation_span import AllocationSpan, SpanEnd, SpanEnding
from scheduler.store.allocation_history import GenerationUse, SpanQuery
from scheduler.store.api_protocol import ApiStore, HistoryLog
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.contract.store_records import make_next_snapshot

SPAN = AllocationSpan(
    "a", "train", "web", "ada", "id-ada", 1, "t0", "train", "h100-80g", (0, 1), False, 10.0, model="m"
)
ALWAYS = SpanQuery(-1e12, 1e12)


def commit_spans(store: ApiStore, *begun: AllocationSpan, ended: tuple[SpanEnding, ...] = ()) -> None:
    previous = store.load().snapshot
    commit = Commit(previous, make_next_snapshot(previous), epoch=0, ended_spans=ended, begun_spans=begun)
    store.commit(commit)


def find(store: ApiStore, query: SpanQuery = ALWAYS) -> list[AllocationSpan]:
    return [stored.span for stored in store.allocations.find_spans(query, before=None, limit=99)]


def test_a_span_is_open_until_its_end_and_the_next_one_follows(store: ApiStore) -> None:
    commit_spans(store, SPAN, replace(SPAN, node="t1"))
    assert find(store) == [replace(SPAN, node="t1"), SPAN]
    smaller = replace(SPAN, generation=2, gpus=(0,), begin_s=20.0)
    commit_spans(store, smaller, ended=(SpanEnding("a", "t0", 20.0, SpanEnd.RESIZED),))
    commit_spans(
        store, ended=(SpanEnding("a", "t0", 30.0, SpanEnd.SUCCEEDED), SpanEnding("b", "t0", 30.0, SpanEnd.FAILED))
    )
    first = replace(SPAN, end_s=20.0, end=SpanEnd.RESIZED)
    assert find(store) == [replace(smaller, end_s=30.0, end=SpanEnd.SUCCEEDED), replace(SPAN, node="t1"), first]


def test_spans_are_filtered_and_paged_newest_first(store: ApiStore) -> None:
    spans = [
        replace(SPAN, job_id=f"j{at}", node=f"t{at % 3}", pool=f"p{at % 2}", queue=f"q{at % 4}", begin_s=10.0 * at)
        for at in range(12)
    ]
    commit_spans(store, *spans)
    endings = [SpanEnding(f"j{at}", f"t{at % 3}", 10.0 * at + 15.0, SpanEnd.FAILED) for at in range(8)]
    commit_spans(store, ended=tuple(endings))
    by_job = {each.job_id: each for each in endings}
    stored = [
        replace(each, end_s=by_job[each.job_id].end_s, end=SpanEnd.FAILED) if each.job_id in by_job else each
        for each in spans
    ]
    queries = (
        ALWAYS,
        SpanQuery(35.0, 60.0),
        SpanQuery(0.0, 1e3, pool="p1"),
        SpanQuery(0.0, 1e3, node="t2"),
        SpanQuery(0.0, 1e3, job_id="j5"),
        SpanQuery(0.0, 1e3, queues=frozenset({"q1", "q2"})),
        SpanQuery(0.0, 1e3, queues=frozenset()),
    )
    for query in queries:
        expected = [each for each in reversed(stored) if query.matches(each)]
        assert find(store, query) == expected
        if expected:
            first = store.allocations.find_spans(query, before=None, limit=1)
            rest = store.allocations.find_spans(query, before=first[0].number, limit=2)
            assert [each.span for each in (*first, *rest)] == expected[:3]


def test_use_of_a_job_is_summed_by_generation_and_kind_of_gpu(store: ApiStore) -> None:
    lent = replace(SPAN, node="i0", is_lent=True, gpu="a100-80g", gpus=(0,), begin_s=12.0)
    commit_spans(store, SPAN, replace(SPAN, node="t1"), lent, replace(SPAN, job_id="b"))
    smaller = replace(SPAN, generation=2, gpus=(0,), begin_s=20.0)
    ended = (SpanEnding("a", "t0", 20.0, SpanEnd.RESIZED), SpanEnding("a", "t1", 16.0, SpanEnd.RESIZED))
    commit_spans(store, smaller, ended=ended)
    assert store.allocations.sum_generations("a", now_s=32.0) == (
        GenerationUse(1, "a100-80g", True, 12.0, None, 20.0),
        GenerationUse(1, "h100-80g", False, 10.0, 20.0, 32.0),
        GenerationUse(2, "h100-80g", False, 20.0, None, 12.0),
    )
    assert store.allocations.sum_generations("none", now_s=32.0) == ()


def test_retention_deletes_ended_spans_only(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    commit_spans(store, SPAN, *(replace(SPAN, node=f"t{at}") for at in range(1, 4)))
    commit_spans(store, ended=tuple(SpanEnding("a", f"t{at}", 20.0 * at, SpanEnd.FAILED) for at in range(1, 4)))
    batch = store.retention.delete_old_rows(HistoryLog.ALLOCATIONS, before_s=50.0, rows_max=9, epoch=0)
    assert (batch.rows, batch.is_complete) == (2, True)
    assert [each.node for each in find(store)] == ["t3", "t0"], "an open span stays, whatever its age"
    store.close()
