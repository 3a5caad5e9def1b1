"""The HTTP application and its server: `create_app` wires the routers, `serve` runs the application with uvicorn."""

from __future__ import annotations

import gc
import math
import socket
import sys
from collections.abc import Callable
from functools import partial

import anyio.to_thread
import uvicorn
from fastapi import FastAPI

from api import (
    accounts,
    allocations,
    archives,
    demand_reports,
    events,
    guides,
    hardware,
    health,
    history,
    job_cost,
    job_details,
    job_list,
    jobs,
    loans,
    logs,
    machine_departure,
    machine_facts,
    machine_logs,
    machine_reports,
    machines,
    nodes,
    overview,
    plans,
    pod_reports,
    pool_explanations,
    pools,
    problems,
    queues,
    recalls,
    replays,
    savings,
    savings_comparison,
    service_settings,
    serving,
    sign_in,
    simulations,
    tokens,
    usage,
    web_console,
    worker_reports,
)
from api.agent_state import AgentStateCache, MachineContacts
from api.decision_watch import DecisionWatch
from api.demo import DemoDay
from api.demo import router as demo_router
from api.explanations import PendingReasonCache
from api.http.access_log import AccessLog
from api.http.connection_limits import (
    ConnectionLimits,
    ConnectionTable,
    LimitedProtocol,
    LimitedServerState,
    raise_open_files_limit,
)
from api.http.dependencies import Service
from api.http.errors import add_error_handlers
from api.http.forwarded import ForwardedMiddleware, TrustedProxies
from api.http.middleware import SecurityMiddleware, TimingMiddleware
from api.identity.authentication import Authenticator, WorkerAuthenticator
from api.identity.authorization import RouteRules, list_route_rules
from api.identity.machine_credentials import is_genuine_token
from api.identity.oidc_sign_in import OidcSignIn
from api.openapi import OpenApiApp
from api.overview import NodeDeltas
from api.problems import ProblemCache
from api.queue_secrets import agent_routes
from api.queue_secrets import routes as secret_routes
from api.queue_secrets.vault import SecretVault
from api.state import StateReader
from api.streams.server_sent_events import StreamRegistry
from api.webhooks import routes
from scheduler.package_version import get_package_version
from scheduler.runtime.clock import Clock
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.settings import Settings
from scheduler.store.api_protocol import ApiStore
from scheduler.store.archives import ArchiveFolder
from scheduler.store.protocol import Lease, RunLog

_ROUTERS = (
    machine_reports.router,
    machine_departure.router,
    machine_facts.router,
    machine_logs.router,
    pod_reports.router,  # first: agents send the most requests, and the first matching route wins
    events.stream_router,  # before the lists that share their paths
    *(
        jobs.router,
        job_list.router,
        job_details.detail_router,
        job_details.checkpoint_router,
        logs.router,
        worker_reports.progress_router,
        archives.router,
    ),
    *(
        overview.router,
        history.router,
        pools.router,
        nodes.router,
        queues.router,
        usage.router,
        loans.router,
        recalls.router,
    ),
    *(allocations.router, savings.router, savings_comparison.router, job_cost.router),
    *(pools.demand_router, demand_reports.router, serving.router, pool_explanations.router),
    machines.router,
    problems.router,
    hardware.router,
    *(
        events.router,
        events.snapshot_router,
        plans.router,
        routes.router,
        simulations.router,
        tokens.router,
        replays.router,
    ),
    *(accounts.router, secret_routes.router, agent_routes.router, sign_in.login_code_router, sign_in.router),
    *(tokens.audit_router, service_settings.router, health.router, guides.router, web_console.router),
)
_DESCRIPTION = (
    "Elastic GPU cluster scheduler. Requests add commands to an inbox, and the controller's next tick applies them. "
    "Errors are always application/problem+json (RFC 9457)."
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
    demo: DemoDay | None = None,
) -> FastAPI:
    """Build the application.

    `lease` returns the current leader's lease. `token_secret` signs the tokens of workers and agents. `run_log` stores
    what agents report. With a `demo`, the application has its routes, and the console its controls. Only the hardware
    of the fleet is state of the process, which several applications share.

    Raises:
        ValueError: An endpoint has no authorization rule.
    """
    routers = _ROUTERS if demo is None else (demo_router, *_ROUTERS)
    app = OpenApiApp(
        title="Ebbtide",
        version=get_package_version(),
        description=_DESCRIPTION,
        docs_url=None,  # the interactive pages load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        routes=[route for router in routers for route in router.routes],  # include_router would analyse them again
    )
    agent_state = AgentStateCache(store, run_log)
    authenticator = Authenticator(store.tokens, store.sessions, settings, clock) if settings.auth == "on" else None
    app.state.service = service = Service(
        store,
        settings,
        clock,
        policies,
        lease,
        token_secret,
        run_log,
        agent_state,
        DecisionWatch(agent_state, clock),
        StateReader(store),
        ArchiveFolder(settings.archive_path),
        MachineContacts(store.machines.record_seen),
        SecretVault(settings.secrets_key_path, creates=settings.secrets_key_file is None),
        authenticator,
        _build_oidc_sign_in(settings, authenticator, token_secret),
    )
    app.state.streams = StreamRegistry(store, streams_max=settings.streams_max)
    app.state.node_deltas = NodeDeltas()
    app.state.demo = demo
    app.state.pending_reasons = PendingReasonCache(policies)
    app.state.problems = ProblemCache()
    add_error_handlers(app)
    _add_middleware(app, service)
    return app


