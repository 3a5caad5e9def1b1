"""A fleet with one problem of each code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.domain.events import Webhook
from scheduler.domain.fleet import (
    DemandReading,
    Forecast,
    IncidentKind,
    LoanState,
    Node,
    NodeIncident,
    NodeState,
    Pool,
    PoolKind,
)
from scheduler.domain.job import Job
from scheduler.domain.job_account import PermanentFault, RunFailure
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import MemoryRecord, OomFailure
from scheduler.domain.job_state import JobState
from scheduler.domain.machine import Machine
from scheduler.domain.shortages import ShortageDay, ShortageRecord
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.problems.evidence import Evidence, GpuTimeUse
from scheduler.scheduling.problems.job_activity import JobActivity
from tests.builders import a_job, a_loan, a_node

NOW_S = 1_760_000_000.0
HOUR_S = 3600.0
OOM = OomFailure("dp8", 8, 80 * 10**9, 70 * 10**9, 81 * 10**9)
QUANTILES, LEVELS = (0.5, 0.999), (4.0, 6.0)


def lender(name: str, **more: Any) -> Pool:
    return Pool(name, PoolKind.INFERENCE, **more)


def a_reading(gpus: float, *, age_s: float = 30.0, intervals: int = 0) -> DemandReading:
    record = ShortageRecord((ShortageDay(11, intervals, 0),)) if intervals else ShortageRecord()
    return DemandReading(NOW_S - age_s, gpus, gpus, record)


def a_machine(name: str, node: str, *, silent_s: float, pool: str = "training") -> Machine:
    return Machine(name, (node,), pool, "a100-80g", "10.0.0.1", "1", NOW_S - 1e5, seen_at_s=NOW_S - silent_s)


def planted_nodes() -> dict[str, Node]:
    loss, slow = (
        NodeIncident(kind, job_id, "ann", NOW_S - 600, 1)
        for kind, job_id in ((IncidentKind.LOSS, "gone"), (IncidentKind.STRAGGLER, "slowed"))
    )
    nodes = (
        a_node("t-down", state=NodeState.DOWN),
        a_node("t-bad", cordoned=True, draining=True, quarantine="it failed 3 jobs", incidents=(loss,)),
        a_node("t-slow", incidents=(slow,)),
        a_node("t-silent"),
        a_node("t-free", gpus=64),
        a_node("i-late", "lending"),
        a_node("i-risk", "lending"),
        a_node("i-own", "lending"),
        *(a_node(f"i-{pool}", pool) for pool in ("lost", "stale", "unmeasured", "unforecast")),
    )
    return {node.name: node for node in nodes}


def planted_jobs() -> dict[str, Job]:
    slowed = a_job("slowed", 4, state=JobState.RUNNING, on={"t-slow": (0, 1, 2, 3)}, now_s=NOW_S - 900)
    late = a_job("late", 2, state=JobState.RUNNING, on={"i-late": (0, 1)}, now_s=NOW_S - 900)
    risky = a_job("risky", 3, state=JobState.RUNNING, on={"i-risk": (0, 1, 2)}, now_s=NOW_S - 900)
    greedy = replace(a_job("greedy", 8, now_s=NOW_S - 60), memory=MemoryRecord(120, (OOM, OOM)))
    restless = a_job("restless", 1, state=JobState.RUNNING, on={"t-slow": (4,)}, now_s=NOW_S - 900)
    loser = a_job("loser", 1, state=JobState.RUNNING, on={"t-slow": (5,)}, now_s=NOW_S - 900)
    account = replace(loser.account, gpu_s=20 * HOUR_S, lost_gpu_s=7 * HOUR_S, resizes=4, preemptions=1)
    promised = a_job("promised", 16, queue="promised", now_s=NOW_S - 2 * HOUR_S)
    stuck = a_job("stuck", 32, queue="stuck", now_s=NOW_S - 3 * HOUR_S)
    jobs = (slowed, late, risky, greedy, restless, replace(loser, account=account), promised, stuck)
    return {job.id: job for job in jobs}


def failed_job(*, at_s: float = NOW_S - 60, job_id: str = "failed", queue: str = "default") -> Job:
    job = a_job(job_id, 1, state=JobState.FAILED, now_s=at_s, queue=queue)
    failure = RunFailure(at_s, "rank 0: SyntaxError", PermanentFault.SYNTAX_ERROR.value, 1.0)
    account = replace(job.account, lost_gpu_s=1800.0, failures=2)
    return replace(job, message="rank 0: SyntaxError", failure=failure, account=account)


def planted_snapshot() -> Snapshot:
    pools = [Pool("training", PoolKind.TRAINING)]
    pools += map(lender, ("lending", "lost", "stale", "unmeasured", "unforecast"))
    forecast = Forecast(NOW_S - 60, 600.0, QUANTILES, LEVELS, "test")
    loans = {
        "i-late": replace(a_loan("i-late", LoanState.RECALLED, return_by_s=NOW_S - 20), pool="lending"),
        "i-risk": replace(a_loan("i-risk", LoanState.RECALLED, return_by_s=NOW_S + 20), pool="lending"),
    }
    demand: Mapping[str, DemandReading] = {
        "lending": a_reading(12.5),
        "lost": a_reading(4.0, age_s=2 * HOUR_S),
        "stale": a_reading(4.0, age_s=HOUR_S - 1),
        "unforecast": a_reading(4.0, intervals=40),
    }
    return Snapshot(
        generation=7,
        now_s=NOW_S,
        pools={pool.name: pool for pool in pools},
        nodes=planted_nodes(),
        jobs=planted_jobs(),
        loans=loans,
        demand=demand,
        forecasts={"lending": forecast, "lost": forecast, "stale": forecast},
        queues={"promised": JobQueue("promised", guaranteed_gpus=24)},
        switches=Switches(lending_paused=True),
        lending_set_by="ann",
        lending_set_at_s=NOW_S - 20 * HOUR_S,
    )


def planted_evidence() -> Evidence:
    webhook = Webhook("wh-1", "ann", "https://example.org", 0.0, dead_in_a_row=4)
    machines = (
        a_machine("m-silent", "t-silent", silent_s=900.0),
        a_machine("m-fine", "t-slow", silent_s=2.0),
        a_machine("m-down", "t-down", silent_s=5000.0),
    )
    return Evidence(
        NOW_S,
        has_leader=False,
        failed_jobs=(failed_job(),),
        activity={"restless": JobActivity(NOW_S - 3000, 2, 7, 1), "slowed": JobActivity(NOW_S - 3000, 1, 1, 1)},
        gpu_time=GpuTimeUse(NOW_S - 2 * HOUR_S, 60 * HOUR_S, 20 * HOUR_S),
        machines=machines,
        webhooks=(webhook, replace(webhook, id="wh-2", dead_in_a_row=1)),
        down_since_s={"t-down": NOW_S - 700},
    )
