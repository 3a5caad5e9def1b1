"""Authorization: which principal may call a route, send a command and see a job.

Every endpoint names its rule with `@requires(...)`. The middleware looks the rule up by method and path before it reads
the body. A rule cannot see which job a request is about; `authorize_command` and `Visibility` decide that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn, TypeVar

from starlette.routing import BaseRoute, Route, compile_path

from api.http.errors import ProblemError
from api.identity.principals import Principal, Role
from scheduler.documents.document import InvalidField
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
from scheduler.domain.job_queue import QUOTA_FIELDS, JobQueue, format_quota_value
from scheduler.domain.snapshot import Snapshot

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Caller(Enum):
    """The kind of client that a route expects."""

    PUBLIC = "anybody"
    SCRAPERS = "scrapers"
    WORKERS = "workers"
    AGENTS = "agents"
    MACHINES = "machines"
    JOINING_MACHINES = "joining machines"
    USERS = "users"


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The permission that a route requires.

    Users need `role` on at least one queue, or on all queues if `on_all_queues` is set. Clients of the kinds
    `or_callers` may call it as well, with their own kind of token. `body_setting` is the name of the setting that
    limits the size of the request body. `changes_state` is False for a POST that only computes its response; all other
    requests that are no reads are audited.
    """

    caller: Caller = Caller.USERS
    role: Role = Role.VIEWER
    on_all_queues: bool = False
    or_callers: tuple[Caller, ...] = ()
    body_setting: str = "body_bytes_max"
    changes_state: bool = True


PUBLIC = RouteRule(Caller.PUBLIC)
VIEWER = RouteRule()
VIEWER_OF_ALL = RouteRule(on_all_queues=True)
SUBMITTER = RouteRule(role=Role.SUBMITTER)
QUEUE_ADMIN = RouteRule(role=Role.QUEUE_ADMIN)
ADMIN = RouteRule(role=Role.ADMIN, on_all_queues=True)

_FRAMEWORK_RULES = {"/openapi.json": PUBLIC}
"""Rules of the routes that FastAPI itself adds."""


def requires(rule: RouteRule) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint with the rule of its route. Place it below the router's decorator."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.route_rule = rule  # type: ignore[attr-defined]  # a callable declares no attributes
        return endpoint

    return mark


def find_rule(route: Route) -> RouteRule | None:
    """Return the rule of the route's endpoint, or None if the endpoint has none."""
    return getattr(route.endpoint, "route_rule", None) or _FRAMEWORK_RULES.get(route.path)


def list_route_rules(routes: Iterable[BaseRoute]) -> Mapping[str, RouteRule]:
    """Return the rule of every route, by "METHOD /path/{template}".

    Where one endpoint serves both, HEAD shares the rule of GET and is left out.

    Raises:
        ValueError: an endpoint has no rule.
    """
    rules: dict[str, RouteRule] = {}
    for route in routes:
        if not isinstance(route, Route):
            continue
        methods = route.methods or set()
        for method in sorted(methods - {"HEAD"} if "GET" in methods else methods):
            rule = find_rule(route)
            if rule is None:
                raise ValueError(f"{method} {route.path} has no rule: decorate its endpoint with @requires(...)")
            rules.setdefault(f"{method} {route.path}", rule)  # a stream has the path and the rule of its list
    return rules


class RouteRules:
    """Authorization rules by method and path of a request."""

    def __init__(self, rules: Mapping[str, RouteRule]) -> None:
        """`rules`: by "METHOD /path/{template}", in the order in which the application tries its routes."""
        self._by_method: dict[str, list[tuple[re.Pattern[str], str, RouteRule]]] = {}
        for key, rule in rules.items():
            method, path = key.split(" ", 1)
            self._by_method.setdefault(method, []).append((compile_path(path)[0], path, rule))

    def find(self, method: str, path: str) -> RouteRule | None:
        """Return the rule of the first matching route, or None if no route matches."""
        return self.match(method, path)[1]

    def match(self, method: str, path: str) -> tuple[str, RouteRule | None]:
        """Return the template and the rule of the first matching route; "unmatched" and None if no route matches."""
        matching = (
            (template, rule) for pattern, template, rule in self._by_method.get(method, ()) if pattern.match(path)
        )
        return next(matching, ("unmatched", None))


