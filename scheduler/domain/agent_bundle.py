"""The folder that brings the node agent into pods, with an interpreter of its own.

`tools.agent_bundle` builds it, `scheduler.kubernetes.agent_injection` mounts it, and `scheduler.agent.bundle_copy`
copies it. The interpreter names its dynamic loader by an absolute path, so the folder works at this place only.
"""

from __future__ import annotations

BUNDLE_DIR = "/opt/ebbtide-agent"
BUNDLE_PYTHON = f"{BUNDLE_DIR}/bin/python3"
BUNDLE_ENTRIES = ("bin", "lib")
"""Entries of the bundle. In the image they are at the root, next to folders that container runtimes add."""
