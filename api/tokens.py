"""API tokens, the caller's identity, and the audit log. `api.accounts` has the tokens of service accounts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from fastapi import Path, Query, Response
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import LimitParameter, PrincipalDep, ServiceDep, create_router
from api.http.errors import problem_responses, raise_not_found
from api.http.paging import (
    CursorParameter,
    PageOf,
    decode_cursor,
    encode_cursor,
    page_by_number,
    page_newest_first,
)
from api.identity.audit import new_audit_entry
from api.identity.authorization import ADMIN, VIEWER, requires
from api.identity.principals import Grant, Principal, generate_token
from scheduler.documents.document import Document, require_form
from scheduler.store.api_protocol import AuditEntry, AuditFilter, HistoryLog, StoredAuditEntry
from scheduler.store.credentials import ApiToken


class TokenView(TypedDict):
    """A token without its secret."""

    id: Annotated[str, Field(description="Public id, with which to revoke the token.")]
    name: Annotated[str, Field(description="Display name of the caller with the token. Several callers may have it.")]
    owner_id: Annotated[
        str, Field(description="Stable id of the caller with the token, which owns what the caller creates.")
    ]
    account: Annotated[str, Field(description="Service account that the token belongs to. Empty: none.")]
    prefix: Annotated[str, Field(description="First characters of the secret, to recognize it.")]
    grants: Annotated[
        list[str], Field(description="Roles such as `admin`, or `submitter:research` for a single queue.")
    ]
    created_at_s: Annotated[float, Field(description="Time of creation, in seconds since 1970 (UTC).")]
    created_by: Annotated[str, Field(description="Principal that requested the token.")]
    expires_at_s: Annotated[
        float | None, Field(description="End of validity, in seconds since 1970 (UTC). Null: no expiry.")
    ]
    last_used_at_s: Annotated[
        float | None, Field(description="Time of the latest request with it, in seconds since 1970 (UTC). Null: never.")
    ]
    revoked_at_s: Annotated[
        float | None, Field(description="Time of revocation, in seconds since 1970 (UTC). Null: not revoked.")
    ]
    secret: NotRequired[
        Annotated[
            str,
            Field(
                description="Text to send as `Authorization: Bearer`. Only in the response to its creation, and not in "
                "that to a repeated request with its `Idempotency-Key`."
            ),
        ]
    ]


class WhoAmIView(TypedDict):
    """The caller of the request."""

    name: Annotated[str, Field(description="Display name of the caller. `anybody` while authentication is off.")]
    owner_id: Annotated[
        str,
        Field(description="Stable id that the caller alone has, such as `token:tok-3f9c`, and which owns its jobs."),
    ]
    grants: Annotated[
        list[str], Field(description="Roles such as `admin`, or `submitter:research` for a single queue.")
    ]
    token_id: Annotated[
        str, Field(description="API token of the request. Empty: another kind of authentication, or none.")
    ]


class AuditView(TypedDict):
    """A requested change."""

    number: Annotated[int, Field(description="Position in the log. Numbers ascend and never repeat.")]
    at_s: Annotated[float, Field(description="Time of the request, in seconds since 1970 (UTC).")]
    actor: Annotated[str, Field(description="Display name of the caller that requested the change.")]
    actor_id: Annotated[str, Field(description="Stable id of that caller. Empty: recorded by an older release.")]
    token_id: Annotated[str, Field(description="API token of the request. Empty: none.")]
    action: Annotated[str, Field(description="Name of the command or, for a forbidden request, method and path.")]
    subject: Annotated[
        str, Field(description="Job id, or name of the pool, node or queue. `fleet`: a fleet-wide switch.")
    ]
    before: Annotated[
        dict[str, Any] | None,
        Field(description="Values of the changed fields as they were. Null: the subject did not exist."),
    ]
    after: Annotated[
        dict[str, Any] | None,
        Field(description="Values of the changed fields from then on. Null: the subject was removed."),
    ]
    request_id: Annotated[str, Field(description="Value of the response header `X-Request-Id`.")]
    outcome: Annotated[str, Field(description="`accepted` or `forbidden`.")]


class ChainProblemView(TypedDict):
    number: Annotated[int, Field(description="Position in the log of the entry. 0: no single entry.")]
    problem: Annotated[str, Field(description="What the check found there.")]


class ChainReportView(TypedDict):
    """Result of verifying the audit log."""

    chained: Annotated[bool, Field(description="Whether entries have digests: the setting `audit_chain`.")]
    entries: Annotated[int, Field(description="Number of entries with a digest.")]
    first_number: Annotated[int, Field(description="Position of the first of them. 0: none.")]
    last_number: Annotated[int, Field(description="Position of the last of them. 0: none.")]
    digest: Annotated[str, Field(description="Digest of the newest entry, to keep elsewhere. Empty: none.")]
    problems: Annotated[list[ChainProblemView], Field(description="Breaks of the chain. Empty: it is intact.")]


def token_view(token: ApiToken) -> TokenView:
    return {
        "id": token.id,
        "name": token.name,
        "owner_id": token.owner_id,
        "account": "" if token.account is None else token.account.name,
        "prefix": token.prefix,
        "grants": list(token.effective_grants),
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
        "actor_id": entry.actor_id,
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
TokenName = Annotated[
    str,
    Field(json_schema_extra={"pattern": TOKEN_NAME_PATTERN}),
    require_form(TOKEN_NAME_PATTERN, "1 to 63 letters, digits and . _ @ + -, starting with a letter or digit"),
]
_DIGEST_PATTERN = r"^([0-9a-f]{64})?$"
GrantText = Annotated[str, AfterValidator(lambda text: str(Grant.parse(text))), Field(max_length=100)]
TokenIdPath = Annotated[str, Path(description="Public id from the response to its creation, not the secret.")]


class TokenDocument(Document):
    """A token to create."""

    name: TokenName = Field(
        description="Display name of the caller with the token. Another token of this name is another caller."
    )
    grants: Annotated[list[GrantText], Field(min_length=1, max_length=100)] = Field(
        description="Roles: admin, or viewer, submitter or queue-admin, each with :QUEUE for a single queue."
    )
    expires_in_s: Annotated[float, Field(gt=0, le=LIFETIME_S_MAX)] | None = Field(
        default=None, description="Lifetime in seconds. Null: the token does not expire."
    )


@router.get("/whoami")
@requires(VIEWER)
def who_am_i(principal: PrincipalDep) -> WhoAmIView:
    """Return the caller's name, id and roles. While authentication is off, the caller is `anybody`."""
    return {
        "name": principal.name,
        "owner_id": principal.subject,
        "grants": list(map(str, principal.grants)),
        "token_id": principal.token_id,
    }


