"""Processes of the front door benchmark: a database with 100,000 jobs, a controller and API processes.

99,000 jobs have ended. Of 1,000 live jobs, 400 run on 4 GPUs each and 600 are pending in a queue at its limit. 400 GPUs
are free for the short jobs of the benchmark.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
from sqlalchemy import func, select, text

from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.database import open_engine
from scheduler.store.protocol import Commit
from scheduler.store.sql_history import ENDED_JOBS, EVENTS
from scheduler.store.sql_inbox import INBOX
from scheduler.store.sql_store import SqlStore
from tests.builders import a_fleet, a_job
from tests.loopback import find_free_port

ENDED, RUNNING, WAITING, NODES = 99_000, 400, 600, 250
CROWDED = "crowded"
PATIENCE_S = 120.0


def fill(url: str) -> None:
    """Create the database. Takes about a minute."""
    store, now_s = SqlStore(url), time.time()
    lease = store.acquire_lease("filler", now_s=now_s, ttl_s=1e6)
    assert lease is not None
    pools, nodes = a_fleet(training=NODES, inference=0)
    del pools["inference"]
    queues = {CROWDED: JobQueue(CROWDED, limit_gpus=0)}
    jobs = {job.id: job for job in (*_running(now_s), *_waiting(now_s))}
    snapshot = Snapshot(1, now_s, pools, nodes, jobs, queues=queues)
    ended = [_ended(at, now_s) for at in range(ENDED)]
    before = Snapshot()
    for first in range(0, ENDED, 9_000):
        share = tuple(ended[first : first + 9_000])
        store.commit(Commit(before, snapshot, lease.epoch, ended_jobs=share))
        before, snapshot = snapshot, replace(snapshot, generation=snapshot.generation + 1)
    store.release_lease("filler")
    store.close()
    _settle(url)


def _settle(url: str) -> None:
    """Run the maintenance that a server would otherwise start during the measurement."""
    engine = open_engine(url).execution_options(isolation_level="AUTOCOMMIT")
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            connection.execute(text("VACUUM ANALYZE"))
    engine.dispose()


def _running(now_s: float) -> list[Job]:
    seats = [{f"t{at // 2}": tuple(range(4 * (at % 2), 4 * (at % 2) + 4))} for at in range(RUNNING)]
    return [
        a_job(f"run-{at}", 4, state=JobState.RUNNING, on=seat, now_s=now_s, steps=10**7)
        for at, seat in enumerate(seats)
    ]


def _waiting(now_s: float) -> list[Job]:
    return [a_job(f"wait-{at}", 2, 8, now_s=now_s - 3600.0 + at, queue=CROWDED) for at in range(WAITING)]


def _ended(at: int, now_s: float) -> Job:
    return a_job(f"past-{at}", 1, 4, state=JobState.SUCCEEDED, now_s=now_s - 1e6 + at)


def count_filled_jobs(url: str) -> int:
    engine = open_engine(url)
    with engine.connect() as connection:
        count = connection.execute(select(func.count()).select_from(ENDED_JOBS)).scalar_one()
    engine.dispose()
    return int(count) + RUNNING + WAITING


class Site:
    """`apis` API processes on one port and a controller, on one database. `close` stops all of them."""

    def __init__(self, folder: Path, url: str, *, apis: int) -> None:
        self.url = url
        folder.mkdir()
        self.record = folder / "ticks.jsonl"
        self.port = find_free_port()
        env = {
            **os.environ,
            "EBBTIDE_DATABASE_URL": url,
            "EBBTIDE_AUTH": "off",
            "EBBTIDE_RUN_DIR": str(folder / "run"),
            "EBBTIDE_PORT": str(self.port),
            "EBBTIDE_API_PROCESSES": str(apis),
            "EBBTIDE_LOG_LEVEL": "WARNING",
        }
        commands = (*apis * [["cli", "api", "--force"]], ["tests.controller_process", str(self.record)])
        self.processes = [
            subprocess.Popen([sys.executable, "-m", *command], env=env, stdin=subprocess.PIPE) for command in commands
        ]
        self._wait()

    def ticks(self, since_s: float, until_s: float) -> list[float]:
        """Return the seconds of each tick that ended in a period."""
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [took_s for at_s, took_s, *_ in lines if since_s <= at_s < until_s]

    def used_s(self) -> dict[str, float]:
        """Return the CPU seconds so far, which are less sensitive to other work than wall-clock time."""
        *apis, controller = self.processes
        names = {controller.pid: "controller", **dict.fromkeys((api.pid for api in apis), "API")}
        used_s = {"client": _cpu_s(psutil.Process()), "API": 0.0, "controller": 0.0, "database": 0.0}
        for child in psutil.Process().children():
            family = (child, *child.children(recursive=True))
            used_s[names.get(child.pid, "database")] += sum(map(_cpu_s, family))
        return used_s

    def delays(self, count: int) -> list[float]:
        """Return how many seconds the last `count` submissions were in the inbox before a tick applied them."""
        engine = open_engine(self.url)
        with engine.connect() as connection:
            sent = connection.execute(select(INBOX).order_by(INBOX.c.number.desc()).limit(count)).all()
            told = connection.execute(select(EVENTS.c.generation, EVENTS.c.at_s).where(EVENTS.c.generation > 1)).all()
        engine.dispose()
        at_s = {row.generation: row.at_s for row in told}
        taken = [(row.consumed_at_generation, row.body["at_s"]) for row in sent]
        return [at_s[generation] - sent_s for generation, sent_s in taken if generation in at_s]

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.communicate(timeout=PATIENCE_S)

    def _wait(self) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not (self.record.exists() and self.record.read_text() and self._answers()):
            assert time.monotonic() < limit_s, "the service does not come up"
            assert {process.poll() for process in self.processes} == {None}
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz").close()
        except (OSError, urllib.error.HTTPError):
            return False
        return True


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
