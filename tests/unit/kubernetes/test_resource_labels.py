"""Labels of ElasticJobs and of their jobs follow each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import ChangeJob, SubmitJob
from scheduler.domain.job_labels import LABELS_MAX
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import ELASTIC_JOB, JOB_LABEL, LABELS_ANNOTATION, MANAGED_BY_LABEL
from scheduler.kubernetes.resource_writes import Patch
from scheduler.kubernetes.resources.elastic_job import derive_job_id
from scheduler.kubernetes.resources.meta import parse_metadata
from tests.builders import a_job
from tests.unit.kubernetes.operator_rig import NAMESPACE, OperatorRig

SPEC = {"gpus": {"min": 2, "max": 8}, "command": ["python", "train.py"]}
CHART = {"app.kubernetes.io/managed-by": "Helm"}


def with_job(**labels: str) -> tuple[OperatorRig, str]:
    """Return a rig with one ElasticJob `llama` and the id of its job."""
    rig = OperatorRig()
    created = rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace="team-a", labels=labels)
    rig.run_until_stable()
    return rig, derive_job_id(parse_metadata(created))


def labels_of(rig: OperatorRig) -> dict[str, str]:
    labels: dict[str, str] = rig.server.get(ELASTIC_JOB, "llama", "team-a")["metadata"]["labels"]
    return {key: value for key, value in labels.items() if key != JOB_LABEL}


def label_object(rig: OperatorRig, **changes: str | None) -> None:
    rig.server.execute([(Patch(ELASTIC_JOB, "team-a", "llama", {"metadata": {"labels": changes}}),)])


def label_job(rig: OperatorRig, job_id: str, **labels: str) -> None:
    job = rig.snapshot.jobs[job_id]
    rig.snapshot = replace(rig.snapshot, jobs={job_id: replace(job, spec=replace(job.spec, labels=labels))})


def test_labels_of_the_resource_are_submitted_without_those_of_ebbtide() -> None:
    rig = OperatorRig()
    labels = {"team": "vision", **CHART, JOB_LABEL: "x"}
    rig.server.add(ELASTIC_JOB, "llama", SPEC, namespace="team-a", labels=labels)
    (command,) = rig.compute_commands().commands
    assert isinstance(command.body, SubmitJob)
    assert command.body.spec.labels == {"team": "vision", **CHART}


def test_changed_labels_of_the_resource_reach_the_job_once() -> None:
    rig, job_id = with_job(team="vision", tier="dev")
    label_object(rig, tier=None, stage="tune")
    (command,) = rig.compute_commands().commands
    assert command.body == ChangeJob(job_id, labels={"stage": "tune", "tier": None})
    assert rig.run_round() == ["ChangeJob"]
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.labels == labels_of(rig) == {"stage": "tune", "team": "vision"}
    label_object(rig, stage="dev")
    label_object(rig, stage="tune")
    assert rig.run_round() == [], "nothing has changed in the end"
    label_object(rig, tier="dev")
    assert rig.run_round() == ["ChangeJob"], "the same label again is another change"


def test_changed_labels_of_the_job_reach_the_resource_without_an_echo() -> None:
    rig, job_id = with_job(team="vision", tier="dev")
    label_job(rig, job_id, team="speech", stage="tune")
    assert rig.compute_commands().commands == ()
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.labels == labels_of(rig) == {"team": "speech", "stage": "tune"}
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["metadata"]["generation"] == 1


def test_changes_of_both_sides_are_merged() -> None:
    rig, job_id = with_job(team="vision", tier="dev")
    label_job(rig, job_id, team="speech", tier="dev")
    label_object(rig, tier="prod")
    assert rig.run_round() == ["ChangeJob"]
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.labels == labels_of(rig) == {"team": "speech", "tier": "prod"}


def test_labels_and_range_change_together() -> None:
    rig, job_id = with_job(team="vision")
    change = {"metadata": {"labels": {"team": "speech"}}, "spec": {"gpus": {"min": 2, "max": 16}}}
    rig.server.execute([(Patch(ELASTIC_JOB, "team-a", "llama", change),)])
    assert rig.run_round() == ["ScaleJob", "ChangeJob"]
    rig.run_until_stable()
    job = rig.snapshot.jobs[job_id]
    assert (job.spec.max_gpus, dict(job.spec.labels)) == (16, {"team": "speech"})
    scaled = replace(job, spec=replace(job.spec, max_gpus=4, labels={}))
    rig.snapshot = replace(rig.snapshot, jobs={job_id: scaled})
    rig.run_until_stable()
    assert labels_of(rig) == {}
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["spec"]["gpus"] == {"min": 2, "max": 4}


def test_labels_of_a_resource_from_an_older_release_are_adopted() -> None:
    rig, job_id = with_job(team="vision")
    label_job(rig, job_id)
    rig.server.execute(
        [(Patch(ELASTIC_JOB, "team-a", "llama", {"metadata": {"annotations": {LABELS_ANNOTATION: None}}}),)]
    )
    assert rig.run_round() == ["ChangeJob"]
    assert rig.snapshot.jobs[job_id].spec.labels == {"team": "vision"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"team": 1}', "[" * 100_000])
def test_an_annotation_that_a_user_broke_is_written_again(text: str) -> None:
    rig, job_id = with_job(team="vision")
    rig.server.execute(
        [(Patch(ELASTIC_JOB, "team-a", "llama", {"metadata": {"annotations": {LABELS_ANNOTATION: text}}}),)]
    )
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.labels == labels_of(rig) == {"team": "vision"}


def test_too_many_labels_are_refused_until_some_are_removed() -> None:
    rig, job_id = with_job(team="vision")
    label_object(rig, **{f"k{number}": "v" for number in range(LABELS_MAX)})
    rig.run_until_stable()
    conditions = rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["conditions"]
    assert [each["status"] for each in conditions if each["type"] == "Accepted"] == ["False"]
    assert rig.snapshot.jobs[job_id].spec.labels == {"team": "vision"}
    label_object(rig, k0=None)
    rig.run_until_stable()
    assert len(rig.snapshot.jobs[job_id].spec.labels) == LABELS_MAX
    conditions = rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["conditions"]
    assert [each["status"] for each in conditions if each["type"] == "Accepted"] == ["True"]


def test_labels_in_the_spec_are_refused() -> None:
    rig = OperatorRig()
    rig.server.add(ELASTIC_JOB, "llama", {**SPEC, "labels": {"team": "vision"}}, namespace="team-a")
    rig.run_until_stable()
    assert rig.snapshot.jobs == {}
    assert rig.server.get(ELASTIC_JOB, "llama", "team-a")["status"]["conditions"][0]["reason"] == "Refused"


def test_an_ended_job_keeps_its_labels() -> None:
    rig, job_id = with_job(team="vision")
    job = replace(rig.snapshot.jobs[job_id], state=JobState.SUCCEEDED)
    rig.snapshot = replace(rig.snapshot, jobs={job_id: job})
    label_object(rig, team="speech")
    rig.run_until_stable()
    assert rig.snapshot.jobs[job_id].spec.labels == {"team": "vision"}


def test_a_job_from_http_gives_its_labels_to_its_resource() -> None:
    rig = OperatorRig()
    job = a_job("llama-abc123", 2, 8, labels={"team": "vision"})
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job})
    rig.run_until_stable()
    labels = rig.server.get(ELASTIC_JOB, job.id, NAMESPACE)["metadata"]["labels"]
    assert labels == {"team": "vision", JOB_LABEL: job.id, MANAGED_BY_LABEL: "ebbtide"}
    assert rig.snapshot.jobs[job.id].spec.labels == {"team": "vision"}
