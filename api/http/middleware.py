"""Times every request under its route's template; a stream until it begins.

Gate: what every request passes before a route sees it, and before its body is read.

id            X-Request-Id, the asker's or a new one; it comes back on every answer and stands in the log
form          path and query are UTF-8 without NUL
host          while nobody has to say who asks: only a name of this machine (against DNS rebinding)
origin        while nobody has to say who asks: no page of another site, in the browser of somebody who may reach us
rule          who may call the route, by method and path (api.identity.authorization)
principal     from the bearer token, with its rate limit (api.identity.authentication, api.identity.authentication)
role          on some queue, or on all; whose job it is, the route finds out
body          no larger than the rule says, whether or not it says its length
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote_to_bytes, urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.errors import REQUEST_ID_HEADER, ProblemError, problem_response, unavailable_response
from api.identity.audit import record_forbidden_request
from api.identity.authentication import TOKEN_PREFIX_BY_CALLER, Authenticator, WorkerAuthenticator
from api.identity.authorization import Caller, RouteRule, RouteRules
from api.identity.principals import ANONYMOUS, WORKER, Principal
from scheduler.settings import Settings, is_loopback
from scheduler.store.protocol import UnavailableError
from scheduler.telemetry.logs import REQUEST_ID
from scheduler.telemetry.metrics import record_request

_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class TimingMiddleware:
    """ASGI middleware. Paths that lead nowhere share one label, and so do invented methods."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status, begun_s = 500, None

        async def note_status(message: Message) -> None:
            nonlocal status, begun_s
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                begun_s = time.perf_counter() if is_stream else None
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            seconds = (begun_s or time.perf_counter()) - started_s
            record_request(method=method, route=route, status=status, seconds=seconds)


_REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:-]{1,100}")


@dataclass(frozen=True, slots=True)
class SecurityMiddleware:
    """ASGI middleware. `authenticator` is None where nobody has to say who asks."""

    app: ASGIApp
    settings: Settings
    route_rules: RouteRules
    authenticator: Authenticator | None
    worker_authenticator: WorkerAuthenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        REQUEST_ID.set(request_id)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = REQUEST_ID_HEADER.lower().encode()
                others = [header for header in message["headers"] if header[0] != name]
                message["headers"] = [*others, (name, request_id.encode())]
                reporter = scope.get("state", {}).get("reporter")
                if reporter is not None:
                    self.worker_authenticator.record_response(reporter, message["status"])
            await send(message)

        try:
            rule = await self._authorize(scope)
        except (ProblemError, UnavailableError) as refused:
            answer = await self._error_response(Request(scope), refused)
            await answer(scope, receive, tagged)
            return
        if rule is not None:
            receive = _limit_body(receive, getattr(self.settings, rule.body_setting))
        await self.app(scope, receive, tagged)

    async def _authorize(self, scope: Scope) -> RouteRule | None:
        """The rule that lets this request pass, its principal in the request's state; None where no route takes it."""
        _refuse_malformed(scope)
        if self.authenticator is None:
            host = _header(scope, b"host").lower()
            self._refuse_foreign_host(host)
            self._refuse_foreign_origin(_header(scope, b"origin").lower(), host)
        rule = self.route_rules.find(scope["method"], scope["path"])
        if rule is None:
            return None
        state = scope.setdefault("state", {})
        state["rule"] = rule
        state["principal"] = principal = await self._authenticate(rule, scope)
        if rule.caller is not Caller.PUBLIC:
            _require_role(rule, principal)
        _refuse_large_body(scope, getattr(self.settings, rule.body_setting))
        return rule

    async def _authenticate(self, rule: RouteRule, scope: Scope) -> Principal:
        address, authorization = (scope.get("client") or ("", 0))[0], _header(scope, b"authorization")
        if rule.caller in TOKEN_PREFIX_BY_CALLER:
            scope["state"]["reporter"] = self.worker_authenticator.authenticate(
                rule, authorization, scope["path"], address
            )
            return WORKER
        if self.authenticator is None or rule.caller is Caller.PUBLIC:
            return ANONYMOUS
        if rule.caller is Caller.SCRAPERS and self.settings.metrics_open:
            return ANONYMOUS
        scope["state"]["is_good"] = partial(self.authenticator.is_still_valid, authorization)
        return await self.authenticator.authenticate(authorization, address)

    def _refuse_foreign_host(self, named: str) -> None:
        if not self.settings.is_loopback:
            return
        host = _hostname(named)
        if not is_loopback(host) and host not in self._allowed_hosts:
            detail = (
                f"Host: got {named!r}; allowed: a name of this machine, or one of EBBTIDE_ALLOWED_HOSTS, because here "
                "nobody has to say who asks"
            )
            raise ProblemError(421, "misdirected", detail)

    def _refuse_foreign_origin(self, origin: str, named: str) -> None:
        """A browser sends what any page asks for, without looking where it needs no body; it says whose page it is."""
        site = origin.partition("://")[2]
        if origin and site != named and _hostname(site) not in self._allowed_hosts:
            detail = (
                f"Origin: got {origin!r}; allowed: pages of this service, or of EBBTIDE_ALLOWED_HOSTS, because "
                "here nobody has to say who asks"
            )
            raise ProblemError(421, "misdirected", detail)

    @property
    def _allowed_hosts(self) -> set[str]:
        """Names that the operator has given to this service, beside those that every machine has for itself."""
        named = {each.strip().lower() for each in self.settings.allowed_hosts.split(",")}
        named |= {urlsplit(self.settings.worker_url).hostname or ""}
        return {each for each in named if each and not is_loopback(each)}

    async def _error_response(self, request: Request, refused: ProblemError | UnavailableError) -> JSONResponse:
        if isinstance(refused, UnavailableError):
            return unavailable_response(request, refused)
        try:
            await run_in_threadpool(record_forbidden_request, request, refused.status)
        except UnavailableError as away:
            return unavailable_response(request, away)
        return problem_response(request, refused)


