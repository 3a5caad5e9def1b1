"""The state folder of a pilot's agent on its node: private, and deleted with the allocation."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from scheduler.agent.folder_removal import delete_folder

logger = logging.getLogger(__name__)

_PREFIX = "ebbtide-pilot-"


@dataclass(frozen=True, slots=True)
class PilotFolder:
    """The state folder, and a file with the join token in it."""

    state: Path
    token_file: Path


@contextmanager
def open_pilot_folder(name: str, *, parent: Path | None, token: str) -> Iterator[PilotFolder]:
    """Create a state folder for the block, and delete those that killed agents of this user have left.

    The folder has a random name, because another user could create a predictable one first.

    Raises:
        OSError: the folder cannot be created.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    parent.mkdir(parents=True, exist_ok=True)
    delete_abandoned_folders(parent)
    state = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-", dir=parent))
    token_file = state / "join-token"
    token_file.touch(mode=0o600)
    token_file.write_text(token, encoding="utf-8")
    try:
        yield PilotFolder(state, token_file)
    finally:
        _delete(state)


def delete_abandoned_folders(parent: Path) -> None:
    """Delete the folders of this user's pilots whose agent has ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # one that is about to be used has no lock yet
            if path.lstat().st_uid == os.geteuid() and not _is_in_use(path):
                _delete(path)


def _is_in_use(state: Path) -> bool:
    """Return whether an agent has locked the folder. Raises OSError if it was never locked."""
    descriptor = os.open(state / "agent.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _delete(state: Path) -> None:
    try:
        delete_folder(state)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", state, error)