CREATED_BEFORE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The `Idempotency-Key` was used before. The token of the first request, without its secret."}
}


@router.post("/tokens", status_code=201, responses={**CREATED_BEFORE, **problem_responses(409)})
@requires(ADMIN)
def create_token(
    document: TokenDocument,
    service: ServiceDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKeyHeader = "",
) -> TokenView:
    """Create a token. Only this response contains its secret; the service stores a digest. With an `Idempotency-Key`, a
    retry returns the same token without the secret; if the first response was lost, revoke it and create another."""
    now_s = service.clock.now_s()
    expires_at_s = None if document.expires_in_s is None else now_s + document.expires_in_s
    grants = [Grant.parse(text) for text in document.grants]
    new, secret = generate_token(
        document.name, grants, created_by=principal.name, now_s=now_s, expires_at_s=expires_at_s
    )
    creation_key = build_creation_key(key, principal, "token", document)

    def create() -> ApiToken:
        service.store.tokens.add(new, token_audit_entry("CreateToken", new, principal, now_s), creation_key)
        return new

    token = create_once(service.store, creation_key, create, service.store.tokens.find_by_id)
    response.headers["Location"] = f"/v1/tokens/{token.id}"
    response.headers["Cache-Control"] = "no-store"
    if token.id == new.id:
        return {**token_view(token), "secret": secret}
    response.status_code = 200
    return token_view(token)


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
def get_token(token_id: TokenIdPath, service: ServiceDep) -> TokenView:
    """Return a token without its secret."""
    return token_view(service.store.tokens.find_by_id(token_id) or raise_not_found("token", token_id))


