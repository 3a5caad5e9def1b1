"""Documents of an OpenID provider: its metadata (OpenID Connect Discovery) and its signing keys (JWKS).

They are fetched in a background thread by a client with limits, never in the thread of a request. Documents that were
fetched once stay in use while the provider is unreachable.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import jwt

from scheduler.settings import Settings

logger = logging.getLogger(__name__)

# Asymmetric algorithms only: with a shared secret, every service that verifies tokens could also create them.
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
DOCUMENTS_TTL_S = 3600.0
FETCH_INTERVAL_MIN_S = 10.0
FETCH_TIMEOUT_S = 5.0
"""Time for all requests of one fetch together."""
DOCUMENT_BYTES_MAX = 1 << 20
REDIRECTS_MAX = 3


class IssuerUnavailableError(Exception):
    """The issuer's documents are needed and cannot be fetched."""


@dataclass(frozen=True, slots=True)
class ProviderMetadata:
    """Endpoints in the discovery document. An endpoint that the provider does not have is empty.

    Args:
        accepts_basic: whether clients may authenticate at the token endpoint with HTTP Basic.
    """

    issuer: str
    jwks_uri: str
    authorization_endpoint: str = ""
    token_endpoint: str = ""
    end_session_endpoint: str = ""
    accepts_basic: bool = True


@dataclass(frozen=True, slots=True)
class _Documents:
    keys: Mapping[str, jwt.PyJWK]
    metadata: ProviderMetadata | None


class OidcProvider:
    """Metadata and keys of the issuer in the settings. Thread-safe.

    Documents are fetched when they are first needed, again after an hour, and when a token names an unknown key. There
    is at most one fetch at a time and one in 10 s, whether or not it succeeds. An unreachable issuer and invented key
    ids therefore cause little load, and their callers do not wait again within that time.

    All times are those of a monotonic clock, in seconds.
    """

    def __init__(self, settings: Settings) -> None:
        self._issuer = settings.oidc_issuer
        self._jwks_url = settings.oidc_jwks_url
        self._lock = threading.Lock()
        self._documents: _Documents | None = None
        self._fetch: Future[None] | None = None
        self._attempted_at_s = self._fetched_at_s = float("-inf")
        self._has_failed = False

    async def find_key(self, kid: str, elapsed_s: float) -> jwt.PyJWK | None:
        """Return the key with this id, or None if the issuer has none.

        Waits for a fetch only if the key is unknown.

        Raises:
            IssuerUnavailableError: the key is unknown, and the last fetch failed or takes too long.
        """
        if fetch := self._start_fetch_if_due(elapsed_s, is_missing=kid not in self._keys):
            await _wait(fetch, is_needed=kid not in self._keys)
        if kid not in self._keys and (self._has_failed or self._fetch is not None):
            raise self._unavailable()
        return self._keys.get(kid)

    async def get_metadata(self, elapsed_s: float) -> ProviderMetadata:
        """Return the provider's metadata, possibly of an earlier fetch.

        Raises:
            IssuerUnavailableError: no fetch has succeeded yet.
        """
        if fetch := self._start_fetch_if_due(elapsed_s, is_missing=self._metadata is None):
            await _wait(fetch, is_needed=self._metadata is None)
        if self._metadata is None:
            raise self._unavailable()
        return self._metadata

    @property
    def _keys(self) -> Mapping[str, jwt.PyJWK]:
        return self._documents.keys if self._documents else {}

    @property
    def _metadata(self) -> ProviderMetadata | None:
        return self._documents.metadata if self._documents else None

    def _unavailable(self) -> IssuerUnavailableError:
        return IssuerUnavailableError(f"the OIDC issuer {self._issuer} is unreachable")

    def _start_fetch_if_due(self, elapsed_s: float, *, is_missing: bool) -> Future[None] | None:
        """Return the fetch in progress, which may be new, or None."""
        with self._lock:
            if self._fetch is not None:
                return self._fetch
            is_due = is_missing or elapsed_s - self._fetched_at_s >= DOCUMENTS_TTL_S
            if not is_due or elapsed_s - self._attempted_at_s < FETCH_INTERVAL_MIN_S:
                return None
            self._attempted_at_s = elapsed_s
            fetch: Future[None] = Future()
            self._fetch = fetch
            fetch.set_running_or_notify_cancel()  # no caller that goes away may cancel it
        threading.Thread(target=self._run_fetch, args=(fetch, elapsed_s), name="oidc", daemon=True).start()
        return fetch

    def _run_fetch(self, fetch: Future[None], started_at_s: float) -> None:
        try:
            asyncio.run(self._fetch_documents())
            self._fetched_at_s, self._has_failed = started_at_s, False
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:  # OSError includes TimeoutError
            self._has_failed = True
            reason = str(error) or type(error).__name__
            logger.warning("cannot fetch the documents of %s: %s", self._issuer, reason)
        finally:
            with self._lock:
                self._fetch = None
            fetch.set_result(None)

    async def _fetch_documents(self) -> None:
        async with asyncio.timeout(FETCH_TIMEOUT_S), _open_client() as http:
            if self._jwks_url:  # keys first: the provider may have no discovery document
                keys = await _fetch_keys(http, self._jwks_url)
                self._documents = _Documents(keys, self._metadata)
            metadata = await self._fetch_metadata(http, is_needed=not self._jwks_url)
            if metadata and not self._jwks_url:
                keys = await _fetch_keys(http, metadata.jwks_uri)
            self._documents = _Documents(keys, metadata or self._metadata)

    async def _fetch_metadata(self, http: httpx.AsyncClient, *, is_needed: bool) -> ProviderMetadata | None:
        try:
            document = await _fetch_json(http, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            return _parse_metadata(document, self._issuer)
        except (httpx.HTTPError, OSError, ValueError):
            if is_needed:
                raise
            return None


async def _wait(fetch: Future[None], *, is_needed: bool) -> None:
    if is_needed:
        await asyncio.wait([asyncio.wrap_future(fetch)], timeout=FETCH_TIMEOUT_S)


def _open_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=FETCH_TIMEOUT_S,
        follow_redirects=True,
        max_redirects=REDIRECTS_MAX,
        headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        event_hooks={"response": [_refuse_downgrade]},
    )


