"""Who has nothing to give back trains on while agents come up on its new nodes."""

from __future__ import annotations

from dataclasses import replace

from api.agent_assignments import NEW_AGENTS_WAIT_S_MAX, select_notice
from api.agent_state import AGENT_TIMEOUT_S, CACHE_TTL_S, AgentStateCache
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport, BegunRun
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from tests.builders import a_job
from tests.memory_run_log import MemoryRunLog

HELD: Gpus = {"t0": (0, 1)}
NOW_S = 100.0


def told(
    target: Gpus, *, agents_on: tuple[str, ...] = ("t0",), at_s: float = NOW_S, told_s: float = NOW_S
) -> str | None:
    """The notice to generation 1, which runs on t0, once generation 2 is to run on `target`."""
    job = resized(target)
    log = MemoryRunLog()
    plan = a_job("a", on=HELD).allocation.plan
    assert plan is not None
    log.begin_run(BegunRun("a", 1, HELD, (("t0", 0), ("t0", 1)), 0.0, {"t0": "p"}, plan), epoch=1)
    log.record_reports(*(AgentReport("a", node, "p", told_s) for node in agents_on))
    desk = AgentStateCache(MemoryStore(Snapshot(jobs={"a": job})), log)
    notice = select_notice(job, 1, at_s, desk)
    return None if notice is None else str(notice["action"])


def resized(target: Gpus) -> Job:
    job = a_job("a", 1, 8, state=JobState.RESIZING, on=target, now_s=NOW_S)
    return replace(job, allocation=replace(job.allocation, generation=2, leave_by_s=NOW_S + 60))


def test_a_job_that_grows_goes_on_until_all_its_agents_are_there() -> None:
    grown: Gpus = {**HELD, "t1": (0, 1)}
    assert told(grown) is None
    assert told(grown, agents_on=("t0", "t1")) == "replan"


def test_an_agent_that_was_there_once_is_waited_for_as_well() -> None:
    grown: Gpus = {**HELD, "t1": (0, 1)}
    assert told(grown, agents_on=("t0", "t1"), told_s=NOW_S - AGENT_TIMEOUT_S) is None


def test_it_waits_for_half_of_its_time_and_no_longer() -> None:
    assert told({**HELD, "t1": (0,)}, at_s=NOW_S + 29) is None
    assert told({**HELD, "t1": (0,)}, at_s=NOW_S + 30) == "replan"
    assert NEW_AGENTS_WAIT_S_MAX > 30


def test_a_job_that_gives_a_gpu_back_stops_at_once() -> None:
    assert told({"t0": (0,), "t1": (0,)}) == "replan"
    assert told({"t1": (0, 1)}) == "replan"


def test_a_job_without_a_place_leaves() -> None:
    assert told({}) == "leave"


class CountingRunLog(MemoryRunLog):
    asked = 0

    def get_report(self, job_id: str, node: str) -> AgentReport | None:
        self.asked += 1
        return super().get_report(job_id, node)


def test_all_agents_of_a_job_share_one_look_at_who_has_reported() -> None:
    log = CountingRunLog()
    log.record_reports(AgentReport("a", "t0", "p", NOW_S))
    desk = AgentStateCache(MemoryStore(Snapshot(jobs={"a": resized(HELD)})), log)
    assert [desk.have_all_reported("a", ["t0", "t1"], NOW_S) for _ in range(16)] == [False] * 16
    assert log.asked == 2
    log.record_reports(AgentReport("a", "t1", "p", NOW_S))
    assert desk.have_all_reported("a", ["t0", "t1"], NOW_S + CACHE_TTL_S)
