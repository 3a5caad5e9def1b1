"""Addresses of clients behind reverse proxies: `Forwarded` (RFC 7239) and `X-Forwarded-For`, `-Proto` and `-Host`.

Any client can send these headers. They count only on connections from EBBTIDE_TRUSTED_PROXIES, and only as far as
trusted proxies wrote them: the client is the rightmost address that is not a trusted proxy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.network_addresses import Network, parse_networks

HOPS_MAX = 32
_HOST_PATTERN = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_PAIR_PATTERN = re.compile(r'\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s",;]*))\s*(;|,|$)')


@dataclass(frozen=True, slots=True)
class ForwardedClient:
    """The client as the nearest trusted proxies saw it. `scheme` and `host` are empty if no proxy named them."""

    address: str
    scheme: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class _Hop:
    """Entry of one proxy in a forwarding header. `address` is empty if it is hidden or malformed."""

    address: str
    scheme: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """Addresses of proxies whose headers count."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, setting: str) -> TrustedProxies:
        """Return the proxies in the setting EBBTIDE_TRUSTED_PROXIES. Raises ValueError."""
        return cls(parse_networks(setting))

    def __contains__(self, address: str) -> bool:
        if not self.networks:
            return False
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        return any(each in network for each in (parsed, mapped) if each is not None for network in self.networks)

    def find_client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> ForwardedClient | None:
        """Return the client of a request that came from `peer`, or None if the peer itself is the client.

        If a proxy hides the address that it saw, the proxy stands for its clients. A proxy that writes one kind of
        header may pass the other on as a client sent it, so both kinds count only if they name the same client.
        """
        if peer not in self:
            return None
        fields = [(name, value.decode("latin-1")) for name, value in headers if b"forwarded" in name]
        standard = parse_forwarded(_join(fields, b"forwarded"))
        common = _read_x_forwarded(fields)
        found = [self._find_client(peer, hops) for hops in (standard, common) if hops]
        if not found or (len(found) == 2 and found[0].address != found[1].address):
            return None
        return found[0]

    def _find_client(self, peer: str, hops: list[_Hop]) -> ForwardedClient:
        client = ForwardedClient(peer)
        for hop in reversed(hops):
            if not hop.address:
                return ForwardedClient(client.address, hop.scheme, hop.host)
            client = ForwardedClient(hop.address, hop.scheme, hop.host)
            if hop.address not in self:
                break
        return client


class ForwardedMiddleware:
    """Middleware that replaces client, scheme and Host header of requests that came through trusted proxies."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._proxies.networks and scope["type"] == "http":
            scope = self._replace_client(scope)
        await self._app(scope, receive, send)

    def _replace_client(self, scope: Scope) -> Scope:
        client = self._proxies.find_client((scope.get("client") or ("", 0))[0], scope["headers"])
        if client is None:
            return scope
        headers = scope["headers"]
        if client.host:
            others = [header for header in headers if header[0] != b"host"]
            headers = [*others, (b"host", client.host.encode())]
        scheme = client.scheme or scope["scheme"]
        return {**scope, "client": (client.address, 0), "scheme": scheme, "headers": headers}


def parse_forwarded(text: str) -> list[_Hop]:
    """Return the hops of a `Forwarded` header, the client's first. What stands before a malformed part is left out."""
    hops: list[_Hop] = []
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR_PATTERN.match(text, at)
        if match is None:
            hops, values = [_Hop("")], {}  # a proxy appends to what it received, so the rightmost hops are its own
            comma = text.find(",", at)
            at = len(text) if comma < 0 else comma + 1
            continue
        name, quoted, token, end = match.groups()
        values[name.lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else token
        at = match.end()
        if end != ";":
            hops.append(_to_hop(values.get("for", ""), values.get("proto", ""), values.get("host", "")))
            values = {}
    return hops[-HOPS_MAX:]


def _read_x_forwarded(fields: list[tuple[bytes, str]]) -> list[_Hop]:
    """Return the hops of the X-Forwarded headers.

    Protocols and hosts belong to the addresses at the same place from the right. A single one belongs to all.
    """
    addresses, schemes, hosts = (
        [part.strip() for part in text.split(",")] if text else []
        for text in (_join(fields, b"x-forwarded-" + name) for name in (b"for", b"proto", b"host"))
    )
    hops = [
        _to_hop(address, _pick(schemes, place), _pick(hosts, place))
        for place, address in enumerate(reversed(addresses[-HOPS_MAX:]), start=1)
    ]
    return hops[::-1]


def _pick(values: list[str], place: int) -> str:
    return values[-place] if place <= len(values) else values[0] if len(values) == 1 else ""


def _to_hop(address: str, scheme: str, host: str) -> _Hop:
    scheme = scheme.lower()
    return _Hop(
        _parse_address(address),
        scheme if scheme in ("http", "https") else "",
        host if _HOST_PATTERN.fullmatch(host) else "",
    )


def _parse_address(text: str) -> str:
    """Return the address of `192.0.2.1`, `192.0.2.1:4711`, `2001:db8::1` or `[2001:db8::1]:4711`, else nothing."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def _join(fields: list[tuple[bytes, str]], wanted: bytes) -> str:
    """Return all values of a header as one list, as RFC 9110 combines them."""
    return ", ".join(value for name, value in fields if name == wanted)
