"""create_app: the HTTP API of one service. Nothing here is global: two applications may live in one process.

serve: the application on a socket, until SIGTERM or SIGINT. Streams end at once then.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from api import (
    events,
    health,
    job_details,
    jobs,
    loans,
    logs,
    nodes,
    overview,
    plans,
    pools,
    queues,
    simulations,
    tokens,
    usage,
    web_console,
    worker_reports,
)
from api.agent_state import AgentStateCache
from api.explanations import PendingReasonCache
from api.http.dependencies import Service
from api.http.errors import add_error_handlers
from api.http.middleware import SecurityMiddleware, TimingMiddleware
from api.identity.authentication import Authenticator, WorkerAuthenticator
from api.identity.authorization import RouteRules
from api.openapi import OpenApiApp
from api.overview import NodeDeltas
from api.state import StateReader
from api.streams.server_sent_events import StreamRegistry
from api.webhooks import routes
from scheduler.runtime.clock import Clock
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.settings import Settings
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Lease, RunLog
from scheduler.telemetry.fleet_gauges import get_package_version

_ROUTERS = (
    worker_reports.agent_router,  # first, because agents ask most often, and the first route that matches is taken
    events.stream_router,  # before the pages of the same paths
    *(
        jobs.router,
        job_details.detail_router,
        job_details.checkpoint_router,
        logs.router,
        worker_reports.progress_router,
    ),
    *(overview.router, pools.router, nodes.router, queues.router, usage.router, pools.demand_router, loans.router),
    *(events.router, events.snapshot_router, plans.router, routes.router, simulations.router, tokens.router),
    *(tokens.audit_router, health.router, web_console.router),
)
_DESCRIPTION = (
    "Elastic GPU cluster scheduler. Requests never change the state: they put commands into an inbox, and the next "
    "tick of the controller acts on them. Errors are always application/problem+json (RFC 9457)."
)


def create_app(
    store: ApiStore,
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
    app = OpenApiApp(
        title="Ebbtide",
        version=get_package_version(),
        description=_DESCRIPTION,
        docs_url=None,  # the interactive pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        routes=[route for router in _ROUTERS for route in router.routes],  # including them would analyse them anew
    )
    desk = AgentStateCache(store, run_log)
    app.state.service = Service(store, settings, clock, policies, lease, token_secret, desk, StateReader(store))
    app.state.streams = StreamRegistry(store, streams_max=settings.streams_max)
    app.state.glances = NodeDeltas()
    app.state.reasons = PendingReasonCache(policies)
    add_error_handlers(app)
    app.add_middleware(
        SecurityMiddleware,
        settings=settings,
        route_rules=RouteRules(list_routes(app)),
        authenticator=Authenticator(store.tokens, settings, clock) if settings.auth == "on" else None,
        worker_authenticator=WorkerAuthenticator(settings, clock),
    )
    app.add_middleware(TimingMiddleware)
    return app


def list_routes(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path template of every route, in the order in which they are tried."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return [(method, route.path) for route in routes for method in sorted((route.methods or set()) - {"HEAD"})]


SHUTDOWN_TIMEOUT_S = 10
"""What has not been answered then is given up."""
WORKER_THREADS = 8
"""Requests that are worked on at a time; others wait their turn. More would only take the interpreter from one another:
of 4, 8, 16 and 40, 8 answered 120 submissions a second soonest."""
_STARTUP_FAILURE_CODE = 3


class Server(uvicorn.Server):
    """Uvicorn waits for all requests to end before it does, and a stream would not by itself."""

    def __init__(self, config: uvicorn.Config, streams: StreamRegistry) -> None:
        super().__init__(config)
        self._streams = streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = WORKER_THREADS
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.close()
        await super().shutdown(sockets)


def serve(app: FastAPI, *, host: str, port: int, is_shared: bool = False) -> None:
    """`is_shared`: other processes listen on the same port, and the kernel gives each connection to one of them."""
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S
    )
    server = Server(config, app.state.streams)
    gc.collect()
    gc.freeze()  # what stays for good is not searched for garbage again and again, in the middle of requests
    try:
        server.run([_shared_socket(host, port)] if is_shared else None)
    except KeyboardInterrupt:
        return  # it has ended as it should, and then passed the signal on
    if not server.started:
        sys.exit(_STARTUP_FAILURE_CODE)


def _shared_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048, reuse_port=True)
