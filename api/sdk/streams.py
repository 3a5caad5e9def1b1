"""What comes as it comes: events and logs as endless iterators, and a checkpoint now."""

from __future__ import annotations

from urllib.parse import quote

from api.answers.checkpoints import Checkpoints
from api.sdk.calls import Calls


class StreamCalls(Calls):
    def checkpoint(self, job_id: str) -> Checkpoints:
        """Have the running job save at its next step boundary; `checkpoints` tells when it is done."""
        return self._connection.object("POST", f"{_job(job_id)}:checkpoint")

    def checkpoints(self, job_id: str) -> Checkpoints:
        return self._connection.object("GET", f"{_job(job_id)}/checkpoints")


def _job(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
