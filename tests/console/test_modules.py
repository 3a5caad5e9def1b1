"""Modules of the console without a browser: their types, and unit tests in Node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CONSOLE = Path(__file__).resolve().parents[2] / "api" / "console"
TYPESCRIPT = CONSOLE / "node_modules" / "typescript" / "bin" / "tsc"
TESTS = sorted((Path(__file__).parent / "modules").glob("*.test.js"))


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None or not TYPESCRIPT.exists():
        pytest.skip("no Node.js or no node_modules: run `npm ci` in api/console")
    return found


def _run(*command: str | Path) -> str:
    """Return what a failing command printed, else an empty string."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ended.stdout + ended.stderr if ended.returncode else ""


def test_types_agree(node: str) -> None:
    assert _run(node, TYPESCRIPT, "--project", CONSOLE) == ""


@pytest.mark.parametrize("file", TESTS, ids=lambda path: path.name.removesuffix(".test.js"))
def test_module(node: str, file: Path) -> None:
    assert _run(node, "--test", file) == ""
