"""Two controller processes on one database: one leads and is stopped or killed, the other takes over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, SubmitJob
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.store.protocol import Page
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node, a_spec
from tests.controller_process import INSIDE_COMMIT
from tests.postgres_server import PostgresServer

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
LEASE_S = 3.0


class Pair:
    """A database, controllers on it, and a client that sends commands to the inbox."""

    def __init__(self, url: str, folder: Path) -> None:
        self.is_a_file = url.startswith("sqlite")
        self.store = SqlStore(url)
        self._folder = folder
        self._env = {**os.environ, "EBBTIDE_DATABASE_URL": url, "EBBTIDE_LEASE_S": str(LEASE_S)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._sent = 0
        self.send(CreatePool(Pool("training", PoolKind.TRAINING)))
        self.send(AddNode(a_node("t0")))

    def start(self, name: str, point: str = "") -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "tests.controller_process",
            str(self._folder / name),
            *([point] if point else []),
        ]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=log, stderr=log)
        return self._processes[name]

    def send(self, body: CommandBody) -> None:
        self._sent += 1
        self.store.send(Command(f"pair-{self._sent}", time.time(), body))

    def submit(self, job_id: str) -> None:
        self.send(SubmitJob(job_id, a_spec()))

    def events(self, code: EventCode) -> Counter[str]:
        """Count the events with this code by subject."""
        events = (each.event for each in self.store.list_events(Page(limit=10_000)))
        return Counter(each.subject for each in events if each.code is code)

    def starts(self, job_id: str) -> int:
        return self.events(EventCode.JOB_STARTED)[job_id]

    def leader(self) -> str:
        lease = self.store.get_lease()
        return "" if lease is None else lease.holder.partition("-")[0]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < limit_s, f"{what}: {[self.log(name) for name in self._processes]}"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.store.close()


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.full)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    if request.param == "sqlite":
        migrate(url)
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.new_database()
    pair = Pair(url, tmp_path)
    yield pair
    pair.close()


def _start_and_stop_at(pair: Pair, point: str) -> subprocess.Popen[bytes]:
    """Start a leader and wait until it has stopped itself at `point`."""
    first = pair.start("first", point)
    pair.wait(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED, "the first stops itself")
    assert pair.leader() == "first"
    return first


@pytest.mark.e2e
@pytest.mark.parametrize(
    "point",
    [
        INSIDE_COMMIT,
        pytest.param("after-commit", marks=pytest.mark.full),
        pytest.param("after-load", marks=pytest.mark.full),
        pytest.param("before-commit", marks=pytest.mark.full),
    ],
)
def test_stopped_leader_is_fenced_and_changes_nothing(pair: Pair, point: str) -> None:
    if point == INSIDE_COMMIT and pair.is_a_file:
        pytest.skip("a SQLite file has one writer: the other controller cannot write before this one continues")
    pair.submit("a")
    first = _start_and_stop_at(pair, point)
    pair.start("second")
    pair.wait(lambda: pair.leader() == "second" and pair.starts("a") == 1, "the second takes over")
    pair.submit("b")
    pair.wait(lambda: pair.starts("b") == 1, "the second continues")

    first.send_signal(signal.SIGCONT)
    pair.wait(lambda: _has_noticed(pair, point), "the first notices that it does not lead")
    pair.submit("c")
    pair.wait(lambda: pair.starts("c") == 1, "the second still leads")
    assert pair.leader() == "second"
    assert pair.events(EventCode.JOB_STARTED) == {"a": 1, "b": 1, "c": 1}
    steps = pair.events(EventCode.JOB_STATE)
    assert (steps["a"], steps["b"]) == (3, 3), "submitted, queued, running: each once"
    assert first.poll() is None, "the first must keep running as a follower"


def _has_noticed(pair: Pair, point: str) -> bool:
    log = pair.log("first")
    return "epoch of this controller has ended" in log or "is unavailable" in log or point == "after-commit"


@pytest.mark.e2e
def test_follower_takes_over_when_the_leader_is_killed_or_stopped(pair: Pair) -> None:
    first = pair.start("first")
    pair.wait(lambda: pair.leader() == "first", "the first leads")
    second = pair.start("second")
    pair.submit("a")
    pair.wait(lambda: pair.starts("a") == 1, "a runs")
    first.kill()
    pair.submit("b")
    pair.wait(lambda: pair.starts("b") == 1 and pair.leader() == "second", "the second takes over")
    pair.start("third")
    second.terminate()
    assert second.wait(PATIENCE_S) == 0
    pair.submit("c")
    pair.wait(lambda: pair.starts("c") == 1 and pair.leader() == "third", "the third takes over")
    assert pair.events(EventCode.JOB_STARTED) == {"a": 1, "b": 1, "c": 1}
