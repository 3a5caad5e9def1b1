"""API tokens: make, list, look at, revoke; and who asks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Response
from pydantic import AfterValidator, Field

from api.answers.identity import TokenView, WhoView, token_view
from api.answers.page import PageOf
from api.dependencies import Limit, PrincipalDep, ServiceDep
from api.errors import not_found
from api.identity.api_token import new_token
from api.identity.principal import Grant, Principal
from api.paging import Cursor, cursor_of, place_in
from api.routing import noun_router
from scheduler.documents.document import Document
from scheduler.store.front import ApiToken, AuditEntry
from scheduler.telemetry.logs import REQUEST_ID

router = noun_router("identity")

LIFE_S_MAX = 10 * 366 * 86_400.0
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}$"
GrantText = Annotated[str, AfterValidator(lambda text: str(Grant.of(text))), Field(max_length=100)]


class TokenDocument(Document):
    """`name` is who asks with it: jobs are owned by it. `grants`: each viewer, submitter, queue-admin, perhaps with
    :QUEUE, or admin. `expires_in_s`: seconds from now; absent: never."""

    name: Annotated[str, Field(pattern=NAME)]
    grants: Annotated[list[GrantText], Field(min_length=1, max_length=100)]
    expires_in_s: Annotated[float, Field(gt=0, le=LIFE_S_MAX)] | None = None


@router.get("/whoami")
def who_am_i(principal: PrincipalDep) -> WhoView:
    """Who asks, and with which roles. Where nobody has to say who asks, everybody is `anybody`."""
    return {"name": principal.name, "grants": list(map(str, principal.grants)), "token_id": principal.token_id}


@router.post("/tokens", status_code=201)
def create_token(
    document: TokenDocument, service: ServiceDep, principal: PrincipalDep, response: Response
) -> TokenView:
    """Make a token. Its secret is in this answer alone: only a digest of it is kept."""
    now_s = service.clock.now_s()
    expires_at_s = None if document.expires_in_s is None else now_s + document.expires_in_s
    grants = [Grant.of(text) for text in document.grants]
    token, secret = new_token(document.name, grants, created_by=principal.name, now_s=now_s, expires_at_s=expires_at_s)
    service.store.tokens.add(token, token_entry("CreateToken", token, principal, now_s))
    response.headers["Location"] = f"/v1/tokens/{token.id}"
    response.headers["Cache-Control"] = "no-store"
    return {**token_view(token), "secret": secret}


@router.get("/tokens")
def list_tokens(service: ServiceDep, limit: Limit = 100, cursor: Cursor = "") -> PageOf[TokenView]:
    """All tokens by id, revoked and expired ones too, without their secrets."""
    place = place_in(cursor, "tokens", str)
    found = service.store.tokens.page(after=place[0] if place else "", limit=limit + 1)
    following = cursor_of("tokens", found[limit - 1].id) if len(found) > limit else None
    return {"items": [token_view(token) for token in found[:limit]], "next": following}


@router.get("/tokens/{token_id}")
def get_token(token_id: str, service: ServiceDep) -> TokenView:
    """A token, without its secret."""
    return token_view(service.store.tokens.by_id(token_id) or not_found("token", token_id))


@router.delete("/tokens/{token_id}")
def revoke_token(token_id: str, service: ServiceDep, principal: PrincipalDep) -> TokenView:
    """End a token. Every process of the API refuses it within 5 s. Again, it changes nothing."""
    now_s, token = service.clock.now_s(), service.store.tokens.by_id(token_id)
    if token is None:
        not_found("token", token_id)
    entry = token_entry("RevokeToken", token, principal, now_s)
    return token_view(service.store.tokens.revoke(token_id, now_s, entry) or not_found("token", token_id))


def token_entry(action: str, token: ApiToken, principal: Principal, now_s: float) -> AuditEntry:
    """What the audit log says of a token that is made or revoked."""
    told = {"name": token.name, "grants": list(token.grants), "expires_at_s": token.expires_at_s}
    before, after = (None, told) if action == "CreateToken" else (told, None)
    return AuditEntry(now_s, principal.name, principal.token_id, action, token.id, before, after, REQUEST_ID.get())
