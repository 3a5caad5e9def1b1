"""Client: the HTTP API of DESIGN section 7 as typed methods. Answers are plain JSON values."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from api.connection import Connection, FieldError, JsonObject, ProblemError, Retries, UnreachableError

__all__ = ["Client", "FieldError", "JsonObject", "ProblemError", "Retries", "UnreachableError"]


class Client:
    """A connection to one service. Use it as a context manager, or call `close`.

    Every method raises:
        ProblemError: the service refused; `status`, `title` and `detail` say why.
        UnreachableError: no usable answer came.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Raises ValueError for a URL that is not http or https."""
        self._connection = Connection(url, timeout_s=timeout_s, retries=retries or Retries(), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def is_ready(self) -> bool:
        """The service answers and a controller leads, so that what is asked for will be done."""
        try:
            self._connection.object("GET", "/readyz")
        except (ProblemError, UnreachableError):
            return False
        return True

    # jobs

    def submit(self, document: Mapping[str, Any], *, key: str = "") -> JsonObject:
        """Submit a job document (DESIGN section 7) and give the job as the service took it. Where an answer is lost it
        is asked again, which makes no second job. `key`: by default one of this call alone; a job that another process
        may submit again needs one of its own."""
        return self._connection.object("POST", "/v1/jobs", json=document, key=key or secrets.token_hex(16))

    def dry_run(self, document: Mapping[str, Any]) -> JsonObject:
        """What would be decided for this job document now, without submitting it."""
        return self._connection.object("POST", "/v1/jobs:dry-run", json=document)

    def jobs(self, *, state: str = "", limit: int = 100) -> Iterator[JsonObject]:
        """All jobs, a page of `limit` at a time."""
        yield from self._connection.items("/v1/jobs", limit=limit, query={"state": state})

    def job(self, job_id: str) -> JsonObject:
        return self._connection.object("GET", _job(job_id))

    def scale(self, job_id: str, *, min_gpus: int | None = None, max_gpus: int | None = None) -> JsonObject:
        """Change the job's GPU range; a bound that is None stays as it is."""
        given = {"min": min_gpus, "max": max_gpus}
        gpus = {bound: value for bound, value in given.items() if value is not None}
        return self._connection.object("PATCH", _job(job_id), json={"gpus": gpus})

    def cancel(self, job_id: str) -> JsonObject:
        return self._connection.object("DELETE", _job(job_id))

    def suspend(self, job_id: str) -> JsonObject:
        return self._connection.object("POST", f"{_job(job_id)}:suspend")

    def resume(self, job_id: str) -> JsonObject:
        return self._connection.object("POST", f"{_job(job_id)}:resume")

    def job_plan(self, job_id: str) -> JsonObject:
        """The plan that the job runs under, as the contract's Plan JSON."""
        return self._connection.object("GET", f"{_job(job_id)}/plan")

    def explanation(self, job_id: str) -> JsonObject:
        """Why the job is where it is, with numbers."""
        return self._connection.object("GET", f"{_job(job_id)}/explanation")

    def job_events(self, job_id: str, *, limit: int = 100) -> Iterator[JsonObject]:
        yield from self._connection.items(f"{_job(job_id)}/events", limit=limit, query={})

    def progress(self, job_id: str) -> JsonObject:
        """How far the job is. (Workers report it; see `scheduler.worker`.)"""
        return self._connection.object("GET", f"{_job(job_id)}/progress")

    # pools and nodes

    def pools(self) -> list[JsonObject]:
        return list(self._connection.items("/v1/pools", query={}))

    def pool(self, name: str) -> JsonObject:
        return self._connection.object("GET", _pool(name))

    def create_pool(self, document: Mapping[str, Any]) -> JsonObject:
        return self._connection.object("POST", "/v1/pools", json=document)

    def delete_pool(self, name: str) -> JsonObject:
        return self._connection.object("DELETE", _pool(name))

    def nodes(self, *, pool: str = "") -> list[JsonObject]:
        return list(self._connection.items("/v1/nodes", query={"pool": pool}))

    def node(self, name: str) -> JsonObject:
        return self._connection.object("GET", _node(name))

    def add_node(self, document: Mapping[str, Any]) -> JsonObject:
        return self._connection.object("POST", "/v1/nodes", json=document)

    def delete_node(self, name: str) -> JsonObject:
        return self._connection.object("DELETE", _node(name))

    def cordon(self, node: str) -> JsonObject:
        return self._connection.object("POST", f"{_node(node)}:cordon")

    def drain(self, node: str) -> JsonObject:
        return self._connection.object("POST", f"{_node(node)}:drain")

    def uncordon(self, node: str) -> JsonObject:
        return self._connection.object("POST", f"{_node(node)}:uncordon")

    def demand(self, pool: str) -> JsonObject:
        """The pool's latest demand and the recorded readings."""
        return self._connection.object("GET", f"{_pool(pool)}/demand")

    def report_demand(self, pool: str, *, gpus: float, at_s: float | None = None) -> JsonObject:
        """Say how many GPUs the pool's inference needs from `at_s` on (seconds since 1970, UTC; None: from now on)."""
        report = {"gpus": gpus} if at_s is None else {"gpus": gpus, "at": at_s}
        return self._connection.object("POST", f"{_pool(pool)}/demand", json=report)

    def forecast(self, pool: str) -> JsonObject:
        return self._connection.object("GET", f"{_pool(pool)}/forecast")

    # queues

    def queues(self) -> list[JsonObject]:
        """Declared queues and those that live jobs name, with what they use, borrow and wait for."""
        return list(self._connection.items("/v1/queues", query={}))

    def queue(self, name: str) -> JsonObject:
        return self._connection.object("GET", _queue(name))

    def create_queue(self, document: Mapping[str, Any]) -> JsonObject:
        return self._connection.object("POST", "/v1/queues", json=document)

    def change_queue(self, name: str, change: Mapping[str, Any]) -> JsonObject:
        """Change `guaranteed_gpus`, `limit_gpus` (None: no limit) or `weight`; what is left out stays."""
        return self._connection.object("PATCH", _queue(name), json=change)

    def delete_queue(self, name: str) -> JsonObject:
        return self._connection.object("DELETE", _queue(name))

    # lending

    def loans(self, *, state: str = "") -> list[JsonObject]:
        return list(self._connection.items("/v1/loans", query={"state": state}))

    def pause_lending(self) -> JsonObject:
        return self._connection.object("POST", "/v1/lending:pause")

    def resume_lending(self) -> JsonObject:
        return self._connection.object("POST", "/v1/lending:resume")

    def recall_all(self) -> JsonObject:
        return self._connection.object("POST", "/v1/lending:recall-all")

    # the record

    def events(self, *, subject: str = "", after: int = 0, limit: int = 100) -> Iterator[JsonObject]:
        """Events in order, of one subject or of all, a page of `limit` at a time. To follow them, ask again with
        `after` = the last one's number."""
        query = {"subject": subject, "after": str(after or "")}
        yield from self._connection.items("/v1/events", limit=limit, query=query)

    def decisions(self, *, limit: int = 100) -> Iterator[JsonObject]:
        yield from self._connection.items("/v1/decisions", limit=limit, query={})

    def snapshot(self) -> JsonObject:
        """The newest snapshot, as `scheduler.domain.codec` encodes it."""
        return self._connection.object("GET", "/v1/snapshots/latest")

    def plan(self, request: Mapping[str, Any]) -> JsonObject:
        """Solve a plan request on the service."""
        return self._connection.object("POST", "/v1/plans", json=request)


def _job(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _pool(name: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}"


def _queue(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


def _node(name: str) -> str:
    return f"/v1/nodes/{quote(name, safe='')}"
