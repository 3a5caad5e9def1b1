"""The bearer token of a request (RFC 6750)."""

from __future__ import annotations

from typing import NoReturn

from api.errors import ProblemError


def bearer_token(authorization: str, *, needed: str) -> str:
    """The token in that header. Raises ProblemError (401), which says what is `needed`, where there is none."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        unauthenticated(needed)
    return token.strip()


def unauthenticated(detail: str) -> NoReturn:
    raise ProblemError(401, "unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})
