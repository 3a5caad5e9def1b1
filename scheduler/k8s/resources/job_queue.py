"""Queue: who pays for jobs, to the domain's JobQueue and back to a status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler.documents.custom_resource import QueueSpec, queue_of
from scheduler.documents.document import read
from scheduler.domain.job_queue import JobQueue
from scheduler.k8s.resources.conditions import Claim
from scheduler.k8s.resources.metadata import Resource, metadata
from scheduler.policies.quota import QueueUse


def read_queue(resource: Resource) -> JobQueue:
    """What the Queue asks for.

    Raises:
        RefusedError: fields are refused; the message names each with its value and what is allowed.
    """
    return queue_of(metadata(resource).name, read(QueueSpec, resource.get("spec")))


def queue_status(use: QueueUse | None, claims: Iterable[Claim]) -> dict[str, Any]:
    """The status of a Queue, but for its time; nobody uses a queue that nobody names."""
    return {
        "usedGpus": use.used_gpus if use else 0,
        "borrowedGpus": use.borrowed_gpus if use else 0,
        "runningJobs": use.running_jobs if use else 0,
        "waitingJobs": use.waiting_jobs if use else 0,
        "conditions": tuple(claims),
    }
