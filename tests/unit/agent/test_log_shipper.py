"""Sending the logs of ranks to a real HTTP server that fails in every way that a service can."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from scheduler.agent import log_shipper
from scheduler.agent.agent_state import AgentIdentity
from scheduler.agent.log_shipper import LogShipper
from scheduler.agent.run_folder import AgentFolders
from scheduler.domain.run_document import LaunchMode, RankSeat, RunDocument
from scheduler.executors.log_files import trim_log_file
from tests.http_server import LoopbackServer, QuietHandler

TIMEOUT_S = 10.0
CREDENTIAL = "ebm_of_a_test"


class LogService:
    """A service that stores logs in memory. `failures` are answered first: a status, or 0 to drop the connection."""

    def __init__(self) -> None:
        self.logs: dict[str, bytearray] = {}
        self.complete: set[str] = set()
        self.failures: list[int] = []
        self.sizes: list[int] = []
        self.chunk_bytes_max = 262_144
        self.lock = threading.Lock()

    def answer(self, path: str, data: bytes) -> tuple[int, int]:
        """Return a status and the offset at which the log ends."""
        parts = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        offset, key = int(query["offset"]), parts.path
        with self.lock:
            self.sizes.append(len(data))
            if self.failures:
                return self.failures.pop(0), 0
            if len(data) > self.chunk_bytes_max:
                return 413, 0
            log = self.logs.setdefault(key, bytearray())
            if offset > len(log):
                return 409, len(log)
            log += data[len(log) - offset :]
            if query.get("complete") == "true":
                self.complete.add(key)
            return 204, len(log)


def build_handler(service: LogService) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler, BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            assert self.headers["Authorization"] == f"Bearer {CREDENTIAL}"
            status, offset = service.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Upload-Offset", str(offset))
            if status != 204:
                self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


class Site:
    """A machine with one run of two ranks, and the service that its shipper sends to."""

    def __init__(self, state: Path) -> None:
        self.service = LogService()
        self.server = LoopbackServer(build_handler(self.service))
        self.folders = AgentFolders(state)
        self.document = RunDocument(
            job_id="a/job",
            owner="",
            node="n1",
            generation=3,
            command=("true",),
            nodes=1,
            node_rank=0,
            world_size=2,
            ranks=(RankSeat(0, 0, 0), RankSeat(1, 1, 1)),
            launch=LaunchMode.RANK,
        )
        self.folder = self.folders.folder("a/job", 3, "n1")
        self.folder.create(self.document)
        self.shippers: list[LogShipper] = []

    def start(self) -> LogShipper:
        """Start a shipper, as an agent that starts again does."""
        identity = AgentIdentity("m 1", ("n1",), self.server.url, CREDENTIAL)
        shipper = LogShipper(identity, self.folders.list_folders())
        self.shippers.append(shipper)
        return shipper

    def follow(self, *, has_ended: bool = False) -> None:
        self.shippers[-1].follow(self.folder, self.document, has_ended=has_ended)

    def print(self, data: bytes, rank: int = 0) -> None:
        with self.folder.log_path(rank).open("ab") as file:
            file.write(data)

    def key(self, rank: int = 0) -> str:
        return f"/v1/machines/m%201/logs/a%2Fjob/3/{rank}"

    def sent(self, rank: int = 0) -> bytes:
        with self.service.lock:
            return bytes(self.service.logs.get(self.key(rank), b""))

    def is_complete(self) -> bool:
        with self.service.lock:
            return self.service.complete == {self.key(0), self.key(1)}

    def record(self) -> dict[str, list[int]]:
        path = self.folder.path / "shipping.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def close(self) -> None:
        for shipper in self.shippers:
            shipper.close(within_s=TIMEOUT_S)
        self.server.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(log_shipper, "_PERIOD_S", 0.02)
    monkeypatch.setattr(log_shipper, "_MIN_BACKOFF_S", 0.01)
    made = Site(tmp_path)
    yield made
    made.close()


def wait(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_output_arrives_as_it_is_printed_and_completely_at_the_end(site: Site) -> None:
    site.start()
    site.print(b"one\n")
    site.follow()
    wait(lambda: site.sent() == b"one\n")
    wait(lambda: site.sent(1) == b"" and site.key(1) in site.service.logs)
    site.print(b"two\n")
    wait(lambda: site.sent() == b"one\ntwo\n")
    assert not site.service.complete
    rest = b"x" * 600_000
    site.print(rest)
    site.print(b"other", rank=1)
    site.follow(has_ended=True)
    wait(site.is_complete)
    assert (site.sent(), site.sent(1)) == (b"one\ntwo\n" + rest, b"other")
    wait(lambda: site.record() == {"0": [600_008, 600_008, True], "1": [5, 5, True]})


def test_nothing_is_sent_again_once_a_run_is_complete(site: Site) -> None:
    site.start()
    site.follow(has_ended=True)
    wait(lambda: [log[-1] for log in site.record().values()] == [True, True])
    requests = len(site.service.sizes)
    site.follow(has_ended=True)
    site.start()
    site.follow(has_ended=True)
    time.sleep(0.1)
    assert len(site.service.sizes) == requests


@pytest.mark.parametrize("failures", [[0, 0, 0], [500, 503, 429], [401, 0, 404], [403, 404]])
def test_failed_requests_are_repeated(site: Site, failures: list[int]) -> None:
    site.start()
    site.service.failures = list(failures)
    site.print(b"one\n")
    site.follow()
    wait(lambda: site.sent() == b"one\n")
    site.service.failures = list(failures)
    site.print(b"two\n")
    site.follow(has_ended=True)
    wait(site.is_complete)
    assert site.sent() == b"one\ntwo\n"


def test_a_refused_log_is_given_up(site: Site) -> None:
    site.service.failures = [404] * 100
    site.start()
    site.follow(has_ended=True)
    wait(lambda: [entry[2] for entry in site.record().values()] == [True, True])
    assert len(site.service.sizes) == 2 * log_shipper._REFUSALS_MAX


def test_chunks_become_smaller_if_they_are_too_large(site: Site) -> None:
    site.service.chunk_bytes_max = 10_000
    site.start()
    site.print(b"x" * 50_000)
    site.follow(has_ended=True)
    wait(site.is_complete)
    assert site.sent() == b"x" * 50_000


def test_a_service_that_has_lost_output_gets_it_again(site: Site) -> None:
    site.start()
    site.print(b"one\ntwo\n")
    site.follow()
    wait(lambda: site.sent() == b"one\ntwo\n")
    with site.service.lock:
        site.service.logs[site.key()] = bytearray(b"one\n")
    site.print(b"three\n")
    wait(lambda: site.sent() == b"one\ntwo\nthree\n")


@pytest.mark.parametrize("has_record", [True, False])
def test_a_restarted_agent_continues(site: Site, *, has_record: bool) -> None:
    first = site.start()
    site.print(b"x" * 1000)
    site.follow()
    wait(lambda: site.record().get("0") == [1000, 1000, False])
    first.close(within_s=TIMEOUT_S)
    if not has_record:
        (site.folder.path / "shipping.json").unlink()
    site.print(b"two\n")
    requests = len(site.service.sizes)
    site.start()
    site.follow(has_ended=True)
    wait(site.is_complete)
    assert site.sent() == b"x" * 1000 + b"two\n"
    assert (max(site.service.sizes[requests:]) == 4) == has_record


def test_a_restarted_agent_sends_the_rest_of_a_settled_run(site: Site) -> None:
    site.print(b"one\n")
    site.folder.write_record("start.json", {})
    site.folder.settle()
    site.start()
    wait(site.is_complete)
    assert site.sent() == b"one\n"


def test_dropped_output_is_replaced_by_a_notice(site: Site) -> None:
    lines = b"".join(b"line %06d\n" % number for number in range(40_000))
    site.print(lines)
    trim_log_file(site.folder.log_path(0), 65_536)
    site.start()
    site.follow(has_ended=True)
    wait(site.is_complete)
    notice, _, rest = site.sent().removeprefix(b"\n").partition(b"\n")
    dropped = int(notice.split()[1])
    assert rest == lines[dropped:]
    assert 0 < len(rest) <= 65_536


def test_a_truncated_log_is_sent_from_its_new_front(site: Site) -> None:
    site.start()
    site.print(b"one\ntwo\n")
    site.follow()
    wait(lambda: site.sent() == b"one\ntwo\n")
    site.folder.log_path(0).write_bytes(b"new\n")
    site.follow(has_ended=True)
    wait(site.is_complete)
    assert site.sent() == b"one\ntwo\nnew\n"


def test_links_and_pipes_of_ranks_are_not_read(site: Site, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    site.folder.log_path(0).symlink_to(secret)
    os.mkfifo(site.folder.log_path(1))
    (site.folder.path / "shipping.json").symlink_to(secret)
    site.start()
    site.follow(has_ended=True)
    wait(site.is_complete)
    assert (site.sent(), site.sent(1), secret.read_bytes()) == (b"", b"", b"secret")
