"""Authentication: from a request's bearer token (RFC 6750) to its principal, with rate limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from jwt import PyJWK
from starlette.concurrency import run_in_threadpool

from api.http.errors import AuthenticationFailedError, ProblemError
from api.identity.authorization import Caller, RouteRule
from api.identity.login_codes import LOGIN_CODE_PREFIX
from api.identity.oidc import InvalidTokenError, OidcIssuer
from api.identity.oidc_provider import IssuerUnavailableError
from api.identity.principals import API_TOKEN_PREFIX, Principal, token_digest, token_principal
from api.identity.sessions import SESSION_PREFIX, decode_principal, encode_principal
from scheduler.domain.machine import JOIN_TOKEN_PREFIX, MACHINE_CREDENTIAL_PREFIX
from scheduler.domain.worker_token import AGENT_TOKEN_PREFIX
from scheduler.domain.worker_token import WORKER_TOKEN_PREFIX as WORKER_PREFIX
from scheduler.runtime.clock import Clock
from scheduler.settings import Settings
from scheduler.store.api_protocol import TokenStore
from scheduler.store.credentials import ApiToken
from scheduler.store.protocol import UnavailableError
from scheduler.store.sessions import SessionStore, SignedInUser


def parse_bearer_token(authorization: str, *, hint: str) -> str:
    """Return the token in an Authorization header.

    Raises:
        ProblemError: 401 with `hint` if there is none.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise_unauthenticated(hint)
    return token.strip()


