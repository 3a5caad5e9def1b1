"""What the API tells of tokens, of who asks, and of the audit log.

API tokens: make, list, look at, revoke; and who asks.

The audit log: who asked for which change.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NotRequired

from fastapi import Query, Response
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from api.http.dependencies import LimitParameter, PrincipalDep, ServiceDep, create_router
from api.http.errors import problem_responses, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_cursor, encode_cursor, page_by_number
from api.identity.principals import Grant, Principal, generate_token
from scheduler.documents.document import Document
from scheduler.store.api_protocol import ApiToken, AuditEntry, AuditFilter, HistoryLog, StoredAuditEntry
from scheduler.telemetry.logs import REQUEST_ID


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


class WhoAmIView(TypedDict):
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
    """`name` is who asks with it: jobs are owned by it. `grants`: each viewer, submitter, queue-admin, perhaps with
    :QUEUE, or admin. `expires_in_s`: seconds from now; absent: never."""

    name: Annotated[str, Field(pattern=TOKEN_NAME_PATTERN)]
    grants: Annotated[list[GrantText], Field(min_length=1, max_length=100)]
    expires_in_s: Annotated[float, Field(gt=0, le=LIFETIME_S_MAX)] | None = None


@router.get("/whoami")
def who_am_i(principal: PrincipalDep) -> WhoAmIView:
    """Who asks, and with which roles. Where nobody has to say who asks, everybody is `anybody`."""
    return {"name": principal.name, "grants": list(map(str, principal.grants)), "token_id": principal.token_id}


@router.post("/tokens", status_code=201)
def create_token(
    document: TokenDocument, service: ServiceDep, principal: PrincipalDep, response: Response
) -> TokenView:
    """Make a token. Its secret is in this answer alone: only a digest of it is kept."""
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
def list_tokens(service: ServiceDep, limit: LimitParameter = 100, cursor: CursorParameter = "") -> PageOf[TokenView]:
    """All tokens by id, revoked and expired ones too, without their secrets."""
    place = decode_cursor(cursor, "tokens", str)
    found = service.store.tokens.list_tokens(after=place[0] if place else "", limit=limit + 1)
    following = encode_cursor("tokens", found[limit - 1].id) if len(found) > limit else None
    return {"items": [token_view(token) for token in found[:limit]], "next": following}


@router.get("/tokens/{token_id}")
def get_token(token_id: str, service: ServiceDep) -> TokenView:
    """A token, without its secret."""
    return token_view(service.store.tokens.find_by_id(token_id) or raise_not_found("token", token_id))


@router.delete("/tokens/{token_id}")
def revoke_token(token_id: str, service: ServiceDep, principal: PrincipalDep) -> TokenView:
    """End a token. Every process of the API refuses it within 5 s. Again, it changes nothing."""
    now_s, token = service.clock.now_s(), service.store.tokens.find_by_id(token_id)
    if token is None:
        raise_not_found("token", token_id)
    entry = token_audit_entry("RevokeToken", token, principal, now_s)
    return token_view(service.store.tokens.revoke(token_id, now_s, entry) or raise_not_found("token", token_id))


def token_audit_entry(action: str, token: ApiToken, principal: Principal, now_s: float) -> AuditEntry:
    """What the audit log says of a token that is made or revoked."""
    told = {"name": token.name, "grants": list(token.grants), "expires_at_s": token.expires_at_s}
    before, after = (None, told) if action == "CreateToken" else (told, None)
    return AuditEntry(now_s, principal.name, principal.token_id, action, token.id, before, after, REQUEST_ID.get())


audit_router = create_router("identity")


@audit_router.get("/audit", responses=problem_responses(410))
def list_audit(
    service: ServiceDep,
    actor: str = "",
    subject: str = "",
    since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
    *,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[AuditView]:
    """Changes asked for, oldest first: forbidden ones too. What workers and agents report is none."""
    wanted = AuditFilter(actor, subject, since_s)
    read = partial(service.store.audit_log.list_entries, filters=wanted)
    swept = partial(service.store.get_retention_mark, HistoryLog.AUDIT)
    page = page_by_number("audit", read, lambda _: True, swept=swept, after=0, cursor=cursor, limit=limit)
    return {"items": [audit_view(row) for row in page["items"]], "next": page["next"]}
