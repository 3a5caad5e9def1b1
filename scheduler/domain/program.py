"""The user's code: the archive of a working directory, what prepares it on a machine, and how it is launched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from posixpath import normpath

from scheduler.domain.run_document import LaunchMode
from scheduler.domain.secret_reference import SecretReference

ARCHIVE_BYTES_MAX = 256 * 2**20
"""Default limit of a packed archive."""
UNPACKED_RATIO_MAX = 4
"""Largest size of the files in an archive, in multiples of the limit of the packed archive."""
ARCHIVE_ENTRIES_MAX = 100_000
"""Most files, folders and links in one archive."""
SETUP_TIMEOUT_S = 3600.0
"""Time after which the agent ends a setup command."""
DIGEST_FORM = "sha256: followed by 64 hexadecimal digits"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def find_digest_problem(digest: str) -> str | None:
    """Return the accepted form if `digest` names no archive, else None."""
    return None if _DIGEST.fullmatch(digest) else DIGEST_FORM


def find_setup_problem(setup: tuple[str, ...], *, archive: str) -> str | None:
    """Return what is accepted instead of `setup`, or None if it is valid."""
    if setup and not archive:
        return "nothing without workdir.archive, in whose directory it runs"
    return None


def find_venv_problem(venv: str, *, has_setup: bool) -> str | None:
    """Return what is accepted instead of `venv`, or None if it is valid."""
    if not venv or (venv.startswith("/") and ".." not in venv.split("/")):
        return None
    if venv.startswith("/") or ".." in venv.split("/"):
        return "a path without '..'"
    return None if has_setup else "an absolute path; a relative one only with setup, which creates it"


@dataclass(frozen=True, slots=True)
class Program:
    """The user's code besides its command.

    Args:
        archive: digest of the working directory's archive, `sha256:<hex>`. Empty: the job has none.
        setup: command that runs once per machine in a new working directory. Empty: none.
        venv: virtual environment whose `python` comes first on PATH: an absolute path, or a path in the working
            directory that `setup` creates. Empty: the PATH of the machine.
        launch: one process per GPU, or one per node.
        secrets: what its ranks get besides their environment, by reference.
    """

    archive: str = ""
    setup: tuple[str, ...] = ()
    venv: str = ""
    launch: LaunchMode = LaunchMode.RANK
    secrets: tuple[SecretReference, ...] = ()

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Names of the secrets of the queue that the job needs."""
        return tuple(dict.fromkeys(each.name for each in self.secrets if each.name))

    def __post_init__(self) -> None:
        for field, value, problem in (
            ("workdir.archive", self.archive, None if not self.archive else find_digest_problem(self.archive)),
            ("setup", self.setup, find_setup_problem(self.setup, archive=self.archive)),
            ("venv", self.venv, find_venv_problem(self.venv, has_setup=bool(self.setup))),
        ):
            if problem is not None:
                raise ValueError(f"{field} is {value!r}; allowed: {problem}")


DEFAULT_PROGRAM = Program()


def find_entry_name_problem(name: str) -> str | None:
    """Return why an archive must not contain an entry with this name, or None."""
    parts = name.split("/")
    if name.startswith("/"):
        return "its name is absolute"
    if ".." in parts:
        return "its name contains '..'"
    if not name or "" in parts or "." in parts or "\0" in name:
        return "its name is malformed"
    return None


def find_link_problem(name: str, target: str) -> str | None:
    """Return why the symbolic link `name` may lead out of the folder that contains it, or None.

    A safe target starts with at most as many `..` as the link has parent folders, and contains no other `..`. Under
    this rule, a chain of links cannot leave the folder either, as long as no entry lies below a link.
    """
    if target.startswith("/"):
        return f"it is a symbolic link to the absolute path {target}"
    parts = target.split("/")
    leading = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    if leading > name.count("/"):
        return f"it is a symbolic link that leads out of the folder, to {target}"
    if ".." in parts[leading:]:
        return f"it is a symbolic link to {target}, with '..' after a name; link to {normpath(target)} instead"
    return None if target and "\0" not in target else "it is a symbolic link without a target"
