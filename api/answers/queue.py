"""Queues as answers."""

from __future__ import annotations

from typing_extensions import TypedDict

from scheduler.policies.quota import QueueUse


class QueueView(TypedDict):
    """`own_gpus` and `borrowed_gpus` are parts of `used_gpus`; `waiting_gpus` are the minimums of waiting jobs."""

    name: str
    guaranteed_gpus: int
    limit_gpus: int | None
    user_limit_gpus: int | None
    user_jobs_max: int | None
    weight: float
    declared: bool
    used_gpus: int
    own_gpus: int
    borrowed_gpus: int
    running_jobs: int
    waiting_jobs: int
    waiting_gpus: int


def queue_view(use: QueueUse) -> QueueView:
    queue = use.queue
    return {
        "name": queue.name,
        "guaranteed_gpus": queue.guaranteed_gpus,
        "limit_gpus": queue.limit_gpus,
        "user_limit_gpus": queue.user_limit_gpus,
        "user_jobs_max": queue.user_jobs_max,
        "weight": queue.weight,
        "declared": use.is_declared,
        "used_gpus": use.used_gpus,
        "own_gpus": use.own_gpus,
        "borrowed_gpus": use.borrowed_gpus,
        "running_jobs": use.running_jobs,
        "waiting_jobs": use.waiting_jobs,
        "waiting_gpus": use.waiting_gpus,
    }
