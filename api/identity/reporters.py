"""Reporters: workers and agents, let through the gate by the kind of their token; the route checks whose it is."""

from __future__ import annotations

from api.errors import ProblemError
from api.identity.api_token import digest
from api.identity.bearer import bearer_token
from api.identity.limits import RateLimit, slow_down
from api.identity.rules import Asks, Rule
from scheduler.domain.worker_token import AGENT_PREFIX
from scheduler.domain.worker_token import PREFIX as WORKER_PREFIX
from scheduler.runtime.clock import Clock
from scheduler.settings import Settings

PREFIXES = {Asks.WORKERS: WORKER_PREFIX, Asks.AGENTS: AGENT_PREFIX}


class Reporters:
    """Belongs to one application, and to its event loop. All agents of a job have one token: each has a path."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._limit = RateLimit(settings.report_rate_per_s, settings.report_rate_burst)

    def admit(self, rule: Rule, authorization: str, path: str) -> None:
        """Raises ProblemError: 401 without a token, 403 with one of another kind, 429 for one who reports too often."""
        prefix = PREFIXES[rule.asks]
        needed = (
            f"{rule.asks.value} report with the token that they were started with: Authorization: Bearer {prefix}..."
        )
        token = bearer_token(authorization, needed=needed)
        if not token.startswith(prefix):
            raise ProblemError(403, "forbidden", f"the token is not that of {rule.asks.value} of this job")
        slow_down(self._limit, f"{digest(token)} {path}", self._clock.elapsed_s())
