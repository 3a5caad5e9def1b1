"""Who may call which route: one table, looked up before a request's body is read. A route without a rule is no route:
`create_app` refuses to build. What a rule cannot see, whose job it is, `api.identity.authorization` and `permits` decide.

Who may ask for which change. Every command of a request passes here before it is sent.

Sight: what a principal may see of the record. Whoever reads all queues sees everything; of another's sight, jobs of
queues that it may not read are gone, and where a text names one, it says so without the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn

from starlette.routing import compile_path

from api.http.errors import ProblemError
from api.identity.principals import Principal, Role
from scheduler.domain.commands import (
    CancelJob,
    ChangeJob,
    ChangeQueue,
    CheckpointJob,
    CommandBody,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    SuspendJob,
)
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot


class Caller(Enum):
    """Whom a route expects."""

    PUBLIC = "nobody"
    SCRAPERS = "scrapers"
    WORKERS = "workers"
    AGENTS = "agents"
    USERS = "people"


@dataclass(frozen=True, slots=True)
class RouteRule:
    """People need `role` on some queue, or on all of them where `everywhere`. `body_setting` names the setting that
    bounds the request's body."""

    caller: Caller = Caller.USERS
    role: Role = Role.VIEWER
    on_all_queues: bool = False
    body_setting: str = "body_bytes_max"


PUBLIC = RouteRule(Caller.PUBLIC)
VIEWER = RouteRule()
VIEWER_OF_ALL = RouteRule(on_all_queues=True)
SUBMITTER = RouteRule(role=Role.SUBMITTER)
QUEUE_ADMIN = RouteRule(role=Role.QUEUE_ADMIN)
ADMIN = RouteRule(role=Role.ADMIN, on_all_queues=True)

