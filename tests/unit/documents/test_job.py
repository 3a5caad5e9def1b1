"""Job documents: parsing, validation and writing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec

COMPLETE: dict[str, Any] = {
    "name": "train-7b",
    "queue": "research",
    "priority": 5,
    "gpus": {"min": 2, "max": 8},
    "gpu": "a100-80g",
    "model": "llama-2-7b",
    "globalBatch": 256,
    "sequenceLength": 4096,
    "steps": 1000,
    "durationEstimate": "2h",
    "deadline": "1d",
    "maxRunTime": "1h30m",
    "retries": 1,
    "command": ["python", "-m", "train"],
    "image": "registry.example/train:1",
    "env": {"LOG": "debug"},
    "checkpoint": {"dir": "/data/ckpt", "interval": "5m", "keep": 3},
    "fungible": False,
}


def test_complete_document_becomes_a_spec() -> None:
    assert parse_job(COMPLETE) == JobSpec(
        name="train-7b",
        min_gpus=2,
        max_gpus=8,
        queue="research",
        priority=5,
        gpu="a100-80g",
        model="llama-2-7b",
        global_batch=256,
        sequence_length=4096,
        steps=1000,
        duration_estimate_s=7200.0,
        deadline_s=86_400.0,
        run_time_s_max=5400.0,
        retries=1,
        command=("python", "-m", "train"),
        image="registry.example/train:1",
        env={"LOG": "debug"},
        checkpoint=CheckpointSpec("/data/ckpt", 300.0, 3),
        fungible=False,
        on_resize=OnResize.CHECKPOINT,
    )


@pytest.mark.parametrize(
    ("fields", "on_resize"),
    [
        ({}, None),
        ({"checkpoint": {}}, None),
        ({"checkpoint": {"keep": 2}}, OnResize.CHECKPOINT),
        ({"onResize": "restart"}, OnResize.RESTART),
        ({"onResize": "never", "checkpoint": {"interval": "5m"}}, OnResize.NEVER),
    ],
)
def test_resize_mode_follows_from_the_document(fields: dict[str, Any], on_resize: OnResize | None) -> None:
    spec = parse_job({"name": "a", "gpus": {"min": 1, "max": 2}, **fields})
    assert spec.on_resize is on_resize
    assert parse_job(to_job_document(spec)) == spec, "a copy of the document can be resized exactly if the job can"


def test_name_and_gpu_range_are_sufficient() -> None:
    assert parse_job({"name": "a", "gpus": {"min": 1, "max": 1}}) == JobSpec("a", 1, 1)


@pytest.mark.parametrize(
    "document",
    [
        COMPLETE,
        {"name": "a", "gpus": {"min": 1, "max": 1}},
        {"name": "a", "gpus": {"min": 1, "max": 1}, "speeds": {"a100-80g": 1, "t4": 0.18}},
        {"name": "a", "gpus": {"min": 1, "max": 1}, "model": "gpt2", "globalBatch": 8, "lengths": {512: 9, "64": 1}},
        {"name": "a", "gpus": {"min": 1, "max": 1}, "profile": {"b": [1.5], "a": "x"}, "globalBatch": 1},
    ],
)
def test_spec_round_trips_through_its_document(document: dict[str, Any]) -> None:
    spec = parse_job(document)
    written = json.loads(json.dumps(to_job_document(spec), allow_nan=False))
    assert parse_job(written) == spec


def test_equal_profiles_have_equal_canonical_json() -> None:
    base = {"name": "a", "gpus": {"min": 1, "max": 1}, "globalBatch": 1}
    assert parse_job(base | {"profile": {"x": 1, "y": 2}}) == parse_job(base | {"profile": {"y": 2, "x": 1}})


def test_spec_with_an_invalid_name_can_be_written() -> None:
    assert to_job_document(JobSpec("Odd name", 1, 1))["name"] == "Odd name"


def test_error_names_every_invalid_field() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_job({"name": "A", "gpus": {"min": 0, "max": 2}, "retries": -1})
    assert [invalid.field for invalid in caught.value.invalid_fields] == ["name", "gpus.min", "retries"]
    assert "gpus.min: got 0; allowed: greater than or equal to 1" in str(caught.value)


def test_unknown_field_is_rejected_with_the_known_fields() -> None:
    with pytest.raises(InvalidDocumentError, match=r"minGpus: there is no such field; allowed: .*name, gpus, queue"):
        parse_job({"name": "a", "gpus": {"min": 1, "max": 1}, "minGpus": 1})


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_value_that_is_no_object_is_rejected(document: object) -> None:
    with pytest.raises(InvalidDocumentError, match="an object"):
        parse_job(document)


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ({"t4": 0}, r"speeds\.t4: got 0; allowed: greater than 0"),
        ({"t4": -1.0}, r"speeds\.t4: got -1\.0; allowed: greater than 0"),
        ({"t4": float("inf")}, r"speeds\.t4: got \"inf\"; allowed: a finite number"),
        ({"t4": "fast"}, r"speeds\.t4: got \"fast\"; allowed: a valid number"),
        ([1], r"speeds: got .*; allowed: a valid dictionary"),
    ],
)
def test_speed_that_is_no_positive_number_is_rejected(speeds: object, message: str) -> None:
    with pytest.raises(InvalidDocumentError, match=message):
        parse_job({"name": "a", "gpus": {"min": 1, "max": 1}, "speeds": speeds})


@pytest.mark.parametrize(
    ("lengths", "field"),
    [
        ({}, "lengths"),
        ({512: 0}, "lengths.512"),
        ({512: -1}, "lengths.512"),
        ({0: 1}, "lengths.0"),
        ({"long": 1}, "lengths.long"),
        ({str(tokens): 1 for tokens in range(1, 258)}, "lengths"),
        ("lengths.txt", "lengths"),
    ],
)
def test_invalid_lengths_are_rejected(lengths: object, field: str) -> None:
    document = {"name": "a", "gpus": {"min": 1, "max": 1}, "model": "gpt2", "globalBatch": 8, "lengths": lengths}
    with pytest.raises(InvalidDocumentError) as caught:
        parse_job(document)
    assert {invalid.field.partition(".[")[0] for invalid in caught.value.invalid_fields} == {field}


def test_lengths_are_only_for_jobs_with_a_model() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_job({"name": "a", "gpus": {"min": 1, "max": 1}, "lengths": {512: 1}})
    assert [invalid.field for invalid in caught.value.invalid_fields] == ["lengths"]
    with pytest.raises(ValueError, match="model or profile"):
        JobSpec("a", 1, 1, lengths=((512, 1),))
    with pytest.raises(ValueError, match="ascending"):
        JobSpec("a", 1, 1, model="gpt2", global_batch=8, lengths=((512, 1), (64, 1)))


def test_speeds_are_only_for_jobs_without_a_model() -> None:
    document = {"name": "a", "gpus": {"min": 1, "max": 1}, "model": "gpt2", "globalBatch": 8, "speeds": {"t4": 0.2}}
    with pytest.raises(InvalidDocumentError, match=r"speeds: got .*; allowed: nothing; the plans of a model"):
        parse_job(document)
    with pytest.raises(ValueError, match=r"speeds applies to jobs without model or profile"):
        JobSpec("a", 1, 1, model="gpt2", global_batch=8, speeds={"t4": 0.2})
    with pytest.raises(ValueError, match=r"speeds\.t4 must be a finite number above 0, got 0\.0"):
        JobSpec("a", 1, 1, speeds={"t4": 0.0})


STORED: dict[str, Any] = {"name": "a", "gpus": {"min": 1, "max": 2}, "command": ["python", "train.py"]}


@pytest.mark.parametrize(
    "url",
    [
        "s3://runs",
        "s3://runs/speech/v1",
        "gs://my.bucket_1/a-b",
        "az://container/run",
        "abfs://container@account.dfs.core.windows.net/run",
        "abfss://container/run/..b",
    ],
)
def test_object_store_holds_checkpoints_without_a_volume(url: str) -> None:
    spec = parse_job({**STORED, "checkpoint": {"dir": url}})
    assert spec.checkpoint.dir == url
    assert spec.on_resize is OnResize.CHECKPOINT
    assert parse_job(to_job_document(spec)) == spec


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///runs",
        "s3:/runs",
        "S3://runs",
        "s4://runs/a",
        "https://account.blob.core.windows.net/container",
        "s3://runs/a?versionId=7",
        "s3://runs/../other",
        "s3://runs/a b",
        "gs://runs:443/a",
    ],
)
def test_malformed_object_store_is_refused(url: str) -> None:
    with pytest.raises(
        InvalidDocumentError, match=r'^checkpoint.dir: got ".*allowed: a directory, or a URL: s3://BUCKET'
    ):
        parse_job({**STORED, "checkpoint": {"dir": url}})


def test_scheme_of_google_cloud_storage_is_suggested() -> None:
    with pytest.raises(InvalidDocumentError, match=r'got "gcs://runs/a".*Write gs://runs/a'):
        parse_job({**STORED, "checkpoint": {"dir": "gcs://runs/a"}})


def test_credentials_in_an_object_store_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidDocumentError, match=r'got "s3://\*\*\*@runs/a".*without credentials') as refused:
        parse_job({**STORED, "checkpoint": {"dir": "s3://key:secret@runs/a"}})
    assert "secret" not in str(refused.value)


def test_object_store_excludes_a_volume_and_the_reference_trainer() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "shared"}}
    document = {**STORED, "checkpoint": {"dir": "s3://runs/a", "volume": claim}}
    with pytest.raises(InvalidDocumentError, match=r'checkpoint\.volume: got "shared"; allowed: nothing'):
        parse_job(document)
    trainer = {**STORED, "command": ["python", "-m", "scheduler.trainer.train"], "checkpoint": {"dir": "s3://runs/a"}}
    with pytest.raises(InvalidDocumentError, match=r'checkpoint\.dir: got "s3://runs/a".*writes folders only'):
        parse_job(trainer)
