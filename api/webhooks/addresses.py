"""Which addresses webhooks may lead to: public ones alone, unless the operator has named the host.

What counts is the address that the connection goes to. It is looked up once for each attempt, checked, and connected to
by number, so that a name that leads elsewhere a moment later (DNS rebinding) leads nowhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host's name. Raises OSError where it has none."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class RefusedAddressError(ValueError):
    """The host leads to where webhooks may not go."""


async def resolved(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def allowed_hosts(setting: str) -> frozenset[str]:
    """The hosts of EBBTIDE_WEBHOOK_HOSTS."""
    return frozenset(part.strip().strip("[]").lower() for part in setting.split(",") if part.strip())


def is_public(text: str) -> bool:
    """Whether this address is of the internet at large; False for what is no address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(one.is_global and not one.is_multicast for one in (address, *_within(address)))


def _within(address: Address) -> list[Address]:
    """Addresses that an IPv6 one carries, to which a gateway or the system itself may lead."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def check_literal(host: str, allowed: frozenset[str]) -> None:
    """Refuse at once a host that can only lead to where webhooks may not go. Raises RefusedAddressError."""
    name = host.strip("[]").lower()
    is_local = name.rstrip(".") == "localhost" or name.rstrip(".").endswith(".localhost")
    if name not in allowed and (is_local or _is_address(name)) and not is_public(name):
        raise RefusedAddressError(_refusal(host))


async def addresses_of(host: str, port: int, allowed: frozenset[str], resolve: Resolver) -> list[str]:
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
                raise RefusedAddressError(_refusal(host if address == name else f"{host} ({address})"))
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _refusal(host: str) -> str:
    return f"{host} is not a public address; an operator may allow the host by EBBTIDE_WEBHOOK_HOSTS"
