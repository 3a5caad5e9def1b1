"""API tokens: made once, shown once, and known by their digest from then on.

A secret has 256 random bits, so nobody finds it by trying, and a digest that is slow or salted would protect nothing:
those are for passwords, which people choose. SHA-256 makes looking one up a single indexed read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import sha256

from api.identity.principal import Grant, Principal
from scheduler.store.front import ApiToken

PREFIX = "ebk_"
_SECRET_BYTES = 32
_SHOWN_CHARACTERS = 10


def new_token(
    name: str, grants: Iterable[Grant], *, created_by: str, now_s: float, expires_at_s: float | None
) -> tuple[ApiToken, str]:
    """A token to keep, and its secret, which is in no other place."""
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    token = ApiToken(
        id=f"tok-{secrets.token_hex(6)}",
        name=name,
        prefix=secret[:_SHOWN_CHARACTERS],
        digest=digest(secret),
        grants=tuple(map(str, grants)),
        created_at_s=now_s,
        created_by=created_by,
        expires_at_s=expires_at_s,
    )
    return token, secret


def digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def principal_of(token: ApiToken) -> Principal:
    return Principal(token.name, tuple(map(Grant.of, token.grants)), token.id)
