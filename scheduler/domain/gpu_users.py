"""Users of a GPU model: the nodes that have it, and the jobs that name it."""

from __future__ import annotations

from scheduler.domain.snapshot import Snapshot


def describe_gpu_users(gpu: str, snapshot: Snapshot) -> str:
    """Return the numbers of nodes and live jobs that need a profile of the GPU model, or an empty string."""
    nodes = sum(node.gpu == gpu for node in snapshot.nodes.values())
    jobs = sum(job.spec.gpu == gpu and not job.is_ended for job in snapshot.jobs.values())
    return ", ".join(filter(None, (_count(nodes, "node"), _count(jobs, "job"))))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}" if number else ""
