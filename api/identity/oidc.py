"""Verification of JWTs that an OIDC issuer signed: signature, issuer, audience and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from api.identity.claims import build_principal
from api.identity.oidc_provider import ALGORITHMS, OidcProvider, ProviderMetadata
from api.identity.principals import Principal
from scheduler.settings import Settings

LEEWAY_S = 30.0
_REQUIRED_CLAIMS = ["exp", "iss", "aud", "sub"]


class InvalidTokenError(ValueError):
    """The token is invalid. The message gives the reason and nothing from the token."""


@dataclass(frozen=True, slots=True)
class VerifiedIdentity:
    """The principal of a verified token. `expires_at_s` is in seconds since 1970 (UTC)."""

    principal: Principal
    expires_at_s: float


class OidcIssuer:
    """Verification of the tokens of one issuer. Thread-safe.

    Finding a key may wait for the network, verifying a token only computes. So the event loop does the first, and a
    thread the second.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._provider = OidcProvider(settings)

    async def get_metadata(self, elapsed_s: float) -> ProviderMetadata:
        """Return the issuer's endpoints. `elapsed_s` is the time of a monotonic clock.

        Raises:
            IssuerUnavailableError: the issuer does not answer, and never did.
        """
        return await self._provider.get_metadata(elapsed_s)

    async def find_key(self, token: str, elapsed_s: float) -> jwt.PyJWK:
        """Return the key that the token names. `elapsed_s` is the time of a monotonic clock.

        Raises:
            InvalidTokenError: the token is malformed, or the issuer has no such key.
            IssuerUnavailableError: the key is unknown and the issuer does not answer.
        """
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise InvalidTokenError(str(error)) from error
        if header.get("alg") not in ALGORITHMS:
            raise InvalidTokenError("it is not signed with an asymmetric algorithm")
        key = await self._provider.find_key(str(header.get("kid", "")), elapsed_s)
        if key is None:
            raise InvalidTokenError("its issuer has no key with that id")
        return key

    def verify(self, token: str, key: jwt.PyJWK, *, client_id: str = "", nonce: str = "") -> VerifiedIdentity:
        """Return the identity in the token.

        With `client_id`, the token is the identity token of a sign-in: it must be for this client and have the nonce.

        Raises:
            InvalidTokenError: the token is malformed, expired, for another audience, or not signed with the key.
        """
        try:
            claims = jwt.decode(
                token,
                key,
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
        return VerifiedIdentity(self._build_principal(claims), float(claims["exp"]) + LEEWAY_S)

    def _build_principal(self, claims: Mapping[str, Any]) -> Principal:
        try:
            return build_principal(claims, self._settings)
        except ValueError as error:
            raise InvalidTokenError(str(error)) from error
