"""`python3 -I -m scheduler.agent.bundle_copy TARGET`: copy the agent's bundle into a volume, in an init container."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from scheduler.domain.agent_bundle import BUNDLE_ENTRIES


def copy_bundle(source: Path, target: Path) -> None:
    """Copy the bundle into an existing folder, which may belong to another user. Every user can read the copy."""
    for name in BUNDLE_ENTRIES:
        # A restarted init container finds what it has copied before.
        shutil.copytree(source / name, target / name, symlinks=True, dirs_exist_ok=True)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python3 -I -m scheduler.agent.bundle_copy TARGET")
    os.umask(0o022)
    copy_bundle(Path(sys.prefix), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
