"""Users who can log in to this machine, besides the caller: they can reach every loopback address of it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

_LOGIN_DEFS = Path("/etc/login.defs")
_SHELLS = Path("/etc/shells")
_UIDS = {"UID_MIN": 1000, "UID_MAX": 60_000}
"""Range of the uids of people if /etc/login.defs sets none, as shadow-utils documents it."""
_NO_LOGIN = frozenset({"nologin", "false", "sync", "halt", "shutdown"})


def list_other_login_users() -> list[str]:
    """Return the names of users with a uid of people and a login shell, except the caller, in order.

    Not listed: root, which reads everything anyway; users of a directory service that does not enumerate its users; and
    the user who started this process with sudo.
    """
    uids, shells = _read_uid_range(), _read_shells()
    own = {os.getuid(), int(os.environ.get("SUDO_UID") or os.getuid())}
    return sorted(
        each.pw_name
        for each in pwd.getpwall()
        if each.pw_uid in uids and each.pw_uid not in own and _is_login_shell(each.pw_shell, shells)
    )


def _is_login_shell(shell: str, shells: frozenset[str]) -> bool:
    path = shell or "/bin/sh"
    return Path(path).name not in _NO_LOGIN and (not shells or path in shells)


def _read_uid_range() -> range:
    found = dict(_UIDS)
    for line in _read_lines(_LOGIN_DEFS):
        name, *values = line.split()
        if name in found and len(values) == 1 and values[0].isdigit():
            found[name] = int(values[0])
    return range(found["UID_MIN"], found["UID_MAX"] + 1)


def _read_shells() -> frozenset[str]:
    return frozenset(_read_lines(_SHELLS))


def _read_lines(path: Path) -> list[str]:
    """Return the lines without comments and blanks; none if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
