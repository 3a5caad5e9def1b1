"""Commands for ElasticJobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import CancelJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import ELASTIC_JOB, QUEUE, ResourceKind
from scheduler.kubernetes.resources.elastic_job import derive_job_id
from scheduler.kubernetes.resources.meta import parse_metadata
from scheduler.kubernetes.spec_commands import compute_spec_commands
from scheduler.store.protocol import LoadedState
from tests.builders import a_fleet, a_job, a_snapshot
from tests.unit.kubernetes.fake_server import CREATED_S
from tests.unit.kubernetes.operator_rig import NOW_S, OperatorRig

SPEC = {"gpus": {"min": 2, "max": 8}, "command": ["python", "train.py"]}


def with_job(**spec: object) -> tuple[OperatorRig, str]:
    """Return a rig with one ElasticJob `llama` and the id of its job."""
    rig = OperatorRig()
    created = rig.server.add(ELASTIC_JOB, "llama", {**SPEC, **spec}, namespace="team-a")
    rig.run_until_stable()
    return rig, derive_job_id(parse_metadata(created))


def accepted(rig: OperatorRig, name: str = "llama") -> tuple[str, str, str]:
    resource = rig.server.get(ELASTIC_JOB, name, "team-a")
    (claim,) = [each for each in resource["status"]["conditions"] if each["type"] == "Accepted"]
    return claim["status"], claim["reason"], claim["message"]


def test_new_resource_is_submitted_once_with_its_creation_time() -> None:
    rig = OperatorRig()
    created = rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace="team-a")
    (command,) = rig.compute_commands().commands
    assert (command.id, command.at_s) == (f"submit-{created['metadata']['uid']}", CREATED_S)
    assert isinstance(command.body, SubmitJob)
    assert (command.actor, command.actor_id) == ("namespace/team-a", "namespace:team-a"), "the owner"
    assert (command.body.spec.namespace, command.body.spec.resource_uid) == ("team-a", created["metadata"]["uid"])
    assert rig.run_round() == ["SubmitJob"]
    rig.run_until_stable()
    assert rig.compute_commands().commands == ()


def test_a_priority_above_the_ceiling_of_the_queue_is_refused() -> None:
    rig, spec = OperatorRig(), {**SPEC, "queue": "research"}
    rig.server.add(QUEUE, "research", {"maxPriority": 7})
    for name, priority in (("high", 8), ("fair", 7)):
        rig.server.add(ELASTIC_JOB, name, {**spec, "priority": priority}, namespace="team-a")
    rig.run_until_stable()
    assert accepted(rig, "high")[:2] == ("False", "PriorityTooHigh")
    assert accepted(rig, "fair")[:2] == ("True", "Accepted")


def test_an_undeclared_queue_has_the_ceiling_of_the_default_queue() -> None:
    rig = OperatorRig()
    rig.server.add(QUEUE, "default", {"maxPriority": 7})
    for name, priority in (("high", 8), ("fair", 7)):
        rig.server.add(ELASTIC_JOB, name, {**SPEC, "queue": "foo", "priority": priority}, namespace="team-a")
    rig.send(*rig.compute_commands().commands)
    resources, loaded = rig.server.resources(), LoadedState(rig.snapshot, rig.inbox)
    computed = compute_spec_commands(
        resources, loaded, NOW_S, job_namespace="ebbtide-jobs", allows_undeclared_queues=True
    )
    submitted = [each.body for each in computed.commands]
    assert [body.spec.name for body in submitted if isinstance(body, SubmitJob)] == ["fair"]


@pytest.mark.parametrize("order", [(QUEUE, ELASTIC_JOB), (ELASTIC_JOB, QUEUE)])
def test_job_and_its_queue_may_be_applied_in_any_order(order: tuple[ResourceKind, ...]) -> None:
    rig, specs = OperatorRig(), {ELASTIC_JOB: {**SPEC, "queue": "research"}, QUEUE: {"guaranteed": 4}}
    names = {ELASTIC_JOB: ("llama", "team-a"), QUEUE: ("research", "")}
    first, second = order
    rig.server.add(first, names[first][0], specs[first], namespace=names[first][1])
    rig.run_until_stable()
    if first is ELASTIC_JOB:
        message = 'queue: got "research"; allowed: one of default, or a new queue that is created first'
        assert accepted(rig) == ("False", "QueueNotFound", message)
        assert not rig.snapshot.jobs
    rig.server.add(second, names[second][0], specs[second], namespace=names[second][1])
    assert rig.run_round() == [*(["CreateQueue"] if second is QUEUE else []), "SubmitJob"]
    rig.run_until_stable()
    assert accepted(rig)[0] == "True"


def test_job_keeps_running_when_its_queue_is_deleted() -> None:
    rig = OperatorRig()
    rig.server.add(QUEUE, "research", {})
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "queue": "research"}, namespace="team-a")
    rig.run_until_stable()
    rig.server.delete(QUEUE, "research")
    rig.run_until_stable()
    assert [job.intent for job in rig.snapshot.jobs.values()] == [Intent.RUN]
    assert accepted(rig)[0] == "True"


def test_undeclared_queues_can_be_allowed() -> None:
    rig = OperatorRig()
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "queue": "research"}, namespace="team-a")
    loaded = LoadedState(rig.snapshot, ())
    found = compute_spec_commands(
        rig.server.resources(), loaded, NOW_S, job_namespace="jobs", allows_undeclared_queues=True
    )
    assert [type(command.body) for command in found.commands] == [SubmitJob]


def test_resource_created_suspended_is_suspended_in_the_same_tick() -> None:
    rig, job_id = with_job(suspend=True)
    assert rig.snapshot.jobs[job_id].intent is Intent.SUSPEND


def test_changes_of_range_and_suspend_are_sent_once() -> None:
    rig, job_id = with_job()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 16}, suspend=True)
    bodies = [command.body for command in rig.compute_commands().commands]
    assert bodies == [ScaleJob(job_id, 2, 16), SuspendJob(job_id)]
    assert rig.run_round() == ["ScaleJob", "SuspendJob"]
    rig.run_until_stable()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", suspend=False)
    assert rig.run_round() == ["ResumeJob"]


def test_later_http_change_wins() -> None:
    rig, job_id = with_job()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 16})
    assert rig.send(*rig.compute_commands().commands) == ["ScaleJob"]
    rig.apply_inbox()
    job = rig.snapshot.jobs[job_id]
    rig.snapshot = replace(rig.snapshot, jobs={job_id: replace(job, spec=replace(job.spec, max_gpus=4))})
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.max_gpus == 4
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["spec"]["gpus"] == {"min": 2, "max": 4}


def test_change_during_a_tick_is_not_marked_as_applied() -> None:
    """Otherwise the change would count as applied, and the resource would be reset to the job's values."""
    rig, job_id = with_job()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 16})
    rig.send(*rig.compute_commands().commands)
    rig.apply_inbox()
    taken = rig.compute_commands()
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 4})
    rig.server.execute(rig.compute_writes(spec_commands=taken))
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["spec"]["gpus"] == {"min": 2, "max": 4}
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.max_gpus == 4


