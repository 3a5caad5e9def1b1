"""Authenticator: from the bearer token of a request to the principal behind it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from api.errors import ProblemError
from api.identity.api_token import PREFIX, digest, principal_of
from api.identity.bearer import bearer_token, unauthenticated
from api.identity.limits import RateLimit, slow_down
from api.identity.oidc import InvalidTokenError, Issuer, IssuerSilentError
from api.identity.principal import Principal
from scheduler.domain.worker_token import AGENT_PREFIX
from scheduler.domain.worker_token import PREFIX as WORKER_PREFIX
from scheduler.runtime.clock import Clock
from scheduler.settings import Settings
from scheduler.store.front import Tokens
from scheduler.store.protocol import UnavailableError

logger = logging.getLogger(__name__)

FRESH_S = 5.0
"""A token that was found good is believed for so long: what revokes it counts within this time."""
USE_NOTED_S = 60.0
_KNOWN_MAX = 4096
_TOKEN_LENGTH_MAX = 8192
_ISSUER_SILENT = 503
_NEEDED = "this needs a token: Authorization: Bearer ebk_...; `ebbtide login` keeps one for you"


@dataclass(frozen=True, slots=True)
class _Known:
    principal: Principal
    read_at_s: float
    expires_at_s: float


class Authenticator:
    """Belongs to one application, and to its event loop: what waits (database, issuer) does so in a thread.

    Who gives no token or a wrong one is slowed down by address; who gives a right one by token.
    """

    def __init__(self, tokens: Tokens, settings: Settings, clock: Clock) -> None:
        self._tokens = tokens
        self._clock = clock
        self._issuer = Issuer(settings) if settings.oidc_issuer else None
        self._known: dict[str, _Known] = {}
        self._askers = RateLimit(settings.rate_per_s, settings.rate_burst)
        self._strangers = RateLimit(settings.rate_per_s, settings.rate_burst)

    async def principal(self, authorization: str, address: str) -> Principal:
        """Who asks.

        Raises:
            ProblemError: 401 without a token or with a wrong one, 403 for a worker's, 429 for one who asks too often,
                503 where the OIDC issuer is needed and silent.
        """
        known = self._fresh(authorization)
        if known is None:
            self._slow_down(self._strangers, address, cost=0.0)
            try:
                known = await self._looked_up(authorization)
            except ProblemError:
                self._slow_down(self._strangers, address)
                raise
        self._slow_down(self._askers, known.principal.token_id or known.principal.name)
        return known.principal

    async def is_good(self, authorization: str) -> bool:
        """Whether a token that was good a while ago still is. Where nobody can tell now, it is."""
        try:
            return bool(self._fresh(authorization) or await self._looked_up(authorization))
        except ProblemError as problem:
            return problem.status == _ISSUER_SILENT
        except UnavailableError:
            return True

    def _fresh(self, authorization: str) -> _Known | None:
        known, now_s = self._known.get(digest(authorization)), self._clock.now_s()
        is_fresh = known is not None and 0.0 <= now_s - known.read_at_s < FRESH_S and now_s < known.expires_at_s
        return known if is_fresh else None

    async def _looked_up(self, authorization: str) -> _Known:
        key, now_s = digest(authorization), self._clock.now_s()
        self._known.pop(key, None)
        known = await self._read(bearer_token(authorization, needed=_NEEDED), now_s)
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[key] = known
        return known

    async def _read(self, secret: str, now_s: float) -> _Known:
        if secret.startswith((WORKER_PREFIX, AGENT_PREFIX)):
            raise ProblemError(403, "forbidden", "this token is a worker's: it can only report on its own job")
        if secret.startswith(PREFIX):
            return await run_in_threadpool(self._api_token, digest(secret), now_s)
        if self._issuer is None or secret.count(".") != 2 or len(secret) > _TOKEN_LENGTH_MAX:
            unauthenticated("the token is malformed: API tokens begin with ebk_; ask an admin for one")
        return await run_in_threadpool(self._jwt, self._issuer, secret, now_s)

    def _api_token(self, key: str, now_s: float) -> _Known:
        token = self._tokens.by_digest(key)
        if token is None:
            unauthenticated("the token is not known here: is it of this service?")
        if token.revoked_at_s is not None:
            unauthenticated(f"the token {token.prefix}... was revoked: ask an admin for another")
        if not token.is_live(now_s):
            unauthenticated(f"the token {token.prefix}... has expired: ask an admin for another")
        if token.last_used_at_s is None or now_s - token.last_used_at_s >= USE_NOTED_S:
            try:
                self._tokens.touch(token.id, now_s)
            except UnavailableError as busy:  # that it was used is worth a note, not a refusal
                logger.warning("the use of token %s is not noted: %s", token.id, busy)
        expires_at_s = float("inf") if token.expires_at_s is None else token.expires_at_s
        return _Known(principal_of(token), now_s, expires_at_s)

    def _jwt(self, issuer: Issuer, secret: str, now_s: float) -> _Known:
        try:
            identity = issuer.identity(secret, self._clock.elapsed_s())
        except InvalidTokenError as wrong:
            unauthenticated(f"the JWT is refused: {wrong}")
        except IssuerSilentError as silent:
            headers = {"Retry-After": "10"}
            raise ProblemError(_ISSUER_SILENT, "issuer-unavailable", str(silent), headers=headers) from silent
        return _Known(identity.principal, now_s, identity.expires_at_s)

    def _slow_down(self, limit: RateLimit, asker: str, *, cost: float = 1.0) -> None:
        slow_down(limit, asker, self._clock.elapsed_s(), cost=cost)
