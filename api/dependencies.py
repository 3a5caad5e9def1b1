"""What endpoints are given: the service's parts, the world as of now, a page's bounds, a worker's token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import Annotated

from fastapi import Depends, Query, Request

from api.agent_desk import AgentDesk
from api.errors import ProblemError
from api.identity.bearer import bearer_token
from api.identity.principal import Principal
from api.identity.rules import RULES
from api.present import Present
from api.routing import Later
from api.world import World, load_world
from scheduler.domain.worker_token import check_agent_token, check_token
from scheduler.policies.policy_set import PolicySet
from scheduler.runtime.clock import Clock
from scheduler.settings import Settings
from scheduler.store.front import FrontStore
from scheduler.store.protocol import Lease

LIMIT_MAX = 1000
SEARCHES_MAX = 2


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that `create_app` was given. `lease` tells who leads, without taking part.

    `agents` is what requests of node agents share, `present` what all share that look at the state. `searches` bounds
    how many plans are solved at once: a large one takes a core for many seconds.
    """

    store: FrontStore
    settings: Settings
    clock: Clock
    policies: PolicySet
    lease: Callable[[], Lease | None]
    token_secret: bytes
    agents: AgentDesk
    present: Present
    searches: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(SEARCHES_MAX))

    @contextmanager
    def search(self, what: str) -> Iterator[None]:
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


async def _service(request: Request) -> Service:  # async: it need not wait for a thread
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def _principal(request: Request) -> Principal:
    """Whom the gate let in. It looked the route up by itself: here both have to agree."""
    rule = RULES[f"{request.method} {request.scope['route'].path}"]
    assert request.state.rule is rule, "the gate let this request pass by another route's rule"
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


ServiceDep = Annotated[Service, Depends(_service)]
PrincipalDep = Annotated[Principal, Depends(_principal)]


async def _world(service: ServiceDep, principal: PrincipalDep) -> Later[World]:
    return Later(lambda: load_world(service.present, service.store, service.clock.now_s(), principal))


WorldDep = Annotated[World, Depends(_world)]
"""Read in the endpoint's thread, see api.routing."""
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Most items in one answer.")]
After = Annotated[int, Query(ge=0, lt=2**63, description="Only items with a higher number.")]


def require_worker(service: Service, request: Request, *, job_id: str, generation: int) -> None:
    """Lets only the workers of this generation of this job pass: 401 without a token, 403 with another's."""
    needed = "a worker reports with the token of its job and generation: Authorization: Bearer ebt_..."
    token = bearer_token(request.headers.get("Authorization", ""), needed=needed)
    if not check_token(service.token_secret, token, job_id, generation):
        raise ProblemError(403, "forbidden", f"the token is not that of job {job_id}, generation {generation}")


def require_agent(service: Service, request: Request, *, job_id: str) -> None:
    """Lets only the node agents of this job pass: 401 without a token, 403 with another's."""
    needed = "a node agent reports with the token of its job's agents: Authorization: Bearer eba_..."
    token = bearer_token(request.headers.get("Authorization", ""), needed=needed)
    if not check_agent_token(service.token_secret, token, job_id):
        raise ProblemError(403, "forbidden", f"the token is not that of the agents of job {job_id}")
