"""What the API tells of tokens, of who asks, and of the audit log."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from scheduler.store.front import ApiToken, StoredEntry


class TokenView(TypedDict):
    """Times in seconds since 1970 (UTC). `secret` stands in the answer to its making, and never again."""

    id: str
    name: str
    prefix: str
    grants: list[str]
    created_at_s: float
    created_by: str
    expires_at_s: float | None
    last_used_at_s: float | None
    revoked_at_s: float | None
    secret: NotRequired[str]


class WhoView(TypedDict):
    """`token_id` is empty for who came without an API token."""

    name: str
    grants: list[str]
    token_id: str


class AuditView(TypedDict):
    """A change that was asked for. `at_s` in seconds since 1970 (UTC). `before` and `after`: the fields it changed."""

    number: int
    at_s: float
    actor: str
    token_id: str
    action: str
    subject: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str
    outcome: str


def token_view(token: ApiToken) -> TokenView:
    return {
        "id": token.id,
        "name": token.name,
        "prefix": token.prefix,
        "grants": list(token.grants),
        "created_at_s": token.created_at_s,
        "created_by": token.created_by,
        "expires_at_s": token.expires_at_s,
        "last_used_at_s": token.last_used_at_s,
        "revoked_at_s": token.revoked_at_s,
    }


def audit_view(stored: StoredEntry) -> AuditView:
    entry = stored.entry
    return {
        "number": stored.number,
        "at_s": entry.at_s,
        "actor": entry.actor,
        "token_id": entry.token_id,
        "action": entry.action,
        "subject": entry.subject,
        "before": None if entry.before is None else dict(entry.before),
        "after": None if entry.after is None else dict(entry.after),
        "request_id": entry.request_id,
        "outcome": entry.outcome,
    }
