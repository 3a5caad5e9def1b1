"""Routers: an endpoint does everything that waits in one thread: the look at the state, the change, and the answer.

FastAPI goes to a thread for each of these by itself, and checks every answer against its type once more: both together
took longer than the work. Answers are made by typed functions; tests hold each one against the OpenAPI document.

It would also analyse a route again for each application that includes its router. So operations get their ids where
they are written, and applications take the routes as they are.

What endpoints are given: the service's parts, the world as of now, a page's bounds, a worker's token.

State beside the snapshot, which a SqlStore alone keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import iscoroutinefunction
from threading import BoundedSemaphore
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from api.agent_state import AgentStateCache
from api.http.errors import ProblemError
from api.identity.authentication import parse_bearer_token
from api.identity.authorization import ROUTE_RULES
from api.identity.principals import Principal
from api.state import RequestContext, StateReader, load_request_context
from scheduler.domain.worker_token import verify_agent_token, verify_worker_token
from scheduler.runtime.clock import Clock
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.settings import Settings
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Lease
from scheduler.store.sql_store import SqlStore

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Deferred(Generic[V]):
    """What a dependency gives for something that has to be waited for: the endpoint's thread reads it first."""

    read: Callable[[], V]


class Router(APIRouter):
    """Endpoints that are plain functions are called as said above; coroutines are left alone."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not iscoroutinefunction(endpoint):
            endpoint = _run_in_one_thread(endpoint, options.get("status_code") or 200)
        super().add_api_route(path, endpoint, **options)


def create_router(tag: str, prefix: str = "/v1") -> Router:
    """A router whose operations are called what their functions are."""
    return Router(prefix=prefix, tags=[tag], generate_unique_id_function=_operation_id)


def _operation_id(route: APIRoute) -> str:
    return route.name


def _run_in_one_thread(endpoint: Callable[..., Any], status: int) -> Callable[..., Any]:
    @wraps(endpoint)
    def answered(**given: Any) -> Any:
        told = endpoint(
            **{name: value.read() if isinstance(value, Deferred) else value for name, value in given.items()}
        )
        if told is None or isinstance(told, Response):
            return told
        set_up = given.get("response")  # where an endpoint sets headers, or another status
        if not isinstance(set_up, Response):
            return JSONResponse(told, status)
        answer = JSONResponse(told, set_up.status_code or status)
        answer.headers.update(set_up.headers)
        return answer

    return answered


PAGE_LIMIT_MAX = 1000
CONCURRENT_SEARCHES_MAX = 2


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that `create_app` was given. `lease` tells who leads, without taking part.

    `agents` is what requests of node agents share, `present` what all share that look at the state. `searches` bounds
    how many plans are solved at once: a large one takes a core for many seconds.
    """

    store: ApiStore
    settings: Settings
    clock: Clock
    policies: PolicySet
    lease: Callable[[], Lease | None]
    token_secret: bytes
    agent_state: AgentStateCache
    state_reader: StateReader
    searches: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(CONCURRENT_SEARCHES_MAX))

    @contextmanager
    def acquire_search(self, what: str) -> Iterator[None]:
        """Within it, one of `searches` is held. Raises ProblemError (429) where others have all of them."""
        if not self.searches.acquire(blocking=False):
            raise ProblemError(429, "busy", f"{what}; try again soon", headers={"Retry-After": "1"})
        try:
            yield
        finally:
            self.searches.release()

    @property
    def has_leader(self) -> bool:
        lease = self.lease()
        return lease is not None and lease.expires_at_s > self.clock.now_s()


async def _get_service(request: Request) -> Service:  # async: it need not wait for a thread
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def _get_principal(request: Request) -> Principal:
    """Whom the gate let in. It looked the route up by itself: here both have to agree."""
    rule = ROUTE_RULES[f"{request.method} {request.scope['route'].path}"]
    assert request.state.rule is rule, "the gate let this request pass by another route's rule"
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


ServiceDep = Annotated[Service, Depends(_get_service)]
PrincipalDep = Annotated[Principal, Depends(_get_principal)]


async def _get_context(service: ServiceDep, principal: PrincipalDep) -> Deferred[RequestContext]:
    return Deferred(lambda: load_request_context(service.state_reader, service.store, service.clock.now_s(), principal))


ContextDep = Annotated[RequestContext, Depends(_get_context)]
"""Read in the endpoint's thread, see api.http.dependencies."""
LimitParameter = Annotated[int, Query(ge=1, le=PAGE_LIMIT_MAX, description="Most items in one answer.")]
AfterParameter = Annotated[int, Query(ge=0, lt=2**63, description="Only items with a higher number.")]


def require_worker(service: Service, request: Request, *, job_id: str, generation: int) -> None:
    """Lets only the workers of this generation of this job pass: 401 without a token, 403 with another's."""
    needed = "a worker reports with the token of its job and generation: Authorization: Bearer ebt_..."
    token = parse_bearer_token(request.headers.get("Authorization", ""), hint=needed)
    if not verify_worker_token(service.token_secret, token, job_id, generation):
        raise ProblemError(403, "forbidden", f"the token is not that of job {job_id}, generation {generation}")


def require_agent(service: Service, request: Request, *, job_id: str) -> None:
    """Lets only the node agents of this job pass: 401 without a token, 403 with another's."""
    needed = "a node agent reports with the token of its job's agents: Authorization: Bearer eba_..."
    token = parse_bearer_token(request.headers.get("Authorization", ""), hint=needed)
    if not verify_agent_token(service.token_secret, token, job_id):
        raise ProblemError(403, "forbidden", f"the token is not that of the agents of job {job_id}")


def get_sql_store(service: ServiceDep) -> SqlStore:
    assert isinstance(service.store, SqlStore), "a service runs on a SqlStore; only tests of other nouns do without"
    return service.store


SqlStoreDep = Annotated[SqlStore, Depends(get_sql_store)]
