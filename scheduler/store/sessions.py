"""Sessions of the web console and one-time login codes: records and the interface of their store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler.store.api_protocol import AuditEntry


@dataclass(frozen=True, slots=True)
class SignedInUser:
    """The user of a session or of a login code.

    Args:
        token_id: the API token that the user signed in with. The session ends with the token. Empty: another kind.
        principal: fields of the principal as JSON if there is no token.
        expires_at_s: end of validity of the token or of the issuer's identity token, in Unix seconds. None: no end.
    """

    token_id: str
    principal: Mapping[str, Any]
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoginCode:
    """A code that signs one browser in, once.

    Args:
        digest: SHA-256 of the code in hexadecimal.
        browser: digest of a cookie of the browser that the code is for. Empty: any browser.
    """

    digest: str
    user: SignedInUser
    browser: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A browser that is signed in. `digest` is the SHA-256 of the session's credential in hexadecimal."""

    id: str
    digest: str
    user: SignedInUser
    created_at_s: float
    expires_at_s: float


class SessionStore(Protocol):
    """Sessions and login codes. Every method may raise UnavailableError."""

    def add_code(self, code: LoginCode, *, now_s: float, audit: AuditEntry | None = None) -> None:
        """Store a code and its audit entry, and delete expired codes, in one transaction."""

    def take_code(self, digest: str, *, browser: str, now_s: float) -> LoginCode | None:
        """Delete the code and return it. None if it is unknown, was taken, has expired, or is for another browser."""

    def add(self, session: ConsoleSession, audit: AuditEntry) -> None:
        """Store a session and its audit entry, and delete expired sessions, in one transaction."""

    def find(self, digest: str) -> ConsoleSession | None: ...

    def delete(self, session_id: str, audit: AuditEntry) -> None:
        """Delete a session and write the audit entry in one transaction. An unknown id changes nothing."""
