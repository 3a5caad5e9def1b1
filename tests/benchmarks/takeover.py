"""Failover between two controllers on one PostgreSQL: time from killing or stopping the leader to the standby's tick.

The lease duration is that of the default settings.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scheduler.domain.commands import AddNode, Command, CreatePool, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node, a_spec
from tests.postgres_server import PostgresServer

ROOT = Path(__file__).parents[2]
REPETITIONS = 5
PATIENCE_S = 120.0
REST_S = 2.0
ASKED = "15 s"


def rows() -> Iterator[tuple[str, str, str]]:
    server = PostgresServer(is_durable=True)
    try:
        server.start()
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(server.new_database(), Path(folder))
            try:
                for how, name in ((signal.SIGKILL, "is killed"), (signal.SIGSTOP, "is stopped")):
                    took_s = [pair.take_over(how) for _ in range(REPETITIONS)]
                    told = f"{statistics.median(took_s):.1f}, {max(took_s):.1f} s"
                    yield f"the leader {name}, until the other has ticked: median, worst of {REPETITIONS}", ASKED, told
            finally:
                pair.close()
    finally:
        server.close()


class Pair:
    """A leader and a standby, each with a record of its ticks."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder, self._started = folder, 0
        self._env = {**os.environ, "EBBTIDE_DATABASE_URL": url}
        self._store = SqlStore(url)
        for body in (CreatePool(Pool("training", PoolKind.TRAINING)), AddNode(a_node("t0")), SubmitJob("a", a_spec())):
            self._store.send(Command(type(body).__name__, time.time(), body))
        self._leader = self._start()
        self._await(lambda: bool(self._leader[0].read_text()))
        self._other = self._start()

    def take_over(self, how: signal.Signals) -> float:
        """Return the seconds from the signal to the end of the standby's first tick. Starts a new standby."""
        time.sleep(REST_S)  # let the standby reach its wait
        _, process = self._leader
        assert not self._other[0].read_text(), "nobody else leads"
        process.send_signal(how)
        since_s = time.monotonic()
        self._await(lambda: bool(self._other[0].read_text()))
        took_s = time.monotonic() - since_s
        process.kill()
        process.wait()
        self._leader, self._other = self._other, self._start()
        return took_s

    def close(self) -> None:
        for _, process in (self._leader, self._other):
            process.kill()
            process.wait()
        self._store.close()

    def _start(self) -> tuple[Path, subprocess.Popen[bytes]]:
        """Wait for the standby to start, so that failover does not include its start-up."""
        self._started += 1
        record = self._folder / f"controller-{self._started}"
        command = [sys.executable, "-m", "tests.controller_process", str(record)]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=log, stderr=log)
        self._await(record.exists)
        return record, process

    def _await(self, reached: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < limit_s, (self._folder / "log").read_text()
            time.sleep(0.01)
