"""Special-purpose addresses, and whether an address is on the public Internet.

`ipaddress` of the standard library is not used to decide this: `is_global` accepts `64:ff9b:1::/48`, `fec0::/10` and
`2002:7f00:1::`, and its tables change with the version of Python.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import Enum, auto

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

REGISTRY_DATE = "2025-10-09"
"""Date of the registry of IPv6 blocks. BLOCKS reproduces https://www.iana.org/assignments/iana-ipv6-special-registry
and https://www.iana.org/assignments/iana-ipv4-special-registry, without entries inside a block of the same reach."""


class Reach(Enum):
    """Column "Globally Reachable" of the registries."""

    PUBLIC = auto()
    PRIVATE = auto()
    EMBEDDED = auto()
    """Like the IPv4 addresses in it: a gateway or the system itself sends the packets there."""


@dataclass(frozen=True, slots=True)
class AddressBlock:
    """An entry of a registry. `source` is the RFC."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    name: str
    source: str
    reach: Reach


def _block(network: str, name: str, source: str, reach: Reach = Reach.PRIVATE) -> AddressBlock:
    return AddressBlock(ipaddress.ip_network(network), name, source, reach)


BLOCKS = (
    _block("0.0.0.0/8", "This network", "RFC 791"),
    _block("10.0.0.0/8", "Private use", "RFC 1918"),
    _block("100.64.0.0/10", "Shared address space", "RFC 6598"),
    _block("127.0.0.0/8", "Loopback", "RFC 1122"),
    _block("169.254.0.0/16", "Link local", "RFC 3927"),
    _block("172.16.0.0/12", "Private use", "RFC 1918"),
    _block("192.0.0.0/24", "IETF protocol assignments", "RFC 6890"),
    _block("192.0.0.9/32", "Port Control Protocol anycast", "RFC 7723", Reach.PUBLIC),
    _block("192.0.0.10/32", "TURN anycast", "RFC 8155", Reach.PUBLIC),
    _block("192.0.2.0/24", "Documentation (TEST-NET-1)", "RFC 5737"),
    _block("192.31.196.0/24", "AS112-v4", "RFC 7535", Reach.PUBLIC),
    _block("192.52.193.0/24", "AMT", "RFC 7450", Reach.PUBLIC),
    _block("192.88.99.0/24", "Deprecated (6to4 relay anycast)", "RFC 7526"),
    _block("192.168.0.0/16", "Private use", "RFC 1918"),
    _block("192.175.48.0/24", "Direct delegation AS112 service", "RFC 7534", Reach.PUBLIC),
    _block("198.18.0.0/15", "Benchmarking", "RFC 2544"),
    _block("198.51.100.0/24", "Documentation (TEST-NET-2)", "RFC 5737"),
    _block("203.0.113.0/24", "Documentation (TEST-NET-3)", "RFC 5737"),
    _block("224.0.0.0/4", "Multicast", "RFC 5771"),  # in the registry of multicast addresses
    _block("240.0.0.0/4", "Reserved, and limited broadcast", "RFC 1112, RFC 8190"),
    _block("::/0", "Outside of global unicast", "RFC 4291"),  # such as fec0::/10, ff00::/8, IPv4-compatible ::/96
    _block("2000::/3", "Global unicast", "RFC 4291", Reach.PUBLIC),
    _block("::ffff:0:0/96", "IPv4-mapped", "RFC 4291", Reach.EMBEDDED),
    _block("64:ff9b::/96", "IPv4-IPv6 translation", "RFC 6052", Reach.EMBEDDED),
    _block("64:ff9b:1::/48", "Local IPv4-IPv6 translation", "RFC 8215"),
    _block("100::/64", "Discard only", "RFC 6666"),
    _block("100:0:0:1::/64", "Dummy prefix", "RFC 9780"),
    _block("2001::/23", "IETF protocol assignments", "RFC 2928"),
    _block("2001::/32", "Teredo", "RFC 4380", Reach.EMBEDDED),
    _block("2001:1::1/128", "Port Control Protocol anycast", "RFC 7723", Reach.PUBLIC),
    _block("2001:1::2/128", "TURN anycast", "RFC 8155", Reach.PUBLIC),
    _block("2001:1::3/128", "DNS-SD SRP anycast", "RFC 9665", Reach.PUBLIC),
    _block("2001:2::/48", "Benchmarking", "RFC 5180"),
    _block("2001:3::/32", "AMT", "RFC 7450", Reach.PUBLIC),
    _block("2001:4:112::/48", "AS112-v6", "RFC 7535", Reach.PUBLIC),
    _block("2001:10::/28", "Deprecated (ORCHID)", "RFC 4843"),
    _block("2001:20::/28", "ORCHIDv2", "RFC 7343", Reach.PUBLIC),
    _block("2001:30::/28", "Drone remote identification", "RFC 9374", Reach.PUBLIC),
    _block("2001:db8::/32", "Documentation", "RFC 3849"),
    _block("2002::/16", "6to4", "RFC 3056", Reach.EMBEDDED),
    _block("2620:4f:8000::/48", "Direct delegation AS112 service", "RFC 7534", Reach.PUBLIC),
    _block("3fff::/20", "Documentation", "RFC 9637"),
    _block("5f00::/16", "Segment routing (SRv6) SIDs", "RFC 9602"),
    _block("fc00::/7", "Unique local", "RFC 4193"),
    _block("fe80::/10", "Link local", "RFC 4291"),
)
_BY_SPECIFICITY = sorted(BLOCKS, key=lambda block: block.network.prefixlen, reverse=True)


def is_public(text: str) -> bool:
    """Return whether the text is an address on the public Internet.

    Addresses with a zone such as `fe80::1%eth0` are not.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not getattr(address, "scope_id", None) and is_public_address(address)


def is_public_address(address: Address) -> bool:
    """Return whether the address is on the public Internet, also seen through the IPv4 addresses embedded in it."""
    block = find_block(address)
    if block is None:
        return True
    if block.reach is Reach.EMBEDDED:
        return all(is_public_address(embedded) for embedded in extract_embedded(address))
    return block.reach is Reach.PUBLIC


def find_block(address: Address) -> AddressBlock | None:
    """Return the smallest block that contains the address. None: an ordinary IPv4 address."""
    return next((block for block in _BY_SPECIFICITY if address in block.network), None)


def extract_embedded(address: Address) -> tuple[ipaddress.IPv4Address, ...]:
    """Return the IPv4 addresses in an address of a block with `Reach.EMBEDDED`."""
    assert isinstance(address, ipaddress.IPv6Address)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo  # server and client
    return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
