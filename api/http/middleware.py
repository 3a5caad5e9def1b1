"""ASGI middleware that every request passes before its body is read and an endpoint runs.

`TimingMiddleware` records metrics. `SecurityMiddleware` checks, in this order:

- request id: takes X-Request-Id from the client or creates one; it is in every response and in the log
- form: path and query are UTF-8 without NUL
- host and origin, only while authentication is off: a local host name (against DNS rebinding) and no foreign web page
- rule: who may call the route (`api.identity.authorization`)
- principal: from the bearer token or the session of the console, with rate limits (`api.identity.authentication`)
- role: on some queue or on all; the endpoint checks the job's queue
- body: at most as large as the rule's setting allows, with or without Content-Length
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import unquote_to_bytes, urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.access_log import AccessLog
from api.http.connection_limits import mark_authenticated
from api.http.deprecation import list_deprecation_headers
from api.http.errors import REQUEST_ID_HEADER, ProblemError, problem_response, unavailable_response
from api.identity.audit import (
    REQUEST_AUDIT,
    RequestAudit,
    lacks_audit_entry,
    record_forbidden_request,
    record_unaudited_change,
)
from api.identity.authentication import TOKEN_PREFIX_BY_CALLER, Authenticator, WorkerAuthenticator
from api.identity.authorization import Caller, RouteRule, RouteRules
from api.identity.principals import ANONYMOUS, WORKER, Principal
from api.identity.sessions import read_session_authorization
from scheduler.network_addresses import is_loopback
from scheduler.settings import Settings
from scheduler.store.protocol import UnavailableError
from scheduler.telemetry.logs import REQUEST_ID
from scheduler.telemetry.metrics import record_request
from scheduler.telemetry.traces import get_current_trace_id

_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class TimingMiddleware:
    """Middleware that records every request by route template and its duration; of a stream, the time until it starts.

    Unknown paths share one label, and so do unknown methods.
    """

    def __init__(self, app: ASGIApp, access_log: AccessLog) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status, stream_started_s = 500, None

        async def record_start(message: Message) -> None:
            nonlocal status, stream_started_s
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                stream_started_s = time.perf_counter() if is_stream else None
            await send(message)

        try:
            await self._app(scope, receive, record_start)
        finally:
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            seconds = (stream_started_s or time.perf_counter()) - started_s
            record_request(
                method=method,
                route=route,
                status=status,
                seconds=seconds,
                trace_id=get_current_trace_id(),
                at_s=time.time(),
            )
            self._access_log.record(scope, method=method, status=status, seconds=seconds)


class AuditUnavailableError(Exception):
    """The audit entry of a change could not be written, so the change is not confirmed."""


_REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:-]{1,100}")


@dataclass(frozen=True, slots=True)
class SecurityMiddleware:
    """`authenticator` is None while authentication is off."""

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
        REQUEST_AUDIT.set(RequestAudit())
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_request_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                await _audit_change(scope, message["status"])
                name = REQUEST_ID_HEADER.lower().encode()
                others = [header for header in message["headers"] if header[0] != name]
                added = [*list_deprecation_headers(scope), *_cache_headers(scope, others)]
                message["headers"] = [*others, (name, request_id.encode()), *added]
                worker_caller = scope.get("state", {}).get("worker_caller")
                if worker_caller and self.worker_authenticator.record_response(worker_caller, message["status"]):
                    mark_authenticated(scope)
            await send(message)

        try:
            rule = await self._authorize(scope)
        except (ProblemError, UnavailableError) as error:
            response = await self._error_response(Request(scope), error)
            await response(scope, receive, send_with_request_id)
            return
        if rule is not None:
            receive = _limit_body(receive, getattr(self.settings, rule.body_setting))
        try:
            await self.app(scope, receive, send_with_request_id)
        except AuditUnavailableError as error:
            await unavailable_response(Request(scope), error)(scope, receive, send_with_request_id)

    async def _authorize(self, scope: Scope) -> RouteRule | None:
        """Authenticate and authorize the request, and return the rule of its route.

        The result is None if no route matches. The principal is stored in the scope's state.
        """
        _refuse_malformed(scope)
        if self.authenticator is None:
            host = _header(scope, b"host").lower()
            self._refuse_foreign_host(host)
            self._refuse_foreign_origin(_header(scope, b"origin").lower(), host)
        template, rule = self.route_rules.match(scope["method"], scope["path"])
        if rule is None:
            return None
        state = scope.setdefault("state", {})
        state["rule"], state["route_template"] = rule, template
        state["principal"] = principal = await self._authenticate(rule, scope)
        if rule.caller is not Caller.PUBLIC and "worker_caller" not in state:
            _require_role(rule, principal)
        _refuse_large_body(scope, getattr(self.settings, rule.body_setting))
        return rule

    async def _authenticate(self, rule: RouteRule, scope: Scope) -> Principal:
        address, authorization = (scope.get("client") or ("", 0))[0], _header(scope, b"authorization")
        rule = replace(rule, caller=_identify_caller(rule, authorization))
        if rule.caller in TOKEN_PREFIX_BY_CALLER:
            scope["state"]["worker_caller"] = await self.worker_authenticator.authenticate(
                rule, authorization, scope["path"], address
            )
            return WORKER
        if rule.caller is Caller.PUBLIC:
            return ANONYMOUS
        if self.authenticator is None:
            mark_authenticated(scope)
            return ANONYMOUS
        if rule.caller is Caller.SCRAPERS and self.settings.metrics_open:
            return ANONYMOUS
        if not authorization and (session := read_session_authorization(Request(scope), self.settings)):
            authorization = session
            scope["state"]["has_session"] = True
        scope["state"]["is_token_valid"] = partial(self.authenticator.is_still_valid, authorization)
        principal = await self.authenticator.authenticate(authorization, address)
        mark_authenticated(scope)
        return principal

    def _refuse_foreign_host(self, host_header: str) -> None:
        if not self.settings.is_loopback:
            return
        host = _hostname(host_header)
        if not is_loopback(host) and host not in self._allowed_hosts:
            detail = (
                f"Host: {host_header!r} is not allowed while authentication is off. Use a loopback name, or add "
                "the host to EBBTIDE_ALLOWED_HOSTS"
            )
            raise ProblemError(421, "misdirected", detail)

    def _refuse_foreign_origin(self, origin: str, host_header: str) -> None:
        """Refuse requests that a page of another site makes in a user's browser. Browsers name the page's origin."""
        site = origin.partition("://")[2]
        if origin and site != host_header and _hostname(site) not in self._allowed_hosts:
            detail = (
                f"Origin: {origin!r} is not allowed while authentication is off. Use a page of this service, or add "
                "its host to EBBTIDE_ALLOWED_HOSTS"
            )
            raise ProblemError(421, "misdirected", detail)

    @property
    def _allowed_hosts(self) -> set[str]:
        """The host names that the operator configured, without the loopback names that every machine has."""
        hosts = {host.strip().lower() for host in self.settings.allowed_hosts.split(",")}
        hosts |= {urlsplit(self.settings.worker_url).hostname or ""}
        return {host for host in hosts if host and not is_loopback(host)}

    async def _error_response(self, request: Request, error: ProblemError | UnavailableError) -> JSONResponse:
        if isinstance(error, UnavailableError):
            return unavailable_response(request, error)
        try:
            await run_in_threadpool(record_forbidden_request, request, error.status)
        except UnavailableError as unavailable:
            return unavailable_response(request, unavailable)
        return problem_response(request, error)


async def _audit_change(scope: Scope, status: int) -> None:
    """Write the audit entry of an accepted change, if its endpoint wrote none. Called before the response starts."""
    state = scope["state"]
    if not 200 <= status < 300 or "rule" not in state or "worker_caller" in state:
        return
    if not lacks_audit_entry(scope["method"], state["rule"]):
        return
    try:
        await run_in_threadpool(record_unaudited_change, Request(scope))
    except UnavailableError as error:
        raise AuditUnavailableError(str(error)) from error


def _identify_caller(rule: RouteRule, authorization: str) -> Caller:
    """Return the kind of caller: one of the rule's `or_callers` if the token has the prefix of that kind."""
    token = authorization.partition(" ")[2].strip()
    others = (kind for kind in rule.or_callers if token.startswith(TOKEN_PREFIX_BY_CALLER[kind]))
    return next(others, rule.caller)


