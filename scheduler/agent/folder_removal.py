"""Deletion of folders that ranks could write to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def delete_folder(path: Path) -> None:
    """Delete a file or a folder with its content. Links are deleted and never followed. A missing path is ignored.

    `rm` handles trees of any depth. Python's functions fail on a tree that is deeper than the interpreter's stack, and
    a rank can create one.

    Raises:
        OSError: something cannot be deleted.
    """
    if not os.path.lexists(path):
        return
    problem = _run("rm", "-rf", "--", str(path))
    if problem and os.geteuid() != 0 and not path.is_symlink():
        _run("chmod", "-R", "u+rwx", "--", str(path))  # folders that their owner has closed
        problem = _run("rm", "-rf", "--", str(path))
    if problem:
        raise OSError(f"{path} cannot be deleted: {problem}")


def _run(*command: str) -> str:
    """Run a command and return its last error, or an empty string."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()[-300:] or f"exit code {done.returncode}"