def authorize_command(principal: Principal, body: CommandBody, snapshot: Snapshot) -> None:
    """Check that the principal may send this command. The principal must be able to see the jobs named in `body`.

    Raises:
        ProblemError: 403 if the principal lacks the role.
    """
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
            _authorize_quota(principal, snapshot.queues.get(queue.name), queue)
        case _:
            require_role(principal, Role.ADMIN)


def _authorize_quota(principal: Principal, before: JobQueue | None, after: JobQueue) -> None:
    """Check that no field which takes GPUs or precedence from other queues is raised, unless by an admin.

    Raises:
        ProblemError: 403 that names each raised field, its value, and the value up to which it may be set.
    """
    if before is None or principal.has_role(Role.ADMIN):
        return
    raised = tuple(
        InvalidField(
            name,
            getattr(after, name),
            f"at most {format_quota_value(getattr(before, name))}, the present value; only an admin raises it",
        )
        for name, declared in QUOTA_FIELDS.items()
        if declared.takes_from_others and declared.is_raised(getattr(before, name), getattr(after, name))
    )
    if raised:
        detail = f"raising a queue's share needs the role admin; you are {principal}. "
        raise ProblemError(403, "forbidden", detail + "; ".join(each.message for each in raised), raised)


def authorize_job_change(principal: Principal, job: Job) -> None:
    """Check that the principal may change the job: submitters change their own jobs, queue-admins all in their queue.

    Raises:
        ProblemError: 403 if the principal may not.
    """
    queue = job.spec.queue
    owns = principal.owns(job.owner_key) and principal.has_role(Role.SUBMITTER, queue)
    if not owns and not principal.has_role(Role.QUEUE_ADMIN, queue):
        owner = f"its owner is {job.owner}, {job.owner_key}" if job.owner else "it has no owner"
        _raise_forbidden(principal, Role.QUEUE_ADMIN, queue, f"; you do not own job {job.id} ({owner})")


def require_role(principal: Principal, role: Role, queue: str = "") -> None:
    """Check that the principal has `role` on `queue`, or on all queues if `queue` is empty.

    Raises:
        ProblemError: 403 if it does not.
    """
    if not principal.has_role(role, queue):
        _raise_forbidden(principal, role, queue)


def _raise_forbidden(principal: Principal, role: Role, queue: str, more: str = "") -> NoReturn:
    where = f" on queue {queue}" if queue else ""
    raise ProblemError(403, "forbidden", f"this needs the role {role.label}{where}; you are {principal}{more}")


