"""Clients that outside generators make from the OpenAPI document: complete, and usable for the first hour's calls.

`make generators` installs the generators. The Python client runs in their environment against a real service.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from api.openapi import iterate_operations
from tests.api.response_validation import COPY
from tests.clients.running_service import run_service

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / ".venv-tools" / "bin"
NODE_TOOLS = HERE / "node_modules" / ".bin"
TIMEOUT_S = 300.0
CALLS_MIN = 60

needs_python_generator = pytest.mark.skipif(
    not (TOOLS / "openapi-python-client").is_file(), reason="no openapi-python-client: run `make generators`"
)
needs_typescript_generator = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_TOOLS / "openapi-typescript").exists(),
    reason="no openapi-typescript: install npm, then run `make generators`",
)


@pytest.fixture(scope="module")
def python_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated package. Fails if the generator has to leave anything out."""
    folder = tmp_path_factory.mktemp("client") / "generated"
    words = ["generate", "--path", str(COPY), "--output-path", str(folder), "--fail-on-warning"]
    _run([str(TOOLS / "openapi-python-client"), *words])
    return folder


@needs_python_generator
def test_the_python_client_has_every_operation(python_client: Path) -> None:
    document = json.loads(COPY.read_text(encoding="utf-8"))
    operations = {operation["operationId"] for _, _, operation in iterate_operations(document)}
    modules = {path.stem for path in (python_client / "ebbtide_client" / "api").rglob("*.py")} - {"__init__"}
    assert modules == operations


@needs_python_generator
@pytest.mark.e2e
def test_the_python_client_makes_the_first_hours_calls(python_client: Path, tmp_path: Path) -> None:
    with run_service(tmp_path, webhook_hosts="hooks.example.com") as service:
        words = [str(TOOLS / "python"), str(HERE / "first_hour.py"), service.url, service.token]
        calls = int(_run(words, PYTHONPATH=str(python_client)))
        assert service.is_alive(), service.log()
    assert calls >= CALLS_MIN


@needs_typescript_generator
def test_the_typescript_client_compiles_with_the_first_hours_calls(tmp_path: Path) -> None:
    generated = tmp_path / "generated"
    # Without this option, requests would have to name every field that has a default.
    words = [str(COPY), "--default-non-nullable=false", "--output", str(generated / "schema.ts")]
    _run([str(NODE_TOOLS / "openapi-typescript"), *words])
    shutil.copy(HERE / "first_hour.ts", tmp_path)
    options = ["--strict", "--noEmit", "--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom"]
    _run([str(NODE_TOOLS / "tsc"), *options, str(tmp_path / "first_hour.ts")])


def _run(words: Sequence[str], **variables: str) -> str:
    """Run a program with the generators first on PATH, because one calls its formatter by name."""
    env = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}", **variables}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout
