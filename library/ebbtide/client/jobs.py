"""Client methods for jobs, their logs, event streams and checkpoints, and for simulations."""

from __future__ import annotations

import gzip
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from ebbtide.client.connection import ClientMethods, JsonObject, StreamEvent, follow_stream, if_match_headers, job_path

if TYPE_CHECKING:
    from api.event_views import EventView
    from api.explanations import DryRunView, ExplanationView
    from api.job_details import CheckpointsView, JobHistoryView
    from api.jobs import JobView, ProgressView
    from api.plans import PlanView
    from api.simulations import SimulationView
    from api.streams.sources import LogLineView


class JobMethods(ClientMethods):
    def submit(self, document: Mapping[str, Any], *, key: str = "") -> JobView:
        """Submit a job document and return the job as the service accepted it.

        After a lost response the request is retried with the same idempotency key, which creates no second job. `key`
        defaults to a random value per call. Pass your own key if another process may submit the same job again.
        """
        return self._connection.request("POST", "/v1/jobs", json=document, key=key or secrets.token_hex(16))

    def dry_run(self, document: Mapping[str, Any]) -> DryRunView:
        """Return the decision of the next tick about this job document, without submitting it."""
        return self._connection.request("POST", "/v1/jobs:dry-run", json=document)

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
        limit: int = 100,
    ) -> Iterator[JobView]:
        """Yield the jobs that match all filters, newest first. `owner_id` "me" is the caller.

        `state`: one or more states, or `live` or `ended`, separated by commas. `name`, `job_id`: the beginning of the
        name or id. `ended_within_s`: only jobs that ended at most this many seconds ago. `limit`: page size.
        """
        query = {
            "state": state,
            "queue": queue,
            "owner": owner,
            "owner_id": owner_id,
            "name": name,
            "id": job_id,
            "ended_within_s": "" if ended_within_s is None else str(ended_within_s),
        }
        yield from self._connection.list_items("/v1/jobs", limit=limit, query=query)

    def job(self, job_id: str) -> JobView:
        return self._connection.request("GET", job_path(job_id))

    def scale(
        self, job_id: str, *, min_gpus: int | None = None, max_gpus: int | None = None, if_match: str = ""
    ) -> JobView:
        """Change the job's GPU range. A bound that is None stays as it is."""
        given = {"min": min_gpus, "max": max_gpus}
        gpus = {bound: value for bound, value in given.items() if value is not None}
        return self.change_job(job_id, {"gpus": gpus}, if_match=if_match)

    def change_job(self, job_id: str, change: Mapping[str, Any], *, if_match: str = "") -> JobView:
        """Change `gpus`, `queue` or `priority`.

        With `if_match` (see `etag_of`), fail with status 412 if the job has changed.
        """
        return self._connection.request("PATCH", job_path(job_id), json=change, headers=if_match_headers(if_match))

    def cancel(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.request("DELETE", job_path(job_id), headers=if_match_headers(if_match))

    def suspend(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.request("POST", f"{job_path(job_id)}:suspend", headers=if_match_headers(if_match))

    def resume(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.request("POST", f"{job_path(job_id)}:resume", headers=if_match_headers(if_match))

    def job_plan(self, job_id: str) -> PlanView:
        """Return the parallel plan that the job runs under."""
        return self._connection.request("GET", f"{job_path(job_id)}/plan")

    def explanation(self, job_id: str) -> ExplanationView:
        """Return why the job is in its state."""
        return self._connection.request("GET", f"{job_path(job_id)}/explanation")

    def job_events(self, job_id: str, *, limit: int = 100) -> Iterator[EventView]:
        yield from self._connection.list_items(f"{job_path(job_id)}/events", limit=limit, query={})

    def history(self, job_id: str) -> JobHistoryView:
        """Return the job's states, allocations, and its loss and throughput over time."""
        return self._connection.request("GET", f"{job_path(job_id)}/history")

    def progress(self, job_id: str) -> ProgressView:
        """Return the progress of the job."""
        return self._connection.request("GET", f"{job_path(job_id)}/progress")


class StreamMethods(ClientMethods):
    """Logs, event streams and checkpoints.

    The `follow_*` methods reconnect and yield each item once; they raise UnreachableError if the service has not
    answered for most of a minute.
    """

    def follow_events(self, *, subject: str = "", job_id: str = "", after: int | None = None) -> Iterator[JsonObject]:
        """Yield events as they happen, without end.

        The stream starts after the event number `after`. If `after` is None, it starts with the job's first event, or
        with the next event if no job is given. An event with code Gap replaces events that retention has deleted.
        """
        path = f"{job_path(job_id)}/events" if job_id else "/v1/events"
        query = {"subject": subject, "after": "" if after is None else str(after)}
        for message in follow_stream(self._connection, path, {name: value for name, value in query.items() if value}):
            yield message.data if message.kind == "message" else _gap_event(message)

    def logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """Yield the lines that a rank has printed.

        Without `generation`, the newest one is read. Without `tail`, all lines are returned, else only the last `tail`.
        """
        query = _log_query(rank, generation, tail)
        yield from cast("Iterator[LogLineView]", self._connection.list_items(f"{job_path(job_id)}/logs", query=query))

    def follow_logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """Yield the lines of `logs`, then new lines of this and later generations until the job ends.

        A line of the form "... N bytes" replaces output that was dropped before it could be read.
        """
        for message in follow_stream(self._connection, f"{job_path(job_id)}/logs", _log_query(rank, generation, tail)):
            if message.kind == "message":
                yield cast("LogLineView", message.data)
            elif message.kind == "gap":
                gap = f"... {message.data['dropped_bytes']} bytes were dropped"
                gap_generation = int(message.data["generation"])
                line: LogLineView = {
                    "generation": gap_generation,
                    "rank": rank,
                    "text": gap,
                    "cut": False,
                    "cursor": message.id,
                }
                yield line

    def checkpoint(self, job_id: str) -> CheckpointsView:
        """Ask the running job to save a checkpoint at its next step boundary.

        Poll `checkpoints` to see when it is complete.
        """
        return self._connection.request("POST", f"{job_path(job_id)}:checkpoint")

    def checkpoints(self, job_id: str) -> CheckpointsView:
        return self._connection.request("GET", f"{job_path(job_id)}/checkpoints")


def _gap_event(message: StreamEvent) -> JsonObject:
    """Return the gap as an event, so that a caller that prints events prints it too."""
    up_to = int(message.data["up_to"])
    text = f"events {int(message.data['after']) + 1} to {up_to} were deleted by retention"
    defaults = {"generation": 0, "at_s": 0.0, "subject": "", "numbers": {}, "cause": ""}
    return {"number": up_to, "code": "Gap", "message": text, **defaults}


def _log_query(rank: int, generation: int | None, tail: int | None) -> dict[str, str]:
    query = {"rank": rank, "generation": generation, "tail": tail}
    return {name: str(value) for name, value in query.items() if value is not None}


class SimulationMethods(ClientMethods):
    def create_simulation(
        self,
        jobs: str,
        cluster: str | Mapping[str, Any],
        *,
        demand: str = "",
        policies: Sequence[str] = ("ebbtide",),
        seed: int = 0,
        key: str = "",
    ) -> SimulationView:
        """Create a simulation from the texts of the files that `ebbtide simulate` reads.

        `jobs` and `demand` are CSV, `cluster` is YAML or the object itself. `key` is the idempotency key, by default a
        random value per call; a retry after a lost response creates no second simulation.
        """
        texts = {"jobs": jobs} | ({"demand": demand} if demand else {})
        packed = {name: {"gzip_base64": _compress(text)} for name, text in texts.items()}
        document = {**packed, "cluster": cluster, "policies": list(policies), "seed": seed}
        key = key or secrets.token_hex(16)
        return cast("SimulationView", self._connection.request("POST", "/v1/simulations", json=document, key=key))

    def simulations(self, *, limit: int = 100) -> Iterator[SimulationView]:
        """Yield the caller's own simulations, newest first."""
        for item in self._connection.list_items("/v1/simulations", limit=limit, query={}):
            yield cast("SimulationView", item)

    def simulation(self, simulation_id: str) -> SimulationView:
        return cast("SimulationView", self._connection.request("GET", _simulation_path(simulation_id)))

    def simulation_report(self, simulation_id: str) -> JsonObject:
        """Return the report that `ebbtide simulate -o json` prints."""
        return self._connection.request("GET", f"{_simulation_path(simulation_id)}/report")

    def cancel_simulation(self, simulation_id: str) -> SimulationView:
        return cast("SimulationView", self._connection.request("DELETE", _simulation_path(simulation_id)))


def _compress(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _simulation_path(simulation_id: str) -> str:
    return f"/v1/simulations/{quote(simulation_id, safe='')}"
