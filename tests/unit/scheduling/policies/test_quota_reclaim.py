"""Reclaiming a guarantee: flexible GPUs before jobs, the cheapest first, and nothing in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.domain.job import Job
from scheduler.domain.job_account import JobAccount, OnResize
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.policies.preemption import QuotaReclaim, QuotaReclaimer, compute_protection_end_s
from scheduler.scheduling.policies.quota import UNDECLARED, QuotaState
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import GPU, a_fleet, a_loan, a_snapshot
from tests.unit.scheduling.policies.test_quota import runs, waits, world

SETTINGS = PolicySettings(run_time_min_s=600.0)
NOW_S = 1000.0
OWNER = JobQueue("owner", 8)


def claimed(snapshot: Snapshot, missing: int, excluded: frozenset[str] = frozenset()) -> QuotaReclaim | None:
    """Return what is reclaimed for the job `claimant`."""
    book = QuotaState(snapshot)
    book.order_jobs(["claimant"])
    givers = QuotaReclaimer(snapshot, book, SETTINGS, excluded)
    return givers.find_reclaim(snapshot.jobs["claimant"], GPU, missing)


def seen(*jobs: Job, queues: tuple[JobQueue, ...] = (OWNER,)) -> Snapshot:
    return world(list(queues), *jobs, waits("claimant", "owner", 8), now_s=NOW_S)


def test_job_with_the_least_loss_is_preempted() -> None:
    fresh, stale = runs("fresh", "x", "t0", 8), runs("stale", "x", "t1", 8)
    saved = replace(fresh.progress, checkpoint_at_s=NOW_S - 10.0)
    assert claimed(seen(replace(fresh, progress=saved), stale), 8) == QuotaReclaim({"fresh": 0})


def test_own_flexible_gpus_are_reclaimed_before_any_preemption() -> None:
    mine, other = runs("mine", "owner", "t0", 8, least=2), runs("other", "x", "t1", 8)
    snapshot = seen(mine, other, queues=(JobQueue("owner", 10),))
    assert claimed(snapshot, 6) == QuotaReclaim({"mine": 2})
    assert claimed(snapshot, 5) == QuotaReclaim({"mine": 3})
    assert claimed(snapshot, 8) == QuotaReclaim({"other": 0}), "shrinking would not be enough and is left out"
    assert claimed(snapshot, 13) == QuotaReclaim({"mine": 3, "other": 0}), "only what is needed beside the whole job"


def test_only_the_base_of_borrowers_is_reclaimed() -> None:
    snapshot = seen(runs("wide", "x", "t0", 8, least=2))
    assert claimed(snapshot, 2) == QuotaReclaim({"wide": 0})
    assert claimed(snapshot, 3) is None


def test_fixed_job_is_reclaimed_as_a_whole() -> None:
    snapshot = seen(runs("fixed", "x", "t0", 8, least=2, on_resize=OnResize.NEVER))
    assert claimed(snapshot, 3) == QuotaReclaim({"fixed": 0}), "it cannot give up a part"
    book = snapshot.jobs["fixed"]
    quota = QuotaState(snapshot)
    assert (quota.flexible_under_limit("default"), quota.borrowed_base(UNDECLARED)) == (0, 8)
    quota.release(book, 8)
    assert (quota.used(UNDECLARED), quota.flexible_under_limit("default"), quota.borrowed_base(UNDECLARED)) == (0, 0, 0)


def test_guaranteed_gpus_are_never_reclaimed() -> None:
    other = JobQueue("other", 8)
    assert claimed(seen(runs("a", "other", "t0", 8), queues=(OWNER, other)), 1) is None
    beyond = seen(runs("a", "other", "t0", 8), runs("b", "other", "t1", 4), queues=(OWNER, other))
    assert claimed(beyond, 4) == QuotaReclaim({"b": 0})
    saved = replace(beyond.jobs["b"], progress=replace(beyond.jobs["b"].progress, checkpoint_at_s=NOW_S))
    beyond = replace(beyond, jobs={**beyond.jobs, "b": saved})
    assert claimed(beyond, 8) == QuotaReclaim({"a": 0}), "the cheaper b would use up all that the queue borrows"
    assert claimed(beyond, 9) is None, "but not both: without either, the queue borrows nothing more"


def test_unguaranteed_job_preempts_nothing() -> None:
    snapshot = seen(runs("a", "owner", "t0", 4), runs("b", "x", "t1", 8))
    assert claimed(snapshot, 4) is None


def test_priority_does_not_keep_gpus_of_another_queues_guarantee() -> None:
    assert claimed(seen(runs("a", "x", "t0", 8, priority=1)), 8) == QuotaReclaim({"a": 0})


def test_nothing_is_reclaimed_in_vain() -> None:
    assert claimed(seen(runs("a", "x", "t0", 4)), 8) is None
    assert claimed(seen(runs("a", "x", "t0", 8)), 8, excluded=frozenset({"a"})) is None


def test_resizes_do_not_extend_the_protection_of_an_interrupted_job() -> None:
    account = JobAccount(first_started_at_s=0.0, last_started_at_s=NOW_S - 700.0, failures=1)
    resized = replace(runs("resized", "x", "t0", 8), account=account, state_since_s=NOW_S - 10.0)
    assert claimed(seen(resized), 8) == QuotaReclaim({"resized": 0})


def test_recently_started_job_is_protected_until_a_known_time() -> None:
    young = replace(runs("young", "x", "t0", 8), account=JobAccount(first_started_at_s=NOW_S - 100.0))
    assert claimed(seen(young), 8) == QuotaReclaim({}, protected_until_s=NOW_S + 500.0)
    assert claimed(seen(young, runs("old", "x", "t1", 8)), 8) == QuotaReclaim({"old": 0})


def test_protection_restarts_after_an_interruption() -> None:
    job = runs("a", "x", "t0", 8)
    once = replace(job, account=JobAccount(first_started_at_s=5.0, preemptions=1), state_since_s=70.0)
    assert (
        compute_protection_end_s(replace(once, account=JobAccount(first_started_at_s=5.0)), SETTINGS),
        compute_protection_end_s(once, SETTINGS),
    ) == (605.0, 670.0)


def test_frozen_resizes_allow_only_whole_preemptions() -> None:
    snapshot = seen(
        runs("mine", "owner", "t0", 8, least=2), runs("wide", "x", "t1", 8, least=2), queues=(JobQueue("owner", 10),)
    )
    frozen = replace(snapshot, switches=Switches(resizes_frozen=True))
    assert claimed(frozen, 6) == QuotaReclaim({"wide": 0})


def test_lent_gpus_do_not_help_a_non_fungible_job() -> None:
    fleet = a_fleet(training=1, inference=1)
    lent, home = runs("lent", "x", "i0", 8), runs("home", "x", "t0", 8)
    claimant = waits("claimant", "owner", 8, fungible=False)
    snapshot = a_snapshot(fleet, [lent, home, claimant], [a_loan("i0")], queues={"owner": OWNER}, now_s=NOW_S)
    assert claimed(snapshot, 8) == QuotaReclaim({"home": 0})
    assert claimed(replace(snapshot, jobs={**snapshot.jobs, "claimant": waits("claimant", "owner", 8)}), 8) is not None


def test_own_flexible_gpus_make_room_within_a_limit() -> None:
    jobs = (
        runs("wide", "owner", "t0", 8, least=2),
        runs("other", "x", "t1", 8, least=2),
        waits("claimant", "owner", 4),
    )
    snapshot = world([JobQueue("owner", 0, 10)], *jobs)
    claimant, small = snapshot.jobs["claimant"], waits("small", "owner", 2)
    assert room_within(snapshot, claimant) == {"wide": 6}
    assert room_within(snapshot, small) == {}, "it fits already"
    assert room_within(world([JobQueue("owner", 0, 5)], *jobs), claimant) == {}, "it would not fit beside the minimums"


def room_within(snapshot: Snapshot, job: Job) -> Mapping[str, int]:
    givers = QuotaReclaimer(snapshot, QuotaState(snapshot), SETTINGS, frozenset())
    return givers.find_shrinks_within_limit(job, job.spec.min_gpus)


def test_each_job_is_reclaimed_once() -> None:
    snapshot = seen(runs("a", "x", "t0", 4), runs("b", "x", "t1", 4), queues=(JobQueue("owner", 16),))
    book = QuotaState(snapshot)
    book.order_jobs(["claimant"])
    givers = QuotaReclaimer(snapshot, book, SETTINGS, frozenset())
    claimant = snapshot.jobs["claimant"]
    found = [givers.find_reclaim(claimant, GPU, 4) for _ in range(3)]
    assert found == [QuotaReclaim({"a": 0}), QuotaReclaim({"b": 0}), None]
    assert book.used("x") == 0
