"""The health checks for Argo CD, run by Lua on objects as the API server returns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

lupa = pytest.importorskip("lupa", reason="no lupa: `make lint` installs the development packages")

FOLDER = Path(__file__).parents[1]
FILE = FOLDER.parent / "deploy" / "argocd" / "argocd-cm.yaml"
RESOURCES = FOLDER / "golden" / "custom_resources"


def assess(obj: dict[str, Any]) -> tuple[str, str]:
    """Return health and message of the object, as Argo CD determines them."""
    checks = yaml.safe_load(FILE.read_text(encoding="utf-8"))["data"]
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    check = checks["resource.customizations.health.ebbtide.dev_" + obj["kind"]]
    function = lua.eval(f"function(obj) {check} end")
    found = function(lua.table_from(obj, recursive=True))
    return found["status"], found["message"] or ""


def read(name: str) -> dict[str, Any]:
    """Return a golden resource, as the operator writes it."""
    resource: dict[str, Any] = yaml.safe_load((RESOURCES / f"{name}.yaml").read_text(encoding="utf-8"))
    return resource


def with_conditions(resource: dict[str, Any], **statuses: str) -> dict[str, Any]:
    """Return the resource with these conditions changed or added."""
    kept = [each for each in resource["status"]["conditions"] if each["type"] not in statuses]
    added = [{"type": kind, "status": status, "message": f"about {kind}"} for kind, status in statuses.items()]
    return {**resource, "status": {**resource["status"], "conditions": [*kept, *added]}}


@pytest.mark.parametrize("kind", ["ElasticJob", "Pool", "Queue", "GpuProfile"])
def test_object_that_no_operator_has_read_is_progressing(kind: str) -> None:
    assert assess({"kind": kind, "metadata": {"generation": 1}})[0] == "Progressing"


def test_running_job_and_queue_are_healthy() -> None:
    assert assess(read("elastic_job")) == ("Healthy", "Running on 6/8 GPUs")
    assert assess(read("queue"))[0] == "Healthy"
    assert assess(read("gpu_profile")) == ("Healthy", "version 1")


@pytest.mark.parametrize(("reason", "health"), [("Refused", "Degraded"), ("Deleting", "Progressing")])
def test_gpu_profile_that_is_not_accepted(reason: str, health: str) -> None:
    profile = read("gpu_profile")
    profile["status"]["conditions"][0] |= {"status": "False", "reason": reason, "message": "why"}
    assert assess(profile) == (health, "why")


@pytest.mark.parametrize(
    ("conditions", "phase", "health"),
    [
        ({"Accepted": "False"}, "Refused", ("Degraded", "about Accepted")),
        ({"Failed": "True"}, "Failed", ("Degraded", "about Failed")),
        ({"VolumesReady": "False"}, "Queued", ("Degraded", "about VolumesReady")),
        ({"Complete": "True"}, "Succeeded", ("Healthy", "Succeeded")),
        ({"Suspended": "True"}, "Suspended", ("Suspended", "spec.suspend is true")),
        ({}, "Starting", ("Progressing", "Starting")),
    ],
)
def test_health_of_a_job(conditions: dict[str, str], phase: str, health: tuple[str, str]) -> None:
    job = with_conditions(read("elastic_job"), **conditions)
    job["status"] |= {"phase": phase}
    job["status"].pop("message", None)
    assert assess(job) == health


def test_changed_job_is_progressing_until_it_is_read() -> None:
    job = read("elastic_job")
    job["metadata"]["generation"] = job["status"]["observedGeneration"] + 1
    assert assess(job)[0] == "Progressing"


@pytest.mark.parametrize(
    ("kind", "status"), [("Accepted", "False"), ("Conflict", "True"), ("Matched", "False"), ("DemandKnown", "False")]
)
def test_pool_with_a_problem_is_degraded(kind: str, status: str) -> None:
    good = {"Accepted": "True", "Conflict": "False", "Matched": "True", "NodesUsable": "True", "DemandKnown": "True"}
    assert assess(with_conditions(read("pool"), **good))[0] == "Healthy"
    assert assess(with_conditions(read("pool"), **good | {kind: status})) == ("Degraded", f"about {kind}")


def test_queue_that_is_refused_is_degraded() -> None:
    assert assess(with_conditions(read("queue"), Accepted="False")) == ("Degraded", "about Accepted")
