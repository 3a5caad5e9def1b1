"""Classification of rejected job objects and volume claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.job_state import JobState
from scheduler.domain.observation import RunPhase
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.cluster_observation import START_TIMEOUT_S, merge_pod_runs
from scheduler.kubernetes.provisioning_errors import ProvisioningFailures, classify_api_error, describe_claim_error
from tests.builders import a_job

INVALID = ApiError(422, "Invalid", 'Pod "a-g1-0" is invalid: spec.containers[0].image: Required value')
INSECURE = ApiError(403, "Forbidden", 'pods "a-g1-0" is forbidden: violates PodSecurity "restricted:latest"')
FULL = ApiError(403, "Forbidden", 'pods "a-g1-0" is forbidden: exceeded quota: small, requested: nvidia.com/gpu=8')
NO_RIGHT = ApiError(403, "Forbidden", 'pods is forbidden: User "x" cannot create resource "pods" in API group ""')
UNADMITTED = ApiError(500, "InternalError", 'Internal error occurred: failed calling webhook "x": connection refused')
NOWHERE = ApiError(404, "NotFound", 'namespaces "nowhere" not found')


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", "etcd"), ApiError(409, "Conflict", "x")])
def test_transient_errors_are_not_failures(error: ApiError) -> None:
    assert classify_api_error(1, error) is None


@pytest.mark.parametrize(
    ("error", "at_once", "later"),
    [
        (INVALID, RunPhase.FAILED, RunPhase.FAILED),
        (INSECURE, RunPhase.STARTING, RunPhase.FAILED),
        (NOWHERE, RunPhase.STARTING, RunPhase.FAILED),
        (FULL, RunPhase.STARTING, RunPhase.LOST),
        (NO_RIGHT, RunPhase.STARTING, RunPhase.LOST),
        (UNADMITTED, RunPhase.STARTING, RunPhase.LOST),
    ],
    ids=["invalid", "insecure", "nowhere", "quota", "no right", "unadmitted"],
)
def test_job_errors_and_namespace_errors_are_distinct(error: ApiError, at_once: RunPhase, later: RunPhase) -> None:
    job = a_job("a", 1, state=JobState.STARTING, on={"t0": (0,)})
    refusal = classify_api_error(job.allocation.generation, error)
    assert refusal is not None
    (now,) = merge_pod_runs(job, (), (), job.state_since_s, failure=refusal)
    (then,) = merge_pod_runs(job, (), (), job.state_since_s + START_TIMEOUT_S, failure=refusal)
    assert (now.phase, then.phase) == (at_once, later)
    assert error.message in then.reason


def test_failure_belongs_to_one_generation() -> None:
    known, job = ProvisioningFailures(lambda: 0.0), a_job("a", 1, state=JobState.STARTING, on={"t0": (0,)})
    later = replace(job, allocation=replace(job.allocation, generation=job.allocation.generation + 1))
    known.record(job, classify_api_error(job.allocation.generation, INVALID))
    known.prune({"a"})
    assert known.get(job) is not None
    assert known.get(later) is None
    known.record(job, None)
    assert known.get(job) is None
    known.record(job, classify_api_error(job.allocation.generation, INVALID))
    known.prune(())
    assert known.get(job) is None


def build_claim(phase: str = "Bound", *modes: str, **meta: str) -> dict[str, Any]:
    return {"metadata": meta, "spec": {"accessModes": list(modes)}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("mode", "max_gpus", "node_gpus", "is_usable"),
    [
        ("ReadWriteOnce", 8, 8, True),
        ("ReadWriteOnce", 16, 8, False),
        ("ReadWriteOncePod", 16, 8, False),
        ("ReadOnlyMany", 16, 8, True),
        ("ReadWriteMany", 16, 8, True),
        ("ReadWriteOnce", 16, 0, True),
    ],
)
def test_claim_of_a_template_must_serve_all_nodes_of_the_job(
    mode: str, max_gpus: int, node_gpus: int, is_usable: bool
) -> None:
    claim = build_claim("Bound", mode)
    found = describe_claim_error(claim, "team/data", max_gpus=max_gpus, field="template", node_gpus=node_gpus)
    assert (not found) is is_usable


@pytest.mark.parametrize(
    ("claim", "max_gpus", "words"),
    [
        (build_claim("Bound", "ReadWriteMany"), 2, ""),
        (build_claim("Bound", "ReadWriteOnce"), 1, ""),
        (None, 1, "checkpoint.volume: claim team/shared does not exist"),
        (build_claim("Pending", "ReadWriteMany"), 1, "is Pending"),
        (build_claim("Bound", "ReadWriteMany", deletionTimestamp="now"), 1, "is being deleted"),
        (
            build_claim("Bound", "ReadWriteOnce"),
            2,
            "ReadWriteOnce",
        ),
        (build_claim("Bound", "ReadOnlyMany"), 1, "ReadOnlyMany"),
    ],
)
def test_unusable_claim_is_described(claim: dict[str, Any] | None, max_gpus: int, words: str) -> None:
    found = describe_claim_error(claim, "team/shared", max_gpus=max_gpus)
    assert bool(found) == bool(words)
    assert words in found
