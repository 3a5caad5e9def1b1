"""One attempt to deliver a webhook message: address checks, timeouts, and how much of the response is read.

Webhooks may only reach public addresses, unless the operator allows the host. The host is resolved once per attempt,
its addresses are checked, and the connection goes to the checked address. DNS rebinding therefore has no effect.
Redirects are not followed, so they lead nowhere unchecked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from api.webhooks.special_addresses import is_public

logger = logging.getLogger(__name__)

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host name. Raises OSError if it has none."""


class RefusedAddressError(ValueError):
    """Webhooks may not reach the host.

    The message is the same for every name that cannot be used, so that it reveals neither whether an internal name
    exists nor its address. `detail`, for the service's log, has the reason.
    """

    def __init__(self, host: str, detail: str) -> None:
        super().__init__(
            f"{host} is not the host of a public address. An operator can allow the host with EBBTIDE_WEBHOOK_HOSTS"
        )
        self.detail = detail


async def resolve_host(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def parse_allowed_hosts(setting: str) -> frozenset[str]:
    """Return the hosts in the setting EBBTIDE_WEBHOOK_HOSTS."""
    return frozenset(part.strip().strip("[]").lower() for part in setting.split(",") if part.strip())


def check_host(host: str, allowed: frozenset[str]) -> None:
    """Reject a host that can only lead to a forbidden address, without resolving it. Raises RefusedAddressError."""
    name = host.strip("[]").lower()
    is_local = name.rstrip(".") == "localhost" or name.rstrip(".").endswith(".localhost")
    if name not in allowed and (is_local or _is_address(name)) and not is_public(name):
        raise RefusedAddressError(host, "it is not public")


async def resolve_allowed(host: str, port: int, allowed: frozenset[str], resolve: Resolver) -> list[str]:
    """Return the addresses to connect to.

    Raises:
        RefusedAddressError: the host has no address, or one of its addresses is not public. None of them may be used
            then.
    """
    name = host.strip("[]").lower()
    try:
        found = [name] if _is_address(name) else await resolve(name, port)
    except OSError as error:
        raise RefusedAddressError(host, f"it has no address: {error}") from error
    if name not in allowed:
        for address in found:
            if not is_public(address):
                raise RefusedAddressError(host, f"its address {address} is not public")
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


ATTEMPT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
RESPONSE_BYTES_MAX = 1024
ADDRESSES_TRIED_MAX = 2
HTTP_GONE = 410


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """`status` is None if no response came. `error` is empty if the receiver accepted the message.

    `response_start` are the first `RESPONSE_BYTES_MAX` bytes of an accepting response.
    """

    status: int | None
    error: str = ""
    retry_after_s: float = 0.0
    response_start: bytes = b""

    @property
    def is_delivered(self) -> bool:
        return not self.error


def create_ssl_context(ca_file: Path | None = None) -> ssl.SSLContext:
    """Return a context that trusts the public certificate authorities and those in the PEM file."""
    context = httpx.create_ssl_context(trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


@dataclass(frozen=True, slots=True)
class WebhookSender:
    """HTTP client that sends messages to webhook URLs.

    `timeout_s` covers a whole attempt, from the DNS lookup to the response.

    `ssl_context` decides which certificates are trusted.
    """

    allowed_hosts: frozenset[str] = frozenset()
    resolve: Resolver = resolve_host
    timeout_s: float = ATTEMPT_TIMEOUT_S
    now_s: Callable[[], float] = time.time
    ssl_context: ssl.SSLContext = field(default_factory=create_ssl_context)

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> DeliveryOutcome:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._send(httpx.URL(url), headers, body)
        except TimeoutError:
            return DeliveryOutcome(None, f"no response within {self.timeout_s:g} s")
        except RefusedAddressError as error:
            logger.warning("no webhook message was sent to %s: %s", httpx.URL(url).host, error.detail)
            return DeliveryOutcome(None, str(error))
        except httpx.ConnectError as error:
            return DeliveryOutcome(None, _certificate_error(error) or f"ConnectError: {error}")
        except httpx.HTTPError as error:
            return DeliveryOutcome(None, f"{type(error).__name__}: {error}".removesuffix(": "))
        except OSError as error:
            return DeliveryOutcome(None, f"the connection failed: {type(error).__name__}")
        except (httpx.InvalidURL, UnicodeError) as error:  # for example an empty or overlong label
            return DeliveryOutcome(None, f"the host name is invalid: {error}")

    async def _send(self, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> DeliveryOutcome:
        port = url.port or (443 if url.scheme == "https" else 80)
        *spare, last = (await resolve_allowed(url.host, port, self.allowed_hosts, self.resolve))[:ADDRESSES_TRIED_MAX]
        # trust_env=False: a proxy would resolve the name again.
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S)
        async with httpx.AsyncClient(timeout=timeout, verify=self.ssl_context, trust_env=False) as http:
            for address in spare:
                try:
                    return await self._post(http, url, address, headers, body)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    continue
            return await self._post(http, url, last, headers, body)

    async def _post(
        self, http: httpx.AsyncClient, url: httpx.URL, address: str, headers: Mapping[str, str], body: bytes
    ) -> DeliveryOutcome:
        """Connect to the IP address. The certificate and the Host header are checked against the host name."""
        request = http.build_request(
            "POST",
            url.copy_with(host=address),
            headers={**headers, "Host": url.netloc.decode(), "Content-Type": "application/json"},
            content=body,
            extensions={"sni_hostname": url.host},
        )
        response = await http.send(request, stream=True, follow_redirects=False)
        try:
            return _to_outcome(response, await _read_response_start(response), now_s=self.now_s())
        finally:
            await response.aclose()


def _certificate_error(error: httpx.ConnectError) -> str:
    """Return the problem with the receiver's certificate, or an empty string if the error has another cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    accepted = "a certificate for that host from a public authority or one in EBBTIDE_WEBHOOK_CA_FILE"
    return f"the certificate is not trusted: {cause.verify_message.rstrip('.')}; accepted: {accepted}"


async def _read_response_start(response: httpx.Response) -> bytes:
    """Return the first bytes of the raw body. They are not decompressed, so a compression bomb has no effect."""
    read = b""
    async for part in response.aiter_raw():
        read += part
        if len(read) >= RESPONSE_BYTES_MAX:
            break
    return read[:RESPONSE_BYTES_MAX]


def _to_outcome(response: httpx.Response, response_start: bytes, *, now_s: float) -> DeliveryOutcome:
    status = response.status_code
    if response.is_success:
        return DeliveryOutcome(status, response_start=response_start)
    if response.is_redirect:
        return DeliveryOutcome(
            status, f"HTTP {status}: redirects are not followed. Set the webhook's URL to the redirect's target"
        )
    text = " ".join(response_start.decode("utf-8", "replace").split())[:200]
    return DeliveryOutcome(status, f"HTTP {status}" + (f": {text}" if text else ""), _retry_after_s(response, now_s))


def _retry_after_s(response: httpx.Response, now_s: float) -> float:
    value = response.headers.get("Retry-After", "")
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, OverflowError):
        return 0.0