HIDDEN_JOB = "a job of another queue"
_WORD_LENGTH_MAX = 40
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class Visibility:
    """The queues and jobs that a principal can read. Viewers of all queues see everything.

    Other principals see jobs in their own queues, and the fleet. `redact` replaces the ids of hidden jobs in texts and
    keys. `ended_job` looks up a job that has left `snapshot`; `ended_job_queues` looks up the queues of many at once.
    Lookups are cached for the lifetime of the instance.
    """

    principal: Principal
    snapshot: Snapshot
    ended_job: Callable[[str], Job | None]
    ended_job_queues: Callable[[Collection[str]], Mapping[str, str]] | None = None
    _queues: dict[str, str | None] = field(default_factory=dict)
    _readable_queues: dict[str, bool] = field(default_factory=dict)
    _redacted_words: dict[str, str] = field(default_factory=dict)

    @property
    def is_unrestricted(self) -> bool:
        return self._can_read("")

    def can_see_job(self, job: Job) -> bool:
        return self._can_read(job.spec.queue)

    def can_read_queue(self, queue: str) -> bool:
        return self._can_read(queue)

    def can_see_subject(self, name: str) -> bool:
        """Return whether events and decisions about this job, queue, node or pool are visible."""
        if self.is_unrestricted:
            return True
        queue = self._find_job_queue(name)
        if queue is None and name in self.snapshot.queues:
            queue = name
        if queue is not None:
            return self._can_read(queue)
        return name in self.snapshot.nodes or name in self.snapshot.pools

    def select_visible_subjects(self, names: Collection[str]) -> set[str]:
        """Return the names that `can_see_subject` accepts, with one lookup for all."""
        self.load_job_queues(names)
        return set(filter(self.can_see_subject, names))

    def redact_job(self, job: Job) -> Job:
        """Return the job with hidden job ids removed from its message."""
        return job if self.is_unrestricted else replace(job, message=self.redact(job.message))

    def redact(self, value: Any) -> Any:
        """Return the JSON value with the ids of hidden jobs replaced in texts and keys."""
        return value if self.is_unrestricted else self._redact(value)

    def redact_all(self, values: Sequence[Any]) -> list[Any]:
        """Return the JSON values as `redact` does, with one lookup for all."""
        if self.is_unrestricted:
            return list(values)
        self.load_job_queues(set(_NAME_PATTERN.findall(json.dumps(values))))
        return [self._redact(value) for value in values]

    def load_job_queues(self, names: Iterable[str]) -> None:
        """Look up the queues of all names that may be ended jobs at once."""
        if self.ended_job_queues is not None:
            unknown = {name for name in names if name not in self._queues and self._may_be_ended_job(name)}
            found = self.ended_job_queues(unknown) if unknown else {}
            self._queues.update((name, found.get(name)) for name in unknown)

    def _redact(self, value: Any) -> Any:
        if isinstance(value, str):
            if len(value) > _WORD_LENGTH_MAX:
                return self._redact_text(value)
            if value not in self._redacted_words:  # mostly field names, which repeat
                self._redacted_words[value] = self._redact_text(value)
            return self._redacted_words[value]
        if isinstance(value, dict):
            return self._redact_object(value)
        if isinstance(value, list | tuple):
            return [self._redact(item) for item in value]
        return value

    def _redact_text(self, text: str) -> str:
        if not any(map(self._is_hidden, _NAME_PATTERN.findall(text))):
            return text
        return _NAME_PATTERN.sub(lambda match: HIDDEN_JOB if self._is_hidden(match[0]) else match[0], text)

    def _redact_object(self, value: dict[str, Any]) -> dict[str, Any]:
        """Redact keys and values. Numbers of several hidden jobs are added up: their total is not secret."""
        redacted: dict[str, Any] = {}
        for key, item in value.items():
            name, redacted_item = self._redact(key), self._redact(item)
            if name in redacted and isinstance(redacted_item, int | float) and isinstance(redacted[name], int | float):
                redacted_item += redacted[name]
            redacted[name] = redacted_item
        return redacted

    def _is_hidden(self, name: str) -> bool:
        queue = self._find_job_queue(name)
        return queue is not None and not self._can_read(queue)

    def _can_read(self, queue: str) -> bool:
        """Return whether the principal is a viewer of the queue, or of all queues if `queue` is empty."""
        if queue not in self._readable_queues:
            self._readable_queues[queue] = self.principal.has_role(Role.VIEWER, queue)
        return self._readable_queues[queue]

    def _find_job_queue(self, name: str) -> str | None:
        """Return the queue of the live or ended job, or None if there is no such job."""
        if name not in self._queues:
            job = self.snapshot.jobs.get(name)
            if job is None and self._may_be_ended_job(name):
                job = self.ended_job(name)
            self._queues[name] = None if job is None else job.spec.queue
        return self._queues[name]

    def _may_be_ended_job(self, name: str) -> bool:
        return "-" in name and name not in self.snapshot.jobs and name not in self.snapshot.nodes
