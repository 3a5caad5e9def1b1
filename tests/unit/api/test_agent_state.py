"""AgentStateCache: which reports are written, and when."""

from __future__ import annotations

from dataclasses import replace

from api.agent_state import HEARTBEAT_INTERVAL_S, AgentStateCache
from scheduler.domain.observation import AgentReport
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from tests.builders import a_job
from tests.memory_run_log import MemoryRunLog


def test_a_pending_heartbeat_of_an_ended_job_is_not_written() -> None:
    before = Snapshot(jobs={"a": a_job("a"), "b": a_job("b")})
    store, log = MemoryStore(before), MemoryRunLog()
    lease = store.acquire_lease("leader", now_s=0.0, ttl_s=60.0)
    assert lease is not None
    cache = AgentStateCache(store, log)
    cache.record_report(AgentReport("a", "t0", "pa", at_s=0.0))
    cache.record_report(AgentReport("b", "t1", "pb", at_s=0.0))
    cache.record_report(AgentReport("a", "t0", "pa", at_s=HEARTBEAT_INTERVAL_S))
    cache.record_report(AgentReport("b", "t1", "pb", at_s=HEARTBEAT_INTERVAL_S + 0.5))
    after = replace(before, jobs={"a": before.jobs["a"]}, generation=1)
    store.commit(Commit(before, after, epoch=lease.epoch))
    log.delete_runs("b", up_to_generation=0, epoch=1)
    cache.snapshot(HEARTBEAT_INTERVAL_S + 1)
    cache.record_report(AgentReport("a", "t0", "pa", at_s=2 * HEARTBEAT_INTERVAL_S))
    assert [(report.job_id, report.at_s) for report in log.list_reports()] == [("a", 2 * HEARTBEAT_INTERVAL_S)]