def _require_role(rule: RouteRule, principal: Principal) -> None:
    has_role = principal.has_role(rule.role) if rule.on_all_queues else principal.has_role_anywhere(rule.role)
    if not has_role:
        where = "" if not rule.on_all_queues or rule.role.label == "admin" else " on all queues"
        raise ProblemError(403, "forbidden", f"this needs the role {rule.role.label}{where}; you are {principal}")


def _hostname(authority: str) -> str:
    return (authority if authority.endswith("]") else authority.rsplit(":", 1)[0]).strip("[]")


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID_PATTERN.fullmatch(given) else secrets.token_hex(8)


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _cache_headers(scope: Scope, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the header that keeps caches from storing what a session reads; by default, they ignore cookies."""
    has_session = scope.get("state", {}).get("has_session", False)
    is_set = any(name == b"cache-control" for name, _ in headers)
    return [(b"cache-control", b"no-store")] if has_session and not is_set else []


def _refuse_malformed(scope: Scope) -> None:
    for part, raw in (("path", scope.get("raw_path") or scope["path"].encode()), ("query", scope["query_string"])):
        decoded = unquote_to_bytes(raw)
        try:
            decoded.decode()
        except UnicodeDecodeError:
            raise ProblemError(400, "malformed", f"the {part} is not percent-encoded UTF-8") from None
        if b"\0" in decoded:
            raise ProblemError(400, "malformed", f"the {part} contains a NUL character")


def _refuse_large_body(scope: Scope, bytes_max: int) -> None:
    length = _header(scope, b"content-length")
    if length.isascii() and length.isdigit() and int(length[:20]) > bytes_max:
        raise ProblemError(413, "body-too-large", _too_large_message(bytes_max))


def _limit_body(receive: Receive, bytes_max: int) -> Receive:
    """Return a `receive` that fails once the body exceeds the limit, for bodies without Content-Length."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bytes_max:
            raise HTTPException(413, _too_large_message(bytes_max))  # the only exception that FastAPI does not wrap
        return message

    return bounded


def _too_large_message(bytes_max: int) -> str:
    return f"the request body has more than {bytes_max} bytes, the maximum for this route"
