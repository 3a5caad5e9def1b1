"""Parsing ElasticJobs into job specs and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.domain.checkpoints import CheckpointSpec, CheckpointVolume
from scheduler.domain.job import Intent
from scheduler.kubernetes.resources.elastic_job import (
    build_elastic_job_spec,
    derive_job_id,
    find_immutable_changes,
    is_managed_by_us,
    parse_elastic_job,
)
from scheduler.kubernetes.resources.elastic_job_status import build_checkpoints_condition
from scheduler.kubernetes.resources.meta import parse_metadata
from tests.builders import a_job


def build_elastic_job(spec: object, *, name: str = "llama", uid: str = "u-1", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team-a", "uid": uid, "generation": 1, **more}, "spec": spec}


WHOLE = {"gpus": {"min": 2, "max": 8}, "command": ["python", "-m", "train"]}
CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}


def build_template(kind: str, path: str) -> dict[str, Any]:
    container = {"name": "main", "volumeMounts": [{"name": "kept", "mountPath": path}]}
    return {"spec": {"containers": [container], "volumes": [{"name": "kept", kind: {}}]}}


def test_metadata_sets_name_namespace_and_uid() -> None:
    read = parse_elastic_job(build_elastic_job({**WHOLE, "suspend": True, "managedBy": ""}))
    assert (read.spec.name, read.spec.namespace, read.spec.resource_uid) == ("llama", "team-a", "u-1")
    assert (read.spec.min_gpus, read.spec.max_gpus, read.suspend) == (2, 8, True)


def test_recreated_resource_is_another_job() -> None:
    ids = [derive_job_id(parse_metadata(build_elastic_job(WHOLE, uid=uid))) for uid in ("u-1", "u-1", "u-2")]
    assert ids[0] == ids[1] == "llama-" + ids[0][-6:]
    assert ids[2] != ids[0]


def test_resource_from_the_api_has_the_name_of_its_job() -> None:
    ours = build_elastic_job(WHOLE, name="llama-abc123", annotations={"ebbtide.dev/origin": "api"})
    assert derive_job_id(parse_metadata(ours)) == "llama-abc123"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (None, "spec: got nothing; allowed: an object"),
        ([1], "spec"),
        ({**WHOLE, "gpus": {"min": 9, "max": 8}}, "gpus.max: got 8; allowed: at least gpus.min, which is 9"),
        ({**WHOLE, "suspend": "yes"}, 'suspend: got "yes"; allowed: true or false'),
        ({**WHOLE, "namespace": "x"}, "namespace: got"),
        ({**WHOLE, "gpu": "abacus"}, 'gpu: got "abacus"; allowed: one of a100-40g'),
        ({**WHOLE, "speeds": {"abacus": 1}}, 'speeds: got "abacus"; allowed: one of a100-40g'),
        ({**WHOLE, "speeds": {"t4": 0}}, "speeds.t4: got 0; allowed: greater than 0"),
        (
            {**WHOLE, "model": "gpt2", "globalBatch": 1, "lengths": {"2048": 1}},
            "lengths: got 2048; allowed: at most 1024 tokens",
        ),
        ({**WHOLE, "model": "abacus", "globalBatch": 1}, 'model: got "abacus"; allowed: one of '),
        ({**WHOLE, "profile": {"a": 1}, "globalBatch": 1}, "profile"),
        ({"gpus": {"min": 1, "max": 1}}, "command: got nothing; allowed: at least one word, or a template"),
        ({**WHOLE, "color": "red"}, "color"),
        (
            {**WHOLE, "checkpoint": {"volume": CLAIM}, "template": build_template("nfs", "/checkpoints")},
            'checkpoint.volume: got "shared"; allowed: nothing; the template mounts kept at /checkpoints',
        ),
        (
            {**WHOLE, "checkpoint": {"dir": "saved", "volume": CLAIM}},
            'checkpoint.dir: got "saved"; allowed: an absolute path',
        ),
        (
            {**WHOLE, "template": {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 4}}}]}}},
            r"template.spec.containers[0].resources.limits[nvidia.com/gpu]: got 4",
        ),
    ],
)
def test_errors_name_field_and_value(spec: object, words: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_elastic_job(build_elastic_job(spec))
    assert words in str(refused.value)


def test_long_name_is_rejected_unless_the_spec_has_a_name() -> None:
    long = "a" * 53
    with pytest.raises(InvalidDocumentError, match=r"metadata\.name: got"):
        parse_elastic_job(build_elastic_job(WHOLE, name=long))
    assert parse_elastic_job(build_elastic_job({**WHOLE, "name": "short"}, name=long)).spec.name == "short"


@pytest.mark.parametrize(
    ("manager", "ours"),
    [("", True), (None, True), ("ebbtide.dev/operator", True), ("kueue.x-k8s.io/multikueue", False), (7, False)],
)
def test_is_managed_by_us(manager: object, ours: bool) -> None:
    assert is_managed_by_us(build_elastic_job({**WHOLE, "managedBy": manager})) is ours


def test_durations_are_written_as_integers_or_text() -> None:
    job = a_job("llama", 1, 2, deadline_s=90.0, run_time_s_max=0.25, checkpoint=CheckpointSpec("/c", 1e-7))
    spec = build_elastic_job_spec(job)
    assert (spec["deadline"], spec["maxRunTime"], spec["checkpoint"]["interval"]) == (90, "0.25s", "0.0000001s")
    read = parse_elastic_job(build_elastic_job({**spec, "command": ["x"]})).spec
    assert (read.deadline_s, read.run_time_s_max, read.checkpoint.interval_s) == (90.0, 0.25, 1e-7)


def test_spec_has_the_current_range_and_intent() -> None:
    job = replace(a_job("llama", 1, 2, namespace="elsewhere"), intent=Intent.SUSPEND)
    spec = build_elastic_job_spec(job)
    assert spec["suspend"] is True
    assert "namespace" not in spec


@pytest.mark.parametrize("sub_path", ["", "runs/llama"])
def test_checkpoint_volume_round_trips(sub_path: str) -> None:
    checkpoint = CheckpointSpec("/saved", 60.0, 3, CheckpointVolume("shared", sub_path))
    job = a_job("llama", 1, 2, checkpoint=checkpoint)
    read = parse_elastic_job(build_elastic_job({**build_elastic_job_spec(job), "command": ["x"]}))
    assert read.spec.checkpoint == checkpoint
    assert find_immutable_changes(replace(job.spec, checkpoint=CheckpointSpec("/saved", 60.0, 3)), job) == (
        "checkpoint",
    )


@pytest.mark.parametrize(
    ("change", "holds", "reason", "words"),
    [
        ({}, False, "InPodsOnly", "nothing is mounted at /checkpoints: checkpoints are lost with the pod"),
        ({"checkpoint": {"volume": CLAIM}}, True, "ClaimMounted", "claim shared"),
        ({"checkpoint": {"dir": "/a/b"}, "template": build_template("nfs", "/a/")}, True, "TemplateMounts", "kept"),
        ({"template": build_template("persistentVolumeClaim", "/data")}, False, "InPodsOnly", "nothing is mounted"),
        ({"template": build_template("emptyDir", "/checkpoints")}, False, "InPodsOnly", "(emptyDir)"),
        ({"template": build_template("hostPath", "/")}, None, "NodesDecide", "(hostPath)"),
        ({"checkpoint": {"dir": "s3://runs/a"}}, True, "ObjectStore", "s3://runs/a"),
    ],
)
def test_checkpoints_shared_condition(change: dict[str, Any], holds: bool | None, reason: str, words: str) -> None:
    claim = build_checkpoints_condition(parse_elastic_job(build_elastic_job({**WHOLE, **change})).spec)
    assert (claim.type, claim.holds, claim.reason) == ("CheckpointsShared", holds, reason)
    assert words in claim.message


def test_find_immutable_changes() -> None:
    job = a_job("llama", 1, 2, model="gpt2", global_batch=8)
    wanted = replace(job.spec, min_gpus=2, max_gpus=4, namespace="team-a", resource_uid="u-1")
    assert find_immutable_changes(wanted, job) == ()
    assert find_immutable_changes(replace(wanted, queue="other", model=""), job) == ("queue", "model")
