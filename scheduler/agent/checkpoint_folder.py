"""The checkpoint directory of a run: created and tried as the user of its ranks."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from scheduler.agent.containment import Containment, RankUser
from scheduler.agent.run_folder import make_private_folder
from scheduler.domain.checkpoints import is_object_store

_RESOLVE = "import os, sys; print(os.path.realpath(sys.argv[1]), end='')"
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
_END_TIMEOUT_S = 1.0


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
    return open_named_folder(Path(location), containment, user)


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


def open_named_folder(path: Path, containment: Containment, user: RankUser | None) -> Path:
    """Create a checkpoint directory that the job names, as the ranks' user, and return it resolved.

    Separate processes look at it, because only the kernel knows all that decides: owners, access lists, network file
    systems. One that does not answer must not stop the agent.

    Raises:
        ValueError: it is hidden, or cannot be created or written; the message says why and what to do.
    """
    if not path.is_absolute():
        raise ValueError(f"checkpointDir: {path} is relative. Use an absolute path.")
    resolved = Path(_run_python(path, _RESOLVE, str(path)).stdout.decode("utf-8", "surrogateescape"))
    containment.check_visible(resolved, name="checkpointDir")
    identity = (-1, -1) if user is None else (user.uid, user.gid, *user.groups)
    tried = _run_python(path, _TRY, str(resolved), *map(str, identity))
    if tried.returncode != 0:
        raise ValueError(_describe(path, user, tried.stderr.decode("utf-8", "replace").strip()[-300:]))
    return resolved


def _run_python(path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a script that looks at `path`.

    Raises:
        ValueError: it did not end in time.
    """
    command = [sys.executable, "-I", "-S", "-c", script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/")
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel may not let it end before the file system answers
            process.communicate(timeout=_END_TIMEOUT_S)
        raise ValueError(
            f"checkpointDir: the file system of {path} has not answered for {_TIMEOUT_S:.0f} s. "
            f"Look whether it is mounted and its server is up (stat {path})."
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _describe(path: Path, user: RankUser | None, cause: str) -> str:
    name = "the agent's user" if user is None else user.name
    return (
        f"checkpointDir: {path} is not usable by {name}, the user of the job's ranks: {cause}. "
        f"Give the folder and its files to that user (chown -R), or set another directory."
    )
