"""Idle event streams of one API process: memory per stream, and delay of events that another process commits.

API, writer, readers and SQLite share one machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from scheduler.domain.events import Event, EventCode
from scheduler.store.protocol import Commit
from scheduler.store.sql_store import SqlStore
from tests.api.stream_process import StreamProcess, run_stream_process

STREAMS, EVENTS = 500, 100
PAUSE_S = 0.2
MIB = 2**20


def rows() -> Iterator[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder, run_stream_process(Path(folder)) as play:
        before, after, delays_s, cpu_share, cpu_s = asyncio.run(_measured(play))
    slow_s = statistics.quantiles(delays_s, n=100)[98]
    yield f"{STREAMS} idle event streams: memory of the API process", "under 300 MiB", f"{after / MIB:.0f} MiB"
    yield "the same without a stream", "", f"{before / MIB:.0f} MiB"
    yield "its share of a core with idle streams", "", f"{cpu_share:.1%}"
    yield f"the API's processor time for one event to {STREAMS} readers", "", f"{1e3 * cpu_s / EVENTS:.0f} ms"
    yield f"from commit to each of {STREAMS} readers, p50", "", f"{1e3 * statistics.median(delays_s):.0f} ms"
    yield "the same, p99", "under 500 ms", f"{1e3 * slow_s:.0f} ms"
    yield "the same, slowest", "", f"{1e3 * max(delays_s):.0f} ms"


async def _measured(play: StreamProcess) -> tuple[int, int, list[float], float, float]:
    """Return bytes without and with streams, delays from commit to reader in seconds, the share of a core that idle
    streams
    use, and CPU seconds of the API during events."""
    api = psutil.Process(play.api.pid)
    before = api.memory_info().rss
    streams = [await _follow(play.port) for _ in range(STREAMS)]
    readers = [asyncio.create_task(_read(reader)) for reader, _ in streams]
    used_s, began_s = sum(api.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(5.0)
    idle_s = sum(api.cpu_times()[:2])
    share = (idle_s - used_s) / (time.monotonic() - began_s)
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(play.url,))
    writer.start()
    delays_s = [delay for delays in await asyncio.gather(*readers) for delay in delays]
    after = api.memory_info().rss
    cpu_s = sum(api.cpu_times()[:2]) - idle_s
    writer.join()
    for _, socket in streams:
        socket.close()
    return before, after, delays_s, share, cpu_s


async def _follow(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readuntil(b"retry: 1000\n\n")
    return reader, writer


async def _read(reader: asyncio.StreamReader) -> list[float]:
    """Return the seconds from the commit of each event to its arrival."""
    delays_s = list[float]()
    while len(delays_s) < EVENTS:
        line = await reader.readline()
        if line.startswith(b"data: "):
            delays_s.append(time.time() - json.loads(line[6:])["numbers"]["committed_s"])
    return delays_s


def _write(url: str) -> None:
    """Commit events that contain the time of their commit, in a separate process."""
    store = SqlStore(url)
    lease = store.get_lease()
    assert lease is not None
    for number in range(EVENTS):
        time.sleep(PAUSE_S)
        previous = store.load().snapshot
        after = replace(previous, generation=previous.generation + 1)
        now_s = time.time()
        event = Event(now_s, EventCode.JOB_STATE, f"job-{number}", "it happened", {"committed_s": now_s})
        store.commit(Commit(previous, after, epoch=lease.epoch, events=(event,)))
    store.close()
