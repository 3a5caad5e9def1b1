"""`python -m tests.benchmarks.metrics_site record|scrape|both`: records all metrics, scrapes /metrics, or both.

The cluster has 20 pools, 50 queues, 1,000 nodes and 5,000 jobs, of which 1,000 run. Every value of the labels pool,
queue, reason and route occurs, each route with a successful and a failed request.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from statistics import median, quantiles

import httpx

from api.app import create_app
from api.identity.authorization import list_route_rules
from scheduler.domain.decisions import PreemptJob, Reason, ReasonCode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState, Node, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.runtime.clock import ManualClock
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from scheduler.telemetry.metrics import record_request, record_solve
from scheduler.telemetry.tick_metrics import TickRecorder
from tests.api.conftest import AppTransport
from tests.builders import a_job, a_node
from tests.memory_run_log import MemoryRunLog

POOLS, QUEUES, NODES, RUNNING, PENDING, SCRAPES = 20, 50, 1000, 1000, 4000, 40
NOW_S = 100_000.0
_LEVELS = (0.5, 0.9, 0.95, 0.99, 0.999)
_STAGES = ("observe", "load", "absorb", "decide", "apply", "commit", "converge")
_DIRECTIONS = (EventCode.JOB_GROWN, EventCode.JOB_SHRUNK, EventCode.JOB_MOVED, EventCode.JOB_REARRANGED)


def build_snapshot() -> Snapshot:
    kinds = [PoolKind.TRAINING if at % 2 else PoolKind.INFERENCE for at in range(POOLS)]
    pools = {f"pool-{at}": Pool(f"pool-{at}", kind) for at, kind in enumerate(kinds)}
    nodes = {f"n{at}": _node(at) for at in range(NODES)}
    lent = [node for node in nodes.values() if pools[node.pool].kind is PoolKind.INFERENCE][:200]
    made = (Loan(f"l-{node.name}", node.name, node.pool, LoanState.ACTIVE, 0.0, 0.0) for node in lent)
    loans = {loan.node: loan for loan in made}
    jobs = {job.id: job for job in (*map(_running_job, range(RUNNING)), *map(_pending_job, range(PENDING)))}
    reading = DemandReading(NOW_S, 8.0, 8.0)
    forecast = Forecast(NOW_S, 600.0, _LEVELS, (8.0,) * len(_LEVELS), "test")
    queues = {f"queue-{at}": JobQueue(f"queue-{at}", at) for at in range(QUEUES)}
    lenders = [name for name in pools if pools[name].kind is PoolKind.INFERENCE]
    demand, forecasts = dict.fromkeys(lenders, reading), dict.fromkeys(lenders, forecast)
    return Snapshot(1, NOW_S, pools, nodes, jobs, loans, {}, demand, forecasts, queues)


def _node(at: int) -> Node:
    return a_node(f"n{at}", f"pool-{at % POOLS}", cordoned=at % 50 == 7, draining=at % 100 == 7)


def _running_job(at: int) -> Job:
    seat = {f"n{at}": (0, 1, 2, 3)}
    return a_job(f"run-{at}", 4, 8, state=JobState.RUNNING, on=seat, now_s=0.0, queue=f"queue-{at % (QUEUES + 5)}")


def _pending_job(at: int) -> Job:
    return a_job(f"wait-{at}", 1, 8, now_s=0.0, queue=f"queue-{at % (QUEUES + 5)}")


def record(state: Snapshot) -> None:
    """Record every metric of a controller."""
    codes = list(ReasonCode)
    waiting = {f"wait-{at}": Reason(codes[17 + (at // (QUEUES + 5)) % (len(codes) - 17)], "") for at in range(PENDING)}
    resizes = [Event(NOW_S, code, "run-0", "", {}, reason) for code in _DIRECTIONS for reason in codes[:17]]
    replan = Event(NOW_S, EventCode.JOB_REPLANNED, "run-0", "", {f"{phase}_s": 1.0 for phase in ReplanPhase})
    decisions = tuple(PreemptJob("run-0", NOW_S, Reason(code, "")) for code in codes[:17])
    report = TickReport(
        generation=2,
        now_s=NOW_S,
        decisions=decisions,
        violations=(),
        breaches=(),
        waiting=waiting,
        wanted_shapes=(),
        events=(*resizes, replan),
        next_wake_s=NOW_S,
        full_pass=True,
        committed=True,
        stage_s=dict.fromkeys(_STAGES, 0.01),
        before=state,
        after=state,
    )
    recorder = TickRecorder()
    recorder.record(report)
    recorder.record(replace(report, now_s=NOW_S + 601.0))  # after the horizons of the forecasts
    record_solve(1.0, [0.0])


def scrape(state: Snapshot) -> tuple[float, ...]:
    """Return median and 95th percentile of a scrape in ms, its median CPU time in ms, its series and its bytes."""
    store, settings = MemoryStore(), Settings(auth="off", allowed_hosts="service")
    lease = store.acquire_lease("bench", now_s=NOW_S, ttl_s=1e9)
    assert lease is not None
    store.commit(Commit(Snapshot(), state, lease.epoch))
    app = create_app(
        store,
        settings,
        clock=ManualClock(NOW_S),
        policies=load_policy_set("ebbtide"),
        lease=store.get_lease,
        token_secret=b"a secret of at least 32 characters",
        run_log=MemoryRunLog(),
    )
    for method, route in (key.split(" ", 1) for key in list_route_rules(app.routes)):
        for status in (200, 422):
            record_request(method=method, route=route, status=status, seconds=0.01)
    with httpx.Client(transport=AppTransport(app), base_url="http://service") as client:
        took_s, used_s = list[float](), list[float]()
        for _ in range(SCRAPES):
            started_s, used_from_s = time.perf_counter(), time.process_time()
            answer = client.get("/metrics")
            took_s.append(time.perf_counter() - started_s)
            used_s.append(time.process_time() - used_from_s)
    assert answer.status_code == 200, answer.text
    series = sum(not line.startswith("#") for line in answer.text.splitlines())
    p95_s = quantiles(took_s, n=20, method="inclusive")[18]
    return 1e3 * median(took_s), 1e3 * p95_s, 1e3 * median(used_s), series, len(answer.content)


def main(what: str) -> None:
    state = build_snapshot()
    if what in ("record", "both"):
        record(state)
    if what == "record":
        print("recorded", flush=True)
        sys.stdin.read()  # gauges of exited processes are not exported
    if what in ("scrape", "both"):
        print(json.dumps(scrape(state)))


if __name__ == "__main__":
    main(sys.argv[1])
