"""What the runs of a job cost and how they can go on: usage, resize mode and failures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OnResize(StrEnum):
    """What a resize does to a job.

    CHECKPOINT: it saves and resumes. RESTART: it starts again from its last reported checkpoint, or from step 0. NEVER:
    it keeps its GPUs from start to end, and does not run on lent nodes.
    """

    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    NEVER = "never"


class PermanentFault(StrEnum):
    """Why a retry of a failed run cannot succeed."""

    COMMAND_NOT_FOUND = "command-not-found"
    FILE_NOT_FOUND = "file-not-found"
    IMPORT_ERROR = "import-error"
    SYNTAX_ERROR = "syntax-error"
    ARCHIVE_REFUSED = "archive-refused"
    REPEATED_FAILURE = "repeated-failure"


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A run that failed by itself, observed at `at_s`.

    `reason` ends with the last lines of the failing rank's log. `code` is one word for comparison: a `PermanentFault`,
    a `FailureCause`, or empty if the cause is unknown. `ran_s` is how long the ranks ran, or None if unknown.
    """

    at_s: float
    reason: str
    code: str = ""
    ran_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobAccount:
    """Time and GPU-seconds that the job used, updated at each change of state or allocation.

    `last_started_at_s` is when the job last started from the queue; resizes and moves do not change it. It is None in
    records of older versions, too.
    """

    waited_s: float = 0.0
    gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    first_started_at_s: float | None = None
    settled_at_s: float = 0.0
    last_started_at_s: float | None = None

    def advance_to(
        self, now_s: float, *, waits: bool, held_gpus: int, resizes: int, preemptions: int, starts: bool
    ) -> JobAccount:
        """Return the account as of `now_s`, for a job that waited or held GPUs since the last update."""
        elapsed_s = max(0.0, now_s - self.settled_at_s)
        return JobAccount(
            waited_s=self.waited_s + (elapsed_s if waits else 0.0),
            gpu_s=self.gpu_s + elapsed_s * held_gpus,
            lost_gpu_s=self.lost_gpu_s,
            failures=self.failures,
            preemptions=self.preemptions + preemptions,
            resizes=self.resizes + resizes,
            first_started_at_s=now_s if starts and self.first_started_at_s is None else self.first_started_at_s,
            settled_at_s=now_s,
            last_started_at_s=now_s if starts else self.last_started_at_s,
        )
