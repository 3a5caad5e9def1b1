"""Files that an agent shares with ranks, which it does not trust.

The agent and the supervisor write into folders in which a rank may create any name, and read what a rank wrote. So
files are created under unpredictable names and renamed, and readers follow no link, open only regular files and read
a limited number of bytes. This module is also loaded by the supervisor, so it imports little.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

JSON_BYTES_MAX = 1_048_576


class JsonFile(NamedTuple):
    """The content of a JSON file, and when it was last written."""

    document: Any
    written_at_ns: int


def write_json(path: Path, document: object, *, mode: int = 0o600, gid: int = -1, durable: bool = False) -> None:
    """Replace a JSON file as `write_text` does.

    Raises:
        OSError: as `write_text`.
        ValueError: JSON cannot represent a number of the document.
    """
    write_text(path, json.dumps(document, allow_nan=False), mode=mode, gid=gid, durable=durable)


def write_text(path: Path, text: str, *, mode: int = 0o600, gid: int = -1, durable: bool = False) -> None:
    """Replace a file as a whole, also where a rank has created something else under its name.

    Args:
        gid: group of the file, or -1 for the group of the writer.
        durable: make the file survive a power failure.

    Raises:
        OSError: the folder is missing, read-only or full.
    """
    part = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchown(descriptor, -1, gid)
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        _replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def open_regular_file(path: Path, *, owner: int | None = None) -> int | None:
    """Open a file for reading and return the descriptor. None if it does not exist.

    Args:
        owner: user id that must own the file, or None for any.

    Raises:
        ValueError: it is not a regular file, or it belongs to somebody else.
        OSError: it cannot be opened.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError(f"{path} is a link or a socket. A regular file is required.") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file.")
        if owner is not None and status.st_uid != owner:
            raise ValueError(f"{path} belongs to user id {status.st_uid}. It must belong to user id {owner}.")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_json(path: Path, *, owner: int | None = None, bytes_max: int = JSON_BYTES_MAX) -> JsonFile | None:
    """Read a JSON file of at most `bytes_max` bytes. None if it does not exist.

    Raises:
        ValueError: it is not a regular file, belongs to another user than `owner`, is too large, or is not JSON.
        OSError: it cannot be read.
    """
    descriptor = open_regular_file(path, owner=owner)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        written_at_ns = os.fstat(descriptor).st_mtime_ns
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"{path} has more than {bytes_max} bytes.")
    try:
        return JsonFile(json.loads(data), written_at_ns)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_end(path: Path, bytes_max: int) -> bytes:
    """Return the last bytes of a regular file, or none if it is missing or something else."""
    try:
        descriptor = open_regular_file(path)
    except (OSError, ValueError):
        return b""
    if descriptor is None:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - bytes_max))
        return file.read(bytes_max)


def _replace(part: Path, path: Path) -> None:
    try:
        part.replace(path)
    except IsADirectoryError:
        # A rank has created a folder under this name. Its content may be large, so it is only moved away.
        path.rename(path.with_name(f".{path.name}.{os.urandom(8).hex()}"))
        part.replace(path)
