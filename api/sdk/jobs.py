"""Jobs: submit, follow, change."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from api.sdk.calls import Calls, job_path, matching

if TYPE_CHECKING:
    from api.answers.history import JobHistoryView
    from api.answers.job import JobView, ProgressView
    from api.answers.plan import PlanView
    from api.answers.prospect import DryRunView, ExplanationView
    from api.answers.record import EventView


class JobCalls(Calls):
    def submit(self, document: Mapping[str, Any], *, key: str = "") -> JobView:
        """Submit a job document (DESIGN section 7) and give the job as the service took it. Where an answer is lost it
        is asked again, which makes no second job. `key`: by default one of this call alone; a job that another process
        may submit again needs one of its own."""
        return self._connection.object("POST", "/v1/jobs", json=document, key=key or secrets.token_hex(16))

    def dry_run(self, document: Mapping[str, Any]) -> DryRunView:
        """What would be decided for this job document now, without submitting it."""
        return self._connection.object("POST", "/v1/jobs:dry-run", json=document)

    def jobs(
        self, *, state: str = "", queue: str = "", owner: str = "", name: str = "", limit: int = 100
    ) -> Iterator[JobView]:
        """All jobs with these traits, those submitted last first, a page of `limit` at a time. `state`: one or more,
        or `live`, `ended`, with commas between; `name`: how names begin."""
        query = {"state": state, "queue": queue, "owner": owner, "name": name}
        yield from self._connection.items("/v1/jobs", limit=limit, query=query)

    def job(self, job_id: str) -> JobView:
        return self._connection.object("GET", job_path(job_id))

    def scale(
        self, job_id: str, *, min_gpus: int | None = None, max_gpus: int | None = None, if_match: str = ""
    ) -> JobView:
        """Change the job's GPU range; a bound that is None stays as it is."""
        given = {"min": min_gpus, "max": max_gpus}
        gpus = {bound: value for bound, value in given.items() if value is not None}
        return self.change_job(job_id, {"gpus": gpus}, if_match=if_match)

    def change_job(self, job_id: str, change: Mapping[str, Any], *, if_match: str = "") -> JobView:
        """Change `gpus`, `queue` or `priority`. `if_match`: only if that is still the job's ETag (`etag_of`); else a
        problem of status 412."""
        return self._connection.object("PATCH", job_path(job_id), json=change, headers=matching(if_match))

    def cancel(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.object("DELETE", job_path(job_id), headers=matching(if_match))

    def suspend(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.object("POST", f"{job_path(job_id)}:suspend", headers=matching(if_match))

    def resume(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.object("POST", f"{job_path(job_id)}:resume", headers=matching(if_match))

    def job_plan(self, job_id: str) -> PlanView:
        """The plan that the job runs under, as the contract's Plan JSON."""
        return self._connection.object("GET", f"{job_path(job_id)}/plan")

    def explanation(self, job_id: str) -> ExplanationView:
        """Why the job is where it is, with numbers."""
        return self._connection.object("GET", f"{job_path(job_id)}/explanation")

    def job_events(self, job_id: str, *, limit: int = 100) -> Iterator[EventView]:
        yield from self._connection.items(f"{job_path(job_id)}/events", limit=limit, query={})

    def history(self, job_id: str) -> JobHistoryView:
        """The job's states, what it held, and its loss and throughput over time."""
        return self._connection.object("GET", f"{job_path(job_id)}/history")

    def progress(self, job_id: str) -> ProgressView:
        """How far the job is. (Workers report it; see `scheduler.worker`.)"""
        return self._connection.object("GET", f"{job_path(job_id)}/progress")
