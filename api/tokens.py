"""API tokens, the caller's identity, and the audit log."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NotRequired

from fastapi import Query, Response
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from api.http.dependencies import LimitParameter, PrincipalDep, ServiceDep, create_router
from api.http.errors import problem_responses, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_cursor, encode_cursor, page_by_number
from api.identity.authorization import ADMIN, VIEWER, requires
from api.identity.principals import Grant, Principal, generate_token
from scheduler.documents.document import Document
from scheduler.store.api_protocol import ApiToken, AuditEntry, AuditFilter, HistoryLog, StoredAuditEntry
from scheduler.telemetry.logs import REQUEST_ID


class TokenView(TypedDict):
    """A token without its secret. Times are in seconds since 1970 (UTC). Only the response to its creation contains
    `secret`."""

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


class WhoAmIView(TypedDict):
    """The caller. `token_id` is empty without an API token."""

    name: str
    grants: list[str]
    token_id: str


class AuditView(TypedDict):
    """A requested change. `at_s` is in seconds since 1970 (UTC). `before` and `after` hold the changed fields."""

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


def audit_view(stored: StoredAuditEntry) -> AuditView:
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


router = create_router("identity")

LIFETIME_S_MAX = 10 * 366 * 86_400.0
TOKEN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}$"
GrantText = Annotated[str, AfterValidator(lambda text: str(Grant.parse(text))), Field(max_length=100)]


class TokenDocument(Document):
    """`name`: the principal's name, which becomes the owner of its jobs. `grants`: admin, or viewer, submitter or
    queue-admin, each with :QUEUE for a single queue. `expires_in_s`: lifetime in seconds; without it the token does not
    expire."""

    name: Annotated[str, Field(pattern=TOKEN_NAME_PATTERN)]
    grants: Annotated[list[GrantText], Field(min_length=1, max_length=100)]
    expires_in_s: Annotated[float, Field(gt=0, le=LIFETIME_S_MAX)] | None = None


@router.get("/whoami")
@requires(VIEWER)
def who_am_i(principal: PrincipalDep) -> WhoAmIView:
    """Return the caller's name and roles. While authentication is off, the caller is `anybody`."""
    return {"name": principal.name, "grants": list(map(str, principal.grants)), "token_id": principal.token_id}


@router.post("/tokens", status_code=201)
@requires(ADMIN)
def create_token(
    document: TokenDocument, service: ServiceDep, principal: PrincipalDep, response: Response
) -> TokenView:
    """Create a token. Only this response contains its secret; the service stores a digest."""
    now_s = service.clock.now_s()
    expires_at_s = None if document.expires_in_s is None else now_s + document.expires_in_s
    grants = [Grant.parse(text) for text in document.grants]
    token, secret = generate_token(
        document.name, grants, created_by=principal.name, now_s=now_s, expires_at_s=expires_at_s
    )
    service.store.tokens.add(token, token_audit_entry("CreateToken", token, principal, now_s))
    response.headers["Location"] = f"/v1/tokens/{token.id}"
    response.headers["Cache-Control"] = "no-store"
    return {**token_view(token), "secret": secret}


@router.get("/tokens")
@requires(ADMIN)
def list_tokens(service: ServiceDep, limit: LimitParameter = 100, cursor: CursorParameter = "") -> PageOf[TokenView]:
    """List all tokens by id, including revoked and expired ones, without their secrets."""
    place = decode_cursor(cursor, "tokens", str)
    found = service.store.tokens.list_tokens(after=place[0] if place else "", limit=limit + 1)
    next_cursor = encode_cursor("tokens", found[limit - 1].id) if len(found) > limit else None
    return {"items": [token_view(token) for token in found[:limit]], "next": next_cursor}


@router.get("/tokens/{token_id}")
@requires(ADMIN)
def get_token(token_id: str, service: ServiceDep) -> TokenView:
    """Return a token without its secret."""
    return token_view(service.store.tokens.find_by_id(token_id) or raise_not_found("token", token_id))


@router.delete("/tokens/{token_id}")
@requires(ADMIN)
def revoke_token(token_id: str, service: ServiceDep, principal: PrincipalDep) -> TokenView:
    """Revoke a token. Every process rejects it within 5 s. Revoking again changes nothing."""
    now_s, token = service.clock.now_s(), service.store.tokens.find_by_id(token_id)
    if token is None:
        raise_not_found("token", token_id)
    entry = token_audit_entry("RevokeToken", token, principal, now_s)
    return token_view(service.store.tokens.revoke(token_id, now_s, entry) or raise_not_found("token", token_id))


def token_audit_entry(action: str, token: ApiToken, principal: Principal, now_s: float) -> AuditEntry:
    """Return the audit log entry for a created or revoked token."""
    fields = {"name": token.name, "grants": list(token.grants), "expires_at_s": token.expires_at_s}
    before, after = (None, fields) if action == "CreateToken" else (fields, None)
    return AuditEntry(now_s, principal.name, principal.token_id, action, token.id, before, after, REQUEST_ID.get())


audit_router = create_router("identity")


@audit_router.get("/audit", responses=problem_responses(410))
@requires(ADMIN)
def list_audit(
    service: ServiceDep,
    actor: str = "",
    subject: str = "",
    since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    *,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[AuditView]:
    """List requested changes, oldest first, including forbidden ones. Reports of workers and agents are not audited."""
    filters = AuditFilter(actor, subject, since_s)
    read = partial(service.store.audit_log.list_entries, filters=filters)
    get_retention_mark = partial(service.store.get_retention_mark, HistoryLog.AUDIT)
    page = page_by_number(
        "audit", read, lambda _: True, get_retention_mark=get_retention_mark, after=0, cursor=cursor, limit=limit
    )
    return {"items": [audit_view(row) for row in page["items"]], "next": page["next"]}
