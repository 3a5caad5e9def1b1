"""Modules of the console without a browser: their types, and unit tests in Node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = ROOT / "api" / "console"
TOOLS = ROOT / "tests" / "clients" / "node_modules" / ".bin"
TESTS = sorted((Path(__file__).parent / "modules").glob("*.test.js"))


@pytest.fixture(scope="module")
def node() -> str:
    return shutil.which("node") or pytest.skip("no Node.js")


def _run(*command: str | Path) -> str:
    """Return what a failing command printed, else an empty string."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ended.stdout + ended.stderr if ended.returncode else ""


@pytest.mark.skipif(not (TOOLS / "tsc").exists(), reason="no TypeScript: run `make generators`")
def test_types_agree(node: str) -> None:
    """The views of the OpenAPI document are the types of responses."""
    views = CONSOLE / "types" / "api.d.ts"
    assert _run(TOOLS / "openapi-typescript", ROOT / "api" / "openapi.json", "--output", views) == ""
    assert _run(TOOLS / "tsc", "--project", CONSOLE) == ""


@pytest.mark.parametrize("file", TESTS, ids=lambda path: path.name.removesuffix(".test.js"))
def test_module(node: str, file: Path) -> None:
    assert _run(node, "--test", file) == ""
