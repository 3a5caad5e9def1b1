"""Output of ranks that machines send, and the log routes that read it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.machine_logs import CHUNK_BYTES_MAX
from api.streams import sources
from api.streams.server_sent_events import StreamRegistry, StreamTimings
from api.streams.sources import JobLogReader, LogPosition, follow_logs
from scheduler.domain.run_document import MasterAddress
from scheduler.executors.agent_executor import agent_id
from scheduler.executors.log_files import LogLimits
from scheduler.executors.reported_runs import build_begun_run
from scheduler.executors.shipped_logs import LAST_OUTPUT_S, RunMachines, ShippedLogs
from scheduler.executors.stored_logs import LogRoot
from scheduler.store.memory_store import MemoryStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import Problem
from tests.api.test_machines import create_token, join, join_document

LOG_BYTES = 65_536
AGENT = "an agent"


class Site:
    """A job with two ranks on machine m0. Machine m1 has none."""

    def __init__(self, folder: Path) -> None:
        self.service = AuthenticatedService(run_dir=folder, log_bytes=LOG_BYTES).with_fleet()
        self.root = LogRoot(folder)
        token = create_token(self.service, uses=2)
        self.credentials = {
            name: join(self.service, token, join_document(name)).json()["credential"] for name in ("m0", "m1")
        }
        self.job = self.service.job(self.service.root, "research")
        self.service.tick()
        self.service.tick()
        live = self.service.store.load().snapshot.jobs[self.job]
        agent = next(agent_id(each) for each in self.service.store.machines.list_machines() if each.name == "m0")
        (node,) = live.allocation.target
        seats, master = ((node, 0), (node, 1)), MasterAddress("127.0.0.1", 29500)
        run = build_begun_run(live, seats, {(self.job, node): agent}, 0.0, master=master)
        self.service.run_log.begin_run(run, epoch=1)
        self.generation = run.generation

    def put(
        self,
        data: bytes,
        *,
        offset: int = 0,
        complete: bool = False,
        rank: int = 0,
        machine: str = "m0",
        later: int = 0,
    ) -> httpx.Response:
        """Send output of the run, or of one that many generations later."""
        return self.service.http.put(
            f"/v1/machines/{machine}/logs/{self.job}/{self.generation + later}/{rank}",
            params={"offset": offset, "complete": complete},
            content=data,
            headers={"Authorization": f"Bearer {self.credentials[machine]}"},
        )

    def end(self, data: bytes, *, offset: int = 0, complete: bool = False, rank: int = 0) -> int:
        """Return the offset at which the stored output ends, after sending more."""
        answer = self.put(data, offset=offset, complete=complete, rank=rank)
        assert answer.status_code == 204, answer.text
        return int(answer.headers["Upload-Offset"])

    def lines(self, rank: int = 0) -> list[str]:
        headers = {"Authorization": f"Bearer {self.service.root}"}
        answer = self.service.http.get(f"/v1/jobs/{self.job}/logs", params={"rank": rank}, headers=headers)
        assert answer.status_code == 200, answer.text
        return [line["text"] for line in answer.json()["items"]]

    def log(self, rank: int = 0) -> Path:
        return self.root.folder(self.job, self.generation).log_path(rank)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.service.http.close()


def test_output_is_readable_as_it_arrives(site: Site) -> None:
    assert site.lines() == [], "a run on machines that has sent nothing yet"
    assert site.end(b"one\ntw") == 6
    assert site.lines() == ["one"]
    assert site.end(b"o\nthree", offset=6) == 13
    assert site.lines() == ["one", "two"]
    assert site.end(b"", offset=13, complete=True) == 13
    assert site.lines() == ["one", "two", "three"]
    assert site.end(b"other\n", rank=1) == 6
    assert site.lines(1) == ["other"]


def test_repeated_output_is_skipped_and_a_gap_is_refused(site: Site, problem: Problem) -> None:
    assert site.end(b"one\n") == 4
    assert site.end(b"one\n") == 4
    assert site.end(b"one\ntwo\n") == 8
    assert site.lines() == ["one", "two"]
    gap = site.put(b"four\n", offset=20)
    problem(gap, 409)
    assert gap.headers["Upload-Offset"] == "8"
    assert site.log().read_bytes() == b"one\ntwo\n"


def test_output_after_the_end_of_the_run_is_stored(site: Site, problem: Problem) -> None:
    assert site.end(b"one\n") == 4
    site.service.run_log.delete_runs(site.job, up_to_generation=site.generation, epoch=1)
    site.service.clock.move_to(site.service.clock.now_s() + 60.0)
    assert site.end(b"two\n", offset=4, complete=True) == 8
    assert site.lines() == ["one", "two"]
    problem(site.put(b"two\n", machine="m1"), 403)


def test_only_the_machine_of_the_rank_may_send(site: Site, problem: Problem) -> None:
    problem(site.put(b"x", machine="m1"), 403)
    problem(site.put(b"x", rank=2), 403)
    problem(site.put(b"x", later=1), 404)
    site.job = "nobody"
    problem(site.put(b"x"), 404)
    assert not (site.root.path / "jobs").exists()


def test_large_chunks_and_offsets_are_refused(site: Site, problem: Problem) -> None:
    problem(site.put(bytes(CHUNK_BYTES_MAX + 1)), 413)
    problem(site.put(b"x", offset=-1), 422)
    assert site.end(bytes(CHUNK_BYTES_MAX)) == CHUNK_BYTES_MAX


def test_stored_logs_are_trimmed_and_keep_their_offsets(site: Site) -> None:
    chunk = b"".join(b"line %06d\n" % number for number in range(2000))
    for number in range(10):
        assert site.end(chunk, offset=number * len(chunk)) == (number + 1) * len(chunk)
    assert site.log().stat().st_blocks * 512 <= LOG_BYTES + len(chunk) + 4096
    headers = {"Authorization": f"Bearer {site.service.root}"}
    page = site.service.http.get(f"/v1/jobs/{site.job}/logs", headers=headers).json()
    assert page["dropped_bytes"] >= 10 * len(chunk) - LOG_BYTES - len(chunk)
    assert page["items"][0]["text"] == f"line {page['dropped_bytes'] // 12 % 2000:06d}"


def test_links_below_the_run_root_are_not_followed(site: Site, tmp_path: Path, problem: Problem) -> None:
    assert site.end(b"one\n") == 4
    secret = tmp_path / "secret"
    secret.write_bytes(b"")
    site.log().unlink()
    site.log().symlink_to(secret)
    problem(site.put(b"x"), 503)
    folder = site.log().parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    problem(site.put(b"x", rank=1), 503)
    assert secret.read_bytes() == b""
    assert not (tmp_path / "elsewhere" / "rank-1.log").exists()


def test_logs_of_old_generations_are_deleted_and_take_no_output(site: Site, problem: Problem) -> None:
    assert site.end(b"one\n") == 4
    logs = ShippedLogs(site.root.path, LogLimits(generations=1))
    logs.begin(site.job, site.generation + 1, RunMachines(0.0, (AGENT,)))
    assert not site.log().exists()
    limit = site.service.app.state.service.settings.log_generations
    for generation in range(2, limit + 2):
        logs.begin(site.job, site.generation + generation, RunMachines(0.0, (AGENT,)))
    problem(site.put(b"one\n"), 404)


def test_logs_of_machines_are_removed_with_the_job(site: Site) -> None:
    assert site.end(b"one\n", complete=True) == 4
    assert list(site.root.list_jobs()) == [site.job]
    assert site.root.delete_job(site.job) == 1
    assert list(site.root.list_jobs()) == []


def test_processes_that_begin_a_run_at_once_create_one_folder(tmp_path: Path) -> None:
    logs = ShippedLogs(tmp_path, LogLimits())
    for agent in (AGENT, "another agent"):
        logs.begin("job", 1, RunMachines(0.0, (agent,)))
    assert [path.name for path in (tmp_path / "jobs" / "job").iterdir()] == ["gen-1"]
    assert AGENT in (tmp_path / "jobs" / "job" / "gen-1" / "machines.json").read_text()


def test_readers_wait_for_the_last_output_before_the_next_generation(tmp_path: Path) -> None:
    now_s, logs = 100.0, ShippedLogs(tmp_path, LogLimits())
    for generation in (1, 2):
        logs.begin("job", generation, RunMachines(now_s, (AGENT,)))
    logs.append("job", 1, 0, b"one\n", offset=0)
    logs.append("job", 2, 0, b"three\n", offset=0)
    reader = JobLogReader(LogRoot(tmp_path), "job", 0, now=lambda: now_s)

    def read(position: LogPosition) -> tuple[list[str], LogPosition]:
        batch = reader.read(position, 10)
        return [line["text"] for line in batch.lines], batch.position

    assert read(LogPosition(1)) == (["one"], LogPosition(1, 4))
    assert read(LogPosition(1, 4)) == ([], LogPosition(1, 4))
    logs.append("job", 1, 0, b"two\n", offset=4)
    assert read(LogPosition(1, 4)) == (["two"], LogPosition(1, 8))
    now_s += LAST_OUTPUT_S
    assert read(LogPosition(1, 8)) == (["three"], LogPosition(2, 6)), "the machine of generation 1 is lost"


def test_a_stream_ends_with_the_last_output_or_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = ShippedLogs(tmp_path, LogLimits())
    logs.begin("job", 1, RunMachines(0.0, (AGENT, AGENT)))
    logs.append("job", 1, 0, b"one\ntwo", offset=0, is_complete=True)
    logs.append("job", 1, 1, b"one\ntwo", offset=0)
    monkeypatch.setattr(sources, "LAST_OUTPUT_S", 0.05)

    async def follow(rank: int) -> str:
        streams = StreamRegistry(MemoryStore(), streams_max=1, timings=StreamTimings(file_poll_s=0.01))
        reader = JobLogReader(LogRoot(tmp_path), "job", rank)
        return "".join([each.decode() async for each in follow_logs(streams, reader, LogPosition(1), lambda: True)])

    for rank, lines in ((0, 2), (1, 1)):
        text = asyncio.run(follow(rank))
        assert (text.count('"text"'), text.count("event: end")) == (lines, 1)
