"""Client methods for jobs, their logs, event streams and checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ebbtide.client.methods import IteratorMethod, RequestMethod
from ebbtide.client.requests import Pages, Request, Stream, StreamEvent, if_match_headers, job_path
from ebbtide.client.responses import JsonObject

if TYPE_CHECKING:
    from ebbtide.client.views import (
        CheckpointsView,
        DryRunView,
        EventView,
        ExplanationView,
        JobCostView,
        JobHistoryView,
        JobView,
        LogLineView,
        PlanView,
        ProgressView,
    )


class JobMethods:
    @RequestMethod
    def submit(self, document: Mapping[str, Any], *, key: str = "") -> Request[JobView]:
        """Submit a job document and return the job as the service accepted it.

        After a lost response the request is retried with the same idempotency key, which creates no second job. `key`
        defaults to a random value per call. Pass your own key if another process may submit the same job again.
        """
        return Request("POST", "/v1/jobs", json=document, key=key or secrets.token_hex(16))

    @RequestMethod
    def dry_run(self, document: Mapping[str, Any]) -> Request[DryRunView]:
        """Return the decision of the next tick about this job document, without submitting it."""
        return Request("POST", "/v1/jobs:dry-run", json=document)

    @IteratorMethod
    def jobs(
        self,
        *,
        state: str = "",
        queue: str = "",
        owner: str = "",
        owner_id: str = "",
        name: str = "",
        job_id: str = "",
        ended_within_s: float | None = None,
        search: str = "",
        selector: str = "",
        sort: str = "",
        limit: int = 100,
    ) -> Pages[JobView]:
        """Yield the jobs that match all filters, newest first or in the order `sort`. `owner_id` "me" is the caller.

        `state`: one or more states, or `live` or `ended`, separated by commas. `name`, `job_id`: the beginning of the
        name or id. `search`: a part of the id, name, queue or owner. `selector`: requirements on labels, such as
        `team=vision,tier!=dev,urgent`. `sort`: for example `name` or `-gpus`.
        `ended_within_s`: only jobs that ended at most this many seconds ago. `limit`: page size.
        """
        query = {
            "state": state,
            "queue": queue,
            "owner": owner,
            "owner_id": owner_id,
            "name": name,
            "id": job_id,
            "ended_within_s": "" if ended_within_s is None else str(ended_within_s),
            "search": search,
            "selector": selector,
            "sort": sort,
        }
        return Pages("/v1/jobs", limit=limit, query=query)

    @RequestMethod
    def job(self, job_id: str) -> Request[JobView]:
        return Request("GET", job_path(job_id))

    @RequestMethod
    def scale(
        self, job_id: str, *, min_gpus: int | None = None, max_gpus: int | None = None, if_match: str = ""
    ) -> Request[JobView]:
        """Change the job's GPU range. A bound that is None stays as it is."""
        given = {"min": min_gpus, "max": max_gpus}
        gpus = {bound: value for bound, value in given.items() if value is not None}
        return Request("PATCH", job_path(job_id), json={"gpus": gpus}, headers=if_match_headers(if_match))

    @RequestMethod
    def change_job(self, job_id: str, change: Mapping[str, Any], *, if_match: str = "") -> Request[JobView]:
        """Change `gpus`, `queue`, `priority` or `labels`. A label that is None is removed.

        With `if_match` (see `etag_of`), fail with status 412 if the job has changed.
        """
        return Request("PATCH", job_path(job_id), json=change, headers=if_match_headers(if_match))

    @RequestMethod
    def cancel(self, job_id: str, *, if_match: str = "") -> Request[JobView]:
        return Request("DELETE", job_path(job_id), headers=if_match_headers(if_match))

    @RequestMethod
    def suspend(self, job_id: str, *, if_match: str = "") -> Request[JobView]:
        return Request("POST", f"{job_path(job_id)}:suspend", headers=if_match_headers(if_match))

    @RequestMethod
    def resume(self, job_id: str, *, if_match: str = "") -> Request[JobView]:
        return Request("POST", f"{job_path(job_id)}:resume", headers=if_match_headers(if_match))

    @RequestMethod
    def job_plan(self, job_id: str) -> Request[PlanView]:
        """Return the parallel plan that the job runs under."""
        return Request("GET", f"{job_path(job_id)}/plan")

    @RequestMethod
    def explanation(self, job_id: str) -> Request[ExplanationView]:
        """Return why the job is in its state."""
        return Request("GET", f"{job_path(job_id)}/explanation")

    @IteratorMethod
    def job_events(self, job_id: str, *, limit: int = 100) -> Pages[EventView]:
        return Pages(f"{job_path(job_id)}/events", limit=limit)

    @RequestMethod
    def history(self, job_id: str) -> Request[JobHistoryView]:
        """Return the job's states, allocations, and its loss and throughput over time."""
        return Request("GET", f"{job_path(job_id)}/history")

    @RequestMethod
    def cost(self, job_id: str) -> Request[JobCostView]:
        """Return the job's GPU time on own and lent nodes by generation, with amounts if the service has prices."""
        return Request("GET", f"{job_path(job_id)}/cost")

    @RequestMethod
    def progress(self, job_id: str) -> Request[ProgressView]:
        """Return the progress of the job."""
        return Request("GET", f"{job_path(job_id)}/progress")