ROUTE_RULES: Mapping[str, RouteRule] = {
    "GET /": PUBLIC,
    "GET /console/{version}/{path:path}": PUBLIC,
    "GET /healthz": PUBLIC,
    "GET /readyz": PUBLIC,
    "GET /openapi.json": PUBLIC,
    "GET /metrics": RouteRule(Caller.SCRAPERS, on_all_queues=True),
    "POST /v1/jobs/{job_id}/agents/{node}": RouteRule(Caller.AGENTS),
    "POST /v1/jobs/{job_id}/progress": RouteRule(Caller.WORKERS),
    "GET /v1/whoami": VIEWER,
    "GET /v1/jobs": VIEWER,
    "POST /v1/jobs": SUBMITTER,
    "POST /v1/jobs:dry-run": SUBMITTER,
    "GET /v1/jobs/{job_id}": VIEWER,
    "PATCH /v1/jobs/{job_id}": SUBMITTER,
    "DELETE /v1/jobs/{job_id}": SUBMITTER,
    "POST /v1/jobs/{job_id}:suspend": SUBMITTER,
    "POST /v1/jobs/{job_id}:resume": SUBMITTER,
    "GET /v1/jobs/{job_id}/plan": VIEWER,
    "GET /v1/jobs/{job_id}/events": VIEWER,
    "GET /v1/jobs/{job_id}/history": VIEWER,
    "GET /v1/jobs/{job_id}/explanation": VIEWER,
    "GET /v1/jobs/{job_id}/progress": VIEWER,
    "GET /v1/overview": VIEWER,
    "GET /v1/waiting": VIEWER,
    "GET /v1/pools": VIEWER,
    "POST /v1/pools": ADMIN,
    "GET /v1/pools/{name}": VIEWER,
    "PATCH /v1/pools/{name}": ADMIN,
    "DELETE /v1/pools/{name}": ADMIN,
    "GET /v1/pools/{name}/demand": VIEWER,
    "POST /v1/pools/{name}/demand": ADMIN,
    "GET /v1/pools/{name}/forecast": VIEWER,
    "GET /v1/nodes": VIEWER,
    "POST /v1/nodes": ADMIN,
    "GET /v1/nodes/{name}": VIEWER,
    "DELETE /v1/nodes/{name}": ADMIN,
    "POST /v1/nodes/{name}:cordon": ADMIN,
    "POST /v1/nodes/{name}:drain": ADMIN,
    "POST /v1/nodes/{name}:uncordon": ADMIN,
    "GET /v1/queues": VIEWER,
    "POST /v1/queues": ADMIN,
    "GET /v1/queues/{name}": VIEWER,
    "PATCH /v1/queues/{name}": QUEUE_ADMIN,
    "DELETE /v1/queues/{name}": ADMIN,
    "GET /v1/usage": VIEWER,
    "GET /v1/loans": VIEWER,
    "POST /v1/lending:pause": ADMIN,
    "POST /v1/lending:resume": ADMIN,
    "POST /v1/lending:recall-all": ADMIN,
    "GET /v1/events": VIEWER,
    "GET /v1/decisions": VIEWER,
    "GET /v1/snapshots/latest": VIEWER_OF_ALL,
    "POST /v1/plans": VIEWER,
    "POST /v1/jobs/{job_id}:checkpoint": SUBMITTER,
    "GET /v1/jobs/{job_id}/checkpoints": VIEWER,
    "GET /v1/jobs/{job_id}/logs": VIEWER,
    "GET /v1/webhooks": QUEUE_ADMIN,
    "POST /v1/webhooks": QUEUE_ADMIN,
    "GET /v1/webhooks/{webhook_id}": QUEUE_ADMIN,
    "PATCH /v1/webhooks/{webhook_id}": QUEUE_ADMIN,
    "DELETE /v1/webhooks/{webhook_id}": QUEUE_ADMIN,
    "POST /v1/webhooks/{webhook_id}:test": QUEUE_ADMIN,
    "POST /v1/webhooks/{webhook_id}:rotate-secret": QUEUE_ADMIN,
    "GET /v1/webhooks/{webhook_id}/deliveries": QUEUE_ADMIN,
    "POST /v1/webhooks/{webhook_id}/deliveries/{delivery_id}:redeliver": QUEUE_ADMIN,
    "GET /v1/simulations": SUBMITTER,
    "POST /v1/simulations": RouteRule(role=Role.SUBMITTER, body_setting="simulation_body_bytes"),
    "GET /v1/simulations/{simulation_id}": SUBMITTER,
    "GET /v1/simulations/{simulation_id}/report": SUBMITTER,
    "DELETE /v1/simulations/{simulation_id}": SUBMITTER,
    "GET /v1/tokens": ADMIN,
    "POST /v1/tokens": ADMIN,
    "GET /v1/tokens/{token_id}": ADMIN,
    "DELETE /v1/tokens/{token_id}": ADMIN,
    "GET /v1/audit": ADMIN,
}


class RouteRules:
    """The rules of an application's routes, by method and path.

    Args:
        routes: method and path template of each, in the order in which the application tries them.

    Raises:
        ValueError: a route has no rule.
    """

    def __init__(self, routes: Iterable[tuple[str, str]]) -> None:
        self._by_method: dict[str, list[tuple[re.Pattern[str], RouteRule]]] = {}
        for method, path in routes:
            rule = ROUTE_RULES.get(f"{method} {path}")
            if rule is None:
                raise ValueError(f"{method} {path} has no rule: say in api/identity/authorization.py who may call it")
            self._by_method.setdefault(method, []).append((compile_path(path)[0], rule))

    def find(self, method: str, path: str) -> RouteRule | None:
        """None where no route takes this."""
        return next((rule for pattern, rule in self._by_method.get(method, ()) if pattern.match(path)), None)


