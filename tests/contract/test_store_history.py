"""Contract of all stores for history: ended jobs and loans, readings, usage and samples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.fleet import DemandReading, Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.domain.job_records import Sample, SlottedSample
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.domain.reading_bins import bin_readings
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import ApiStore, LoanQuery, get_job_sort_key, get_loan_sort_key
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import Commit, ConflictError, FencedError, Page
from tests.contract.store_records import OpenStore, commit_next, make_next_snapshot, make_stored_job


def test_ended_jobs_and_loans_are_listed_newest_first(store: ApiStore) -> None:
    jobs = tuple(make_stored_job(at, state) for at, state in enumerate(sorted(ENDED_STATES)))
    loans = tuple(Loan(f"l{at}", f"i{at}", "serve", s, 1.0, 2.0) for at, s in enumerate(list(LoanState)[3:]))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, ended_jobs=jobs, ended_loans=loans))
    assert store.get_ended_job("job-1") == jobs[1]
    assert store.get_ended_job("job-99") is None
    assert store.list_ended_jobs(limit=2) == (jobs[2], jobs[1])
    assert store.list_ended_loans(limit=9) == loans[::-1]


def test_queues_of_ended_jobs_and_subjects_of_events_are_read_in_one_call(store: ApiStore) -> None:
    jobs = tuple(make_stored_job(at, JobState.SUCCEEDED) for at in range(3))
    events = tuple(Event(1.0, EventCode.JOB_STATE, f"job-{at % 2}", "it ended") for at in range(4))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, ended_jobs=jobs, events=events))
    wanted = ["job-0", "job-2", *(f"job-{at}" for at in range(100, 1200))]
    for _ in range(2):
        found = store.find_ended_job_queues(wanted)
        assert dict(found) == {job.id: job.spec.queue for job in (jobs[0], jobs[2])}
    assert store.find_ended_job_queues([]) == {}
    listed = store.list_events(Page())
    assert store.list_event_subjects(Page(after=1, limit=2)) == tuple(
        (each.number, each.event.subject) for each in listed[1:3]
    )
    assert store.get_events([listed[3].number, listed[0].number]) == (listed[0], listed[3])
    assert store.get_events([]) == ()


def test_ended_jobs_are_paged_by_submission_and_filtered(store: ApiStore) -> None:
    jobs = [_listed(at, state) for at, state in enumerate([*sorted(ENDED_STATES)] * 3)]
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, ended_jobs=tuple(reversed(jobs))))
    asked = [
        JobQuery(),
        JobQuery(states=frozenset({JobState.FAILED, JobState.SUCCEEDED})),
        JobQuery(queues=frozenset({"odd"}), owner="ada"),
        JobQuery(queues=frozenset()),
        JobQuery(name_prefix="tr"),
        JobQuery(name_prefix="%"),
        JobQuery(since_s=1.0, until_s=2.0),
        JobQuery(id_prefix="a-"),
        JobQuery(id_prefix="a-b8"),
        JobQuery(id_prefix="%"),
        JobQuery(states=frozenset({JobState.FAILED}), ended_since_s=196.0),
        JobQuery(ended_since_s=0.0),
        JobQuery(recent_since_s=196.0),
        JobQuery(text="E"),
        JobQuery(text="a-B8"),
        JobQuery(text="od", states=frozenset({JobState.FAILED})),
        JobQuery(text="BO", queues=frozenset({"odd"})),
        JobQuery(text="_"),
        JobQuery(text="ain", recent_since_s=197.0),
        JobQuery(ended_since_s=1e9),
    ]
    for wanted in asked:
        listed = sorted(filter(wanted.matches, jobs), key=get_job_sort_key, reverse=True)
        assert store.find_ended_jobs(wanted, after=None, limit=99) == tuple(listed)
        for at, job in enumerate(listed):
            assert store.find_ended_jobs(wanted, after=get_job_sort_key(job), limit=2) == tuple(listed[at + 1 : at + 3])


def _listed(at: int, state: JobState) -> Job:
    """Return jobs of one time, with ids whose order depends on sorting by code points."""
    job = make_stored_job(at, state)
    spec = replace(job.spec, name=("train", "Test", "eval")[at % 3], queue=("even", "odd")[at % 2])
    job_id = ("a-b", "aa", "a-", "B")[at % 4] + str(at)
    owner = ("ada", "bob")[at // 2 % 2]  # the store gets jobs in the order in which they end
    return replace(job, id=job_id, spec=spec, submitted_at_s=at // 3, state_since_s=200.0 - at, owner=owner)


def test_ended_loans_are_paged_by_offer_and_filtered(store: ApiStore) -> None:
    ended = [LoanState.RETURNED, LoanState.LOST] * 3
    loans = [Loan(f"l{at}", f"i{at % 3}", f"p{at % 2}", state, at // 2, 9.0) for at, state in enumerate(ended)]
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, ended_loans=tuple(loans)))
    for wanted in (LoanQuery(), LoanQuery(frozenset({LoanState.LOST})), LoanQuery(pool="p0", node="i1")):
        listed = sorted(filter(wanted.matches, loans), key=get_loan_sort_key, reverse=True)
        assert store.find_ended_loans(wanted, after=None, limit=99) == tuple(listed)
        assert store.find_ended_loans(wanted, after=get_loan_sort_key(listed[0]), limit=1) == tuple(listed[1:2])


def test_page_of_ended_jobs_is_repeatable(store: ApiStore) -> None:
    jobs = tuple(_listed(at, JobState.FAILED) for at in range(6))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, ended_jobs=jobs))
    first = store.find_ended_jobs(JobQuery(), after=None, limit=4)
    assert len(first) == 4
    assert store.find_ended_jobs(JobQuery(), after=None, limit=4) == first
    assert store.find_ended_jobs(JobQuery(), after=None, limit=6)[:4] == first


def test_readings_are_listed_by_pool_in_order_of_time(store: ApiStore) -> None:
    late, early, same = DemandReading(30.0, 8.0, 9.0), DemandReading(10.0, 4.0, 4.0), DemandReading(30.0, 7.0, 7.0)
    readings = (("serve", late), ("serve", early), ("other", early), ("serve", same))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, readings=readings))
    assert store.list_readings("serve", since_s=0.0) == (early, late, same)
    assert store.list_readings("serve", since_s=30.0) == (late, same)
    assert store.list_readings("other", since_s=10.1) == ()


@pytest.mark.parametrize("bin_s", [300.0, 30.0, 7.3])
def test_bins_of_readings_are_those_of_python(store: ApiStore, bin_s: float) -> None:
    """Times are random, on the edges of bins, just below them, and repeated, and come in no order."""
    generator = np.random.default_rng(int(10 * bin_s))
    edges = bin_s * generator.integers(0, 40, 60)
    times_s = [*generator.uniform(1.0, 40 * bin_s, 300), *edges, *(edges - 1e-12 * edges), *edges[:20]]
    gpus = generator.uniform(0.0, 90.0, len(times_s)).round(1)
    pairs = generator.permutation(np.stack([times_s, gpus], axis=1)).tolist()
    named = tuple(("serve", DemandReading(at_s, min(each, 64.0), each)) for at_s, each in pairs)
    other = ("other", DemandReading(1.0, 99.0, 99.0))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, readings=(*named, other)))
    for since_s in (-math.inf, 0.0, 17 * bin_s, 18.5 * bin_s, 1e9):
        expected = tuple(bin_readings(store.list_readings("serve", since_s=since_s), bin_s))
        assert store.list_reading_bins("serve", since_s=since_s, bin_s=bin_s) == expected
    assert len(expected) == 0


def test_back_filled_readings_replace_those_of_their_pool_and_time(store: ApiStore) -> None:
    first, second = DemandReading(10.0, 4.0, 4.0), DemandReading(30.0, 8.0, 9.0)
    before = make_next_snapshot(Snapshot())
    readings = (("serve", first), ("serve", second), ("other", first))
    store.commit(Commit(Snapshot(), before, epoch=0, readings=readings))
    older, other = DemandReading(5.0, 1.0, 1.0), DemandReading(10.0, 2.0, 2.0)
    newest = DemandReading(40.0, 3.0, 3.0)
    backfill = (("serve", older), ("serve", other))
    commit = Commit(before, make_next_snapshot(before), epoch=0, readings=(("serve", newest),), backfill=backfill)
    store.commit(commit)
    assert store.list_readings("serve", since_s=0.0) == (older, other, second, newest)
    assert store.list_readings("other", since_s=0.0) == (first,)


def test_usage_is_summed_by_key_and_loaded_with_its_snapshot(open_store: OpenStore) -> None:
    own, lent = (UsageKey(3600, "vision", "ada", "a100-80g", is_lent) for is_lent in (False, True))
    later, nameless = replace(own, hour_s=7200), replace(own, owner_id="", gpu="")
    writer, reader = open_store(), open_store()
    added = (UsageEntry(own, 1.5), UsageEntry(lent, 8.0, 0.5)), (UsageEntry(later, 4.0), UsageEntry(own, 2.5, 1.0))
    for usage in (*added, (UsageEntry(nameless, 0.25),), ()):
        previous = writer.load().snapshot
        writer.commit(Commit(previous, make_next_snapshot(previous), epoch=0, usage=usage))
    first = (UsageEntry(nameless, 0.25), UsageEntry(own, 4.0, 1.0), UsageEntry(lent, 8.0, 0.5))
    books = reader.load_usage(from_s=3600.0, to_s=7200.0)
    assert (books.entries, books.snapshot) == (first, writer.load().snapshot)
    assert reader.load_usage(from_s=7199.0, to_s=7201.0).entries == (*first, UsageEntry(later, 4.0))
    assert reader.load_usage(from_s=7200.0, to_s=9000.0).entries == (UsageEntry(later, 4.0),)
    assert reader.load_usage(from_s=0.0, to_s=3600.0).entries == ()


def test_usage_is_split_by_model_and_the_rest_is_not_stated(open_store: OpenStore) -> None:
    plain = UsageKey(3600, "vision", "ada", "a100-80g", False)
    llama, gpt = replace(plain, model="llama-2-7b"), replace(plain, model="gpt-3-2.7b")
    store = open_store()
    for usage in (
        (UsageEntry(plain, 1.5, owner="ann"), UsageEntry(llama, 0.1, 0.2, owner="ann")),
        (UsageEntry(llama, 0.2, owner="ann"), UsageEntry(gpt, 8.0, owner="ann")),
    ):
        previous = store.load().snapshot
        store.commit(Commit(previous, make_next_snapshot(previous), epoch=0, usage=usage))
    entries = open_store().load_usage(from_s=0.0, to_s=math.inf).entries
    assert [(each.key, each.owner) for each in entries] == [(plain, "ann"), (gpt, "ann"), (llama, "ann")]
    assert [each.gpu_s for each in entries] == pytest.approx([1.5, 8.0, 0.3])
    assert [each.lost_gpu_s for each in entries] == pytest.approx([0.0, 0.0, 0.2])
    previous = store.load().snapshot
    only = (UsageEntry(replace(llama, hour_s=7200), 1 / 3), UsageEntry(replace(gpt, hour_s=7200), 1 / 7))
    store.commit(Commit(previous, make_next_snapshot(previous), epoch=0, usage=only))
    late = store.load_usage(from_s=7200.0, to_s=math.inf).entries
    assert [each.key.model for each in late] == ["gpt-3-2.7b", "llama-2-7b"], "no row for a remainder of rounding"


def test_usage_names_each_owner_as_last_seen(store: ApiStore) -> None:
    key = UsageKey(3600, "vision", "token:1", "a100-80g", False)
    for owner in ("ada", "ann"):
        previous = store.load().snapshot
        usage = (UsageEntry(key, 1.0, owner=owner), UsageEntry(replace(key, owner_id="token:2"), 1.0, owner="ada"))
        store.commit(Commit(previous, make_next_snapshot(previous), epoch=0, usage=usage))
    entries = store.load_usage(from_s=0.0, to_s=math.inf).entries
    assert [(entry.key.owner_id, entry.gpu_s, entry.owner) for entry in entries] == [
        ("token:1", 2.0, "ann"), ("token:2", 2.0, "ada"),
    ]  # fmt: skip


def test_failed_commit_adds_no_usage(store: ApiStore) -> None:
    usage = (UsageEntry(UsageKey(0, "vision", "ada", "a100-80g", False), 1.0),)
    previous = store.load().snapshot
    commit_next(store)
    with pytest.raises(ConflictError):
        store.commit(Commit(previous, make_next_snapshot(previous), epoch=0, usage=usage))
    with pytest.raises(FencedError):
        store.commit(Commit(store.load().snapshot, make_next_snapshot(store.load().snapshot), epoch=7, usage=usage))
    assert store.load_usage(from_s=0.0, to_s=math.inf).entries == ()


def test_sample_replaces_the_one_in_its_place_and_series_are_ordered(
    open_store: OpenStore,
) -> None:
    first, second = Sample(10.0, 1.0), Sample(20.0, 2.0, 0.5, 8.25, 70_000_000_000)
    third, fourth, last = (Sample(at_s, at_s, -1.5) for at_s in (30.0, 40.0, 45.0))
    writer = open_store()
    commits = (
        (SlottedSample("a", 0, first), SlottedSample("a", 3, second), SlottedSample("b", 0, third)),
        (SlottedSample("a", 1, third),),
        (SlottedSample("a", 3, fourth), SlottedSample("a", 3, last)),
        (),
    )
    seen = []
    for samples in commits:
        previous = writer.load().snapshot
        writer.commit(Commit(previous, make_next_snapshot(previous), epoch=0, samples=samples))
        seen.append(open_store().list_samples("a"))
    assert seen == [(first, second), (first, second, third), (first, third, last), (first, third, last)]
    assert writer.list_samples("b") == (third,)
    assert writer.list_samples("nobody") == ()


def test_failed_commit_stores_no_samples(store: ApiStore) -> None:
    previous = store.load().snapshot
    commit_next(store)
    with pytest.raises(ConflictError):
        store.commit(
            Commit(previous, make_next_snapshot(previous), epoch=0, samples=(SlottedSample("a", 0, Sample(1.0, 1.0)),))
        )
    assert store.list_samples("a") == ()


def test_last_events_of_a_subject_are_in_order_with_their_job_step(store: ApiStore) -> None:
    step = JobStep(JobState.RUNNING, 3, 8, 2, "dp8 · 1 micro-batch")
    events = [Event(float(at), EventCode.JOB_STATE, "ab"[at % 2], "so", job=step if at else None) for at in range(9)]
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, events=tuple(events)))
    assert [each.event for each in store.list_last_events("a", limit=9)] == events[::2]
    assert [each.event for each in store.list_last_events("a", limit=2)] == [events[6], events[8]]
    assert store.list_last_events("a", limit=2) == store.list_events(Page(), subject="a")[-2:]
    assert store.list_last_events("nobody", limit=2) == ()