class StreamMethods:
    """Logs, event streams and checkpoints.

    The `follow_*` methods reconnect and yield each item once; they raise UnreachableError if the service has not
    answered for most of a minute.
    """

    @IteratorMethod
    def follow_events(self, *, subject: str = "", job_id: str = "", after: int | None = None) -> Stream[JsonObject]:
        """Yield events as they happen, without end.

        The stream starts after the event number `after`. If `after` is None, it starts with the job's first event, or
        with the next event if no job is given. An event with code Gap replaces events that retention has deleted.
        """
        path = f"{job_path(job_id)}/events" if job_id else "/v1/events"
        query = {"subject": subject, "after": "" if after is None else str(after)}
        return Stream(path, _read_event, {name: value for name, value in query.items() if value})

    @IteratorMethod
    def logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Pages[LogLineView]:
        """Yield the lines that a rank has printed.

        Without `generation`, the newest one is read. Without `tail`, all lines are returned, else only the last `tail`.
        """
        query = _log_query(rank, generation, tail)
        return Pages(f"{job_path(job_id)}/logs", query=query)

    @IteratorMethod
    def follow_logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Stream[LogLineView]:
        """Yield the lines of `logs`, then new lines of this and later generations until the job ends.

        A line of the form "... N bytes" replaces output that was dropped before it could be read.
        """
        query = _log_query(rank, generation, tail)
        return Stream(f"{job_path(job_id)}/logs", partial(_read_log_line, rank=rank), query)

    @RequestMethod
    def checkpoint(self, job_id: str) -> Request[CheckpointsView]:
        """Ask the running job to save a checkpoint at its next step boundary.

        Poll `checkpoints` to see when it is complete.
        """
        return Request("POST", f"{job_path(job_id)}:checkpoint")

    @RequestMethod
    def checkpoints(self, job_id: str) -> Request[CheckpointsView]:
        return Request("GET", f"{job_path(job_id)}/checkpoints")


def _read_event(message: StreamEvent) -> JsonObject:
    """Return the event. A gap is returned as an event too, so that a caller that prints events prints it."""
    if message.kind == "message":
        return message.data
    up_to = int(message.data["up_to"])
    text = f"events {int(message.data['after']) + 1} to {up_to} were deleted by retention"
    defaults = {"generation": 0, "at_s": 0.0, "subject": "", "numbers": {}, "cause": ""}
    return {"number": up_to, "code": "Gap", "message": text, **defaults}


def _read_log_line(message: StreamEvent, *, rank: int) -> LogLineView | None:
    if message.kind == "message":
        return cast("LogLineView", message.data)
    if message.kind != "gap":
        return None
    return {
        "generation": int(message.data["generation"]),
        "rank": rank,
        "text": f"... {message.data['dropped_bytes']} bytes were dropped",
        "cut": False,
        "cursor": message.id,
    }


def _log_query(rank: int, generation: int | None, tail: int | None) -> dict[str, str]:
    query = {"rank": rank, "generation": generation, "tail": tail}
    return {name: str(value) for name, value in query.items() if value is not None}
