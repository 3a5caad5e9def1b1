"""The environment variables that a process was started with."""

from __future__ import annotations

import os
from pathlib import Path


def read_start_variables() -> dict[str, str]:
    """Return the variables that this process was started with.

    They are the pod's own: where a pod sets no locale, Python adds LC_CTYPE to `os.environ`.
    """
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, is_pair, value in pairs if is_pair}
