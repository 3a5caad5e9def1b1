"""Many clients submit, scale and cancel jobs while the API, controllers and PostgreSQL are killed in turn.

Processes are killed with SIGKILL, PostgreSQL as by a power failure. No accepted request is lost or executed twice,
and the accounts are correct. A seed determines what happens when. The long variant is marked `full`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import httpx
import pytest
from sqlalchemy import select

from scheduler.domain.codec import decode
from scheduler.domain.commands import Command, ScaleJob, SubmitJob
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.database import open_engine
from scheduler.store.protocol import Commit, UnavailableError
from scheduler.store.sql_history import ENDED_JOBS, EVENTS
from scheduler.store.sql_inbox import INBOX
from scheduler.store.sql_store import SqlStore
from tests.builders import a_fleet, a_loan
from tests.controller_process import BRIEF
from tests.e2e.gpu_hold_record import held_gpu_s, keep_record
from tests.loopback import find_free_port
from tests.postgres_server import PostgresServer

ROOT = Path(__file__).parents[2]
OWN_NODES, LENT_NODES = 1, 8
QUEUES = ("blue", "red")
PAUSE_S, TIMEOUT_S, LEASE_S = 1.0, 120.0, 3.0
REFUSED = (404, 409)
RESIZED = {EventCode.JOB_GROWN, EventCode.JOB_SHRUNK, EventCode.JOB_MOVED, EventCode.JOB_REARRANGED}


@dataclass(slots=True)
class Accepted:
    """The requests of one client that were accepted.

    Attributes:
        jobs: job ids by idempotency key.
        scaled: the last accepted range of each scaled job.
    """

    jobs: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    scaled: dict[str, tuple[int, int]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)


class Site:
    """PostgreSQL, an API and two controllers, each of which can be killed and restarted."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server, self.url, self._folder = server, server.new_database(), folder
        self.port = find_free_port()
        self._env = {
            **os.environ,
            "EBBTIDE_DATABASE_URL": self.url,
            "EBBTIDE_AUTH": "off",
            "EBBTIDE_RUN_DIR": str(folder / "run"),
            "EBBTIDE_PORT": str(self.port),
            "EBBTIDE_LEASE_S": str(LEASE_S),
            "EBBTIDE_UNDECLARED_QUEUES": "allow",
        }
        self.kills: Counter[str] = Counter()
        _open(self.url)
        self._processes = {name: self._started(name) for name in ("api", "one", "two")}

    def kill(self, name: str) -> None:
        self.kills[name] += 1
        if name == "postgres":
            self.server.kill()
            self.server.start()
            return
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].communicate()
        self._processes[name] = self._started(name)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def log(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        controller = ["tests.controller_process", str(self._folder / name)]
        command = [sys.executable, "-m", *(["cli", "api", "--force"] if name == "api" else controller)]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=log, stderr=log)


@pytest.fixture
def site(disposable_postgres: PostgresServer, tmp_path: Path) -> Iterator[Site]:
    site = Site(disposable_postgres, tmp_path)
    yield site
    site.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("seed", "kills", "clients"), [(1, 2, 10), *(pytest.param(seed, 40, 30, marks=pytest.mark.full) for seed in (2, 3))]
)
def test_nothing_accepted_is_lost_or_done_twice(site: Site, seed: int, kills: int, clients: int) -> None:
    over, accepted = threading.Event(), [Accepted() for _ in range(clients)]
    threads = [
        threading.Thread(target=_use, args=(site.port, Random(f"{seed}-{number}"), number, accepted[number], over))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    random, names = Random(seed), ("api", "one", "postgres", "two")
    for at in range(kills):
        _wait_for_work(accepted)
        time.sleep(random.uniform(0.0, 1.0))
        site.kill(names[at % len(names)])
    over.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), site.log()
    history = _settled(site)
    _check_submissions(history, accepted)
    _check_changes(history, accepted)
    _check_accounts(history, clients)
    _check_usage(site, clients)


def _wait_for_work(accepted: list[Accepted]) -> None:
    """Wait until two more jobs per three clients are accepted: all killed processes are then running again."""
    wanted, deadline_s = _submitted(accepted) + 2 * len(accepted) // 3, time.monotonic() + TIMEOUT_S
    while _submitted(accepted) < wanted:
        assert time.monotonic() < deadline_s, "no request is answered"
        time.sleep(0.05)


def _submitted(accepted: list[Accepted]) -> int:
    return sum(len(each.jobs) for each in accepted)


def _open(url: str) -> None:
    """Create a fleet of mostly lent nodes, and start a record of GPU use in the database."""
    store, now_s = SqlStore(url), time.time()
    lease = store.acquire_lease("opener", now_s=now_s, ttl_s=LEASE_S)
    assert lease is not None
    pools, nodes = a_fleet(training=OWN_NODES, inference=LENT_NODES)
    loans = {node.name: a_loan(node.name) for node in nodes.values() if node.pool == "inference"}
    demand = {"inference": DemandReading(now_s, 0.0, 0.0)}
    store.commit(Commit(Snapshot(), Snapshot(1, now_s, pools, nodes, loans=loans, demand=demand), lease.epoch))
    store.release_lease("opener")
    store.close()
    engine = open_engine(url)
    with engine.begin() as connection:
        keep_record(connection)
    engine.dispose()


