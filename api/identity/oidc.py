"""JWTs of an OIDC issuer: whose signature, issuer, audience and times are right is who the token says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jwt

from api.identity.principals import Grant, Principal
from scheduler.settings import Settings

logger = logging.getLogger(__name__)

# A secret that both sides share would let whoever checks tokens make them: signatures by key pairs alone.
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
LEEWAY_S = 30.0
KEYS_TTL_S = 3600.0
REFRESH_INTERVAL_MIN_S = 10.0
_TIMEOUT_S = 5.0
_NAME_LENGTH_MAX = 200
_REQUIRED_CLAIMS = ["exp", "iss", "aud"]


class InvalidTokenError(ValueError):
    """The token is not one to believe; the message says why, and nothing that is in it."""


class IssuerUnavailableError(Exception):
    """The issuer's keys are needed and cannot be had."""


@dataclass(frozen=True, slots=True)
class VerifiedIdentity:
    """`expires_at_s` in seconds since 1970 (UTC)."""

    principal: Principal
    expires_at_s: float


class OidcIssuer:
    """Knows the keys of one issuer. Safe to use from several threads.

    Keys are fetched when the first token comes, again after an hour, and when a token names one that is not known: then
    at most every 10 s, so that nobody makes us fetch with invented names.
    """

    def __init__(self, settings: Settings, http: httpx.Client | None = None) -> None:
        self._settings = settings
        self._http = http or httpx.Client(timeout=_TIMEOUT_S)
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._refresh_attempted_at_s = self._refreshed_at_s = float("-inf")

    def verify(self, token: str, elapsed_s: float) -> VerifiedIdentity:
        """Who the token says. `elapsed_s` is a clock that only goes forward, in seconds.

        Raises:
            InvalidTokenError: it is malformed, expired, of another issuer, for another audience, or not signed by it.
            IssuerSilentError: its key is not known, and the issuer does not answer.
        """
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise InvalidTokenError("it is not signed with a key pair")
            claims = jwt.decode(
                token,
                self._find_key(str(header.get("kid", "")), elapsed_s),
                algorithms=sorted(ALGORITHMS),
                audience=self._settings.oidc_audience,
                issuer=self._settings.oidc_issuer,
                leeway=LEEWAY_S,
                options={"require": _REQUIRED_CLAIMS, "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as wrong:
            raise InvalidTokenError(str(wrong)) from wrong
        return VerifiedIdentity(self._principal(claims), float(claims["exp"]) + LEEWAY_S)

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        name = claims.get(self._settings.oidc_name_claim)
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_LENGTH_MAX or not name.isprintable():
            raise InvalidTokenError(f"its claim {self._settings.oidc_name_claim} names nobody")
        told = claims.get(self._settings.oidc_roles_claim, [])
        grants = [each for each in map(_parse_grant, told if isinstance(told, list) else [told]) if each is not None]
        return Principal(name, tuple(grants))

    def _find_key(self, kid: str, elapsed_s: float) -> jwt.PyJWK:
        with self._lock:
            stale = elapsed_s - self._refreshed_at_s >= KEYS_TTL_S
            if (stale or kid not in self._keys) and elapsed_s - self._refresh_attempted_at_s >= REFRESH_INTERVAL_MIN_S:
                self._refresh_attempted_at_s = elapsed_s
                self._refresh_keys(kid, elapsed_s)
            if kid in self._keys:
                return self._keys[kid]
            if self._refreshed_at_s < self._refresh_attempted_at_s:
                raise IssuerUnavailableError(f"{self._settings.oidc_issuer} did not answer a moment ago")
        raise InvalidTokenError("its issuer does not have the key that it names")

    def _refresh_keys(self, kid: str, elapsed_s: float) -> None:
        """A silent issuer stands only against who needs a key that is not known."""
        try:
            self._keys = self._fetch_keys()
            self._refreshed_at_s = elapsed_s
        except IssuerUnavailableError:
            if kid not in self._keys:
                raise

    def _fetch_keys(self) -> dict[str, jwt.PyJWK]:
        try:
            found = self._get_json(self._settings.oidc_jwks_url or self._discover_jwks_url()).get("keys")
        except (httpx.HTTPError, ValueError) as failed:
            logger.warning("the keys of %s cannot be had: %s", self._settings.oidc_issuer, failed)
            raise IssuerUnavailableError(f"{self._settings.oidc_issuer} does not tell its keys: {failed}") from failed
        keys = [key for key in map(_parse_public_key, found if isinstance(found, list) else []) if key is not None]
        return {str(key.key_id or ""): key for key in keys}

    def _discover_jwks_url(self) -> str:
        issuer = self._settings.oidc_issuer
        document = self._get_json(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if document.get("issuer") != issuer:
            raise ValueError(f"its discovery document is that of another issuer, {document.get('issuer')!r}")
        return str(document.get("jwks_uri"))

    def _get_json(self, url: str) -> dict[str, Any]:
        answer = self._http.get(url)
        answer.raise_for_status()
        document = answer.json()
        if not isinstance(document, dict):
            raise ValueError(f"{url} answered with something other than a JSON object")
        return document


def _parse_grant(text: object) -> Grant | None:
    """None for a role of another application: an issuer may serve many."""
    try:
        return Grant.parse(str(text))
    except ValueError:
        return None


def _parse_public_key(document: object) -> jwt.PyJWK | None:
    """None for a key that is not one to check signatures with."""
    if not isinstance(document, dict) or document.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(document)
    except jwt.PyJWTError:
        return None
    return key if key.algorithm_name in ALGORITHMS else None
