"""The token with which commands of the user who runs `ebbtide serve` find and use that service.

The token is in the service's run directory, which jobs do not see. The user's state folder has a file for each running
service that names the token's file, and no secret:

    RUN_DIR/local.token                                          the token, mode 0600
    ~/.local/state/ebbtide/services/HOST_PORT.json               {"url": ..., "token_file": ...}   (or XDG_STATE_HOME)

A command sends the token only to the address in that file, and only if a process of the same user listens there on this
machine. So no other user gets it by listening on the port of a service that has ended.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cli.exit_codes import InputError

TOKEN_FILE = "local.token"
_LISTENING = "0A"
_SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(frozen=True, slots=True)
class LocalService:
    """A service of the calling user on this machine, with its own address and the token for it."""

    url: str
    token: str


def find_local_service(url: str) -> LocalService | None:
    """Return the service of the calling user that `url` reaches, or None.

    `localhost` stands for the address that the service listens on, which the result's URL names.
    """
    address = _parse_local_url(url)
    path = None if address is None else _entry_path(address[1])
    document = None if path is None else _read_own_json(path)
    if address is None or document is None:
        return None
    known = _parse_local_url(str(document.get("url", "")))
    if known is None or address[1] != known[1] or address[0] not in ("localhost", known[0]):
        return None
    if not _is_own_listener(*known):
        return None
    token = _read_own_file(Path(str(document.get("token_file", ""))))
    return LocalService(f"http://{_join(*known)}", token.strip()) if token else None


def announce_service(url: str, token_file: Path) -> Path | None:
    """Let commands of this user find the service at `url`. Return the file that names it, or None without a home.

    Raises:
        OSError: the state folder cannot be written.
    """
    address = _parse_local_url(url)
    path = None if address is None else _entry_path(address[1])
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private_file(path, json.dumps({"url": url, "token_file": str(token_file.absolute())}) + "\n")
    return path


def write_private_file(path: Path, text: str) -> None:
    """Replace a file atomically. Only its owner can read it at any time."""
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mkstemp creates with mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).replace(path)


def read_token_file(path: Path) -> str:
    """Return the token in a file of this user; empty if there is none. Raises InputError if others have access."""
    return _read_own_file(path).strip()


def _entry_path(port: int) -> Path | None:
    """Return the path for the service on a port. It names the host, because hosts may share a home directory."""
    if given := os.environ.get("XDG_STATE_HOME"):
        folder = Path(given)
    else:
        try:
            folder = Path.home() / ".local" / "state"
        except RuntimeError:
            return None
    return folder / "ebbtide" / "services" / f"{socket.gethostname()}_{port}.json"


def _read_own_json(path: Path) -> dict[str, object] | None:
    try:
        document = json.loads(_read_own_file(path) or "null")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _read_own_file(path: Path) -> str:
    """Return the text of a file of this user; empty if there is none.

    Raises:
        InputError: other users can read or change the file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                return ""
            if mode := status.st_mode & 0o077:
                raise InputError(
                    f"{path} is for its owner alone, but other users have access ({mode:03o}). Run `chmod 600 {path}`."
                )
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _parse_local_url(url: str) -> tuple[str, int] | None:
    """Return address and port of an http URL that names an IP address or localhost; None for any other URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        is_plain = parts.scheme == "http" and not (parts.username or parts.query or parts.path.strip("/"))
        if host != "localhost":
            host = str(ipaddress.ip_address(host))
    except ValueError:
        return None
    return (host, port) if is_plain else None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_own_listener(host: str, port: int) -> bool:
    """Return whether a process of this user listens on the address, by the kernel's table of sockets.

    Of sockets on the same port, the kernel prefers one that is bound to the address over one that is bound to all.
    """
    owners: dict[str, set[int]] = {}
    for table in _SOCKET_TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # the kernel has no IPv6, or this is no Linux
        for fields in map(str.split, lines):
            local, _, its_port = fields[1].partition(":")
            if fields[3] == _LISTENING and int(its_port, 16) == port:
                owners.setdefault(_decode_address(local), set()).add(int(fields[7]))
    wildcards = ("0.0.0.0", "::") if ":" not in host else ("::",)
    found = next((owners[each] for each in (host, *wildcards) if each in owners), set())
    return found == {os.geteuid()}


def _decode_address(text: str) -> str:
    """Return the IP address of a hexadecimal entry in /proc/net/tcp: 32-bit words in the byte order of the machine."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return str(ipaddress.ip_address(raw))