def _require_role(rule: RouteRule, principal: Principal) -> None:
    has = principal.has_role(rule.role) if rule.on_all_queues else principal.has_role_anywhere(rule.role)
    if not has:
        where = "" if not rule.on_all_queues or rule.role.label == "admin" else " on all queues"
        raise ProblemError(403, "forbidden", f"this needs the role {rule.role.label}{where}; you are {principal}")


def _hostname(authority: str) -> str:
    return (authority if authority.endswith("]") else authority.rsplit(":", 1)[0]).strip("[]")


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID_PATTERN.fullmatch(given) else secrets.token_hex(8)


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _refuse_malformed(scope: Scope) -> None:
    for what, raw in (("path", scope.get("raw_path") or scope["path"].encode()), ("query", scope["query_string"])):
        found = unquote_to_bytes(raw)
        try:
            found.decode()
        except UnicodeDecodeError:
            raise ProblemError(400, "malformed", f"{what}: allowed: UTF-8, percent-encoded") from None
        if b"\0" in found:
            raise ProblemError(400, "malformed", f"{what}: got a NUL; allowed: text")


def _refuse_large_body(scope: Scope, bytes_max: int) -> None:
    length = _header(scope, b"content-length")
    if length.isascii() and length.isdigit() and int(length[:20]) > bytes_max:
        raise ProblemError(413, "body-too-large", _too_large_message(bytes_max))


def _limit_body(receive: Receive, bytes_max: int) -> Receive:
    """For bodies that do not say how long they are."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bytes_max:
            raise HTTPException(
                413, _too_large_message(bytes_max)
            )  # FastAPI lets this class of errors pass, and no other
        return message

    return bounded


def _too_large_message(bytes_max: int) -> str:
    return f"the body has more than {bytes_max} bytes, which is the most that is taken here"