def authorize_command(principal: Principal, body: CommandBody, snapshot: Snapshot) -> None:
    """Raises a 403 problem for who may not ask for this. Jobs named in `body` are known to be visible."""
    match body:
        case SubmitJob(spec=spec):
            require_role(principal, Role.SUBMITTER, spec.queue)
        case CancelJob(job_id) | SuspendJob(job_id) | ResumeJob(job_id) | ScaleJob(job_id) | CheckpointJob(job_id):
            authorize_job_change(principal, snapshot.jobs[job_id])
        case ChangeJob(job_id, queue=queue):
            authorize_job_change(principal, snapshot.jobs[job_id])
            if queue is not None:
                require_role(principal, Role.SUBMITTER, queue)
        case ChangeQueue(queue):
            require_role(principal, Role.QUEUE_ADMIN, queue.name)
        case _:
            require_role(principal, Role.ADMIN)


def authorize_job_change(principal: Principal, job: Job) -> None:
    """Raises a 403 problem for who may not change this job: submitters change their own, queue-admins all."""
    queue = job.spec.queue
    owns = job.owner == principal.name and principal.has_role(Role.SUBMITTER, queue)
    if not owns and not principal.has_role(Role.QUEUE_ADMIN, queue):
        _raise_forbidden(principal, Role.QUEUE_ADMIN, queue, f"; job {job.id} is {job.owner or 'nobody'}'s")


def require_role(principal: Principal, role: Role, queue: str = "") -> None:
    """Raises a 403 problem for who does not have `role` on `queue` (everywhere where it is empty)."""
    if not principal.has_role(role, queue):
        _raise_forbidden(principal, role, queue)


def _raise_forbidden(principal: Principal, role: Role, queue: str, more: str = "") -> NoReturn:
    where = f" on queue {queue}" if queue else ""
    raise ProblemError(403, "forbidden", f"this needs the role {role.label}{where}; you are {principal}{more}")


HIDDEN_JOB = "a job of another queue"
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class Visibility:
    """`ended_job` finds jobs that have left `snapshot`; what was found out is kept for as long as this lives."""

    principal: Principal
    snapshot: Snapshot
    ended_job: Callable[[str], Job | None]
    _hidden: dict[str, bool] = field(default_factory=dict)

    @property
    def is_unrestricted(self) -> bool:
        return self.principal.has_role(Role.VIEWER)

    def can_see_job(self, job: Job) -> bool:
        return self.principal.has_role(Role.VIEWER, job.spec.queue)

    def can_see_subject(self, name: str) -> bool:
        """Whether events and decisions about it may be seen: jobs of its queues, and what is there of the fleet."""
        if self.is_unrestricted:
            return True
        if job := self._find_job(name):
            return self.can_see_job(job)
        snapshot = self.snapshot
        if name in snapshot.queues:
            return self.principal.has_role(Role.VIEWER, name)
        return name in snapshot.nodes or name in snapshot.pools

    def redact_job(self, job: Job) -> Job:
        """The job with what may be seen of its message."""
        return job if self.is_unrestricted else replace(job, message=self.redact(job.message))

    def redact(self, value: Any) -> Any:
        """`value` (plain JSON) without the ids of jobs that may not be seen, in keys or in texts."""
        if self.is_unrestricted:
            return value
        if isinstance(value, str):
            return _NAME_PATTERN.sub(lambda found: HIDDEN_JOB if self._is_hidden(found[0]) else found[0], value)
        if isinstance(value, list | tuple):
            return [self.redact(each) for each in value]
        if isinstance(value, dict):
            return self._redact_object(value)
        return value

    def _redact_object(self, value: dict[str, Any]) -> dict[str, Any]:
        """Numbers of several hidden jobs add up: what they hold together is no secret."""
        shown: dict[str, Any] = {}
        for key, each in value.items():
            name, told = self.redact(key), self.redact(each)
            both_count = isinstance(told, int | float) and isinstance(shown.get(name), int | float)
            shown[name] = shown[name] + told if both_count else told
        return shown

    def _is_hidden(self, name: str) -> bool:
        if name not in self._hidden:
            job = self._find_job(name)
            self._hidden[name] = job is not None and not self.can_see_job(job)
        return self._hidden[name]

    def _find_job(self, name: str) -> Job | None:
        job = self.snapshot.jobs.get(name)
        if job is None and "-" in name and name not in self.snapshot.nodes:
            job = self.ended_job(name)
        return job
