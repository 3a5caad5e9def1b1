"""Service accounts: callers that are no persons, whose tokens are replaced while they stay the same caller."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, Self

from fastapi import Path, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import LimitParameter, PrincipalDep, ServiceDep, StoreDep, create_router
from api.http.errors import problem_responses, raise_conflict, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_cursor, encode_cursor
from api.identity.audit import new_audit_entry
from api.identity.authorization import ADMIN, requires
from api.identity.principals import Grant, Principal, generate_account_id, generate_token
from api.tokens import CREATED_BEFORE, LIFETIME_S_MAX, GrantText, TokenName, TokenView, token_view
from scheduler.documents.document import Document, invalid_field
from scheduler.store.api_protocol import AccountNameTakenError, AccountStore, ServiceStore
from scheduler.store.credentials import ApiToken, ServiceAccount

OVERLAP_S_DEFAULT = 86_400.0
OVERLAP_S_MAX = 30 * 86_400.0


class ServiceAccountView(TypedDict):
    """A service account with its tokens, without their secrets."""

    name: Annotated[str, Field(description="Unique name, which is also the display name of the caller.")]
    owner_id: Annotated[str, Field(description="Stable id that owns its jobs. All its tokens share it.")]
    grants: Annotated[
        list[str], Field(description="Roles such as `admin`, or `submitter:research` for a single queue.")
    ]
    created_at_s: Annotated[float, Field(description="Time of creation, in seconds since 1970 (UTC).")]
    created_by: Annotated[str, Field(description="Display name of the caller that created it.")]
    expires_at_s: Annotated[
        float | None, Field(description="End of validity, in seconds since 1970 (UTC). Null: no expiry.")
    ]
    disabled_at_s: Annotated[
        float | None,
        Field(description="Time since which it is disabled, in seconds since 1970 (UTC). Null: it is not."),
    ]
    last_used_at_s: Annotated[
        float | None,
        Field(
            description="Time of the latest request with any of its tokens, in seconds since 1970 (UTC). Null: never."
        ),
    ]
    tokens: Annotated[
        list[TokenView], Field(description="Its tokens that are neither revoked nor expired, oldest first.")
    ]


class ServiceAccountTokenView(TypedDict):
    """A service account with a new token."""

    account: Annotated[ServiceAccountView, Field(description="The account, with all its valid tokens.")]
    token: Annotated[TokenView, Field(description="The new token. It has a `secret` only in the first response.")]
    overlap_until_s: NotRequired[
        Annotated[
            float,
            Field(description="Time at which the earlier tokens expire at the latest, in seconds since 1970 (UTC)."),
        ]
    ]


Lifetime = Annotated[float, Field(gt=0, le=LIFETIME_S_MAX)]
Grants = Annotated[list[GrantText], Field(min_length=1, max_length=100)]
_TOKEN_LIFETIME = "Lifetime of the token, in seconds. Null: it is valid as long as the account."


class ServiceAccountDocument(Document):
    """A service account to create."""

    name: TokenName = Field(description="Unique name of the account, which is shown as the owner of its jobs.")
    grants: Grants = Field(
        description="Roles: admin, or viewer, submitter or queue-admin, each with :QUEUE for a single queue."
    )
    expires_in_s: Lifetime | None = Field(
        default=None, description="Lifetime of the account, in seconds. Null: it does not expire."
    )
    token_expires_in_s: Lifetime | None = Field(default=None, description=_TOKEN_LIFETIME)


class ServiceAccountChange(Document):
    """Changes of a service account. Omitted fields keep their value. They apply to all its tokens within 5 s."""

    enabled: bool | None = Field(default=None, description="Whether its tokens are accepted. Null: unchanged.")
    grants: Grants | None = Field(default=None, description="New roles. Null: unchanged.")
    expires_in_s: Lifetime | None = Field(
        default=None, description="New lifetime of the account from now on, in seconds. Null: unchanged."
    )

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.enabled is None and self.grants is None and self.expires_in_s is None:
            raise invalid_field("enabled", None, "at least one of enabled, grants and expires_in_s")
        return self


class RotationDocument(Document):
    """How to replace the tokens of a service account."""

    overlap_s: Annotated[float, Field(ge=0, le=OVERLAP_S_MAX)] = Field(
        default=OVERLAP_S_DEFAULT,
        description="How long the earlier tokens stay valid, in seconds, at most 30 days. 0: they expire at once.",
    )
    token_expires_in_s: Lifetime | None = Field(default=None, description=_TOKEN_LIFETIME)


router = create_router("identity", prefix="/v1/accounts")
AccountNamePath = Annotated[str, Path(description="Name of the service account.")]


@router.post("", status_code=201, responses={**CREATED_BEFORE, **problem_responses(409)})
@requires(ADMIN)
def create_account(
    document: ServiceAccountDocument,
    service: ServiceDep,
    store: StoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKeyHeader = "",
) -> ServiceAccountTokenView:
    """Create a service account and its first token. Only this response contains the token's secret. With an
    `Idempotency-Key`, a retry returns the same token without the secret; if the first response was lost, rotate."""
    now_s = service.clock.now_s()
    account = ServiceAccount(
        generate_account_id(),
        document.name,
        tuple(document.grants),
        now_s,
        principal.name,
        _compute_expiry(now_s, document.expires_in_s),
    )
    new, secret = _generate_account_token(account, principal, now_s, document.token_expires_in_s)
    creation_key = build_creation_key(key, principal, "account", document)

    def create() -> ApiToken:
        audit = new_audit_entry(principal, now_s, "CreateAccount", account.name, after=_audited_fields(account))
        try:
            store.accounts.create(account, new, audit, creation_key)
        except AccountNameTakenError:
            raise_conflict(f"service account {account.name} exists. Choose another name, or rotate its token")
        return new

    token = create_once(store, creation_key, create, store.tokens.find_by_id)
    if token.id != new.id:
        response.status_code = 200
    return _new_token_response(store.accounts, token, secret if token.id == new.id else "", now_s, response)


@router.get("")
@requires(ADMIN)
def list_accounts(
    service: ServiceDep, store: StoreDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[ServiceAccountView]:
    """List service accounts by name, with their valid tokens."""
    place = decode_cursor(cursor, "accounts", str)
    found = store.accounts.list_accounts(after=place[0] if place else "", limit=limit + 1)
    next_cursor = encode_cursor("accounts", found[limit - 1].name) if len(found) > limit else None
    now_s = service.clock.now_s()
    return {"items": [account_view(each, store.accounts, now_s) for each in found[:limit]], "next": next_cursor}


@router.get("/{name}")
@requires(ADMIN)
def get_account(name: AccountNamePath, service: ServiceDep, store: StoreDep) -> ServiceAccountView:
    """Return a service account with its valid tokens."""
    return account_view(_find_account(store, name), store.accounts, service.clock.now_s())


@router.patch("/{name}")
@requires(ADMIN)
def change_account(
    name: AccountNamePath, change: ServiceAccountChange, service: ServiceDep, store: StoreDep, principal: PrincipalDep
) -> ServiceAccountView:
    """Enable or disable a service account, or change its roles or its expiry."""
    account, now_s = _find_account(store, name), service.clock.now_s()
    changes: dict[str, Any] = {}
    if change.grants is not None:
        changes["grants"] = list(change.grants)
    if change.expires_in_s is not None:
        changes["expires_at_s"] = now_s + change.expires_in_s
    if change.enabled is not None:
        changes["disabled_at_s"] = None if change.enabled else account.disabled_at_s or now_s
    before = {name: value for name, value in _audited_fields(account).items() if name in changes}
    audit = new_audit_entry(principal, now_s, "ChangeAccount", account.name, before=before, after=changes)
    changed = store.accounts.update_account(account.id, changes, audit)
    return account_view(changed or raise_not_found("service account", name), store.accounts, now_s)


@router.post("/{name}:rotate", status_code=201, responses={**CREATED_BEFORE, **problem_responses(409)})
@requires(ADMIN)
def rotate_account(
    name: AccountNamePath,
    document: RotationDocument,
    service: ServiceDep,
    store: StoreDep,
    principal: PrincipalDep,
    *,
    response: Response,
    key: IdempotencyKeyHeader = "",
) -> ServiceAccountTokenView:
    """Create another token of the account. Its earlier tokens expire after `overlap_s`, so that clients can change
    over. Only this response contains the secret; with an `Idempotency-Key`, a retry returns the token without it."""
    account, now_s = _find_account(store, name), service.clock.now_s()
    until_s = now_s + document.overlap_s
    new, secret = _generate_account_token(account, principal, now_s, document.token_expires_in_s)
    creation_key = build_creation_key(key, principal, f"token of {account.id}", document)

    def create() -> ApiToken:
        after = {"token": new.id, "overlap_until_s": until_s}
        audit = new_audit_entry(principal, now_s, "RotateAccount", account.name, after=after)
        if not store.accounts.rotate(new, overlap_until_s=until_s, audit=audit, key=creation_key):
            raise_not_found("service account", name)
        return new

    token = create_once(store, creation_key, create, store.tokens.find_by_id)
    if token.id != new.id:
        response.status_code = 200
        until_s = token.created_at_s + document.overlap_s
    view = _new_token_response(store.accounts, token, secret if token.id == new.id else "", now_s, response)
    return {**view, "overlap_until_s": until_s}


@router.delete("/{name}", status_code=204)
@requires(ADMIN)
def delete_account(name: AccountNamePath, service: ServiceDep, store: StoreDep, principal: PrincipalDep) -> None:
    """Delete a service account and revoke its tokens. Its jobs continue; queue-admins can change them."""
    account, now_s = _find_account(store, name), service.clock.now_s()
    audit = new_audit_entry(principal, now_s, "DeleteAccount", account.name, before=_audited_fields(account))
    if not store.accounts.delete(account.id, now_s, audit):
        raise_not_found("service account", name)


def account_view(account: ServiceAccount, accounts: AccountStore, now_s: float) -> ServiceAccountView:
    tokens = accounts.list_account_tokens(account.id)
    uses = [token.last_used_at_s for token in tokens if token.last_used_at_s is not None]
    return {
        "name": account.name,
        "owner_id": account.owner_id,
        "grants": list(account.grants),
        "created_at_s": account.created_at_s,
        "created_by": account.created_by,
        "expires_at_s": account.expires_at_s,
        "disabled_at_s": account.disabled_at_s,
        "last_used_at_s": max(uses, default=None),
        "tokens": [token_view(token) for token in tokens if token.is_live(now_s)],
    }


def _find_account(store: ServiceStore, name: str) -> ServiceAccount:
    return store.accounts.get_account(name) or raise_not_found("service account", name)


def _compute_expiry(now_s: float, expires_in_s: float | None) -> float | None:
    return None if expires_in_s is None else now_s + expires_in_s


def _generate_account_token(
    account: ServiceAccount, principal: Principal, now_s: float, expires_in_s: float | None
) -> tuple[ApiToken, str]:
    return generate_token(
        account.name,
        map(Grant.parse, account.grants),
        created_by=principal.name,
        now_s=now_s,
        expires_at_s=_compute_expiry(now_s, expires_in_s),
        account=account,
    )


def _new_token_response(
    accounts: AccountStore, token: ApiToken, secret: str, now_s: float, response: Response
) -> ServiceAccountTokenView:
    account = token.account
    if account is None:
        raise_conflict(f"service account {token.name}, which this key created, was deleted. Use a new key")
    response.headers["Location"] = f"/v1/accounts/{account.name}"
    response.headers["Cache-Control"] = "no-store"
    view = token_view(token)
    if secret:
        view["secret"] = secret
    return {"account": account_view(account, accounts, now_s), "token": view}


def _audited_fields(account: ServiceAccount) -> dict[str, Any]:
    return {
        "grants": list(account.grants),
        "expires_at_s": account.expires_at_s,
        "disabled_at_s": account.disabled_at_s,
    }
