"""A job's pod template: it says what runs, never how many GPUs or where."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.job import job_document, read_job
from scheduler.documents.refusal import RefusedError

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "harbour"}},
    "spec": {"containers": [{"name": "train", "image": "tide:1", "command": ["python"], "args": ["train.py", "--x"]}]},
}


def job(template: object, **more: object) -> dict[str, object]:
    return {"name": "a", "gpus": {"min": 1, "max": 2}, "template": template, **more}


def test_the_first_container_says_what_runs() -> None:
    spec = read_job(job(TEMPLATE))
    assert spec.command == ("python", "train.py", "--x")
    assert spec.image == "tide:1"
    assert read_job(job_document(spec)) == spec


def test_a_command_of_the_job_itself_counts_more() -> None:
    spec = read_job(job(TEMPLATE, command=["bash", "run.sh"], image="other:2"))
    assert (spec.command, spec.image) == (("bash", "run.sh"), "other:2")


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({}, "spec: got nothing"),
        ({"spec": {"containers": []}}, "spec.containers"),
        ({"spec": {"containers": ["train"]}}, r"spec.containers\[0\]"),
        ({"spec": {"containers": [{"command": "python"}]}}, r"spec.containers\[0\].command"),
        ({"spec": {"containers": [{}], "schedulerName": "default-scheduler"}}, "spec.schedulerName"),
        ({"spec": {"containers": [{}], "nodeName": "n7"}}, "spec.nodeName"),
        ({"kind": "Pod", "spec": {"containers": [{}]}}, "kind"),
    ],
)
def test_what_is_missing_or_is_ours_to_say_is_named(template: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError, match=f"template.{field}"):
        read_job(job(template))


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_a_template_asks_for_no_gpus_itself(kind: str) -> None:
    container = {"name": "train", "resources": {kind: {"nvidia.com/gpu": 8}}}
    with pytest.raises(RefusedError, match=r"resources.*got 8; allowed: nothing: Ebbtide asks"):
        read_job(job({"spec": {"containers": [container]}}))
