"""Sign-in at an OpenID Connect issuer: authorization code flow with PKCE (RFC 7636), state and nonce.

Nothing is stored between the two requests of a sign-in. Nonce and PKCE verifier are derived from the random state with
the service's secret, and the state is in a signed cookie that binds the sign-in to the browser.
"""

from __future__ import annotations

import hmac
import json
import secrets
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx
from starlette.concurrency import run_in_threadpool

from api.identity.oidc import InvalidTokenError, OidcIssuer, VerifiedIdentity
from api.identity.oidc_provider import IssuerUnavailableError, ProviderMetadata
from scheduler.settings import Settings

STATE_COOKIE = "ebbtide_oidc_state"
STATE_S = 600.0
"""Time that a user has to sign in at the issuer."""
CALLBACK_PATH = "/sign-in/oidc/callback"
_TIMEOUT_S = 5.0
_RESPONSE_BYTES_MAX = 1 << 20


class SignInExpiredError(Exception):
    """The state is not of this browser, or too old."""


class SignInDeniedError(Exception):
    """The issuer returned the browser without a code, for example because the user cancelled."""


class OidcSignIn:
    """Sign-in of browsers at one issuer. Belongs to one event loop."""

    def __init__(self, settings: Settings, issuer: OidcIssuer, secret: bytes) -> None:
        self._settings = settings
        self._issuer = issuer
        self._secret = secret

    @property
    def redirect_uri(self) -> str:
        return self._settings.browser_url + CALLBACK_PATH

    async def start(self, *, now_s: float, elapsed_s: float) -> tuple[str, str]:
        """Return the issuer's URL to send the browser to, and the value of the state cookie.

        Raises:
            IssuerUnavailableError: the issuer's endpoints are unknown and it does not answer.
        """
        metadata = await self._load_metadata(elapsed_s)
        state = secrets.token_urlsafe(32)
        challenge = urlsafe_b64encode(sha256(self._derive("verifier", state).encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": self.redirect_uri,
            "scope": self._settings.oidc_scopes,
            "state": state,
            "nonce": self._derive("nonce", state),
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        joint = "&" if urlsplit(metadata.authorization_endpoint).query else "?"
        started = f"{state}.{now_s:.0f}"
        url = f"{metadata.authorization_endpoint}{joint}{urlencode(query)}"
        return url, f"{started}.{self._derive('cookie', started)}"

    def check_state(self, cookie: str, *, now_s: float) -> str:
        """Return the state in the cookie.

        Raises:
            SignInExpiredError: this service did not set the cookie, or longer than STATE_S ago.
        """
        started, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._derive("cookie", started).encode()):
            raise SignInExpiredError("the state cookie is missing or invalid")
        state, _, at_s = started.partition(".")
        if now_s - float(at_s) > STATE_S:
            raise SignInExpiredError("the sign-in took too long")
        return state

    async def finish(self, code: str, state: str, *, elapsed_s: float) -> VerifiedIdentity:
        """Exchange the authorization code and return the identity in the issuer's identity token.

        Raises:
            InvalidTokenError: the issuer refuses the code, or its identity token is invalid.
            IssuerUnavailableError: the issuer does not answer.
        """
        metadata = await self._load_metadata(elapsed_s)
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "code_verifier": self._derive("verifier", state),
        }
        client_id, secret = self._settings.oidc_client_id, self._settings.oidc_client_secret
        headers = {}
        if secret and metadata.accepts_basic:
            pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
            headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": client_id, **({"client_secret": secret} if secret else {})}
        status, document = await self._request("POST", metadata.token_endpoint, form=form, headers=headers)
        token = document.get("id_token")
        if status != 200 or not isinstance(token, str):
            raise InvalidTokenError(f"the issuer refused the code: {document.get('error', status)!s:.100}")
        nonce = self._derive("nonce", state)
        key = await self._issuer.find_key(token, elapsed_s)
        return await run_in_threadpool(self._issuer.verify, token, key, client_id=client_id, nonce=nonce)

    async def _load_metadata(self, elapsed_s: float) -> ProviderMetadata:
        metadata = await self._issuer.get_metadata(elapsed_s)
        if not (metadata.authorization_endpoint and metadata.token_endpoint):
            raise IssuerUnavailableError(f"{metadata.issuer} has no endpoints for a sign-in with an authorization code")
        return metadata

    async def _request(
        self, method: str, url: str, *, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON object of a response. An answer that is no JSON object counts as an empty one."""
        body = b""
        try:
            async with (
                httpx.AsyncClient(timeout=_TIMEOUT_S) as http,
                http.stream(method, url, data=form, headers=headers) as response,
            ):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _RESPONSE_BYTES_MAX:
                        raise IssuerUnavailableError(f"{url} answers with more than {_RESPONSE_BYTES_MAX} bytes")
        except httpx.HTTPError as error:
            raise IssuerUnavailableError(f"{url} does not answer: {error or type(error).__name__}") from error
        if response.status_code >= 500:
            raise IssuerUnavailableError(f"{url} answers with status {response.status_code}")
        try:
            document = json.loads(body)
        except ValueError:
            document = {}
        return response.status_code, document if isinstance(document, dict) else {}

    def _derive(self, purpose: str, text: str) -> str:
        digest = hmac.digest(self._secret, f"oidc sign-in {purpose}: {text}".encode(), sha256)
        return urlsafe_b64encode(digest).rstrip(b"=").decode()
