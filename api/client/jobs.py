"""Jobs: submit, follow, change.

What comes as it comes: events and logs as iterators; and a checkpoint now.

Simulations: hand in a trace, watch it being played, get the report.
"""

from __future__ import annotations

import gzip
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from api.client.connection import ClientMethods, JsonObject, ServerSentEvent, follow_stream, if_match_headers, job_path

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
        """Submit a job document (DESIGN section 7) and give the job as the service took it. Where an answer is lost it
        is asked again, which makes no second job. `key`: by default one of this call alone; a job that another process
        may submit again needs one of its own."""
        return self._connection.request("POST", "/v1/jobs", json=document, key=key or secrets.token_hex(16))

    def dry_run(self, document: Mapping[str, Any]) -> DryRunView:
        """What would be decided for this job document now, without submitting it."""
        return self._connection.request("POST", "/v1/jobs:dry-run", json=document)

    def jobs(
        self, *, state: str = "", queue: str = "", owner: str = "", name: str = "", limit: int = 100
    ) -> Iterator[JobView]:
        """All jobs with these traits, those submitted last first, a page of `limit` at a time. `state`: one or more,
        or `live`, `ended`, with commas between; `name`: how names begin."""
        query = {"state": state, "queue": queue, "owner": owner, "name": name}
        yield from self._connection.list_items("/v1/jobs", limit=limit, query=query)

    def job(self, job_id: str) -> JobView:
        return self._connection.request("GET", job_path(job_id))

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
        return self._connection.request("PATCH", job_path(job_id), json=change, headers=if_match_headers(if_match))

    def cancel(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.request("DELETE", job_path(job_id), headers=if_match_headers(if_match))

    def suspend(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.request("POST", f"{job_path(job_id)}:suspend", headers=if_match_headers(if_match))

    def resume(self, job_id: str, *, if_match: str = "") -> JobView:
        return self._connection.request("POST", f"{job_path(job_id)}:resume", headers=if_match_headers(if_match))

    def job_plan(self, job_id: str) -> PlanView:
        """The plan that the job runs under, as the contract's Plan JSON."""
        return self._connection.request("GET", f"{job_path(job_id)}/plan")

    def explanation(self, job_id: str) -> ExplanationView:
        """Why the job is where it is, with numbers."""
        return self._connection.request("GET", f"{job_path(job_id)}/explanation")

    def job_events(self, job_id: str, *, limit: int = 100) -> Iterator[EventView]:
        yield from self._connection.list_items(f"{job_path(job_id)}/events", limit=limit, query={})

    def history(self, job_id: str) -> JobHistoryView:
        """The job's states, what it held, and its loss and throughput over time."""
        return self._connection.request("GET", f"{job_path(job_id)}/history")

    def progress(self, job_id: str) -> ProgressView:
        """How far the job is. (Workers report it; see `scheduler.worker`.)"""
        return self._connection.request("GET", f"{job_path(job_id)}/progress")


class StreamMethods(ClientMethods):
    """The followers come back by themselves where a connection breaks, and tell nothing twice. They raise
    UnreachableError once the service has not answered for most of a minute."""

    def follow_events(self, *, subject: str = "", job_id: str = "", after: int | None = None) -> Iterator[JsonObject]:
        """Events without end: those after the number `after`; without it, all of one job, or all from now on. Of
        those that are kept no more an event of code Gap tells."""
        path = f"{job_path(job_id)}/events" if job_id else "/v1/events"
        query = {"subject": subject, "after": "" if after is None else str(after)}
        for message in follow_stream(self._connection, path, {name: value for name, value in query.items() if value}):
            yield message.data if message.kind == "message" else _gap_event(message)

    def logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """What a rank has printed: the newest generation, or that one; all of it, or its last `tail` lines."""
        query = _log_query(rank, generation, tail)
        yield from cast("Iterator[LogLineView]", self._connection.list_items(f"{job_path(job_id)}/logs", query=query))

    def follow_logs(
        self, job_id: str, *, rank: int = 0, generation: int | None = None, tail: int | None = None
    ) -> Iterator[LogLineView]:
        """As `logs`, and then what is printed until the job has ended, from one generation to the next. Where bytes
        were dropped before they could be read, a line says so."""
        for message in follow_stream(self._connection, f"{job_path(job_id)}/logs", _log_query(rank, generation, tail)):
            if message.kind == "message":
                yield cast("LogLineView", message.data)
            elif message.kind == "gap":
                gap = f"... {message.data['dropped_bytes']} bytes are not kept any more"
                of = int(message.data["generation"])
                line: LogLineView = {"generation": of, "rank": rank, "text": gap, "cut": False, "cursor": message.id}
                yield line

    def checkpoint(self, job_id: str) -> CheckpointsView:
        """Have the running job save at its next step boundary; `checkpoints` tells when it is done."""
        return self._connection.request("POST", f"{job_path(job_id)}:checkpoint")

    def checkpoints(self, job_id: str) -> CheckpointsView:
        return self._connection.request("GET", f"{job_path(job_id)}/checkpoints")


def _gap_event(message: ServerSentEvent) -> JsonObject:
    """In the form of an event, so that whoever prints events prints it."""
    up_to = int(message.data["up_to"])
    said = f"events after number {message.data['after']} up to {up_to} are kept no more"
    known = {"generation": 0, "at_s": 0.0, "subject": "", "numbers": {}, "cause": ""}
    return {"number": up_to, "code": "Gap", "message": said, **known}


def _log_query(rank: int, generation: int | None, tail: int | None) -> dict[str, str]:
    asked = {"rank": rank, "generation": generation, "tail": tail}
    return {name: str(value) for name, value in asked.items() if value is not None}


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
        """Hand in the texts of the files of `ebbtide simulate` (jobs and demand CSV, cluster YAML or its object). Where
        an answer is lost it is asked again, which hands in nothing twice; `key`: by default one of this call alone."""
        texts = {"jobs": jobs} | ({"demand": demand} if demand else {})
        packed = {name: {"gzip_base64": _compress(text)} for name, text in texts.items()}
        document = {**packed, "cluster": cluster, "policies": list(policies), "seed": seed}
        key = key or secrets.token_hex(16)
        return cast("SimulationView", self._connection.request("POST", "/v1/simulations", json=document, key=key))

    def simulations(self, *, limit: int = 100) -> Iterator[SimulationView]:
        """One's own, newest first."""
        for item in self._connection.list_items("/v1/simulations", limit=limit, query={}):
            yield cast("SimulationView", item)

    def simulation(self, simulation_id: str) -> SimulationView:
        return cast("SimulationView", self._connection.request("GET", _simulation_path(simulation_id)))

    def simulation_report(self, simulation_id: str) -> JsonObject:
        """What `ebbtide simulate -o json` prints."""
        return self._connection.request("GET", f"{_simulation_path(simulation_id)}/report")

    def cancel_simulation(self, simulation_id: str) -> SimulationView:
        return cast("SimulationView", self._connection.request("DELETE", _simulation_path(simulation_id)))


def _compress(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _simulation_path(simulation_id: str) -> str:
    return f"/v1/simulations/{quote(simulation_id, safe='')}"
