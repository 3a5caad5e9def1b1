"""The objects of jobs: what is refused is not asked for in a hurry, and what nobody needs is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.api_error import ApiError
from scheduler.k8s.client import connect
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.cluster_view import ClusterView, SeenPlan
from scheduler.k8s.job_objects import JobObjects, SiteRules
from scheduler.k8s.refusals import PAUSE_CAP_S
from tests.builders import a_job
from tests.unit.k8s.scripted_server import Answer, ScriptedServer
from tests.unit.k8s.test_asking import QUICK, kubeconfig

QUOTA = Answer(403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "exceeded quota"})


class Clock:
    now_s = 0.0


def objects(folder: Path, url: str, clock: Clock) -> JobObjects:
    cluster = connect(kubeconfig(folder, url), limits=QUICK)
    rules = SiteRules("jobs", "http://api", "worker")
    return JobObjects(
        cluster,
        ClusterMirrors(cluster),
        rules,
        epoch=lambda: 1,
        agent_token=lambda job_id: "token",
        monotonic_s=lambda: clock.now_s,
    )


def a_starting_job(generation: int = 1) -> Job:
    job = a_job("a", 1, 2, state=JobState.STARTING, on={"t0": (0,)})
    return replace(job, allocation=replace(job.allocation, generation=generation))


def attempts(made: JobObjects, job: Job, clock: Clock, *, seconds: int) -> int:
    """How often a tick a second asks for the job's objects, all in vain."""
    count = 0
    for _ in range(seconds):
        clock.now_s += 1.0
        for effect in made.provide(job, (), ClusterView(), {}):
            with pytest.raises(ApiError):
                effect.run()
            count += 1
    return count


def test_a_job_whose_objects_are_refused_is_tried_more_and_more_rarely(tmp_path: Path) -> None:
    clock = Clock()
    with ScriptedServer(*[QUOTA] * 1000).running() as server:
        made = objects(tmp_path, server.url, clock)
        assert 2 <= attempts(made, a_starting_job(), clock, seconds=30) <= 10
        assert attempts(made, a_starting_job(), clock, seconds=10 * int(PAUSE_CAP_S)) <= 22
        assert attempts(made, a_starting_job(generation=2), clock, seconds=1) == 1, "another place is another matter"


def test_a_plan_that_was_made_before_its_job_ended_is_swept_up(tmp_path: Path) -> None:
    made = objects(tmp_path, "http://127.0.0.1:1", Clock())
    view = ClusterView(plans={("jobs", "ebbtide-a"): SeenPlan("a", 1), ("jobs", "other"): SeenPlan("a", 1)})
    assert [effect.what for effect in made.sweep(Snapshot(), view)] == ["delete the objects of a"]
    assert list(made.sweep(Snapshot(jobs={"a": a_starting_job()}), view)) == []
