"""Advice on URLs at which no service answers, because they have the wrong one of http and https."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 2.0


def suggest_scheme(url: str) -> str:
    """Return `; the server speaks https there: use https://...` if the URL has the wrong scheme, else an empty string.

    Asks the server, so call it only after a failed request.
    """
    parts = urlsplit(url)
    host, scheme = parts.hostname or "", "http" if parts.scheme == "https" else "https"
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        speaks_other = _speaks_tls(host, port) if scheme == "https" else _speaks_plain_http(host, port)
    except (OSError, ValueError):
        return ""
    return f"; the server speaks {scheme} there: use {parts._replace(scheme=scheme).geturl()}" if speaks_other else ""


def _speaks_tls(host: str, port: int) -> bool:
    """Return whether a TLS handshake succeeds. Certificates do not matter: nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), PROBE_TIMEOUT_S) as connection:
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLError:
            return False
    return True


def _speaks_plain_http(host: str, port: int) -> bool:
    with socket.create_connection((host, port), PROBE_TIMEOUT_S) as connection:
        connection.sendall(f"HEAD /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return connection.recv(5) == b"HTTP/" and b" 400 " not in connection.recv(8)
