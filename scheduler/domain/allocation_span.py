"""Allocation spans: which job held which GPUs of a node, from when to when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SpanEnd(StrEnum):
    """Why a job no longer holds the GPUs of a span.

    RESIZED: a decision gave the job other GPUs or another plan. RECALLED: inference took the lent node back. PREEMPTED
    and SUSPENDED: the job waits without GPUs. NODE_DOWN: the node went down. FAILED: the run failed, whether the job is
    tried again or not. SUCCEEDED and CANCELLED: the job ended.
    """

    RESIZED = "resized"
    RECALLED = "recalled"
    PREEMPTED = "preempted"
    SUSPENDED = "suspended"
    NODE_DOWN = "node_down"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class AllocationSpan:
    """The GPUs of one node that one generation of a job held without a change.

    A generation that gives up some GPUs of a node has two spans there, one after the other. GPUs that the job is
    releasing count as held, as in its usage.

    Args:
        gpus: indices of the GPUs, ascending.
        gpu: their model.
        model: what the job trains, as in `JobSpec.model_label`.
        is_lent: whether the node was on loan from an inference pool.
        end_s: None while the job holds the GPUs, and `end` with it.
    """

    job_id: str
    name: str
    queue: str
    owner: str
    owner_id: str
    generation: int
    node: str
    pool: str
    gpu: str
    gpus: tuple[int, ...]
    is_lent: bool
    begin_s: float
    end_s: float | None = None
    end: SpanEnd | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class SpanEnding:
    """The end of the span that a job has open on a node."""

    job_id: str
    node: str
    end_s: float
    end: SpanEnd
