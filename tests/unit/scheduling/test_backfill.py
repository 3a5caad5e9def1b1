"""Backfilling: which jobs pass the first one that has to wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.domain.decisions import ReasonCode, StartJob
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_fleet, a_job, a_node, a_snapshot

OTHER = "h100-80g"
HALF = (0, 1, 2, 3)


def running(job_id: str, on: dict[str, tuple[int, ...]], for_s: float) -> Job:
    """Return a rigid job with this run time left. A step is a GPU-second."""
    gpus = sum(map(len, on.values()))
    return a_job(job_id, gpus, state=JobState.RUNNING, on=on, steps=int(for_s * gpus))


def waiting(job_id: str, gpus: int, for_s: float, **more: Any) -> Job:
    return a_job(job_id, gpus, steps=int(for_s * gpus), **more)


def decided(jobs: list[Job], training: int = 1, policy: str = "ebbtide") -> TickResult:
    return decide(a_snapshot(a_fleet(training=training, inference=0), jobs), load_policy_set(policy))


def started(result: TickResult) -> set[str]:
    return {decision.job_id for decision in result.decisions if isinstance(decision, StartJob)}


def test_job_that_ends_before_the_reserved_start_passes_the_head() -> None:
    jobs = [running("busy", {"t0": HALF}, for_s=100.0), waiting("head", 8, 10.0), waiting("short", 1, 99.0)]
    assert started(decided(jobs)) == {"short"}


def test_job_that_would_delay_the_head_waits() -> None:
    jobs = [running("busy", {"t0": HALF}, for_s=100.0), waiting("head", 8, 10.0), waiting("long", 1, 101.0)]
    result = decided(jobs)
    assert started(result) == set()
    assert result.waiting["head"].code is ReasonCode.INSUFFICIENT_GPUS
    assert (result.waiting["long"].code, "head" in result.waiting["long"].detail) == (
        ReasonCode.BEHIND_HEAD_OF_QUEUE,
        True,
    )


def test_extra_gpus_of_the_reservation_are_allocated_once() -> None:
    """8 of 16 GPUs are free now and all in 100 s, of which the head takes 12."""
    jobs = [
        running("busy", {"t0": (*HALF, 4, 5, 6, 7)}, for_s=100.0),
        waiting("head", 12, 10.0),
        waiting("first", 3, 200.0),
        waiting("second", 2, 400.0),
    ]
    assert started(decided(jobs, training=2)) == {"first"}


def test_job_of_unknown_length_passes_on_extra_gpus_only() -> None:
    busy = running("busy", {"t0": HALF}, for_s=100.0)
    unknown = waiting("unknown", 1, 0.0)
    unknown = replace(unknown, account=replace(unknown.account, gpu_s=1000.0))
    assert started(decided([busy, waiting("head", 8, 10.0), unknown])) == set()
    assert started(decided([busy, waiting("head", 7, 10.0), unknown])) == {"unknown"}


def test_head_with_unknown_start_blocks_no_job() -> None:
    endless = running("busy", {"t0": HALF}, for_s=0.0)
    assert started(decided([endless, waiting("head", 8, 10.0), waiting("long", 1, 10**6)])) == {"long"}


def test_head_blocks_its_own_gpu_model_only() -> None:
    pools, nodes = a_fleet(training=1, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu=OTHER)}
    jobs = [
        running("busy", {"t0": HALF}, for_s=100.0),
        waiting("head", 8, 10.0, gpu=GPU),
        waiting("other", 1, 10**6, gpu=OTHER),
        waiting("same", 1, 10**6, gpu=GPU),
    ]
    assert started(decide(a_snapshot((pools, nodes), jobs), load_policy_set("ebbtide"))) == {"other"}


def test_flexible_gpus_do_not_delay_the_reserved_start() -> None:
    """The wide job can give up 6 GPUs. The head needs these, the free one, and all of the other job's."""
    wide = a_job("wide", 2, 8, state=JobState.RUNNING, on={"t0": (*HALF, 4, 5, 6, 7)}, steps=10**7)
    jobs = [wide, running("busy", {"t1": (*HALF, 4, 5, 6)}, for_s=100.0), waiting("head", 14, 10.0)]
    snapshot = a_snapshot(a_fleet(training=2, inference=0), [*jobs, waiting("long", 1, 200.0)])
    assert started(decide(snapshot, load_policy_set("ebbtide"))) == set()


def test_published_policy_sets_pass_jobs_as_published() -> None:
    jobs = [running("busy", {"t0": HALF}, for_s=100.0), waiting("head", 8, 10.0), waiting("long", 1, 10**6)]
    assert started(decided(jobs, policy="opportunistic")) == {"long"}
    assert started(decided(jobs, policy="lyra")) == {"long"}
