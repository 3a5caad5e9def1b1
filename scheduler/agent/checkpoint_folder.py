"""The checkpoint directory of a run: created and tried as the user of its ranks."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from scheduler.agent.containment import Containment, RankUser
from scheduler.agent.run_folder import make_private_folder
from scheduler.domain.checkpoints import is_object_store

_TRY = """
import os, sys
path, uid, gid, *groups = sys.argv[1:]
if int(uid) >= 0:
    os.setgroups([int(group) for group in groups]); os.setresgid(*[int(gid)] * 3); os.setresuid(*[int(uid)] * 3)
try:
    os.makedirs(path, mode=0o700, exist_ok=True)
except OSError as error:
    sys.exit(f"it cannot be created: {error.strerror}")
if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
    sys.exit("the user cannot read and write it")
"""
_TIMEOUT_S = 30.0


def open_checkpoint_folder(
    location: str, containment: Containment, default: Path, user: RankUser | None
) -> Path | None:
    """Return the directory for checkpoints, which the ranks' user can write to, or None for an object store.

    Args:
        location: directory or URL that the job names, empty for `default`.

    Raises:
        ValueError: the directory cannot be used; the message says why and what to do.
        OSError: the default directory cannot be created.
    """
    if is_object_store(location):
        return None
    if not location:
        create_default_folder(default, user)
        return default
    path = containment.check_visible(Path(location), name="checkpointDir")
    open_named_folder(path, user)
    return path


def create_default_folder(path: Path, user: RankUser | None) -> None:
    """Create the checkpoint directory below the agent's state, for the ranks' user alone.

    Raises:
        ValueError: it exists and belongs to another user; the message says what to do.
        OSError: it cannot be created.
    """
    make_private_folder(path)
    if user is None:
        return
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not any(path.iterdir()):
        os.chown(path, user.uid, user.gid)
    elif status.st_uid != user.uid:
        raise ValueError(_describe(path, user, f"it belongs to user id {status.st_uid}"))


def open_named_folder(path: Path, user: RankUser | None) -> None:
    """Create a checkpoint directory that the job names as the ranks' user, and make sure that it is writable.

    A separate process tries it, because only the kernel knows all that decides: owners, access lists, network file
    systems.

    Raises:
        ValueError: it cannot be created or written; the message says why and what to do.
    """
    if not path.is_absolute():
        raise ValueError(f"checkpointDir: {path} is relative. Use an absolute path.")
    identity = (-1, -1) if user is None else (user.uid, user.gid, *user.groups)
    command = [sys.executable, "-I", "-S", "-c", _TRY, str(path), *map(str, identity)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd="/")
    if tried.returncode != 0:
        raise ValueError(_describe(path, user, tried.stderr.strip()[-300:]))


def _describe(path: Path, user: RankUser | None, cause: str) -> str:
    name = "the agent's user" if user is None else user.name
    return (
        f"checkpointDir: {path} is not usable by {name}, the user of the job's ranks: {cause}. "
        f"Give the folder and its files to that user (chown -R), or set another directory."
    )
