"""Which addresses webhooks may lead to: public ones alone, unless the operator has named the host.

What counts is the address that the connection goes to. It is looked up once for each attempt, checked, and connected to
by number, so that a name that leads elsewhere a moment later (DNS rebinding) leads nowhere.

One attempt to deliver a message: where it may go, for how long, and how much of the answer is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host's name. Raises OSError where it has none."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class RefusedAddressError(ValueError):
    """The host leads to where webhooks may not go."""


async def resolve_host(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def parse_allowed_hosts(setting: str) -> frozenset[str]:
    """The hosts of EBBTIDE_WEBHOOK_HOSTS."""
    return frozenset(part.strip().strip("[]").lower() for part in setting.split(",") if part.strip())


def is_public(text: str) -> bool:
    """Whether this address is of the internet at large; False for what is no address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(one.is_global and not one.is_multicast for one in (address, *_embedded_addresses(address)))


def _embedded_addresses(address: Address) -> list[Address]:
    """Addresses that an IPv6 one carries, to which a gateway or the system itself may lead."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def check_host(host: str, allowed: frozenset[str]) -> None:
    """Refuse at once a host that can only lead to where webhooks may not go. Raises RefusedAddressError."""
    name = host.strip("[]").lower()
    is_local = name.rstrip(".") == "localhost" or name.rstrip(".").endswith(".localhost")
    if name not in allowed and (is_local or _is_address(name)) and not is_public(name):
        raise RefusedAddressError(_refusal_message(host))


async def resolve_allowed(host: str, port: int, allowed: frozenset[str], resolve: Resolver) -> list[str]:
    """Where connections to this host may go.

    Raises:
        RefusedAddressError: one of its addresses is not public; none of them is used then.
        OSError: it has none.
    """
    name = host.strip("[]").lower()
    found = [name] if _is_address(name) else await resolve(name, port)
    if name not in allowed:
        for address in found:
            if not is_public(address):
                raise RefusedAddressError(_refusal_message(host if address == name else f"{host} ({address})"))
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _refusal_message(host: str) -> str:
    return f"{host} is not a public address; an operator may allow the host by EBBTIDE_WEBHOOK_HOSTS"


ATTEMPT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
RESPONSE_BYTES_MAX = 1024
ADDRESSES_TRIED_MAX = 2
HTTP_GONE = 410


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """`status` is None where no answer came. `error` is empty where the receiver took the message."""

    status: int | None
    error: str = ""
    retry_after_s: float = 0.0

    @property
    def is_delivered(self) -> bool:
        return not self.error


def create_ssl_context(ca_file: Path | None = None) -> ssl.SSLContext:
    """Trusts the public authorities, and those of the PEM file."""
    context = httpx.create_ssl_context(trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


@dataclass(frozen=True, slots=True)
class WebhookSender:
    """`timeout_s` is for a whole attempt, names looked up and answer read, however slowly either comes. `trust`: whose
    certificates a receiver may show; an attempt is over where it shows another, or one of another name."""

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
            return DeliveryOutcome(None, f"no answer within {self.timeout_s:g} s")
        except RefusedAddressError as refused:
            return DeliveryOutcome(None, str(refused))
        except httpx.ConnectError as broken:
            return DeliveryOutcome(None, _certificate_error(broken) or f"ConnectError: {broken}")
        except httpx.HTTPError as broken:
            return DeliveryOutcome(None, f"{type(broken).__name__}: {broken}".removesuffix(": "))
        except (httpx.InvalidURL, UnicodeError) as malformed:  # such as a label that is empty, or too long
            return DeliveryOutcome(None, f"its host can be none: {malformed}")
        except OSError as unknown:
            return DeliveryOutcome(None, f"{httpx.URL(url).host} has no address: {unknown.strerror or unknown}")

    async def _send(self, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> DeliveryOutcome:
        port = url.port or (443 if url.scheme == "https" else 80)
        *spare, last = (await resolve_allowed(url.host, port, self.allowed_hosts, self.resolve))[:ADDRESSES_TRIED_MAX]
        # No proxy of the environment: it would look the name up again, elsewhere.
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
        """Connects to the address by number; certificate and Host are the name's."""
        request = http.build_request(
            "POST",
            url.copy_with(host=address),
            headers={**headers, "Host": url.netloc.decode(), "Content-Type": "application/json"},
            content=body,
            extensions={"sni_hostname": url.host},
        )
        answer = await http.send(request, stream=True, follow_redirects=False)
        try:
            return _to_outcome(answer, await _read_response_start(answer), now_s=self.now_s())
        finally:
            await answer.aclose()


def _certificate_error(broken: httpx.ConnectError) -> str:
    """What was wrong with the receiver's certificate; empty where nobody got so far as to look."""
    found: BaseException | None = broken
    while found is not None and not isinstance(found, ssl.SSLCertVerificationError):
        found = found.__cause__ or found.__context__
    if found is None:
        return ""
    allowed = "a public authority's, or one's of EBBTIDE_WEBHOOK_CA_FILE, for that host"
    return f"its certificate is not trusted: {found.verify_message}; allowed: {allowed}"


async def _read_response_start(response: httpx.Response) -> bytes:
    """Of the body as it came, which may be packed: so little of it cannot be unpacked into much."""
    read = b""
    async for part in response.aiter_raw():
        read += part
        if len(read) >= RESPONSE_BYTES_MAX:
            break
    return read[:RESPONSE_BYTES_MAX]


def _to_outcome(response: httpx.Response, response_start: bytes, *, now_s: float) -> DeliveryOutcome:
    status = response.status_code
    if response.is_success:
        return DeliveryOutcome(status)
    if response.is_redirect:
        return DeliveryOutcome(
            status, f"HTTP {status}: redirects are not followed; give the webhook the URL that answers"
        )
    said = " ".join(response_start.decode("utf-8", "replace").split())[:200]
    return DeliveryOutcome(status, f"HTTP {status}" + (f": {said}" if said else ""), _retry_after_s(response, now_s))


def _retry_after_s(response: httpx.Response, now_s: float) -> float:
    value = response.headers.get("Retry-After", "")
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, OverflowError):
        return 0.0
