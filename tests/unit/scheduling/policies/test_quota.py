"""Quotas of queues: own and borrowed GPUs, limits, order, and what scaling must respect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.domain.decisions import ReasonCode
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.quota import QuotaState, cap_to_quota, compute_queue_usage
from tests.builders import a_fleet, a_job, a_snapshot

FLEET = a_fleet(training=4, inference=0)


def runs(job_id: str, queue: str, node: str, gpus: int, *, least: int = 0, most: int = 0, **more: Any) -> Job:
    """Return a running job on the first `gpus` GPUs of a node."""
    on = {node: tuple(range(gpus))}
    return a_job(job_id, least or gpus, most or gpus, state=JobState.RUNNING, on=on, queue=queue, **more)


def waits(job_id: str, queue: str, least: int, most: int | None = None, **more: Any) -> Job:
    return a_job(job_id, least, most, queue=queue, **more)


def world(queues: list[JobQueue], *jobs: Job, **more: Any) -> Snapshot:
    return a_snapshot(FLEET, jobs, queues={queue.name: queue for queue in queues}, **more)


def test_gpus_above_the_guarantee_are_borrowed() -> None:
    snapshot = world([JobQueue("vision", 8)], runs("a", "vision", "t0", 6, least=2), runs("b", "vision", "t1", 5))
    book = QuotaState(snapshot)
    assert (book.used("vision"), book.borrowed("vision"), book.borrowed_base("vision")) == (11, 3, 0)
    use = compute_queue_usage(snapshot)["vision"]
    assert (use.own_gpus, use.borrowed_gpus, use.running_jobs) == (8, 3, 2)


def test_undeclared_queue_borrows_everything_without_limit() -> None:
    snapshot = world([JobQueue("vision", 8)], runs("a", "default", "t0", 6), waits("b", "default", 1000))
    book = QuotaState(snapshot)
    assert book.borrowed("default") == 6
    assert book.check_limits(snapshot.jobs["b"], 1000) is None
    book.order_jobs(["b"])
    assert not book.is_guaranteed(snapshot.jobs["b"])
    use = compute_queue_usage(snapshot)["default"]
    assert (use.is_declared, use.waiting_jobs, use.waiting_gpus) == (False, 1, 1000)


def test_full_queue_reason_has_its_numbers() -> None:
    snapshot = world([JobQueue("vision", 4, 8)], runs("a", "vision", "t0", 6), waits("b", "vision", 3))
    book = QuotaState(snapshot)
    verdict = book.check_limits(snapshot.jobs["b"], 3)
    assert verdict is not None
    assert verdict.code is ReasonCode.WAITING_FOR_QUOTA
    assert verdict.detail == "needs 3 GPUs; queue vision uses 6 of its limit of 8"
    assert dict(verdict.numbers) == {
        "needed_gpus": 3.0,
        "used_gpus": 6.0,
        "limit_gpus": 8.0,
        "guaranteed_gpus": 4.0,
        "borrowed_gpus": 2.0,
    }
    assert book.check_limits(snapshot.jobs["b"], 2) is None


def test_minimum_above_the_limit_exceeds_max_quota() -> None:
    snapshot = world([JobQueue("vision", 4, 8)], waits("b", "vision", 9))
    verdict = QuotaState(snapshot).check_limits(snapshot.jobs["b"], 9)
    assert verdict is not None
    assert (verdict.code, verdict.detail) == (
        ReasonCode.EXCEEDS_MAX_QUOTA,
        "needs 9 GPUs; the limit of queue vision is 8",
    )


def of(owner: str, job: Job) -> Job:
    return replace(job, owner=owner)


LAB = JobQueue("lab", 16, user_limit_gpus=8)


def test_user_limit_reason_has_numbers_and_spares_other_users() -> None:
    ours = [of("ada", runs("a", "lab", "t0", 6)), of("ada", waits("b", "lab", 3)), of("bob", waits("c", "lab", 8))]
    snapshot = world([LAB], *ours, of("ada", waits("d", "lab", 9)), of("ada", runs("e", "other", "t1", 8)))
    book = QuotaState(snapshot)
    verdict, never = book.check_limits(snapshot.jobs["b"], 3), book.check_limits(snapshot.jobs["d"], 9)
    assert verdict is not None
    assert (verdict.code, verdict.detail) == (
        ReasonCode.WAITING_FOR_USER_LIMIT,
        "needs 3 GPUs; ada has 6 of 8 GPUs in queue lab",
    )
    assert dict(verdict.numbers) == {"needed_gpus": 3.0, "user_used_gpus": 6.0, "user_limit_gpus": 8.0}
    assert never is not None
    assert (never.code, never.detail) == (
        ReasonCode.EXCEEDS_USER_LIMIT,
        "needs 9 GPUs; the limit per user in queue lab is 8",
    )
    assert (book.check_limits(snapshot.jobs["b"], 2), book.check_limits(snapshot.jobs["c"], 8)) == (None, None)
    assert (book.excess(snapshot.jobs["b"], 3), book.headroom(of("ada", waits("f", "lab", 1, 8)))) == (1, 2)


def test_jobs_without_owner_count_as_one_user() -> None:
    snapshot = world([LAB], runs("a", "lab", "t0", 8), waits("b", "lab", 1))
    verdict = QuotaState(snapshot).check_limits(snapshot.jobs["b"], 1)
    assert verdict is not None
    assert verdict.detail == "needs 1 GPU; its owner has 8 of 8 GPUs in queue lab"


def test_growth_is_limited_per_user() -> None:
    adas = [of("ada", runs(job_id, "lab", node, 3, most=8)) for job_id, node in (("a1", "t0"), ("a2", "t1"))]
    snapshot = world([LAB], *adas, of("bob", runs("b", "lab", "t2", 2, most=8)))
    wanted = {"a1": 4, "a2": 8, "b": 8}
    assert cap_to_quota(snapshot, QuotaState(snapshot), wanted) == {"a1": 4, "a2": 4, "b": 8}


def test_job_above_its_user_limit_claims_no_guarantee() -> None:
    first = [of("ada", runs("a", "lab", "t0", 8)), of("ada", waits("kept", "lab", 4)), of("bob", waits("b", "lab", 8))]
    snapshot = world([LAB, JobQueue("other")], *first, runs("o", "other", "t1", 8))
    book = QuotaState(snapshot)
    assert book.order_jobs(["kept", "b"]) == ("b", "kept")
    assert (book.is_guaranteed(snapshot.jobs["b"]), book.is_guaranteed(snapshot.jobs["kept"])) == (True, False)


def test_allocations_of_a_tick_count_immediately() -> None:
    snapshot = world([JobQueue("vision", 4, 8)], waits("a", "vision", 2, 8), waits("b", "vision", 2))
    book, a, b = QuotaState(snapshot), snapshot.jobs["a"], snapshot.jobs["b"]
    assert book.headroom(a) == 8
    book.allocate(a, 6)
    assert (book.headroom(a), book.headroom(b), book.borrowed("vision"), book.borrowed_base("vision")) == (2, 2, 2, 0)
    book.allocate(b, 2)
    assert book.check_limits(a, 1) is not None
    book.release(a, 5)
    assert (book.used("vision"), book.borrowed_base("vision"), book.headroom(a)) == (3, 0, 5)


def test_only_borrowed_flexible_gpus_are_available_to_others() -> None:
    snapshot = world([JobQueue("vision", 5)], runs("a", "vision", "t0", 8, least=2), runs("b", "x", "t1", 8, least=2))
    book = QuotaState(snapshot)
    assert (book.available_to_others(snapshot.jobs["a"], 6), book.available_to_others(snapshot.jobs["b"], 6)) == (3, 6)


def test_guaranteed_jobs_come_first_then_the_least_borrowing_queue() -> None:
    queues = [JobQueue("own", 4), JobQueue("heavy", weight=2.0), JobQueue("light")]
    jobs = [waits(f"{queue}-{at}", queue, 2) for queue in ("light", "heavy", "own") for at in range(3)]
    book = QuotaState(world(queues, *jobs))
    assert book.order_jobs([job.id for job in jobs]) == (
        *("own-0", "own-1"),  # guaranteed; own-2 would be a third pair of the four guaranteed GPUs
        *("light-0", "heavy-0", "own-2"),  # no queue has borrowed yet: the given order
        *("heavy-1", "light-1", "heavy-2", "light-2"),  # heavy's two count as one
    )


def test_guarantee_precedes_priority_and_queue_order_is_kept() -> None:
    jobs = [waits("b2", "b", 1, priority=5), waits("b1", "b", 1), waits("a2", "a", 1), waits("a1", "a", 1)]
    book = QuotaState(world([JobQueue("a", 8)], *jobs))
    assert book.order_jobs([job.id for job in jobs]) == ("a2", "a1", "b2", "b1")


def test_no_declared_queues_change_nothing() -> None:
    jobs = [runs("r", "a", "t0", 4, least=2, most=8), waits("w", "b", 1)]
    snapshot = world([], *jobs)
    book = QuotaState(snapshot)
    assert not book
    assert book.order_jobs(iter(["w"])) == ("w",)
    assert (book.check_limits(jobs[1], 100), book.headroom(jobs[0]), book.available_to_others(jobs[0], 2)) == (
        None,
        4,
        2,
    )
    wanted = {"r": 8}
    assert cap_to_quota(snapshot, book, wanted) is wanted
    book.allocate(jobs[1], 3)
    assert (book.used("b"), book.reclaimable_gpus(jobs[1])) == (0, 0)


def test_scaling_respects_guarantees_and_limits() -> None:
    queues = [JobQueue("own", 10), JobQueue("small", 0, 6)]
    own = [runs("o1", "own", "t0", 6, least=2, most=8), runs("o2", "own", "t1", 6, least=2, most=8)]
    snapshot = world(queues, *own, runs("s", "small", "t2", 4, least=2, most=8))
    book = QuotaState(snapshot)
    assert cap_to_quota(snapshot, book, {"o1": 4, "s": 8}) == {"o1": 4, "s": 6}
    assert cap_to_quota(snapshot, book, {"o1": 4, "o2": 4, "s": 8}) == {"o2": 4, "s": 6}
    assert cap_to_quota(snapshot, book, {"o1": 2, "o2": 8}) == {"o1": 2, "o2": 8}


def test_queue_above_a_lowered_limit_does_not_grow() -> None:
    snapshot = world([JobQueue("a", 0, 4)], runs("x", "a", "t0", 6, least=2, most=8))
    book = QuotaState(snapshot)
    assert (book.headroom(snapshot.jobs["x"]), dict(cap_to_quota(snapshot, book, {"x": 8}))) == (0, {"x": 6})
    assert book.excess(replace(snapshot.jobs["x"], id="y"), 2) == 4
