"""Addresses and networks in settings and requests."""

from __future__ import annotations

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def to_local_authority(host: str, port: int) -> str:
    """Return HOST:PORT at which this machine reaches a server that listens on `host`."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_networks(text: str) -> tuple[Network, ...]:
    """Return the networks in a comma-separated list; an address is a network of one. Raises ValueError."""
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())
