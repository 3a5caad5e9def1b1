"""A store that a clock wrote a year ahead: what hangs, that it is detected, and that the repair ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cli.composition.service import build_controller
from scheduler.domain.commands import AddNode, Command, CreatePool
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import NodeState, Pool, PoolKind
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.domain.job_state import JobState
from scheduler.domain.machine import JoinToken, Machine
from scheduler.settings import Settings
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.clock_reset import find_clock_lead, reset_clock
from scheduler.store.credentials import ApiToken
from scheduler.store.protocol import Commit, Page
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job, a_node

YEAR_S, NOW_S = 365 * 86_400.0, 1_800_000_000.0
LATE_S = NOW_S + YEAR_S
ENTRY = AuditEntry(LATE_S, "anna", "t", "CreateToken", "t", None, None, "")


@pytest.fixture
def store(database_url: str) -> Iterator[SqlStore]:
    """A store in which a leader wrote everything with a clock that was a year ahead."""
    made = SqlStore(database_url)
    lease = made.acquire_lease("dead", now_s=LATE_S, ttl_s=10.0)
    assert lease is not None
    before = made.load().snapshot
    job = replace(a_job("a"), state=JobState.RUNNING, submitted_at_s=NOW_S - 60.0, state_since_s=LATE_S - 5.0)
    job = replace(job, spec=replace(job.spec, deadline_s=LATE_S + 1.0))
    job = replace(job, allocation=replace(job.allocation, leave_by_s=LATE_S + 30.0))
    ended = replace(a_job("b"), state=JobState.SUCCEEDED, state_since_s=LATE_S, submitted_at_s=LATE_S - 9.0)
    hour_s = int(LATE_S // 3600 * 3600)
    usage = UsageEntry(UsageKey(hour_s, "q", "anna", "a100", False), 7.0, 0.0)
    snapshot = replace(before, generation=1, now_s=LATE_S, jobs={"a": job})
    event = Event(LATE_S, EventCode.JOB_STATE, "a", "it runs")
    made.commit(Commit(before, snapshot, lease.epoch, events=(event,), ended_jobs=(ended,), usage=(usage,)))
    yield made
    made.close()


def test_nobody_can_lead_until_the_clock_is_reset(store: SqlStore, database_url: str) -> None:
    assert store.acquire_lease("new", now_s=NOW_S, ttl_s=10.0) is None
    assert find_clock_lead(database_url, now_s=NOW_S) == YEAR_S
    done = reset_clock(database_url, now_s=NOW_S)
    assert (done.lead_s, {"state", "jobs", "ended_jobs", "events", "usage"} <= done.rows.keys()) == (YEAR_S, True)
    lease = store.acquire_lease("new", now_s=NOW_S, ttl_s=10.0)
    assert lease is not None
    assert lease.epoch > 1
    assert find_clock_lead(database_url, now_s=NOW_S) == 0.0
    assert reset_clock(database_url, now_s=NOW_S).rows == {}


def test_times_move_back_and_what_was_meant_stays(store: SqlStore, database_url: str) -> None:
    meant, made_late = ("meant", NOW_S - 9.0), ("late", LATE_S)
    for name, created_at_s in (meant, made_late):
        expires_at_s = created_at_s + YEAR_S
        token = ApiToken(name, name, "ebk", name, ("admin",), created_at_s, "anna", expires_at_s, None, None)
        store.tokens.add(token, ENTRY)
        store.machines.add_token(JoinToken(name, name, "training", 1, created_at_s, "anna", expires_at_s), ENTRY)
    reset_clock(database_url, now_s=NOW_S)
    snapshot = store.load().snapshot
    job, [ended] = snapshot.jobs["a"], store.list_ended_jobs(limit=9)
    assert (snapshot.now_s, job.submitted_at_s, job.state_since_s) == (NOW_S, NOW_S - 60.0, NOW_S - 5.0)
    assert (job.allocation.leave_by_s, job.spec.deadline_s) == (NOW_S + 30.0, LATE_S + 1.0)
    assert (ended.state_since_s, ended.submitted_at_s) == (NOW_S, NOW_S - 9.0)
    assert [record.event.at_s for record in store.list_events(Page())] == [NOW_S]
    [entry] = store.load_usage(from_s=0.0, to_s=NOW_S + 3600.0).entries
    assert (entry.key.hour_s, entry.gpu_s) == (NOW_S // 3600 * 3600, 7.0)
    tokens = {token.id: token.expires_at_s for token in store.tokens.list_tokens(after="", limit=9)}
    assert tokens == {"meant": NOW_S - 9.0 + YEAR_S, "late": NOW_S + YEAR_S}


def test_controller_counts_machines_as_lost_until_the_clock_is_reset(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, settings = SqlStore(database_url), Settings(database_url=database_url)
    now_s = time.time()
    machine = Machine("m", (), "", "", "127.0.0.1", "0", now_s, digest="digest", is_service=True)
    store.machines.register_service(machine)
    for body in (CreatePool(Pool("training", PoolKind.TRAINING)), AddNode(a_node("t0", gpu="cpu"))):
        store.send(Command(type(body).__name__, now_s, body))
    before = store.load().snapshot
    store.commit(Commit(before, replace(before, generation=1, now_s=now_s + YEAR_S), epoch=0))
    assert _find_node_state(store, settings) is NodeState.DOWN
    assert "reset-clock" in caplog.text
    reset_clock(database_url, now_s=time.time())
    assert _find_node_state(store, settings) is NodeState.UP
    store.close()


def _find_node_state(store: SqlStore, settings: Settings) -> NodeState:
    """Run a controller for a few ticks while the machine reports, and return the state of the node."""
    controller = build_controller(settings, store)
    try:
        for _ in range(4):
            store.machines.record_seen({"m": time.time()})
            controller.step()
            store.send(Command(f"wake-{time.monotonic_ns()}", time.time(), CreatePool(Pool("more", PoolKind.TRAINING))))
        return store.load().snapshot.nodes["t0"].state
    finally:
        controller.close()
