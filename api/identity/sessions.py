"""Sessions of the web console.

A session has two random parts. The browser keeps one in an HttpOnly cookie. The page keeps the other, the key, in the
storage of its origin and sends it as a header. Browsers send cookies of 127.0.0.1 to every port of it, so the server of
another user on this machine can receive the cookie, but it cannot read the key. Pages of other sites cannot send the
header. Decision record 24 has the reasons.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from api.http.errors import ProblemError
from api.identity.audit import new_audit_entry
from api.identity.principals import Grant, Principal, token_digest
from scheduler.settings import Settings
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.sessions import ConsoleSession, SignedInUser

SESSION_PREFIX = "ebs_"
KEY_HEADER = "X-Ebbtide-Session-Key"
REDIRECT_CODE_S = 60.0
"""Lifetime of a login code that a redirect hands to the page."""
_SECRET_BYTES = 32


def session_cookie_name(settings: Settings) -> str:
    """Return a name with the port: browsers share cookies between all ports of a host."""
    return f"ebbtide_session_{settings.port}"


def generate_session(user: SignedInUser, *, now_s: float, session_s: float) -> tuple[ConsoleSession, str, str]:
    """Return a new session to store, its cookie and its key. Neither secret is stored."""
    cookie, key = secrets.token_urlsafe(_SECRET_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    end_s = now_s + session_s if user.expires_at_s is None else min(now_s + session_s, user.expires_at_s)
    digest = token_digest(_join_parts(cookie, key))
    return ConsoleSession(f"ses-{secrets.token_hex(6)}", digest, user, now_s, end_s), cookie, key


def read_session_authorization(connection: HTTPConnection, settings: Settings) -> str:
    """Return the session of a request as the value of an Authorization header; empty without a session.

    A request that a page of another site makes has none.
    """
    cookie = connection.cookies.get(session_cookie_name(settings), "")
    key = connection.headers.get(KEY_HEADER, "")
    if not cookie or not key or is_foreign_page(connection, settings):
        return ""
    return f"Bearer {_join_parts(cookie, key)}"


def is_foreign_page(connection: HTTPConnection, settings: Settings) -> bool:
    """Return whether a page of another origin makes the request in a browser."""
    headers = connection.headers
    if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return True
    origin = headers.get("Origin", "").lower()
    own = {headers.get("Host", "").lower(), urlsplit(settings.browser_url).netloc.lower()}
    return bool(origin) and urlsplit(origin).netloc not in own


def refuse_foreign_page(connection: HTTPConnection, settings: Settings) -> None:
    """Raise a 403 if a page of another origin makes the request in a browser."""
    if is_foreign_page(connection, settings):
        detail = (
            "a page of another site sent this request. Use the console of this service. If a proxy changes the Host "
            "header, set EBBTIDE_CONSOLE_URL"
        )
        raise ProblemError(403, "forbidden", detail)


def encode_principal(principal: Principal) -> dict[str, Any]:
    """Return the principal as JSON fields, for a session without an API token."""
    values = {field.name: getattr(principal, field.name) for field in fields(principal)}
    return values | {"grants": list(map(str, principal.grants))}


def decode_principal(values: Mapping[str, Any]) -> Principal:
    return Principal(**{**values, "grants": tuple(map(Grant.parse, values["grants"]))})


def session_audit_entry(action: str, session_id: str, principal: Principal, now_s: float) -> AuditEntry:
    """Return the audit log entry for a sign-in or sign-out."""
    return new_audit_entry(principal, now_s, action, session_id)


def _join_parts(cookie: str, key: str) -> str:
    return f"{SESSION_PREFIX}{cookie}~{key}"
