"""One-time login codes. This module imports no web framework, because `ebbtide serve` creates a code when it starts."""

from __future__ import annotations

import secrets

from api.identity.principals import token_digest
from scheduler.store.sessions import LoginCode, SignedInUser

LOGIN_CODE_PREFIX = "ebl_"
LOGIN_CODE_S = 900.0
"""Lifetime of a login code that is printed for a user."""
_SECRET_BYTES = 32


def generate_login_code(
    user: SignedInUser, *, now_s: float, lifetime_s: float = LOGIN_CODE_S, browser: str = ""
) -> tuple[LoginCode, str]:
    """Return a new login code to store and its secret, which is stored nowhere."""
    secret = LOGIN_CODE_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    return LoginCode(token_digest(secret), user, browser, now_s + lifetime_s), secret
