"""The job document, to and from the domain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.domain.job import CheckpointSpec, JobSpec

WHOLE: dict[str, Any] = {
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


def test_a_whole_document_becomes_a_spec() -> None:
    assert parse_job(WHOLE) == JobSpec(
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
    )


def test_a_name_and_a_range_are_enough() -> None:
    assert parse_job({"name": "a", "gpus": {"min": 1, "max": 1}}) == JobSpec("a", 1, 1)


@pytest.mark.parametrize(
    "document",
    [
        WHOLE,
        {"name": "a", "gpus": {"min": 1, "max": 1}},
        {"name": "a", "gpus": {"min": 1, "max": 1}, "profile": {"b": [1.5], "a": "x"}, "globalBatch": 1},
    ],
)
def test_a_spec_writes_a_document_that_reads_as_the_same_spec(document: dict[str, Any]) -> None:
    spec = parse_job(document)
    written = json.loads(json.dumps(to_job_document(spec), allow_nan=False))
    assert parse_job(written) == spec


def test_equal_profiles_are_one_text_whatever_the_order_of_their_fields() -> None:
    base = {"name": "a", "gpus": {"min": 1, "max": 1}, "globalBatch": 1}
    assert parse_job(base | {"profile": {"x": 1, "y": 2}}) == parse_job(base | {"profile": {"y": 2, "x": 1}})


def test_a_spec_that_the_form_would_not_take_can_still_be_shown() -> None:
    assert to_job_document(JobSpec("Odd name", 1, 1))["name"] == "Odd name"


def test_every_refused_field_is_named_in_one_message() -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_job({"name": "A", "gpus": {"min": 0, "max": 2}, "retries": -1})
    assert [refusal.field for refusal in refused.value.invalid_fields] == ["name", "gpus.min", "retries"]
    assert "gpus.min: got 0; allowed: greater than or equal to 1" in str(refused.value)


def test_an_unknown_field_is_refused_together_with_the_known_ones() -> None:
    with pytest.raises(InvalidDocumentError, match=r"minGpus: got 1; allowed: one of the fields name, gpus, queue"):
        parse_job({"name": "a", "gpus": {"min": 1, "max": 1}, "minGpus": 1})


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_what_is_no_document_is_refused(document: object) -> None:
    with pytest.raises(InvalidDocumentError, match="an object"):
        parse_job(document)