def _use(port: int, random: Random, number: int, accepted: Accepted, over: threading.Event) -> None:
    """Submit one job at a time until `over` is set. Half of them end; the others are scaled and then cancelled."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False) as http:
        turn = 0
        while not over.is_set():
            turn += 1
            name = f"{random.choice((BRIEF, 'long'))}-{number}-{turn}"
            submit = partial(
                http.post, "/v1/jobs", json=_document(name, random.choice(QUEUES)), headers={"Idempotency-Key": name}
            )
            for _ in range(random.choice((1, 1, 2))):  # some repeat a request that was answered
                accepted.jobs[name].add(_answer(submit).json()["id"])
            if name.startswith(BRIEF):
                continue
            (job_id, *_) = accepted.jobs[name]
            for _ in range(random.randrange(3)):
                low = random.randint(1, 3)
                gpus = {"min": low, "max": low}
                if _answer(partial(http.patch, f"/v1/jobs/{job_id}", json={"gpus": gpus})).status_code == 202:
                    accepted.scaled[job_id] = (low, low)
                over.wait(random.uniform(0.0, PAUSE_S))
            if _answer(partial(http.delete, f"/v1/jobs/{job_id}")).status_code == 202:
                accepted.cancelled.add(job_id)


def _document(name: str, queue: str) -> dict[str, object]:
    steps = 10 if name.startswith(BRIEF) else 10**9
    job = {"name": name, "queue": queue, "gpus": {"min": 1, "max": 1}, "steps": steps, "command": ["true"]}
    return {**job, "onResize": "checkpoint"}


def _answer(ask: Callable[[], httpx.Response]) -> httpx.Response:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            answer = ask()
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if answer.status_code != 503:
            assert answer.is_success or answer.status_code in REFUSED, answer.text
            return answer
        time.sleep(0.1)
    raise AssertionError("no answer")


@dataclass(frozen=True, slots=True)
class History:
    commands: list[Command]
    ended: dict[str, Job]
    events: dict[str, list[Event]]


def _settled(site: Site) -> History:
    """Wait until every job has ended and the inbox is empty, and return the history."""
    store, deadline_s = SqlStore(site.url), time.monotonic() + TIMEOUT_S
    while True:
        try:
            loaded = store.load()
        except UnavailableError:
            continue
        if not loaded.inbox and not loaded.snapshot.jobs:
            break
        assert time.monotonic() < deadline_s, f"still there: {list(loaded.snapshot.jobs)[:5]}, {site.log()}"
        time.sleep(0.2)
    store.close()
    engine = open_engine(site.url)
    with engine.connect() as connection:
        commands = [decode(Command, row.body) for row in connection.execute(select(INBOX).order_by(INBOX.c.number))]
        jobs = [decode(Job, row.body) for row in connection.execute(select(ENDED_JOBS))]
        all_events = [decode(Event, row.body) for row in connection.execute(select(EVENTS).order_by(EVENTS.c.number))]
    engine.dispose()
    assert len({job.id for job in jobs}) == len(jobs), "no job may end twice"
    events = defaultdict(list)
    for event in all_events:
        events[event.subject].append(event)
    return History(commands, {job.id: job for job in jobs}, events)


def _check_submissions(history: History, by_client: list[Accepted]) -> None:
    accepted = {name: ids for each in by_client for name, ids in each.jobs.items()}
    assert all(len(ids) == 1 for ids in accepted.values()), "a repeated submission must not make another job"
    made = Counter(job.spec.name for job in history.ended.values())
    assert made == dict.fromkeys(accepted, 1), "each accepted submission makes one job"
    submits = Counter(command.body.job_id for command in history.commands if isinstance(command.body, SubmitJob))
    assert submits == dict.fromkeys(history.ended, 1)
    assert len(accepted) > 2 * len(by_client)


def _check_changes(history: History, by_client: list[Accepted]) -> None:
    for each in by_client:
        for job_id, (low, high) in each.scaled.items():
            spec = history.ended[job_id].spec
            assert (spec.min_gpus, spec.max_gpus) == (low, high), f"{job_id}: the last accepted range must win"
        assert {history.ended[job_id].state for job_id in each.cancelled} <= {JobState.CANCELLED}
    scales = Counter(command.body.job_id for command in history.commands if isinstance(command.body, ScaleJob))
    for job_id, events in history.events.items():
        if job_id in history.ended:
            assert sum(event.message.startswith("submitted:") for event in events) == 1
            taken = sum(event.message.startswith("range changed to") for event in events)
            refused = sum(event.code is EventCode.COMMAND_REFUSED for event in events)
            assert taken <= scales[job_id] <= taken + refused, f"{job_id}: each scaling must be applied once"


def _check_accounts(history: History, clients: int) -> None:
    """Check that jobs without a resize were charged exactly for the time from their start until they were archived."""
    checked = 0
    for job in history.ended.values():
        codes = {event.code for event in history.events[job.id]}
        starts = [event for event in history.events[job.id] if event.code is EventCode.JOB_STARTED]
        if not RESIZED.intersection(codes) and len(starts) == 1:
            (start,) = starts
            held_s = job.account.settled_at_s - start.at_s
            assert job.account.gpu_s == pytest.approx(start.numbers["gpus"] * held_s, abs=1e-6)
            checked += 1
    assert checked > clients, "too few jobs ran without a resize"


def _check_usage(site: Site, clients: int) -> None:
    """Check the reported usage of each queue, owned and lent, against the record, to the GPU-second."""
    engine = open_engine(site.url)
    with engine.connect() as connection:
        held = held_gpu_s(connection, lent=frozenset(f"i{at}" for at in range(LENT_NODES)))
    engine.dispose()
    report = httpx.get(f"http://127.0.0.1:{site.port}/v1/usage", params={"by": "queue"}, trust_env=False).json()
    booked = {row["queue"]: (row["own_gpu_s"], row["lent_gpu_s"]) for row in report["items"]}
    assert booked.keys() == held.keys() == set(QUEUES)
    for queue, sums in booked.items():
        assert sums == pytest.approx(held[queue], abs=1e-3), queue
        assert min(sums) > clients / 3, "both owned and lent nodes must have been used"
