"""Fleets for the console tests: a small one with a history of ticks, and a very large one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from api.demo import DemoDay
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading, Forecast, LoanState, Node, NodeState
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import GPU, GPU_BYTES, a_fleet, a_job, a_loan
from tests.console.console_site import QUANTILES, ConsoleSite

HOUR_S = 3600.0
LARGE_NODES, LARGE_JOBS = 1000, 5000
MODEL = "llama-2-7b"


def small_site(
    folder: Path,
    *,
    auth: Literal["on", "off"] = "off",
    hours: float = 3.0,
    port: int = 0,
    settings: Mapping[str, Any] | None = None,
    demo: DemoDay | None = None,
) -> ConsoleSite:
    """Six training and ten inference nodes, some hours of demand history, running and pending jobs."""
    url = f"sqlite:///{folder / 'console.sqlite'}"
    migrate(url)
    names = [*((f"t{at}", "training") for at in range(6)), *((f"i{at}", "inference") for at in range(10))]
    nodes = [Node(name, pool, GPU, 8, GPU_BYTES) for name, pool in names]
    now_s = time.time() - hours * HOUR_S
    run_dir = folder / "run"
    site = ConsoleSite(
        SqlStore(url), nodes, now_s=now_s, folder=run_dir, auth=auth, port=port, settings=settings, demo=demo
    )
    site.tick()
    return site


def create_fleet(site: ConsoleSite, token: str = "") -> dict[str, str]:
    """Create pools, nodes, queues and jobs through the API. Returns job IDs by name."""
    with site.client(token) as client:
        client.create_pool({"name": "training", "kind": "training"})
        lending = {"headroom": 0.0, "return_deadline_s": 300}
        client.create_pool({"name": "inference", "kind": "inference", "lending": lending})
        for pool, count in (("training", 6), ("inference", 10)):
            for at in range(count):
                client.add_node({"name": f"{pool[0]}{at}", "pool": pool, "gpu": GPU, "gpus": 8})
        client.create_queue({"name": "research", "guaranteed_gpus": 24, "limit_gpus": 64})
        client.create_queue({"name": "products", "guaranteed_gpus": 16})
        jobs: list[dict[str, Any]] = [
            {
                "name": "llama-pretrain",
                "queue": "research",
                "model": MODEL,
                "globalBatch": 64,
                "gpus": {"min": 8, "max": 16},
            },
            {"name": "vision-sweep", "queue": "products", "gpus": {"min": 4, "max": 16}},
            {"name": "speech-tune", "queue": "research", "gpus": {"min": 2, "max": 8}},
            {"name": "reward-model", "queue": "products", "gpus": {"min": 8, "max": 24}},
            {"name": "embedder", "queue": "default", "gpus": {"min": 4, "max": 8}},
        ]
        usual = {"steps": 400_000, "command": ["true"], "onResize": "checkpoint"}
        return {str(job["name"]): str(client.submit({**usual, **job})["id"]) for job in jobs}


def simulate_history(site: ConsoleSite, hours: float) -> None:
    """Report a daily demand pattern with a tick every five minutes, and solve the requested curves."""
    rounds = round(hours * 12)
    for at in range(rounds):
        site.demand("inference", 44 + 26 * math.sin(1.6 * math.pi * at / rounds + 0.6))
        site.solve_requested_points(site.tick(after_s=295.0))
        site.tick(after_s=5.0)


def large_store() -> MemoryStore:
    """A store with 1,000 nodes and 5,000 jobs. Half of the nodes are inference nodes; a third of those is lent."""
    now_s = time.time()
    pools, nodes = a_fleet(training=LARGE_NODES // 2, inference=LARGE_NODES // 2, lending=LendingPolicy(headroom=0.0))
    kinds = (LoanState.ACTIVE, LoanState.ACTIVE, LoanState.RECALLED, LoanState.OFFERED)
    lent = [f"i{at}" for at in range(0, LARGE_NODES // 2, 3)]
    loans = {
        name: replace(
            a_loan(name, kinds[at % 9 % 4], return_by_s=now_s + 300 if at % 9 % 4 == 2 else None),
            offered_at_s=now_s - 60 * at,
            state_since_s=now_s - 30,
        )
        for at, name in enumerate(lent)
    }
    inference = {
        name: replace(node, inference_gpus=8)
        for name, node in nodes.items()
        if node.pool == "inference" and name not in loans
    }
    nodes |= inference | {f"t{at}": replace(nodes[f"t{at}"], cordoned=True) for at in range(0, 20, 7)}
    places = [f"t{at}" for at in range(LARGE_NODES // 2) if at % 11] + [
        name for name in lent if loans[name].state is LoanState.ACTIVE
    ]
    jobs = {}
    for at in range(LARGE_JOBS):
        queue, job_id = f"team-{at % 12}", f"job-{at:04d}"
        labels = {"team": f"team-{at % 12}", "example.com/stage": "tune" if at % 2 else "pretrain", "number": str(at)}
        if at < 2 * len(places):
            half = 4 * (at % 2)
            on = {places[at // 2]: tuple(range(half, half + 3 + at % 2))}
            jobs[job_id] = a_job(
                job_id,
                2,
                8,
                state=JobState.RUNNING,
                on=on,
                now_s=now_s - 5 * at,
                queue=queue,
                steps=10**6,
                labels=labels,
            )
        else:
            jobs[job_id] = a_job(job_id, 64, 64, now_s=now_s - 5 * at, queue=queue, labels=labels)
    demand = DemandReading(now_s, 2600.0, 2600.0)
    forecast = Forecast(now_s, 600.0, QUANTILES, (2620.0, 2680.0, 2750.0, 2800.0), "test")
    queues = {f"team-{at}": JobQueue(f"team-{at}", guaranteed_gpus=300) for at in range(12)}
    snapshot = Snapshot(1, now_s, pools, nodes, jobs, loans, {}, {"inference": demand}, {"inference": forecast}, queues)
    store = MemoryStore()
    lease = store.acquire_lease("test", now_s=now_s, ttl_s=1e6)
    assert lease is not None
    store.commit(Commit(Snapshot(), snapshot, lease.epoch))
    return store


def large_site(folder: Path) -> ConsoleSite:
    """A site without a controller: the state changes only when a test commits a change."""
    store = large_store()
    site = ConsoleSite(store, store.load().snapshot.nodes.values(), now_s=time.time(), folder=folder / "run")
    site.lead()
    return site


def commit_nodes(site: ConsoleSite, states: dict[str, NodeState]) -> None:
    """Commit node state changes as a tick does."""
    before = site.store.load().snapshot
    nodes = {**before.nodes, **{name: replace(before.nodes[name], state=state) for name, state in states.items()}}
    events = tuple(
        Event(time.time(), EventCode.NODE_CHANGED, name, f"{name} is {state}") for name, state in states.items()
    )
    after = replace(before, generation=before.generation + 1, nodes=nodes)
    assert site.leader is not None
    site.store.commit(Commit(before, after, site.leader.epoch, events=events))