async def _refuse_downgrade(response: httpx.Response) -> None:
    """Refuse a redirect from https to http, which would let the network choose the keys."""
    target = response.headers.get("Location", "") if response.is_redirect else ""
    if target and response.url.scheme == "https" and response.url.join(target).scheme != "https":
        raise httpx.RemoteProtocolError(f"{response.url.host} redirects from https to http")


async def _fetch_keys(http: httpx.AsyncClient, url: str) -> Mapping[str, jwt.PyJWK]:
    found = (await _fetch_json(http, url)).get("keys")
    keys = [key for key in map(_parse_public_key, found if isinstance(found, list) else []) if key is not None]
    return {str(key.key_id or ""): key for key in keys}


async def _fetch_json(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    async with http.stream("GET", url) as response:
        response.raise_for_status()
        body = b""
        async for part in response.aiter_raw():  # not decompressed, so a compression bomb has no effect
            body += part
            if len(body) > DOCUMENT_BYTES_MAX:
                raise ValueError(f"{url} has more than {DOCUMENT_BYTES_MAX} bytes")
    try:
        document = json.loads(body)
    except RecursionError:
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{url} did not answer with a JSON object")
    return document


def _parse_metadata(document: Mapping[str, Any], issuer: str) -> ProviderMetadata:
    """Return the metadata. Raises ValueError."""
    if document.get("issuer") != issuer:
        raise ValueError(f"the discovery document names another issuer, {document.get('issuer')!r:.200}")
    names = ("jwks_uri", "authorization_endpoint", "token_endpoint", "end_session_endpoint")
    urls = {name: str(document.get(name) or "") for name in names}
    for name, url in urls.items():
        allowed = ("https://",) if issuer.startswith("https://") else ("https://", "http://")
        if not url.startswith(allowed) and (url or name == "jwks_uri"):
            raise ValueError(f"{name} of the discovery document is {url!r:.200}, not {' or '.join(allowed)}...")
    methods = document.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
    return ProviderMetadata(issuer, **urls, accepts_basic="client_secret_basic" in methods)


def _parse_public_key(document: object) -> jwt.PyJWK | None:
    """Return the key, or None if it cannot verify signatures."""
    if not isinstance(document, dict) or document.get("use", "sig") != "sig":
        return None
    try:
        key = jwt.PyJWK(document)
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    return key if key.algorithm_name in ALGORITHMS else None
