"""Contract of run logs: only the leader begins a generation, once, and the newest report of an agent wins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler.domain.observation import (
    AgentReport,
    BegunRun,
    FailureCause,
    KillOrder,
    RankPhase,
    RankReport,
    RankStatus,
    Run,
    RunPhase,
)
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.store.protocol import FencedError, RunLog
from scheduler.store.sql_store import SqlStore
from tests.memory_run_log import MemoryRunLog

SEATS = (("n0", 0), ("n0", 1), ("n1", 0))
PODS = {"n0": "pod-1", "n1": "pod-2"}
RUN = BegunRun(
    "a", 3, {"n0": (0, 1), "n1": (0,)}, SEATS, 5.0, PODS, build_data_parallel_plan("cpu", 3), frozen_layers=2
)
END = Run("a", 3, RunPhase.LEFT, steps=12.0, checkpoint_steps=12.0, phases_s={"save": 0.5})
STATUS = RankStatus(RankPhase.FAILED, step=7, loss=0.5, cause=FailureCause.OUT_OF_MEMORY, phases_s={"load": 0.5})
RANKS = (RankReport(0, -9, STATUS, "Killed", oom_kills=1), RankReport(1))
REPORT = AgentReport("a", "n0", "pod-1", 6.0, 3, RANKS, terminated=True, since_s=4.0)
NEVER = 99


@pytest.fixture
def log(store_url: str) -> Iterator[tuple[RunLog, int]]:
    if not store_url:
        yield MemoryRunLog(epoch=4), 4
        return
    store = SqlStore(store_url)
    lease = store.acquire_lease("leader", now_s=0.0, ttl_s=60.0)
    assert lease is not None
    yield store.run_log, lease.epoch
    store.close()


def test_generation_begins_once(log: tuple[RunLog, int]) -> None:
    runs, epoch = log
    assert runs.begin_run(RUN, epoch=epoch)
    assert not runs.begin_run(replace(RUN, begun_at_s=9.0), epoch=epoch)
    assert runs.list_begun_runs() == runs.list_begun_runs_of("a") == (RUN,)
    assert runs.list_begun_runs_of("b") == ()


def test_fenced_leader_begins_no_run(log: tuple[RunLog, int]) -> None:
    runs, _ = log
    with pytest.raises(FencedError, match=str(NEVER)):
        runs.begin_run(RUN, epoch=NEVER)
    assert runs.list_begun_runs() == ()


def test_last_kill_order_of_a_run_wins(log: tuple[RunLog, int]) -> None:
    runs, epoch = log
    other = replace(RUN, generation=4)
    runs.begin_run(RUN, epoch=epoch)
    runs.begin_run(other, epoch=epoch)
    for doom in (KillOrder(20.0), KillOrder(15.0, fault="rank 1 was ended by SIGSEGV", is_hearsay=True)):
        runs.record_kill_order("a", 3, doom, epoch=epoch)
        assert runs.list_begun_runs() == (replace(RUN, doom=doom), other)
    runs.record_kill_order("a", 99, KillOrder(1.0), epoch=epoch)
    with pytest.raises(FencedError):
        runs.record_kill_order("a", 4, KillOrder(1.0), epoch=NEVER)
    assert runs.list_begun_runs_of("a")[1] == other


def test_run_ends_once(log: tuple[RunLog, int]) -> None:
    runs, epoch = log
    runs.begin_run(RUN, epoch=epoch)
    with pytest.raises(FencedError):
        runs.record_end(END, epoch=NEVER)
    assert runs.list_begun_runs() == (RUN,)
    runs.record_end(END, epoch=epoch)
    runs.record_end(replace(END, phase=RunPhase.LOST), epoch=epoch)
    runs.record_end(replace(END, job_id="b"), epoch=epoch)
    assert runs.list_begun_runs() == (replace(RUN, end=END),)
    assert not runs.begin_run(RUN, epoch=epoch)


def test_newest_report_of_an_agent_wins(log: tuple[RunLog, int]) -> None:
    runs, _ = log
    runs.record_reports(REPORT)
    runs.record_reports(replace(REPORT, at_s=5.0, ranks=()))
    assert runs.list_reports() == (REPORT,)
    newer = replace(REPORT, at_s=8.0, pod="pod-2", generation=0, ranks=(), failure="no such program")
    other = replace(REPORT, node="n1")
    runs.record_reports(newer, other)
    runs.record_reports()
    assert runs.list_reports() == (newer, other)
    assert runs.get_report("a", "n1") == other
    assert runs.get_report("a", "n2") is None


def test_deletion_keeps_newer_runs_and_reports(log: tuple[RunLog, int]) -> None:
    runs, epoch = log
    newer, foreign = replace(RUN, generation=4), replace(RUN, job_id="b")
    for run in (RUN, newer, foreign):
        runs.begin_run(run, epoch=epoch)
    runs.record_reports(REPORT)
    runs.record_reports(replace(REPORT, node="n1", generation=4))
    runs.delete_runs("a", up_to_generation=3, epoch=epoch)
    with pytest.raises(FencedError):
        runs.delete_runs("a", up_to_generation=4, epoch=NEVER)
    assert runs.list_begun_runs() == (newer, foreign)
    assert [report.node for report in runs.list_reports()] == ["n1"]
