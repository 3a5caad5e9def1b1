"""Who may call which route: one table, looked up before a request's body is read. A route without a rule is no route:
`create_app` refuses to build. What a rule cannot see, whose job it is, `api.identity.sight` and `permits` decide."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from starlette.routing import compile_path

from api.identity.principal import Role


class Asks(Enum):
    """Whom a route expects."""

    NOBODY = "nobody"
    SCRAPERS = "scrapers"
    WORKERS = "workers"
    AGENTS = "agents"
    PEOPLE = "people"


@dataclass(frozen=True, slots=True)
class Rule:
    """People need `role` on some queue, or on all of them where `everywhere`. `body_setting` names the setting that
    bounds the request's body."""

    asks: Asks = Asks.PEOPLE
    role: Role = Role.VIEWER
    everywhere: bool = False
    body_setting: str = "body_bytes_max"


OPEN = Rule(Asks.NOBODY)
VIEWER = Rule()
VIEWER_OF_ALL = Rule(everywhere=True)
SUBMITTER = Rule(role=Role.SUBMITTER)
QUEUE_ADMIN = Rule(role=Role.QUEUE_ADMIN)
ADMIN = Rule(role=Role.ADMIN, everywhere=True)

RULES: Mapping[str, Rule] = {
    "GET /": OPEN,
    "GET /console/{version}/{path:path}": OPEN,
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /openapi.json": OPEN,
    "GET /metrics": Rule(Asks.SCRAPERS, everywhere=True),
    "POST /v1/jobs/{job_id}/agents/{node}": Rule(Asks.AGENTS),
    "POST /v1/jobs/{job_id}/progress": Rule(Asks.WORKERS),
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
    "POST /v1/simulations": Rule(role=Role.SUBMITTER, body_setting="simulation_body_bytes"),
    "GET /v1/simulations/{simulation_id}": SUBMITTER,
    "GET /v1/simulations/{simulation_id}/report": SUBMITTER,
    "DELETE /v1/simulations/{simulation_id}": SUBMITTER,
    "GET /v1/tokens": ADMIN,
    "POST /v1/tokens": ADMIN,
    "GET /v1/tokens/{token_id}": ADMIN,
    "DELETE /v1/tokens/{token_id}": ADMIN,
    "GET /v1/audit": ADMIN,
}


class RuleBook:
    """The rules of an application's routes, by method and path.

    Args:
        routes: method and path template of each, in the order in which the application tries them.

    Raises:
        ValueError: a route has no rule.
    """

    def __init__(self, routes: Iterable[tuple[str, str]]) -> None:
        self._by_method: dict[str, list[tuple[re.Pattern[str], Rule]]] = {}
        for method, path in routes:
            rule = RULES.get(f"{method} {path}")
            if rule is None:
                raise ValueError(f"{method} {path} has no rule: say in api/identity/rules.py who may call it")
            self._by_method.setdefault(method, []).append((compile_path(path)[0], rule))

    def rule(self, method: str, path: str) -> Rule | None:
        """None where no route takes this."""
        return next((rule for pattern, rule in self._by_method.get(method, ()) if pattern.match(path)), None)
