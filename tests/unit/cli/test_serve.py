"""`ebbtide serve` and `ebbtide migrate`."""

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

from cli import login_users
from ebbtide.client import Client, RetryPolicy
from scheduler.store.database import StoreError, open_engine
from scheduler.store.schema_migration import migrate, require_current_revision
from scheduler.store.sqlite_lock import hold_api_lock
from tests.postgres_server import PostgresServer

Run = Callable[..., Result]
TIMEOUT_S = 90.0


def test_migrate_creates_a_database_and_is_idempotent(
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


def test_password_in_the_database_url_is_redacted() -> None:
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


def test_unavailable_host_is_rejected(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBBTIDE_AUTH", raising=False)
    monkeypatch.setenv("EBBTIDE_HOST", "")
    result = run("serve", "--host", "203.0.113.7", "--port", "0")
    assert result.exit_code == 2
    assert "EBBTIDE_HOST: cannot listen on '203.0.113.7'" in result.stderr


def test_invalid_profile_is_rejected_with_its_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "b200.json").write_text("{}")
    monkeypatch.setenv("EBBTIDE_PROFILES_DIR", str(tmp_path))
    result = run("serve")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "b200.json" in result.stderr


def test_port_in_use_is_rejected_even_if_it_is_shared(run: Run, tmp_path: Path) -> None:
    """With SO_REUSEPORT, processes of another program could share the port unnoticed."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port), EBBTIDE_API_PROCESSES="2", EBBTIDE_RUN_DIR=str(tmp_path))
    assert result.exit_code == 2
    assert f"EBBTIDE_PORT: cannot listen on 127.0.0.1, port {port}: Address already in use" in result.stderr


@pytest.mark.parametrize("verb", ["serve", "api"])
def test_several_api_processes_need_postgresql(run: Run, tmp_path: Path, verb: str) -> None:
    environment = {"EBBTIDE_API_PROCESSES": "2", "EBBTIDE_DATABASE_URL": f"sqlite:///{tmp_path}/x", "EBBTIDE_PORT": "0"}
    result = run(verb, EBBTIDE_RUN_DIR=str(tmp_path), **environment)
    assert result.exit_code == 2
    assert "EBBTIDE_API_PROCESSES is 2" in result.stderr
    assert "PostgreSQL" in result.stderr


def test_second_api_process_on_one_sqlite_file_is_refused(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    with hold_api_lock(url):
        result = run("api", EBBTIDE_DATABASE_URL=url, EBBTIDE_RUN_DIR=str(tmp_path), EBBTIDE_PORT="0")
        with pytest.raises(StoreError, match="another API process"), hold_api_lock(url):
            pass
    assert result.exit_code == 3
    assert str(tmp_path / "state.sqlite") in result.stderr
    with hold_api_lock(url), hold_api_lock("postgresql+psycopg://host/ebbtide"):
        pass


@pytest.mark.parametrize("verb", ["serve", "api"])
def test_unauthenticated_service_on_a_public_address_is_rejected(run: Run, tmp_path: Path, verb: str) -> None:
    environment = {"EBBTIDE_AUTH": "off", "EBBTIDE_HOST": "0.0.0.0", "EBBTIDE_DATABASE_URL": f"sqlite:///{tmp_path}/x"}
    result = run(verb, **environment)
    assert result.exit_code == 2
    assert "EBBTIDE_HOST 0.0.0.0" in result.stderr
    assert "off-everywhere" in result.stderr


def test_switched_off_authentication_needs_force_beside_other_login_users(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the machine would have full access."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(login_users, "list_other_login_users", lambda: ["bert", "carla"])
    for name, value in (("EBBTIDE_AUTH", "on"), ("EBBTIDE_PORT", "0")):
        monkeypatch.setenv(name, value)  # `serve` sets both
    started: list[str] = []

    def start(commands: dict[str, list[str]]) -> tuple[int, str]:
        started.append(f"{os.environ['EBBTIDE_AUTH']} {commands['API'][-1]}")
        return 0, "stopped"

    monkeypatch.setattr("cli.supervisor.supervise", start)
    for words, environment in (
        (["serve", "--no-agent", "--no-auth"], {}),
        (["serve", "--no-agent"], {"EBBTIDE_AUTH": "off"}),
        (["api"], {"EBBTIDE_AUTH": "off"}),
    ):
        refused = run(*words, EBBTIDE_PORT="0", **environment)
        assert (refused.exit_code, started) == (3, [])
        assert "bert, carla" in refused.stderr
        assert "--force" in refused.stderr
    assert run("serve", "--port", "0", "--no-agent", "--no-auth", "--force", EBBTIDE_AUTH="on").exit_code == 0
    monkeypatch.setattr(login_users, "list_other_login_users", list)
    assert run("serve", "--port", "0", "--no-agent", "--no-auth", EBBTIDE_AUTH="on").exit_code == 0
    assert started == ["off --force", "off api"]


@contextmanager
def _served(
    tmp_path: Path, *, apis: int, database_url: str = "sqlite:///ebbtide.sqlite"
) -> Iterator[subprocess.Popen[str]]:
    """A complete service with its own database, folder and port."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cli", "serve", "--port", "0"],
        cwd=tmp_path,
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "EBBTIDE_RUN_DIR": str(tmp_path / "run"),
            "EBBTIDE_API_PROCESSES": str(apis),
            "EBBTIDE_DATABASE_URL": database_url,
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("apis", [1, 2])
def test_serve_runs_and_stops_all_its_processes(run: Run, tmp_path: Path, apis: int, postgres: PostgresServer) -> None:
    with _served(tmp_path, apis=apis, database_url=postgres.new_database()) as served:
        url = _when_ready(served)
        port = int(url.rpartition(":")[2])
        assert run("pools", "create", "training", "--kind", "training", "--url", url).exit_code == 0
        for _ in range(10 * apis):  # each request may reach either process
            assert json.loads(run("pools", "--url", url, "-o", "json").stdout)[0]["name"] == "training"
        children = psutil.Process(served.pid).children(recursive=True)
        assert sum(_listens(child, port) for child in children) == apis
        token = (tmp_path / "run" / "local.token").read_text().strip()
        metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
        assert f'ebbtide_api_request_duration_seconds_count{{method="GET",route="/v1/pools"}} {10 * apis}.0' in metrics
        served.send_signal(signal.SIGTERM)
        _, output = served.communicate(timeout=TIMEOUT_S)
        assert served.returncode == 0, output
        assert "Ebbtide stopped." in output
        alive = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert alive == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


