"""ElasticJobs in the cluster, commands in the inbox."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import CancelJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import ELASTIC_JOB
from scheduler.kubernetes.resources.elastic_job import derive_job_id
from scheduler.kubernetes.resources.meta import parse_metadata
from tests.builders import a_fleet, a_job, a_snapshot
from tests.unit.kubernetes.operating import NOW_S, Operating
from tests.unit.kubernetes.pretend_server import BORN_S

SPEC = {"gpus": {"min": 2, "max": 8}, "command": ["python", "train.py"]}


def with_job(**spec: object) -> tuple[Operating, str]:
    """One ElasticJob `llama`, taken in, and the id of its job."""
    rig = Operating()
    made = rig.server.add(ELASTIC_JOB, "llama", {**SPEC, **spec}, namespace="team-a")
    rig.settle()
    return rig, derive_job_id(parse_metadata(made))


def accepted(rig: Operating, name: str = "llama") -> tuple[str, str, str]:
    resource = rig.server.get(ELASTIC_JOB, name, "team-a")
    (claim,) = [each for each in resource["status"]["conditions"] if each["type"] == "Accepted"]
    return claim["status"], claim["reason"], claim["message"]


def test_a_new_resource_is_submitted_once_under_its_uid_as_of_its_birth() -> None:
    rig = Operating()
    made = rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace="team-a")
    (command,) = rig.take().commands
    assert (command.id, command.at_s) == (f"submit-{made['metadata']['uid']}", BORN_S)
    assert isinstance(command.body, SubmitJob)
    assert command.actor == "namespace/team-a", "the job's owner, for limits of users and for usage"
    assert (command.body.spec.namespace, command.body.spec.resource_uid) == ("team-a", made["metadata"]["uid"])
    assert rig.round() == ["SubmitJob"]
    rig.settle()
    assert rig.take().commands == ()


def test_one_that_is_born_suspended_is_suspended_in_the_same_tick() -> None:
    rig, job_id = with_job(suspend=True)
    assert rig.snapshot.jobs[job_id].intent is Intent.SUSPEND


def test_a_change_of_range_and_suspend_is_passed_on_once() -> None:
    rig, job_id = with_job()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 16}, suspend=True)
    bodies = [command.body for command in rig.take().commands]
    assert bodies == [ScaleJob(job_id, 2, 16), SuspendJob(job_id)]
    assert rig.round() == ["ScaleJob", "SuspendJob"]
    rig.settle()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", suspend=False)
    assert rig.round() == ["ResumeJob"]


def test_a_change_over_http_right_behind_one_of_the_resource_wins_and_is_not_undone() -> None:
    rig, job_id = with_job()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 16})
    assert rig.send(*rig.take().commands) == ["ScaleJob"]
    rig.absorb()
    job = rig.snapshot.jobs[job_id]
    rig.snapshot = replace(rig.snapshot, jobs={job_id: replace(job, spec=replace(job.spec, max_gpus=4))})
    rig.settle()
    assert rig.snapshot.jobs[job_id].spec.max_gpus == 4
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["spec"]["gpus"] == {"min": 2, "max": 4}


def test_a_change_that_comes_while_a_tick_runs_is_not_taken_for_one_that_was_read() -> None:
    """It would count as taken in, and the resource would be made to follow the job: the wish would be lost."""
    rig, job_id = with_job()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 16})
    rig.send(*rig.take().commands)
    rig.absorb()
    taken = rig.take()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 4})
    rig.server.do(rig.steps(taken=taken))
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["spec"]["gpus"] == {"min": 2, "max": 4}
    rig.settle()
    assert rig.snapshot.jobs[job_id].spec.max_gpus == 4


def test_a_deleted_resource_cancels_its_job_and_stays_until_that_has_left() -> None:
    rig, job_id = with_job()
    rig.server.ask_delete(ELASTIC_JOB, "llama", "team-a")
    assert [command.body for command in rig.take().commands] == [CancelJob(job_id)]
    rig.round()
    ended = replace(rig.snapshot.jobs[job_id], state=JobState.CANCELLED)
    rig.snapshot = replace(rig.snapshot, jobs={job_id: ended})
    rig.publish(podded={("team-a", job_id), ("team-b", job_id)})
    assert rig.server.resources().elastic_jobs
    rig.publish(podded={("team-b", job_id)})
    assert rig.server.resources().elastic_jobs == (), "what a pod of another namespace says of itself keeps nothing"


def test_a_resource_that_was_torn_away_cancels_its_job_too() -> None:
    rig, job_id = with_job()
    rig.server.objects.clear()
    assert [command.body for command in rig.take().commands] == [CancelJob(job_id)]
    rig.round()
    assert rig.take().commands == ()


def test_a_refused_resource_says_why_and_is_read_again_when_it_changes() -> None:
    rig = Operating()
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "model": "abacus", "globalBatch": 8}, namespace="team-a")
    rig.settle()
    assert accepted(rig)[:2] == ("False", "Refused")
    assert 'model: got "abacus"; allowed: one of ' in accepted(rig)[2]
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["phase"] == "Refused"
    rig.server.change(ELASTIC_JOB, "llama", "team-a", model="gpt2")
    assert rig.round() == ["SubmitJob"]
    rig.settle()
    assert accepted(rig)[0] == "True"


def test_nonsense_in_a_job_that_runs_is_told_and_the_job_runs_on() -> None:
    rig, job_id = with_job()
    before = rig.snapshot.jobs[job_id]
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus="all")
    rig.settle()
    assert accepted(rig)[:2] == ("False", "Refused")
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 8}, queue="rich")
    rig.settle()
    assert accepted(rig)[1:] == ("FixedFieldChanged", "queue: fixed once the job is submitted; it runs on as it was")
    assert rig.snapshot.jobs[job_id] == before
    rig.server.change(ELASTIC_JOB, "llama", "team-a", queue="default")
    rig.settle()
    assert accepted(rig)[0] == "True"


def test_a_resource_of_another_manager_is_never_touched() -> None:
    rig = Operating()
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "managedBy": "kueue.x-k8s.io/multikueue"}, namespace="team-a")
    rig.settle()
    assert (rig.server.writes, rig.snapshot.jobs) == (0, {})


def test_a_job_that_has_ended_is_not_submitted_again() -> None:
    rig, job_id = with_job()
    ended = replace(rig.snapshot.jobs[job_id], state=JobState.SUCCEEDED, state_since_s=NOW_S)
    rig.snapshot = replace(rig.snapshot, jobs={})
    rig.publish(ended_jobs={job_id: ended})
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["phase"] == "Succeeded"
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 1, "max": 1})
    rig.sent.clear()
    assert rig.take().commands == ()


def test_a_copy_of_what_we_made_for_a_job_over_http_is_no_job() -> None:
    rig = Operating()
    annotations = {"ebbtide.dev/origin": "api"}
    rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace="team-a", annotations=annotations)
    rig.settle()
    assert accepted(rig)[:2] == ("False", "NoSuchJob")
    assert rig.snapshot.jobs == {}


@pytest.mark.parametrize("origin", ["api", ""])
def test_a_resource_that_claims_a_job_of_another_namespace_has_no_say_in_it(origin: str) -> None:
    rig = Operating(snapshot=a_snapshot(a_fleet(training=1, inference=0), [a_job("llama-abc123", 2)], now_s=NOW_S))
    rig.publish()
    annotations = {"ebbtide.dev/origin": origin}
    forged = {"gpus": {"min": 1, "max": 1}, "command": ["x"]}
    rig.server.add(ELASTIC_JOB, "llama-abc123", forged, namespace="thieves", annotations=annotations)
    rig.settle()
    assert rig.snapshot.jobs["llama-abc123"].spec.max_gpus == 2
    rig.server.ask_delete(ELASTIC_JOB, "llama-abc123", "thieves")
    rig.settle()
    assert rig.snapshot.jobs["llama-abc123"].intent is Intent.RUN
