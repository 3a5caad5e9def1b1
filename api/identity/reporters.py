"""Reporters: workers and agents, let through the gate by the kind of their token; the route checks whose it is."""

from __future__ import annotations

from dataclasses import dataclass

from api.errors import ProblemError
from api.identity.api_token import digest
from api.identity.bearer import bearer_token
from api.identity.limits import RateLimit, slow_down
from api.identity.rules import Asks, Rule
from scheduler.domain.worker_token import AGENT_PREFIX
from scheduler.domain.worker_token import PREFIX as WORKER_PREFIX
from scheduler.runtime.clock import Clock
from scheduler.settings import Settings

_KNOWN_MAX = 10_000
_NOTHING_THERE = 404
"""No such job: said only to who has the token that would be its."""
PREFIXES = {Asks.WORKERS: WORKER_PREFIX, Asks.AGENTS: AGENT_PREFIX}


@dataclass(frozen=True, slots=True)
class Reporter:
    """One that the gate has let in. All agents of a job have one token: each has a path."""

    key: str
    address: str


class Reporters:
    """Belongs to one application, and to its event loop. Whose token was found right is slowed down by token and path,
    everybody else by address as well."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._limit = RateLimit(settings.report_rate_per_s, settings.report_rate_burst)
        self._strangers = RateLimit(settings.rate_per_s, settings.rate_burst)
        self._known: set[str] = set()

    def admit(self, rule: Rule, authorization: str, path: str, address: str) -> Reporter:
        """Who may report, if the route finds that the token is the job's.

        Raises:
            ProblemError: 401 without a token, 403 with one of another kind, 429 for one who reports too often.
        """
        prefix = PREFIXES[rule.asks]
        needed = (
            f"{rule.asks.value} report with the token that they were started with: Authorization: Bearer {prefix}..."
        )
        token = bearer_token(authorization, needed=needed)
        if not token.startswith(prefix):
            raise ProblemError(403, "forbidden", f"the token is not that of {rule.asks.value} of this job")
        reporter = Reporter(f"{digest(token)} {path}", address)
        if reporter.key not in self._known:
            slow_down(self._strangers, address, self._clock.elapsed_s(), cost=0.0)
        slow_down(self._limit, reporter.key, self._clock.elapsed_s())
        return reporter

    def answered(self, reporter: Reporter, status: int) -> None:
        """What the route has made of it: of whom it is not known that the token is right, each refusal costs their
        address one request."""
        if status < 300 or status == _NOTHING_THERE:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known.add(reporter.key)
        elif reporter.key not in self._known and status < 500:
            self._strangers.wait_s(reporter.address, self._clock.elapsed_s())