_TRAIN = """
import json, pathlib, sys
import api, scheduler
own = [pathlib.Path(module.__file__).name for module in (api, scheduler)]
ebbtides = [name for name in sys.modules if name.startswith(("scheduler.", "api.", "cli", "ebbtide"))]
print(json.dumps([own, ebbtides, pathlib.Path(api.__file__).parent == pathlib.Path.cwd()]))
"""


@pytest.mark.e2e
@pytest.mark.full
def test_modules_of_the_user_hide_none_of_ebbtides_and_are_hidden_by_none(run: Run, tmp_path: Path) -> None:
    for package in ("scheduler", "api", "cli", "baselines", "ebbtide"):
        (tmp_path / f"{package}.py").write_text(f"IS_EBBTIDE = False  # {package}")
    (tmp_path / "train.py").write_text(_TRAIN)
    (tmp_path / ".ebbtideignore").write_text("run\nebbtide.sqlite*\n")
    with _served(tmp_path, apis=1) as served:
        url = _when_ready(served)
        words = ["--pool", "training", "--gpu", "cpu", "--gpus", "1", "--url", url]
        assert run("pools", "create", "training", "--kind", "training", "--url", url).exit_code == 0
        assert run("nodes", "add", "n0", *words).exit_code == 0
        words = ["--name", "own", "--min", "1", "--workdir", str(tmp_path), "--url", url, "--", "python3", "train.py"]
        result = run("submit", "-q", *words)
        assert result.exit_code == 0, result.output
        give_up_at = time.monotonic() + TIMEOUT_S
        while not (lines := run("logs", result.stdout.strip(), "--url", url).stdout.splitlines()):
            assert time.monotonic() < give_up_at
            time.sleep(0.1)
    assert json.loads(lines[-1]) == [["api.py", "scheduler.py"], [], True]


@pytest.mark.e2e
def test_ranks_outlive_every_process_of_the_service(run: Run, tmp_path: Path) -> None:
    with _served(tmp_path, apis=1) as served:
        url = _when_ready(served)
        assert run("pools", "create", "training", "--kind", "training", "--url", url).exit_code == 0
        words = ["--pool", "training", "--gpu", "cpu", "--gpus", "1", "--url", url]
        assert run("nodes", "add", "n0", *words).exit_code == 0
        script = "import os, time; print(os.environ['EBBTIDE_GENERATION'], flush=True); time.sleep(9); print('done')"
        job = run("submit", "-q", "--name", "steady", "--min", "1", "--url", url, "--", "python3", "-c", script)
        _wait_for_lines(run, job.stdout.strip(), url, ["1"])
        for child in psutil.Process(served.pid).children():
            child.kill()
        _wait_for_lines(run, job.stdout.strip(), url, ["1", "done"])
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=TIMEOUT_S)
        assert served.returncode == 0


def _wait_for_lines(run: Run, job: str, url: str, expected: list[str]) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while (result := run("logs", job, "--url", url)).stdout.splitlines() != expected:
        assert time.monotonic() < give_up_at, result.output
        time.sleep(0.2)


def _when_ready(served: subprocess.Popen[str]) -> str:
    """Return the URL that the service prints, once it is ready."""
    assert served.stderr is not None
    found = re.search(r"serves (http://127\.0\.0\.1:[1-9]\d*) ", served.stderr.readline())
    assert found is not None
    assert "local.token" in served.stderr.readline()
    with Client(found[1], retries=RetryPolicy(attempts=1)) as client:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not client.is_ready():
            assert served.poll() is None, served.stderr.read()
            assert time.monotonic() < give_up_at, f"not ready within {TIMEOUT_S} s"
            time.sleep(0.1)
    return found[1]


def _listens(process: psutil.Process, port: int) -> bool:
    sockets = process.net_connections(kind="tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)