def test_deleted_resource_cancels_its_job_and_waits_for_its_pods() -> None:
    rig, job_id = with_job()
    rig.server.delete(ELASTIC_JOB, "llama", "team-a")
    assert [command.body for command in rig.compute_commands().commands] == [CancelJob(job_id)]
    rig.run_round()
    ended = replace(rig.snapshot.jobs[job_id], state=JobState.CANCELLED)
    rig.snapshot = replace(rig.snapshot, jobs={job_id: ended})
    rig.write(jobs_with_pods={("team-a", job_id), ("team-b", job_id)})
    assert rig.server.resources().elastic_jobs
    rig.write(jobs_with_pods={("team-b", job_id)})
    assert rig.server.resources().elastic_jobs == (), "a pod of another namespace does not count"


def test_resource_removed_despite_finalizer_cancels_its_job() -> None:
    rig, job_id = with_job()
    rig.server.objects.clear()
    assert [command.body for command in rig.compute_commands().commands] == [CancelJob(job_id)]
    rig.run_round()
    assert rig.compute_commands().commands == ()


def test_rejected_resource_is_validated_again_after_a_change() -> None:
    rig = OperatorRig()
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "model": "abacus", "globalBatch": 8}, namespace="team-a")
    rig.run_until_stable()
    assert accepted(rig)[:2] == ("False", "Refused")
    assert 'model: got "abacus"; allowed: one of ' in accepted(rig)[2]
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["phase"] == "Refused"
    rig.server.change(ELASTIC_JOB, "llama", "team-a", model="gpt2")
    assert rig.run_round() == ["SubmitJob"]
    rig.run_until_stable()
    assert accepted(rig)[0] == "True"


