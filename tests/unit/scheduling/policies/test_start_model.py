"""On which GPU model a pending job starts, and when it waits for a faster one."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import StartJob
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.speed import accepts_model, start_loss_s
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_fleet, a_job, a_node, a_snapshot

WORK_S = 8_000


def a_busy_fleet(now_s: float) -> Snapshot:
    """Return a busy node of the usual model, a free t4 node at half the speed, and a job of 1,000 s on the former."""
    pools, nodes = a_fleet(training=1, inference=0)
    busy = a_job("busy", 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, steps=10**9)
    waiting = a_job("next", 8, steps=WORK_S)
    waiting = replace(waiting, spec=replace(waiting.spec, speeds={GPU: 1.0, "t4": 0.5}))
    return a_snapshot((pools, {**nodes, "u0": a_node("u0", gpu="t4")}), [busy, waiting], now_s=now_s)


def test_job_waits_for_the_faster_model_as_long_as_it_would_lose() -> None:
    early, late = a_busy_fleet(500.0), a_busy_fleet(1_000.0)
    assert start_loss_s(early, early.jobs["next"], "t4") == 1_000.0
    assert not accepts_model(early, early.jobs["next"], "t4")
    assert accepts_model(late, late.jobs["next"], "t4")
    policies = load_policy_set("ebbtide")
    result = decide(early, policies)
    assert result.decisions == ()
    assert "t4" in result.waiting["next"].detail
    [start] = decide(late, policies).decisions
    assert isinstance(start, StartJob)
    assert list(start.gpus) == ["u0"]


def test_fastest_model_is_accepted_at_once() -> None:
    snapshot = a_busy_fleet(0.0)
    assert start_loss_s(snapshot, snapshot.jobs["next"], GPU) == 0.0
    assert accepts_model(snapshot, snapshot.jobs["next"], GPU)
