"""Verification of JWTs that an OIDC issuer signed: signature, issuer, audience and times."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jwt

from api.identity.claims import build_principal
from api.identity.principals import Principal
from scheduler.settings import Settings

logger = logging.getLogger(__name__)

# Asymmetric algorithms only: with a shared secret, every service that verifies tokens could also create them.
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
LEEWAY_S = 30.0
KEYS_TTL_S = 3600.0
REFRESH_INTERVAL_MIN_S = 10.0
_TIMEOUT_S = 5.0
_REQUIRED_CLAIMS = ["exp", "iss", "aud", "sub"]


class InvalidTokenError(ValueError):
    """The token is invalid. The message gives the reason and nothing from the token."""


class IssuerUnavailableError(Exception):
    """The issuer's keys are needed and cannot be fetched."""


@dataclass(frozen=True, slots=True)
class VerifiedIdentity:
    """The principal of a verified token. `expires_at_s` is in seconds since 1970 (UTC)."""

    principal: Principal
    expires_at_s: float


class OidcIssuer:
    """The signing keys of one issuer. Thread-safe.

    Keys are fetched with the first token, again after an hour, and when a token names an unknown key. The last happens
    at most every 10 s, so that invented key ids cause no load on the issuer.
    """

    def __init__(self, settings: Settings, http: httpx.Client | None = None) -> None:
        self._settings = settings
        self._http = http or httpx.Client(timeout=_TIMEOUT_S)
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._refresh_attempted_at_s = self._refreshed_at_s = float("-inf")

    def verify(self, token: str, elapsed_s: float, *, client_id: str = "", nonce: str = "") -> VerifiedIdentity:
        """Return the identity in the token. `elapsed_s` is the time of a monotonic clock.

        With `client_id`, the token is the identity token of a sign-in: it must be for this client and have the nonce.

        Raises:
            InvalidTokenError: the token is malformed, expired, for another audience, or not signed by this issuer.
            IssuerUnavailableError: the token's key is unknown and the issuer does not answer.
        """
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise InvalidTokenError("it is not signed with an asymmetric algorithm")
            claims = jwt.decode(
                token,
                self._find_key(str(header.get("kid", "")), elapsed_s),
                algorithms=sorted(ALGORITHMS),
                audience=client_id or self._settings.oidc_audience,
                issuer=self._settings.oidc_issuer,
                leeway=LEEWAY_S,
                options={"require": _REQUIRED_CLAIMS, "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise InvalidTokenError(str(error)) from error
        if client_id and (claims.get("nonce") != nonce or claims.get("azp", client_id) != client_id):
            raise InvalidTokenError("it is of another sign-in")
        return VerifiedIdentity(self._principal(claims), float(claims["exp"]) + LEEWAY_S)

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        try:
            return build_principal(claims, self._settings)
        except ValueError as error:
            raise InvalidTokenError(str(error)) from error

    def _find_key(self, kid: str, elapsed_s: float) -> jwt.PyJWK:
        with self._lock:
            stale = elapsed_s - self._refreshed_at_s >= KEYS_TTL_S
            if (stale or kid not in self._keys) and elapsed_s - self._refresh_attempted_at_s >= REFRESH_INTERVAL_MIN_S:
                self._refresh_attempted_at_s = elapsed_s
                self._refresh_keys(kid, elapsed_s)
            if kid in self._keys:
                return self._keys[kid]
            if self._refreshed_at_s < self._refresh_attempted_at_s:
                raise IssuerUnavailableError(f"the OIDC issuer {self._settings.oidc_issuer} is unreachable")
        raise InvalidTokenError("its issuer has no key with that id")

    def _refresh_keys(self, kid: str, elapsed_s: float) -> None:
        """Fetch the keys. If the issuer is unreachable, only tokens signed with an unknown key are rejected."""
        try:
            self._keys = self._fetch_keys()
            self._refreshed_at_s = elapsed_s
        except IssuerUnavailableError:
            if kid not in self._keys:
                raise

    def _fetch_keys(self) -> dict[str, jwt.PyJWK]:
        try:
            found = self._get_json(self._settings.oidc_jwks_url or self._discover_jwks_url()).get("keys")
        except (httpx.HTTPError, ValueError) as error:
            logger.warning("cannot fetch the keys of %s: %s", self._settings.oidc_issuer, error)
            raise IssuerUnavailableError(f"cannot fetch the keys of {self._settings.oidc_issuer}: {error}") from error
        keys = [key for key in map(_parse_public_key, found if isinstance(found, list) else []) if key is not None]
        return {str(key.key_id or ""): key for key in keys}

    def _discover_jwks_url(self) -> str:
        issuer = self._settings.oidc_issuer
        document = self._get_json(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if document.get("issuer") != issuer:
            raise ValueError(f"the discovery document names another issuer, {document.get('issuer')!r}")
        return str(document.get("jwks_uri"))

    def _get_json(self, url: str) -> dict[str, Any]:
        response = self._http.get(url)
        response.raise_for_status()
        document = response.json()
        if not isinstance(document, dict):
            raise ValueError(f"{url} did not answer with a JSON object")
        return document


def _parse_public_key(document: object) -> jwt.PyJWK | None:
    """Return the key, or None if it cannot verify signatures."""
    if not isinstance(document, dict) or document.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(document)
    except jwt.PyJWTError:
        return None
    return key if key.algorithm_name in ALGORITHMS else None