def test_invalid_change_is_reported_and_the_job_keeps_running() -> None:
    rig, job_id = with_job()
    before = rig.snapshot.jobs[job_id]
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus="all")
    rig.run_until_stable()
    assert accepted(rig)[:2] == ("False", "Refused")
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 2, "max": 8}, queue="rich")
    rig.run_until_stable()
    _, reason, message = accepted(rig)
    assert reason == "FixedFieldChanged"
    assert message.startswith("queue:")
    assert rig.snapshot.jobs[job_id] == before
    rig.server.change(ELASTIC_JOB, "llama", "team-a", queue="default")
    rig.run_until_stable()
    assert accepted(rig)[0] == "True"


def test_resource_of_another_manager_is_ignored() -> None:
    rig = OperatorRig()
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "managedBy": "kueue.x-k8s.io/multikueue"}, namespace="team-a")
    rig.run_until_stable()
    assert (rig.server.write_count, rig.snapshot.jobs) == (0, {})


def test_ended_job_is_not_submitted_again() -> None:
    rig, job_id = with_job()
    ended = replace(rig.snapshot.jobs[job_id], state=JobState.SUCCEEDED, state_since_s=NOW_S)
    rig.snapshot = replace(rig.snapshot, jobs={})
    rig.write(ended_jobs={job_id: ended})
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["phase"] == "Succeeded"
    rig.server.change(ELASTIC_JOB, "llama", "team-a", gpus={"min": 1, "max": 1})
    rig.sent.clear()
    assert rig.compute_commands().commands == ()


def test_copy_of_an_api_resource_is_rejected() -> None:
    rig = OperatorRig()
    annotations = {"ebbtide.dev/origin": "api"}
    rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace="team-a", annotations=annotations)
    rig.run_until_stable()
    assert accepted(rig)[:2] == ("False", "NoSuchJob")
    assert rig.snapshot.jobs == {}


@pytest.mark.parametrize("origin", ["api", ""])
def test_resource_cannot_control_a_job_of_another_namespace(origin: str) -> None:
    rig = OperatorRig(snapshot=a_snapshot(a_fleet(training=1, inference=0), [a_job("llama-abc123", 2)], now_s=NOW_S))
    rig.write()
    annotations = {"ebbtide.dev/origin": origin}
    forged = {"gpus": {"min": 1, "max": 1}, "command": ["x"]}
    rig.server.add(ELASTIC_JOB, "llama-abc123", forged, namespace="thieves", annotations=annotations)
    rig.run_until_stable()
    assert rig.snapshot.jobs["llama-abc123"].spec.max_gpus == 2
    rig.server.delete(ELASTIC_JOB, "llama-abc123", "thieves")
    rig.run_until_stable()
    assert rig.snapshot.jobs["llama-abc123"].intent is Intent.RUN
