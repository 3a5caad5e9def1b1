"""Creation backoff and cleanup of job objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.client import connect
from scheduler.kubernetes.cluster_cache import ClusterCache, ClusterView, PlanConfigMap
from scheduler.kubernetes.job_objects import JobDefaults, JobObjectActions
from scheduler.kubernetes.provisioning_errors import PAUSE_CAP_S
from tests.builders import a_job
from tests.unit.kubernetes.scripted_server import Answer, ScriptedServer
from tests.unit.kubernetes.test_flow_control import QUICK, kubeconfig

QUOTA = Answer(403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "exceeded quota"})


class Clock:
    now_s = 0.0


def objects(folder: Path, url: str, clock: Clock) -> JobObjectActions:
    cluster = connect(kubeconfig(folder, url), limits=QUICK)
    rules = JobDefaults("jobs", "http://api", "worker", AgentImage("agent"))
    return JobObjectActions(
        cluster,
        ClusterCache(cluster),
        rules,
        epoch=lambda: 1,
        agent_token=lambda job_id: "token",
        monotonic_s=lambda: clock.now_s,
    )


def build_starting_job(generation: int = 1) -> Job:
    job = a_job("a", 1, 2, state=JobState.STARTING, on={"t0": (0,)})
    return replace(job, allocation=replace(job.allocation, generation=generation))


def attempts(created: JobObjectActions, job: Job, clock: Clock, *, seconds: int) -> int:
    """Return how often one tick per second attempts to create the job's objects."""
    count = 0
    for _ in range(seconds):
        clock.now_s += 1.0
        for effect in created.create_missing(job, (), ClusterView(), {}):
            with pytest.raises(ApiError):
                effect.run()
            count += 1
    return count


def test_rejected_objects_are_retried_with_backoff(tmp_path: Path) -> None:
    clock = Clock()
    with ScriptedServer(*[QUOTA] * 1000).running() as server:
        created = objects(tmp_path, server.url, clock)
        assert 2 <= attempts(created, build_starting_job(), clock, seconds=30) <= 10
        assert attempts(created, build_starting_job(), clock, seconds=10 * int(PAUSE_CAP_S)) <= 22
        assert attempts(created, build_starting_job(generation=2), clock, seconds=1) == 1, (
            "another place is another matter"
        )


def test_leftover_plan_is_deleted(tmp_path: Path) -> None:
    created = objects(tmp_path, "http://127.0.0.1:1", Clock())
    view = ClusterView(plans={("jobs", "ebbtide-a"): PlanConfigMap("a", 1), ("jobs", "other"): PlanConfigMap("a", 1)})
    assert [effect.description for effect in created.delete_leftovers(Snapshot(), view)] == ["delete the objects of a"]
    assert list(created.delete_leftovers(Snapshot(jobs={"a": build_starting_job()}), view)) == []
