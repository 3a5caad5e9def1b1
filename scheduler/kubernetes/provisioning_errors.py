"""Reasons why a job's objects cannot be created: unusable volume claims and rejections by the API server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from random import Random

from scheduler.domain.job import Job
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import Object, is_terminating
from scheduler.kubernetes.flow_control import compute_backoff_s

_READ_WRITE_MANY = "ReadWriteMany"
_SINGLE_NODE_MODES = ("ReadWriteOnce", "ReadWriteOncePod")


def is_for_one_node(claim: Object) -> bool:
    """Return whether only one node at a time can mount the claim."""
    return set(claim["spec"].get("accessModes") or ()) <= {*_SINGLE_NODE_MODES}


def describe_claim_error(
    claim: Object | None,
    claim_name: str,
    *,
    max_gpus: int,
    field: str = "checkpoint.volume",
    node_gpus: int | None = None,
) -> str:
    """Return why the claim cannot be mounted by a job of up to `max_gpus` GPUs, or an empty string.

    `claim_name` includes the namespace, `field` is where the job names it. With `node_gpus`, the GPUs of the largest
    node, any access mode will do for a job that fits on one node. Without it, the job writes to the claim from as many
    nodes as it has GPUs.

    Ebbtide binds pods itself, without the Kubernetes scheduler, which would wait for the claim. A bound pod that cannot
    mount its claim would hold its GPUs forever.
    """
    prefix = f"{field}: claim {claim_name}"
    if claim is None:
        return f"{prefix} does not exist"
    if is_terminating(claim):
        return f"{prefix} is being deleted"
    phase = (claim.get("status") or {}).get("phase", "Pending")
    if phase != "Bound":
        return f"{prefix} is {phase}; it must be Bound (WaitForFirstConsumer storage classes never bind it)"
    modes = tuple(claim["spec"].get("accessModes") or ())
    if node_gpus is not None:
        if max_gpus <= node_gpus or not node_gpus or not is_for_one_node(claim):
            return ""
        return (
            f"{prefix} has access mode {', '.join(modes)}; a job of up to {max_gpus} GPUs needs several nodes, because "
            f"none has more than {node_gpus}. Use a claim with {_READ_WRITE_MANY} or ReadOnlyMany, or set gpus.max to "
            f"{node_gpus} or less"
        )
    if _READ_WRITE_MANY in modes or (max_gpus == 1 and any(mode in modes for mode in _SINGLE_NODE_MODES)):
        return ""
    return f"{prefix} has access mode {', '.join(modes)}; a job of up to {max_gpus} GPUs needs {_READ_WRITE_MANY}"


_NAMESPACE_ERRORS = ("exceeded quota", "cannot create resource", "cannot get resource", "cannot patch resource")
"""Messages by which the API server reports an exceeded quota or missing permissions. There are no reason codes for
these.
"""

PAUSE_BASE_S, PAUSE_CAP_S = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class ProvisioningFailure:
    """Rejection of a job's objects in one generation.

    `is_permanent`: the same object is always rejected. `is_job_error`: the job is wrong, not its environment.
    `attempts` counts consecutive rejections; the next attempt is at `retry_at_s` on the monotonic clock.
    """

    generation: int
    message: str
    is_permanent: bool
    is_job_error: bool
    attempts: int = 1
    retry_at_s: float = 0.0


def classify_api_error(generation: int, error: ApiError) -> ProvisioningFailure | None:
    """Return the failure, or None if the next attempt may succeed."""
    if not error.is_permanent:
        return None
    is_fault = not (error.is_webhook_unavailable or any(words in error.message for words in _NAMESPACE_ERRORS))
    return ProvisioningFailure(
        generation, f"the API server rejected an object of the job: {error.message}", error.is_invalid, is_fault
    )


class ProvisioningFailures:
    """The last failure of each job, with backoff. Thread-safe, in memory only.

    The backoff leaves the request rate to jobs that can run.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._rng = Random()
        self._lock = threading.Lock()
        self._by_job: dict[str, ProvisioningFailure] = {}

    def record(self, job: Job, failure: ProvisioningFailure | None) -> None:
        """Record the result of an attempt, None for a success or a transient error."""
        before = self.get(job)
        with self._lock:
            if failure is None:
                self._by_job.pop(job.id, None)
                return
            attempts = 1 if before is None else before.attempts + 1
            retry_at_s = self._monotonic_s() + compute_backoff_s(
                attempts, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S, rng=self._rng
            )
            self._by_job[job.id] = replace(failure, attempts=attempts, retry_at_s=retry_at_s)

    def get(self, job: Job) -> ProvisioningFailure | None:
        """Return the failure of the current generation."""
        with self._lock:
            failure = self._by_job.get(job.id)
        return failure if failure is not None and failure.generation == job.allocation.generation else None

    def is_backing_off(self, job: Job) -> bool:
        refusal = self.get(job)
        return refusal is not None and self._monotonic_s() < refusal.retry_at_s

    def prune(self, jobs: Container[str]) -> None:
        """Drop the failures of all other jobs."""
        with self._lock:
            self._by_job = {job_id: failure for job_id, failure in self._by_job.items() if job_id in jobs}
