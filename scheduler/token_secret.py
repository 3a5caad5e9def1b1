"""The file with the secret from which the tokens of workers and agents are derived."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

SECRET_BYTES = 32


def load_token_secret(path: Path) -> bytes:
    """Return the secret in `path`. If the file does not exist, create it with a new secret and mode 0600.

    Several processes may call this at once: all of them return the secret of the first.

    Raises:
        ValueError: the file is shorter than 32 bytes, or other users can read it.
    """
    if not path.exists():
        _create_secret(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(
            f"token secret {path} has mode {mode:04o}; other users must not read it. Run: chmod 0600 {path}"
        )
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        raise ValueError(
            f"token secret {path} has {len(secret)} bytes; at least {SECRET_BYTES} are needed. "
            "Delete the file to have a new secret created."
        )
    return secret


def _create_secret(path: Path) -> None:
    """Write a temporary file and link it to `path`, so that no process reads a partial secret or replaces one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mkstemp creates with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        Path(path).hardlink_to(temporary)
    except FileExistsError:
        pass  # another process created the secret first
    finally:
        Path(temporary).unlink()
