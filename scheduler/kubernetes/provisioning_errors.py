"""What keeps a persistent volume claim from being mounted by all pods of a job. Pure.

Ebbtide binds pods itself, past the scheduler of Kubernetes, which would have waited: a pod whose claim cannot be
mounted would hold its GPUs without an end, and its job would never start.

Refusals: what the API server would not take of a job, so that it hears of it instead of waiting for ever.
"""

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


def describe_claim_error(claim: Object | None, claim_name: str, *, max_gpus: int) -> str:
    """Empty where a job of up to so many GPUs can mount the claim at `place`, its namespace and name: now, and wherever
    it is moved and grows to."""
    got = f"checkpoint.volume: claim {claim_name}"
    if claim is None:
        return f"{got} does not exist"
    if is_terminating(claim):
        return f"{got} is being deleted"
    phase = (claim.get("status") or {}).get("phase", "Pending")
    if phase != "Bound":
        return f"{got} is {phase}; allowed: Bound (a storage class that waits for a first consumer never binds it)"
    modes = tuple(claim["spec"].get("accessModes") or ())
    if _READ_WRITE_MANY in modes or (max_gpus == 1 and any(mode in modes for mode in _SINGLE_NODE_MODES)):
        return ""
    return f"{got} has {', '.join(modes)}; allowed for up to {max_gpus} GPUs, on several nodes: {_READ_WRITE_MANY}"


_NAMESPACE_ERRORS = ("exceeded quota", "cannot create resource", "cannot get resource", "cannot patch resource")
"""How the API server says that a namespace is full, or that the operator lacks a right. It has no codes for either."""

PAUSE_BASE_S, PAUSE_CAP_S = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class ProvisioningFailure:
    """Of the job's objects in one generation. `is_final`: the same object is refused again, whoever asks, whenever;
    others may be taken later. `is_fault`: the job is wrong, not its surroundings. `times`: so often in a row; it is
    left alone until `until_s`, on the monotonic clock."""

    generation: int
    message: str
    is_permanent: bool
    is_job_error: bool
    attempts: int = 1
    retry_at_s: float = 0.0


def classify_api_error(generation: int, error: ApiError) -> ProvisioningFailure | None:
    """None where the call may as well succeed the next time."""
    if not error.is_permanent:
        return None
    is_fault = not (error.is_webhook_unavailable or any(words in error.message for words in _NAMESPACE_ERRORS))
    return ProvisioningFailure(
        generation, f"the API server refuses what it needs: {error.message}", error.is_invalid, is_fault
    )


class ProvisioningFailures:
    """The last one of each job, as its objects were asked for. Used by several threads. A new leader knows none, and
    hears of them anew. What was refused is left alone for a while that grows, so that jobs which cannot run leave the
    pace of requests to those that can."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._rng = Random()
        self._lock = threading.Lock()
        self._known: dict[str, ProvisioningFailure] = {}

    def record(self, job: Job, failure: ProvisioningFailure | None) -> None:
        """What became of asking for the job's objects; None where they were taken, or may be the next time."""
        before = self.get(job)
        with self._lock:
            if failure is None:
                self._known.pop(job.id, None)
                return
            times = 1 if before is None else before.attempts + 1
            until_s = self._monotonic_s() + compute_backoff_s(
                times, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S, rng=self._rng
            )
            self._known[job.id] = replace(failure, attempts=times, retry_at_s=until_s)

    def get(self, job: Job) -> ProvisioningFailure | None:
        """What was refused of the present generation."""
        with self._lock:
            known = self._known.get(job.id)
        return known if known is not None and known.generation == job.allocation.generation else None

    def is_backing_off(self, job: Job) -> bool:
        refusal = self.get(job)
        return refusal is not None and self._monotonic_s() < refusal.retry_at_s

    def prune(self, jobs: Container[str]) -> None:
        """Forget all others."""
        with self._lock:
            self._known = {job_id: known for job_id, known in self._known.items() if job_id in jobs}