@router.delete("/tokens/{token_id}")
@requires(ADMIN)
def revoke_token(token_id: TokenIdPath, service: ServiceDep, principal: PrincipalDep) -> TokenView:
    """Revoke a token. Every process rejects it within 5 s. Revoking again changes nothing."""
    now_s, token = service.clock.now_s(), service.store.tokens.find_by_id(token_id)
    if token is None:
        raise_not_found("token", token_id)
    entry = token_audit_entry("RevokeToken", token, principal, now_s)
    return token_view(service.store.tokens.revoke(token_id, now_s, entry) or raise_not_found("token", token_id))


def token_audit_entry(action: str, token: ApiToken, principal: Principal, now_s: float) -> AuditEntry:
    """Return the audit log entry for a created or revoked token."""
    values = {"name": token.name, "grants": list(token.effective_grants), "expires_at_s": token.expires_at_s}
    before, after = (None, values) if action == "CreateToken" else (values, None)
    return new_audit_entry(principal, now_s, action, token.id, before=before, after=after)


audit_router = create_router("identity")


@audit_router.get("/audit", responses=problem_responses(410))
@requires(ADMIN)
def list_audit(
    service: ServiceDep,
    actor: Annotated[
        str, Query(description="Only changes that callers of this display name requested. Empty: all.")
    ] = "",
    actor_id: Annotated[
        str, Query(description="Only changes that the caller with this `owner_id` requested. Empty: all.")
    ] = "",
    subject: Annotated[str, Query(description="Only changes of this job id, pool, node or queue. Empty: all.")] = "",
    since_s: Annotated[
        float | None,
        Query(
            ge=0, allow_inf_nan=False, description="Only changes at or after this time, in seconds since 1970 (UTC)."
        ),
    ] = None,
    *,
    order: Annotated[Literal["oldest", "newest"], Query(description="Which entries come first.")] = "oldest",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[AuditView]:
    """List requested changes, including forbidden ones. Reports of workers and agents are not audited."""
    filters, log = AuditFilter(actor, subject, since_s, actor_id), service.store.audit_log
    if order == "newest":
        read_newest = partial(log.list_newest, filters=filters)
        page = page_newest_first("audit newest first", read_newest, cursor=cursor, limit=limit)
    else:
        read = partial(log.list_entries, filters=filters)
        mark = partial(service.store.get_retention_mark, HistoryLog.AUDIT)
        page = page_by_number(
            "audit", read, lambda _: True, get_retention_mark=mark, after=0, cursor=cursor, limit=limit
        )
    return {"items": [audit_view(row) for row in page["items"]], "next": page["next"]}


@audit_router.get("/audit:verify")
@requires(ADMIN)
def verify_audit(
    service: ServiceDep,
    digest: Annotated[
        str,
        Query(
            json_schema_extra={"pattern": _DIGEST_PATTERN}, description="Digest that the log must contain. Empty: any."
        ),
        require_form(_DIGEST_PATTERN, "the 64 hexadecimal digits that an earlier verification printed"),
    ] = "",
) -> ChainReportView:
    """Check that no entry of the audit log was changed, removed, inserted or moved since it was written."""
    report = service.store.audit_log.verify_chain(digest)
    return {
        "chained": report.is_chained,
        "entries": report.entries,
        "first_number": report.first_number,
        "last_number": report.last_number,
        "digest": report.digest,
        "problems": [{"number": each.number, "problem": each.problem} for each in report.problems],
    }
