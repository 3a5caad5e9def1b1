"""Notices of a job that is resized while the newer generation is prepared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.agent_assignments import NEW_AGENTS_WAIT_S_MAX, RELEASE_WAIT_S_MAX, select_notice
from api.agent_state import AGENT_TIMEOUT_S, CACHE_TTL_S, AgentStateCache
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport, BegunRun
from scheduler.domain.snapshot import Snapshot
from scheduler.store.memory_store import MemoryStore
from tests.builders import a_fleet, a_job, a_snapshot
from tests.memory_run_log import MemoryRunLog

HELD: Gpus = {"t0": (0, 1)}
NOW_S = 100.0


def notice_for_target(
    target: Gpus,
    *,
    agents_on: tuple[str, ...] = ("t0",),
    at_s: float = NOW_S,
    told_s: float = NOW_S,
    leave_within_s: float = 60.0,
    draining: bool = False,
    in_pods: bool = False,
) -> str | None:
    """Return the notice for generation 1, which runs on t0, when generation 2 is to run on `target`."""
    job = resized(target, leave_within_s=leave_within_s)
    log = MemoryRunLog()
    plan = a_job("a", on=HELD).allocation.plan
    assert plan is not None
    log.begin_run(BegunRun("a", 1, HELD, (("t0", 0), ("t0", 1)), 0.0, {"t0": "p"}, plan, in_pods=in_pods), epoch=1)
    log.record_reports(*(AgentReport("a", node, "p", told_s, prepared=2) for node in agents_on))
    pools, nodes = a_fleet(training=2, inference=0, gpus_per_node=2)
    fleet = pools, {**nodes, "t0": replace(nodes["t0"], draining=draining)}
    agent_state = AgentStateCache(MemoryStore(a_snapshot(fleet, [job])), log)
    notice = select_notice(job, 1, at_s, agent_state)
    return None if notice is None else str(notice["action"])


def resized(target: Gpus, *, leave_within_s: float = 60.0) -> Job:
    job = a_job("a", 1, 8, state=JobState.RESIZING, on=target, now_s=NOW_S)
    return replace(job, allocation=replace(job.allocation, generation=2, leave_by_s=NOW_S + leave_within_s))


def test_a_growing_job_continues_until_all_agents_have_prepared() -> None:
    grown: Gpus = {**HELD, "t1": (0, 1)}
    assert notice_for_target(grown) is None
    assert notice_for_target(grown, agents_on=("t0", "t1")) == "replan"


def test_a_job_that_stays_where_it_is_continues_until_the_newer_generation_is_prepared() -> None:
    assert notice_for_target(HELD, agents_on=()) is None
    assert notice_for_target(HELD) == "replan"


def test_an_agent_that_has_timed_out_is_waited_for() -> None:
    grown: Gpus = {**HELD, "t1": (0, 1)}
    assert notice_for_target(grown, agents_on=("t0", "t1"), told_s=NOW_S - AGENT_TIMEOUT_S) is None


def test_the_wait_ends_at_half_of_the_time_to_leave() -> None:
    assert notice_for_target({**HELD, "t1": (0,)}, at_s=NOW_S + 29) is None
    assert notice_for_target({**HELD, "t1": (0,)}, at_s=NOW_S + 30) == "replan"
    assert NEW_AGENTS_WAIT_S_MAX > 30


@pytest.mark.parametrize("target", [{"t0": (0,)}, {"t0": (0,), "t1": (0,)}, {"t1": (0, 1)}])
def test_a_job_that_releases_a_gpu_continues_until_all_agents_have_prepared(target: Gpus) -> None:
    assert notice_for_target(target, agents_on=()) is None
    assert notice_for_target(target, agents_on=tuple(target)) == "replan"


def test_others_wait_for_released_gpus_only_for_a_while() -> None:
    at_s = NOW_S + RELEASE_WAIT_S_MAX
    assert notice_for_target({"t0": (0,)}, agents_on=(), leave_within_s=100, at_s=at_s - 1) is None
    assert notice_for_target({"t0": (0,)}, agents_on=(), leave_within_s=100, at_s=at_s) == "replan"
    assert notice_for_target(HELD, agents_on=(), leave_within_s=100, at_s=at_s) is None


def test_a_job_leaves_a_node_that_must_be_vacated_at_once() -> None:
    assert notice_for_target({"t1": (0, 1)}, agents_on=(), draining=True) == "replan"


def test_pods_release_gpus_at_once_because_the_newer_pods_may_need_them() -> None:
    assert notice_for_target({"t0": (0,)}, agents_on=(), in_pods=True) == "replan"
    assert notice_for_target(HELD, agents_on=(), in_pods=True) is None


def test_a_job_without_a_place_leaves() -> None:
    assert notice_for_target({}) == "leave"


class CountingRunLog(MemoryRunLog):
    asked = 0

    def get_report(self, job_id: str, node: str) -> AgentReport | None:
        self.asked += 1
        return super().get_report(job_id, node)


def test_agents_of_a_job_share_one_read_of_the_reports() -> None:
    log = CountingRunLog()
    log.record_reports(AgentReport("a", "t0", "p", NOW_S, prepared=2))
    agent_state = AgentStateCache(MemoryStore(Snapshot(jobs={"a": resized(HELD)})), log)
    assert [agent_state.have_all_prepared("a", ["t0", "t1"], NOW_S, 2) for _ in range(16)] == [False] * 16
    assert log.asked == 2
    log.record_reports(AgentReport("a", "t1", "p", NOW_S, prepared=2))
    assert agent_state.have_all_prepared("a", ["t0", "t1"], NOW_S + CACHE_TTL_S, 2)
