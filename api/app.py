"""create_app: the HTTP API of one service. Nothing here is global: two applications may live in one process."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.routing import Route

from api.agent_desk import AgentDesk
from api.dependencies import Service
from api.errors import add_error_handlers
from api.gate import Gate
from api.glances import Glances
from api.identity.authenticator import Authenticator
from api.identity.reporters import Reporters
from api.identity.rules import RuleBook
from api.openapi import DescribedApi
from api.present import Present
from api.reasons import Reasons
from api.request_timing import RequestTiming
from api.routers import (
    agents,
    audit,
    checkpoints,
    console,
    demand,
    events,
    health,
    job_reports,
    jobs,
    lending,
    logs,
    nodes,
    overview,
    plans,
    pools,
    progress,
    queues,
    simulations,
    snapshots,
    streams,
    tokens,
    usage,
    webhooks,
)
from api.streams.streams import Streams
from scheduler.policies.policy_set import PolicySet
from scheduler.runtime.clock import Clock
from scheduler.settings import Settings
from scheduler.store.front import FrontStore
from scheduler.store.protocol import Lease
from scheduler.store.run_log import RunLog
from scheduler.telemetry.fleet_gauges import package_version

_ROUTED = (
    agents,  # first, because it is asked most often, and the first route that matches is taken
    streams,  # before the pages of the same paths
    *(jobs, job_reports, checkpoints, logs, progress),
    *(overview, pools, nodes, queues, usage, demand, lending, events, snapshots, plans),
    *(webhooks, simulations, tokens, audit, health, console),
)
_DESCRIPTION = (
    "Elastic GPU cluster scheduler. Requests never change the state: they put commands into an inbox, and the next "
    "tick of the controller acts on them. Errors are always application/problem+json (RFC 9457)."
)


def create_app(
    store: FrontStore,
    settings: Settings,
    *,
    clock: Clock,
    policies: PolicySet,
    lease: Callable[[], Lease | None],
    token_secret: bytes,
    run_log: RunLog,
) -> FastAPI:
    """The application on these parts. `lease` reads who leads, `token_secret` signs the tokens of workers and agents,
    `run_log` takes what agents report."""
    app = DescribedApi(
        title="Ebbtide",
        version=package_version(),
        description=_DESCRIPTION,
        docs_url=None,  # the interactive pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        routes=[route for noun in _ROUTED for route in noun.router.routes],  # including them would analyse them anew
    )
    desk = AgentDesk(store, run_log)
    app.state.service = Service(store, settings, clock, policies, lease, token_secret, desk, Present(store))
    app.state.streams = Streams(store, streams_max=settings.streams_max)
    app.state.glances = Glances()
    app.state.reasons = Reasons(policies)
    add_error_handlers(app)
    app.add_middleware(
        Gate,
        settings=settings,
        rules=RuleBook(routes_of(app)),
        authenticator=Authenticator(store.tokens, settings, clock) if settings.auth == "on" else None,
        reporters=Reporters(settings, clock),
    )
    app.add_middleware(RequestTiming)
    return app


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path template of every route, in the order in which they are tried."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return [(method, route.path) for route in routes for method in sorted((route.methods or set()) - {"HEAD"})]
