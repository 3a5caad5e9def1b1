"""The API under load: client, API, controller with a live tick, and database on the same cores.

Submissions arrive at a fixed rate, independent of earlier ones, and carry an Idempotency-Key as the SDK sends it. Each
time counts from when the request was due. In parallel, clients list 100 jobs and get single jobs. A second phase has
clients that submit again as soon as they get a response. The database syncs to disk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from scheduler.store.schema_migration import migrate
from tests.benchmarks.front_door_site import ENDED, RUNNING, Site, count_filled_jobs, fill
from tests.controller_process import BRIEF
from tests.postgres_server import PostgresServer

ROUNDS, SECONDS, REST_S = 3, 10.0, 12.0
LISTS_PER_S, GETS_PER_S = 4.0, 20.0
CLIENTS, CONNECTIONS = 16, 64
WANTED_PER_S = {"PostgreSQL": 120.0, "SQLite": 80.0}
APIS = {"PostgreSQL": (1, 2), "SQLite": (1,)}
"""API processes: SQLite allows one writer at a time."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each request, by kind of request."""

    submit: list[float] = field(default_factory=list)
    page: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)


def rows() -> Iterator[tuple[str, str, str]]:
    for dialect in WANTED_PER_S:
        with TemporaryDirectory() as folder, _database(dialect, Path(folder)) as url:
            fill(url)
            for apis in APIS[dialect]:
                site = Site(Path(folder) / f"{apis}", url, apis=apis)
                try:
                    yield from _rows(f"{dialect}, {apis} of the API", site, WANTED_PER_S[dialect])
                finally:
                    site.close()


@contextmanager
def _database(dialect: str, folder: Path) -> Iterator[str]:
    if dialect == "SQLite":
        url = f"sqlite:///{folder / 'ebbtide.sqlite'}"
        migrate(url)
        yield url
        return
    server = PostgresServer(is_durable=True)
    try:
        server.start()
        yield server.new_database()
    finally:
        server.close()


def _rows(name: str, site: Site, wanted_per_s: float) -> Iterator[tuple[str, str, str]]:
    stored = count_filled_jobs(site.url)
    asyncio.run(_send_at_rate(site.port, wanted_per_s, 3.0))  # warm-up
    rest_from_s = time.time()
    time.sleep(REST_S)
    at_rest = site.ticks(rest_from_s, time.time())
    rounds, loaded, used_s = list[Times](), list[list[float]](), site.used_s()
    for _ in range(ROUNDS):
        from_s = time.time()
        rounds.append(asyncio.run(_send_at_rate(site.port, wanted_per_s, SECONDS)))
        loaded.append(site.ticks(from_s, time.time()))
    used_s = {name: after_s - used_s[name] for name, after_s in site.used_s().items()}
    delays_s = site.delays(int(wanted_per_s * SECONDS))
    closed = [asyncio.run(_send_back_to_back(site.port, CLIENTS, SECONDS / 2)) for _ in range(ROUNDS)]
    of = f"{name}, {stored:,} jobs"
    rate = f"{wanted_per_s:g} submits/s, {LISTS_PER_S:g} lists/s and {GETS_PER_S:g} gets/s"
    yield f"{of}: {rate}: submit", "p99 < 150 ms", _format_times([each.submit for each in rounds])
    yield f"{of}: the same: list of 100", "p99 < 50 ms", _format_times([each.page for each in rounds])
    yield f"{of}: the same: get", "p99 < 50 ms", _format_times([each.one for each in rounds])
    yield f"{of}: tick at rest", "", _format_times([at_rest])
    yield f"{of}: tick under that load", "p99 not more than doubled", _format_times(loaded)
    yield f"{of}: a submission waits for its tick", "", _format_times([delays_s])
    submits = sum(len(each.submit) for each in rounds)
    shares = ", ".join(f"{name} {1e3 * each_s / submits:.1f}" for name, each_s in used_s.items())
    yield f"{of}: processor time of all that, by submission", "", f"{shares} ms"
    per_s = median(len(times) / (SECONDS / 2) for times in closed)
    clients = f"{CLIENTS} clients, each submits when it is answered"
    yield f"{of}: {clients}", f"over {wanted_per_s:g}/s", f"{per_s:.0f}/s, {_format_times(closed)}"


def _format_times(rounds: Sequence[Sequence[float]]) -> str:
    """Return the medians over the rounds of their median, 99th percentile and maximum."""
    cuts = [quantiles(times, n=100, method="inclusive") for times in rounds]
    p50_ms = 1e3 * median(each[49] for each in cuts)
    p99_ms = 1e3 * median(each[98] for each in cuts)
    worst_ms = 1e3 * median(max(times) for times in rounds)
    return f"p50 {p50_ms:.1f}, p99 {p99_ms:.1f}, most {worst_ms:.1f} ms"


async def _send_at_rate(port: int, submits_per_s: float, seconds: float) -> Times:
    """Send requests at fixed times, over as many connections as needed."""
    times, random = Times(), Random(1)
    free: asyncio.Queue[_Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await _Connection.open(port))

    async def ask(due_s: float, request: bytes, taken: list[float], expected: bytes) -> None:
        await asyncio.sleep(due_s - time.monotonic())
        connection = await free.get()
        await connection.ask(request, expected)
        taken.append(time.monotonic() - due_s)
        free.put_nowait(connection)

    start_s = time.monotonic() + 0.2
    kinds: tuple[tuple[float, Callable[[], bytes], list[float], bytes], ...] = (
        (submits_per_s, lambda: _submission(random), times.submit, b"201"),
        (LISTS_PER_S, lambda: _get("/v1/jobs?limit=100"), times.page, b"200"),
        (GETS_PER_S, lambda: _get(f"/v1/jobs/{_pick_job(random)}"), times.one, b"200"),
    )
    asked: list[Awaitable[None]] = [
        ask(start_s + (at + random.random()) / per_s, request(), taken, expected)
        for per_s, request, taken, expected in kinds
        for at in range(int(seconds * per_s))
    ]
    await asyncio.gather(*asked)
    while not free.empty():
        free.get_nowait().close()
    return times


async def _send_back_to_back(port: int, clients: int, seconds: float) -> list[float]:
    async def client(number: int) -> list[float]:
        connection, random, times = await _Connection.open(port), Random(number), list[float]()
        while time.monotonic() < until_s:
            asked_s = time.monotonic()
            await connection.ask(_submission(random), b"201")
            times.append(time.monotonic() - asked_s)
        connection.close()
        return times

    until_s = time.monotonic() + seconds
    return [each for times in await asyncio.gather(*map(client, range(clients))) for each in times]


def _pick_job(random: Random) -> str:
    """Create jobs, half of which have ended."""
    return random.choice((f"run-{random.randrange(RUNNING)}", f"past-{random.randrange(ENDED)}"))


def _submission(random: Random) -> bytes:
    body = json.dumps({"name": BRIEF, "gpus": {"min": 1, "max": 1}, "steps": 10, "command": ["true"]}).encode()
    key = f"{time.monotonic_ns()}-{random.getrandbits(64):x}"
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nIdempotency-Key: {key}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


class _Connection:
    """One open connection. A real client would add its own work to the measurement."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> _Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes, expected: bytes) -> None:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await self._reader.readexactly(int(length.partition(b":")[2]))
        assert head.split(b" ", 2)[1] == expected, (head, body)

    def close(self) -> None:
        self._writer.close()
