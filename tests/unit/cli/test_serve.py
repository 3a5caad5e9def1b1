"""`serve` and `migrate`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import Result

from api.client import Client, RetryPolicy
from scheduler.store.database import open_engine
from scheduler.store.schema_migration import require_current_revision

Run = Callable[..., Result]
PATIENCE_S = 90.0


def test_migrate_makes_a_database_and_leaves_a_new_one_as_it_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EBBTIDE_DATABASE_URL", f"sqlite:///{tmp_path / 'state.sqlite'}")
    for _ in range(2):
        result = run("migrate", "-o", "json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["database_url"].endswith("state.sqlite")
        engine = open_engine(os.environ["EBBTIDE_DATABASE_URL"])
        require_current_revision(engine)
        engine.dispose()


def test_a_password_in_the_database_url_is_not_shown() -> None:
    from cli.commands.service import redact_database_url

    assert (
        redact_database_url("postgresql+psycopg://ebbtide:s3cret@db/ebbtide")
        == "postgresql+psycopg://ebbtide:***@db/ebbtide"
    )
    for password in ("p#ss", "p/ss", "p?ss", "p[ss", "p%40ss"):
        assert (
            redact_database_url(f"postgresql+psycopg://ebbtide:{password}@db/ebbtide")
            == "postgresql+psycopg://ebbtide:***@db/ebbtide"
        )
    assert (
        redact_database_url("postgresql+psycopg://db/ebbtide?user=a&password=s3cret")
        == "postgresql+psycopg://db/ebbtide?user=a"
    )
    assert redact_database_url("sqlite:///state.sqlite") == "sqlite:///state.sqlite"


def test_a_host_that_cannot_be_listened_on_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBBTIDE_AUTH", raising=False)
    monkeypatch.setenv("EBBTIDE_HOST", "")
    result = run("serve", "--host", "203.0.113.7", "--port", "0")
    assert result.exit_code == 2
    assert "EBBTIDE_HOST: cannot listen on '203.0.113.7'" in result.stderr


def test_a_port_that_somebody_has_is_refused_also_where_processes_share_theirs(run: Run, tmp_path: Path) -> None:
    """Whoever shares a port would share it with any other who does, and would not be told."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), EBBTIDE_API_PROCESSES="2", EBBTIDE_RUN_DIR=str(tmp_path))
    assert result.exit_code == 2
    assert f"EBBTIDE_PORT: cannot listen on 127.0.0.1, port {port}: Address already in use; 0 takes" in result.stderr


@pytest.mark.parametrize("verb", ["serve", "api"])
def test_nobody_opens_the_service_to_others_by_accident(run: Run, tmp_path: Path, verb: str) -> None:
    environment = {"EBBTIDE_AUTH": "off", "EBBTIDE_HOST": "0.0.0.0", "EBBTIDE_DATABASE_URL": f"sqlite:///{tmp_path}/x"}
    result = run(verb, **environment)
    assert result.exit_code == 2
    assert "EBBTIDE_AUTH: got off with EBBTIDE_HOST 0.0.0.0, which others reach" in result.stderr
    assert "off-everywhere" in result.stderr


@contextmanager
def _served(tmp_path: Path, *, apis: int) -> Iterator[subprocess.Popen[str]]:
    """A whole service on a database, a folder and a port of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "serve", "--port", "0"],
        cwd=tmp_path,
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "EBBTIDE_RUN_DIR": str(tmp_path / "run"),
            "EBBTIDE_API_PROCESSES": str(apis),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.e2e
@pytest.mark.parametrize("apis", [1, 2])
def test_serve_answers_acts_and_leaves_nothing_behind(run: Run, tmp_path: Path, apis: int) -> None:
    with _served(tmp_path, apis=apis) as served:
        url = _when_ready(served)
        port = int(url.rpartition(":")[2])
        assert run("pools", "create", "training", "--kind", "training", "--url", url).exit_code == 0
        for _ in range(10 * apis):  # a connection of its own each, with whichever process
            assert json.loads(run("pools", "--url", url, "-o", "json").stdout)[0]["name"] == "training"
        children = psutil.Process(served.pid).children(recursive=True)
        assert sum(_listens(child, port) for child in children) == apis
        told = httpx.get(f"{url}/metrics").text
        assert f'ebbtide_api_request_duration_seconds_count{{method="GET",route="/v1/pools"}} {10 * apis}.0' in told
        served.send_signal(signal.SIGTERM)
        _, said = served.communicate(timeout=PATIENCE_S)
        assert served.returncode == 0, said
        assert "Ebbtide stopped as asked." in said
        alive = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert alive == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def _when_ready(served: subprocess.Popen[str]) -> str:
    """The URL that it says, once it answers there."""
    assert served.stderr is not None
    found = re.search(r"serves (http://127\.0\.0\.1:[1-9]\d*) ", served.stderr.readline())
    assert found is not None
    assert "Authentication is off: everybody on this machine may do everything" in served.stderr.readline()
    with Client(found[1], retries=RetryPolicy(attempts=1)) as client:
        give_up_at = time.monotonic() + PATIENCE_S
        while not client.is_ready():
            assert served.poll() is None, served.stderr.read()
            assert time.monotonic() < give_up_at, f"not ready within {PATIENCE_S} s"
            time.sleep(0.1)
    return found[1]


def _listens(process: psutil.Process, port: int) -> bool:
    sockets = process.net_connections(kind="tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)
