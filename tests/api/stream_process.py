"""An API process whose event streams a test reads from plain sockets, while the test commits events to the database."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.domain.events import Event, EventCode
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.loopback import find_free_port

PATIENCE_S = 60.0
Message = dict[str, Any]


class StreamProcess:
    """An API process with its database. It can be stopped and started again on the same port."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'ebbtide.sqlite'}"
        migrate(self.url)
        self.store = SqlStore(self.url)
        lease = self.store.acquire_lease("test", now_s=time.time(), ttl_s=1e6)
        assert lease is not None
        self._epoch = lease.epoch
        self.port = find_free_port()
        named = {f"EBBTIDE_{name.upper()}": value for name, value in settings.items()}
        self._env = {
            **os.environ,
            "EBBTIDE_AUTH": "off",
            **named,
            "EBBTIDE_DATABASE_URL": self.url,
            "EBBTIDE_RUN_DIR": str(folder),
            "EBBTIDE_PORT": str(self.port),
            "EBBTIDE_LOG_LEVEL": "WARNING",
        }
        self._log = folder / "api.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "cli", "api", "--force"]
            self.api = subprocess.Popen(command, env=self._env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        limit_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5).close()
            except OSError:
                assert self.api.poll() is None, self.log()
                assert time.monotonic() < limit_s, self.log()
                time.sleep(0.05)
            else:
                return

    def stop(self) -> int:
        """Stop the process with SIGTERM and return its exit code."""
        self.api.send_signal(signal.SIGTERM)
        self.api.communicate(timeout=PATIENCE_S)
        return self.api.returncode

    def commit(self, snapshot: Snapshot | None = None, *subjects: str, message: str = "it happened") -> None:
        """Commit one tick with an event for each subject."""
        previous = self.store.load().snapshot
        after = replace(snapshot or previous, generation=previous.generation + 1)
        events = tuple(Event(time.time(), EventCode.JOB_STATE, subject, message) for subject in subjects)
        self.store.commit(Commit(previous, after, epoch=self._epoch, events=events))

    def end_job(self, job: Job) -> None:
        """Commit one tick in which the job leaves the snapshot."""
        previous = self.store.load().snapshot
        jobs = {name: each for name, each in previous.jobs.items() if name != job.id}
        after = replace(previous, generation=previous.generation + 1, jobs=jobs)
        self.store.commit(Commit(previous, after, epoch=self._epoch, ended_jobs=(job,)))

    @contextmanager
    def follow(self, path: str, *, last_id: str = "", buffer_bytes: int = 0) -> Iterator[Reader]:
        with socket.socket() as connection:
            if buffer_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            connection.settimeout(PATIENCE_S)
            connection.connect(("127.0.0.1", self.port))
            came_from = f"Last-Event-ID: {last_id}\r\n" if last_id else ""
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n{came_from}\r\n"
            connection.sendall(head.encode())
            with connection.makefile("rb") as file:
                yield Reader(file)

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def close(self) -> None:
        self.api.kill()
        self.api.communicate()
        self.store.close()


class Reader:
    """The events of one stream."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.status = int(file.readline().split()[1])
        self.headers: dict[str, str] = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        self._unread = b""

    def lines(self) -> Iterator[str]:
        """Yield lines until the stream ends."""
        while size := int(self._file.readline().strip() or b"0", 16):
            self._unread += self._file.read(size)
            self._file.readline()
            *whole, self._unread = self._unread.split(b"\n")
            yield from (line.decode() for line in whole)

    def messages(self) -> Iterator[Message]:
        """Yield `id`, `event` and `data` of each event, without heartbeats."""
        fields: Message = {}
        for line in self.lines():
            name, _, value = line.partition(": ")
            if line and name:
                fields[name] = value
            elif not line and "data" in fields:
                yield {**fields, "data": json.loads(fields["data"])}
                fields = {}

    def problem(self) -> Message:
        document: Message = json.loads(self._file.read(int(self.headers["content-length"])))
        return document


@contextmanager
def run_stream_process(folder: Path, **settings: str) -> Iterator[StreamProcess]:
    play = StreamProcess(folder, **settings)
    try:
        yield play
    finally:
        play.close()
