"""Conditions of tests that start containers. A skipped test says what the machine lacks."""

from __future__ import annotations

import os
import shutil

import pytest

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: runs cannot be contained"
)
needs_root = pytest.mark.skipif(
    shutil.which("bwrap") is None or os.geteuid() != 0,
    reason="the full level of containment needs bubblewrap and root",
)
