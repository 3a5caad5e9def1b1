"""The documents of queues: what a queue's jobs are guaranteed, at most given, and how they share what is left."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Self

from pydantic import Field, model_validator

from scheduler.documents.document import Document, read
from scheduler.documents.fields import Label
from scheduler.documents.job import GPUS_MAX
from scheduler.documents.refusal import refused_field
from scheduler.domain.job_queue import JobQueue

WEIGHT_MAX = 1e6
JOBS_MAX = 1_000_000
_Gpus = Annotated[int, Field(strict=True, ge=0, le=GPUS_MAX)]


class QuotaDocument(Document):
    """Absent fields keep the default: nothing guaranteed, no limits of GPUs or of one user (null), weight 1. GPUs of
    all models count alike."""

    guaranteed_gpus: _Gpus = 0
    limit_gpus: _Gpus | None = None
    weight: Annotated[float, Field(strict=True, gt=0, le=WEIGHT_MAX)] = 1.0

    user_limit_gpus: Annotated[
        _Gpus | None, Field(description="Most GPUs that the jobs of one owner hold together; null: no limit.")
    ] = None

    user_jobs_max: Annotated[
        Annotated[int, Field(strict=True, ge=0, le=JOBS_MAX)] | None,
        Field(description="Most waiting jobs of one owner that are taken over HTTP; null: no limit."),
    ] = None

    @model_validator(mode="after")
    def _limit_holds_the_guarantee(self) -> Self:
        if self.limit_gpus is not None and self.limit_gpus < self.guaranteed_gpus:
            allowed = f"null, or at least guaranteed_gpus, which is {self.guaranteed_gpus}"
            raise refused_field("limit_gpus", self.limit_gpus, allowed)
        return self


class QueueDocument(QuotaDocument):
    name: Label


def job_queue(document: QueueDocument) -> JobQueue:
    return JobQueue(**document.model_dump())


def changed_queue(queue: JobQueue, change: QuotaDocument) -> JobQueue:
    """The queue with the fields that `change` gives; what it leaves out stays.

    Raises:
        RefusedError: what is given and what stays do not go together.
    """
    whole = {**asdict(queue), **change.model_dump(exclude_unset=True)}
    return job_queue(read(QueueDocument, whole))