def raise_unauthenticated(detail: str) -> NoReturn:
    raise AuthenticationFailedError(401, "unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})


def _raise_wrong_token(detail: str) -> NoReturn:
    raise AuthenticationFailedError(403, "forbidden", detail)


_BUCKETS_MAX = 10_000


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float


class RateLimiter:
    """Token buckets, one per caller: `burst` requests at once, `rate_per_s` in the long run. Not thread-safe."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: dict[str, _Bucket] = {}

    def consume(self, caller: str, now_s: float, *, cost: float = 1.0) -> float:
        """Take `cost` from the caller's bucket and return 0.

        If the bucket is empty, take nothing and return the seconds to wait.
        """
        bucket = self._buckets.get(caller)
        if bucket is None:
            self._evict_buckets(now_s)
            bucket = self._buckets[caller] = _Bucket(self._burst, now_s)
        bucket.level = min(self._burst, bucket.level + max(0.0, now_s - bucket.at_s) * self._rate_per_s)
        bucket.at_s = now_s
        if bucket.level < 1.0:
            return (1.0 - bucket.level) / self._rate_per_s
        bucket.level -= cost
        return 0.0

    def _evict_buckets(self, now_s: float) -> None:
        """Drop buckets that are full again, then the oldest half."""
        if len(self._buckets) < _BUCKETS_MAX:
            return
        full_s = self._burst / self._rate_per_s
        recent = {caller: bucket for caller, bucket in self._buckets.items() if now_s - bucket.at_s < full_s}
        newest = sorted(recent.items(), key=lambda item: item[1].at_s)[-_BUCKETS_MAX // 2 :]
        self._buckets = dict(newest)


def enforce_rate_limit(
    limiter: RateLimiter, caller: str, now_s: float, *, cost: float = 1.0, error: type[ProblemError] = ProblemError
) -> None:
    """Take one request from the caller's bucket.

    Raises:
        ProblemError: 429, of the class `error`, if the bucket is empty.
    """
    if wait_s := limiter.consume(caller, now_s, cost=cost):
        headers = {"Retry-After": str(int(wait_s) + 1)}
        raise error(429, "rate-limited", f"too many requests. Retry in {wait_s:.1f} s", headers=headers)


logger = logging.getLogger(__name__)

TOKEN_CACHE_S = 5.0
"""How long a verified token is accepted without a lookup, and so how long a revoked one may still work."""
LAST_USE_INTERVAL_S = 60.0
_CACHED_TOKENS_MAX = 4096
_TOKEN_LENGTH_MAX = 8192
_ISSUER_UNAVAILABLE = 503
_NEVER_S = float("inf")
_TOKEN_HINT = "authentication required: send Authorization: Bearer ebk_..., or run `ebbtide login` once"


@dataclass(frozen=True, slots=True)
class _CachedToken:
    principal: Principal
    read_at_s: float
    expires_at_s: float


class Authenticator:
    """Authentication of callers with API tokens, OIDC tokens and console sessions. Belongs to one application and its
    event loop.

    Requests with a valid token are rate-limited by token, others by address. Database calls run in threads. Those for
    addresses above their limit share one thread of their own, so they delay no other request and a valid token still
    works.
    """

    def __init__(self, tokens: TokenStore, sessions: SessionStore, settings: Settings, clock: Clock) -> None:
        self._tokens = tokens
        self._sessions = sessions
        self._clock = clock
        self.issuer = OidcIssuer(settings) if settings.oidc_issuer else None
        self._cache: dict[str, _CachedToken] = {}
        self._caller_limiter = RateLimiter(settings.rate_per_s, settings.rate_burst)
        self._address_limiter = RateLimiter(settings.rate_per_s, settings.rate_burst)
        self._throttled_thread = ThreadPoolExecutor(1, thread_name_prefix="throttled-authentication")

    async def authenticate(self, authorization: str, address: str) -> Principal:
        """Return the principal of the request.

        Raises:
            ProblemError: 401 for a missing or invalid token, 403 for a worker's token, 429 above the rate limit, 503 if
                the OIDC issuer is needed and unreachable.
        """
        return (await self._identify(authorization, address)).principal

    async def authenticate_user(self, authorization: str, address: str) -> tuple[SignedInUser, Principal]:
        """Return the user to open a session for. A session opens no other one, so that none outlives its end.

        Raises:
            ProblemError: as `authenticate`, and 401 for a session.
        """
        if authorization.partition(" ")[2].strip().startswith(SESSION_PREFIX):
            raise_unauthenticated("a session opens no other session. Sign in with a token")
        known = await self._identify(authorization, address)
        principal, expires_at_s = known.principal, known.expires_at_s
        stored = {} if principal.token_id else encode_principal(principal)
        return SignedInUser(principal.token_id, stored, None if expires_at_s == _NEVER_S else expires_at_s), principal

    @contextmanager
    def charge_failures(self, address: str, *failures: type[Exception]) -> Iterator[None]:
        """Make a ProblemError of the block, and each other error in `failures`, cost the address a request.

        Raises:
            ProblemError: 429 if the address has failed too often.
        """
        charged: tuple[type[Exception], ...] = (ProblemError, *failures)
        self._charge_failure(address, cost=0.0)
        try:
            yield
        except charged:
            self._charge_failure(address)
            raise

    async def _identify(self, authorization: str, address: str) -> _CachedToken:
        known = self._find_cached(authorization)
        if known is None:
            is_throttled = self._address_limiter.consume(address, self._clock.elapsed_s(), cost=0.0) > 0.0
            try:
                known = await self._verify_and_cache(authorization, is_throttled=is_throttled)
            except ProblemError:
                self._charge_failure(address)
                raise
        caller = known.principal.token_id or known.principal.subject
        enforce_rate_limit(self._caller_limiter, caller, self._clock.elapsed_s())
        return known

    async def is_still_valid(self, authorization: str) -> bool:
        """Return whether a token that was valid before still is. True if the database or the issuer is unreachable."""
        try:
            return bool(self._find_cached(authorization) or await self._verify_and_cache(authorization))
        except ProblemError as problem:
            return problem.status == _ISSUER_UNAVAILABLE
        except UnavailableError:
            return True

    def _find_cached(self, authorization: str) -> _CachedToken | None:
        known, now_s = self._cache.get(token_digest(authorization)), self._clock.now_s()
        is_fresh = known is not None and 0.0 <= now_s - known.read_at_s < TOKEN_CACHE_S and now_s < known.expires_at_s
        return known if is_fresh else None

    async def _verify_and_cache(self, authorization: str, *, is_throttled: bool = False) -> _CachedToken:
        key, now_s = token_digest(authorization), self._clock.now_s()
        self._cache.pop(key, None)
        secret = parse_bearer_token(authorization, hint=_TOKEN_HINT)
        known = await self._verify(secret, now_s, is_throttled=is_throttled)
        if len(self._cache) >= _CACHED_TOKENS_MAX:
            self._cache.clear()
        self._cache[key] = known
        return known

    async def _verify(self, secret: str, now_s: float, *, is_throttled: bool) -> _CachedToken:
        if secret.startswith((WORKER_PREFIX, AGENT_TOKEN_PREFIX)):
            raise AuthenticationFailedError(
                403, "forbidden", "this is a worker's token, which can only report on its own job"
            )
        if secret.startswith((MACHINE_CREDENTIAL_PREFIX, JOIN_TOKEN_PREFIX)):
            raise AuthenticationFailedError(
                403, "forbidden", "this is a machine's token, which can only join or report for it"
            )
        if secret.startswith(LOGIN_CODE_PREFIX):
            _raise_wrong_token("this is a login code, which only signs a browser in")
        if secret.startswith(SESSION_PREFIX):
            verify_session = partial(self._verify_session, token_digest(secret), now_s)
            return await self._run_in_thread(verify_session, is_throttled=is_throttled)
        if secret.startswith(API_TOKEN_PREFIX):
            verify = partial(self._verify_api_token, token_digest(secret), now_s)
            return await self._run_in_thread(verify, is_throttled=is_throttled)
        if self.issuer is None or secret.count(".") != 2 or len(secret) > _TOKEN_LENGTH_MAX:
            raise_unauthenticated("the token is malformed. API tokens start with ebk_; ask an admin for one")
        return await self._verify_jwt(self.issuer, secret, now_s, is_throttled=is_throttled)

    async def _run_in_thread(self, verify: Callable[[], _CachedToken], *, is_throttled: bool) -> _CachedToken:
        if is_throttled:
            return await asyncio.get_running_loop().run_in_executor(self._throttled_thread, verify)
        return await run_in_threadpool(verify)

    def _verify_session(self, key: str, now_s: float) -> _CachedToken:
        session = self._sessions.find(key)
        if session is None or session.expires_at_s <= now_s:
            raise_unauthenticated("the session has ended. Sign in again")
        known = self._load_user(session.user, now_s)
        return replace(known, expires_at_s=min(known.expires_at_s, session.expires_at_s))

    def load_principal(self, user: SignedInUser) -> Principal:
        """Return the principal of a session or login code. Reads the database.

        Raises:
            ProblemError: 401 if its token was revoked or has expired.
        """
        return self._load_user(user, self._clock.now_s()).principal

    def _load_user(self, user: SignedInUser, now_s: float) -> _CachedToken:
        if user.token_id:
            return self._check_api_token(self._tokens.find_by_id(user.token_id), now_s)
        expires_at_s = _NEVER_S if user.expires_at_s is None else user.expires_at_s
        if expires_at_s <= now_s:
            raise_unauthenticated("the identity has expired. Sign in again")
        return _CachedToken(decode_principal(user.principal), now_s, expires_at_s)

    def _verify_api_token(self, key: str, now_s: float) -> _CachedToken:
        return self._check_api_token(self._tokens.find_by_digest(key), now_s)

    def _check_api_token(self, token: ApiToken | None, now_s: float) -> _CachedToken:
        if token is None:
            raise_unauthenticated("the token does not exist. Check that it belongs to this service")
        if token.revoked_at_s is not None:
            raise_unauthenticated(f"the token {token.prefix}... was revoked. Ask an admin for a new one")
        if not token.is_live(now_s):
            raise_unauthenticated(f"the token {token.prefix}... has expired. Ask an admin for a new one")
        self._check_account(token, now_s)
        if token.last_used_at_s is None or now_s - token.last_used_at_s >= LAST_USE_INTERVAL_S:
            try:
                self._tokens.record_use(token.id, now_s)
            except UnavailableError as error:  # the last-use time is not worth failing the request
                logger.warning("last use of token %s not recorded: %s", token.id, error)
        ends_at_s = (token.expires_at_s, None if token.account is None else token.account.expires_at_s)
        expires_at_s = min((at_s for at_s in ends_at_s if at_s is not None), default=_NEVER_S)
        return _CachedToken(token_principal(token), now_s, expires_at_s)

    def _check_account(self, token: ApiToken, now_s: float) -> None:
        """Raise a 401 if the token's service account was deleted, is disabled or has expired."""
        account = token.account
        if account is None:
            if token.account_id:
                raise_unauthenticated(f"the service account {token.name} was deleted. Ask an admin for a new one")
        elif account.disabled_at_s is not None:
            raise_unauthenticated(f"the service account {account.name} is disabled. Ask an admin to enable it")
        elif account.has_expired(now_s):
            raise_unauthenticated(f"the service account {account.name} has expired. Ask an admin to extend it")

    async def _verify_jwt(self, issuer: OidcIssuer, secret: str, now_s: float, *, is_throttled: bool) -> _CachedToken:
        try:
            key = await issuer.find_key(secret, self._clock.elapsed_s())
            verify = partial(_verify_with_key, issuer, secret, key, now_s)
            return await self._run_in_thread(verify, is_throttled=is_throttled)
        except InvalidTokenError as error:
            raise_unauthenticated(f"the JWT is invalid: {error}")
        except IssuerUnavailableError as error:
            headers = {"Retry-After": "10"}
            raise ProblemError(_ISSUER_UNAVAILABLE, "issuer-unavailable", str(error), headers=headers) from error

    def _charge_failure(self, address: str, *, cost: float = 1.0) -> None:
        """Take `cost` for a failed authentication from the address. Raises a 429 if it has failed too often."""
        now_s = self._clock.elapsed_s()
        enforce_rate_limit(self._address_limiter, address, now_s, cost=cost, error=AuthenticationFailedError)


def _verify_with_key(issuer: OidcIssuer, secret: str, key: PyJWK, now_s: float) -> _CachedToken:
    identity = issuer.verify(secret, key)
    return _CachedToken(identity.principal, now_s, identity.expires_at_s)


_TRUSTED_MAX = 10_000
_NOT_FOUND = 404
"""A 404 is answered only to the holder of the right token, so it proves the token."""
TOKEN_PREFIX_BY_CALLER = {
    Caller.WORKERS: WORKER_PREFIX,
    Caller.AGENTS: AGENT_TOKEN_PREFIX,
    Caller.MACHINES: MACHINE_CREDENTIAL_PREFIX,
    Caller.JOINING_MACHINES: JOIN_TOKEN_PREFIX,
}


@dataclass(frozen=True, slots=True)
class WorkerCaller:
    """A worker, agent or machine whose token has the right prefix.

    The key includes the path, because all agents of a job share a token.
    """

    key: str
    address: str


class WorkerAuthenticator:
    """Authentication of workers, agents and machines by the prefix of their token.

    The endpoint checks the token against the job or the machine.

    Belongs to one application and its event loop. Callers with a proven token are rate-limited by token and path,
    others by address as well. `is_genuine` proves a token from an address above its limit, given token and path. It
    runs in one thread for all such addresses, so that other callers do not wait for them.
    """

    def __init__(self, settings: Settings, clock: Clock, is_genuine: Callable[[str, str], bool]) -> None:
        self._clock = clock
        self._is_genuine = is_genuine
        self._throttled_thread = ThreadPoolExecutor(1, thread_name_prefix="throttled-agents")
        self._caller_limiter = RateLimiter(settings.report_rate_per_s, settings.report_rate_burst)
        self._address_limiter = RateLimiter(settings.rate_per_s, settings.rate_burst)
        self._trusted: set[str] = set()

    async def authenticate(self, rule: RouteRule, authorization: str, path: str, address: str) -> WorkerCaller:
        """Check the form of the token and the rate limit.

        Raises:
            ProblemError: 401 without a token, 403 for another kind of token, 429 above the rate limit.
        """
        prefix = TOKEN_PREFIX_BY_CALLER[rule.caller]
        hint = (
            f"{rule.caller.value} authenticate with the token they were started with: Authorization: Bearer {prefix}..."
        )
        token = parse_bearer_token(authorization, hint=hint)
        if not token.startswith(prefix):
            _raise_wrong_token(f"the token is not valid here: it must begin with {prefix}")
        reporter = WorkerCaller(f"{token_digest(token)} {path}", address)
        if reporter.key not in self._trusted:
            await self._require_genuine_if_throttled(token, path, address)
        enforce_rate_limit(self._caller_limiter, reporter.key, self._clock.elapsed_s())
        return reporter

    async def _require_genuine_if_throttled(self, token: str, path: str, address: str) -> None:
        if self._address_limiter.consume(address, self._clock.elapsed_s(), cost=0.0):
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(self._throttled_thread, self._is_genuine, token, path):
                now_s = self._clock.elapsed_s()
                enforce_rate_limit(self._address_limiter, address, now_s, error=AuthenticationFailedError)

    def record_response(self, caller: WorkerCaller, status: int) -> bool:
        """Learn from the endpoint's status whether the token is valid, and return it.

        A refusal of an unproven token costs its address a request.
        """
        if status < 300 or status == _NOT_FOUND:
            if len(self._trusted) >= _TRUSTED_MAX:
                self._trusted.clear()
            self._trusted.add(caller.key)
        elif caller.key not in self._trusted and status < 500:
            self._address_limiter.consume(caller.address, self._clock.elapsed_s())
        return caller.key in self._trusted