def _add_middleware(app: FastAPI, service: Service) -> None:
    """Add the middleware. A request passes the last one first."""
    settings, machines = service.settings, service.store.machines
    app.add_middleware(
        SecurityMiddleware,
        settings=settings,
        route_rules=RouteRules(list_route_rules(app.routes)),
        authenticator=service.authenticator,
        worker_authenticator=WorkerAuthenticator(
            settings, service.clock, partial(is_genuine_token, machines, service.token_secret)
        ),
    )
    app.add_middleware(TimingMiddleware, access_log=AccessLog(settings.access_log))
    app.add_middleware(ForwardedMiddleware, proxies=TrustedProxies.parse(settings.trusted_proxies))


def _build_oidc_sign_in(
    settings: Settings, authenticator: Authenticator | None, token_secret: bytes
) -> OidcSignIn | None:
    if authenticator is None or authenticator.issuer is None or not settings.oidc_client_id:
        return None
    return OidcSignIn(settings, authenticator.issuer, token_secret)


SHUTDOWN_TIMEOUT_S = 10
"""Requests still running this long after SIGTERM are dropped."""
WORKER_THREADS = 8
"""Concurrent request threads. More threads only compete for the interpreter lock: of 4, 8, 16 and 40 threads, 8 had the
lowest latency at 120 submissions per second."""
_STARTUP_FAILURE_CODE = 3
_TICKS_PER_SECOND = 10


class Server(uvicorn.Server):
    """A uvicorn server that closes event streams on shutdown; uvicorn alone would wait for them to end.

    `connections` closes the connections that exceed their limits. Without it there are none.
    """

    def __init__(
        self, config: uvicorn.Config, streams: StreamRegistry, connections: ConnectionTable | None = None
    ) -> None:
        super().__init__(config)
        self._streams = streams
        self._connections = connections
        if connections is not None:
            self.server_state = LimitedServerState(connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = WORKER_THREADS
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._connections is not None and counter % _TICKS_PER_SECOND == 0:
            self._connections.close_expired()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.close()
        await super().shutdown(sockets)


def serve(app: FastAPI, settings: Settings) -> None:
    """Serve the application until SIGTERM or SIGINT. Exits with status 3 if the server cannot start.

    With several API processes, all listen on the same port (SO_REUSEPORT); the kernel distributes the connections.
    """
    host, port = settings.host, settings.port
    limits = ConnectionLimits(
        raise_open_files_limit(settings.connections_max),
        settings.connections_per_address,
        settings.header_timeout_s,
        settings.idle_timeout_s,
    )
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=LimitedProtocol,
        ws="none",
        proxy_headers=False,  # it trusts every process of this machine; see ForwardedMiddleware
        log_config=None,
        access_log=False,
        timeout_keep_alive=math.ceil(settings.idle_timeout_s),
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    proxies = TrustedProxies.parse(settings.trusted_proxies)
    server = Server(config, app.state.streams, ConnectionTable(limits, is_proxy=proxies.__contains__))
    gc.collect()
    gc.freeze()  # keeps the collector from scanning long-lived objects in the middle of requests
    try:
        server.run([_open_shared_socket(host, port)] if settings.api_processes > 1 else None)
    except KeyboardInterrupt:
        return  # uvicorn has shut down cleanly and re-raised the signal
    if not server.started:
        sys.exit(_STARTUP_FAILURE_CODE)


def _open_shared_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048, reuse_port=True)
