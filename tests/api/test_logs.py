"""Logs over HTTP, read from the run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api.streams.server_sent_events import StreamRegistry, StreamTimings
from api.streams.sources import JobLogReader, LogPosition, follow_logs
from scheduler.executors.log_files import LogLimits, trim_log_file
from scheduler.executors.reported_runs import build_begun_run
from scheduler.executors.stored_logs import LogFolder, LogRoot
from scheduler.store.memory_store import MemoryStore

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


@pytest.fixture
def root(fleet: ApiService, tmp_path: Path) -> LogRoot:
    service = fleet.app.state.service
    fleet.app.state.service = replace(service, settings=service.settings.model_copy(update={"run_dir": tmp_path}))
    return LogRoot(tmp_path, limits=LogLimits(generations=2))


def begin(root: LogRoot, job: str, generation: int, printed: bytes, *, ended: bool = False) -> LogFolder:
    folder = root.folder(job, generation)
    folder.path.mkdir(parents=True)
    root.delete_old_logs(job)
    folder.log_path(0).write_bytes(printed)
    if ended:
        folder.complete_path(0).touch()
    return folder


def test_a_new_job_has_no_logs_and_an_unknown_one_is_a_404(fleet: ApiService, root: LogRoot, problem: Problem) -> None:
    job = fleet.submit()
    page = fleet.get(f"/v1/jobs/{job}/logs")
    assert (page["items"], page["generations"], page["next"]) == ([], [], None)
    problem(fleet.http.get("/v1/jobs/nobody/logs"), 404)
    problem(fleet.http.get("/v1/jobs/..%2f..%2fetc/logs"), 404)


def test_pages_continue_across_generations(fleet: ApiService, root: LogRoot) -> None:
    job = fleet.submit()
    begin(root, job, 1, b"one\ntwo\nthree\npart", ended=True)
    begin(root, job, 2, b"four\nfi")
    assert [line["text"] for line in fleet.get(f"/v1/jobs/{job}/logs")["items"]] == ["four"], "the newest by itself"
    path, seen = f"/v1/jobs/{job}/logs", []
    page = fleet.get(path, generation=1, limit=2)
    assert page["generations"] == [1]
    page = fleet.get(path, limit=2, cursor="1:0")
    while True:
        seen += [(line["generation"], line["text"]) for line in page["items"]]
        if page["next"] is None:
            break
        page = fleet.get(path, limit=2, cursor=page["next"])
    assert seen == [(1, "one"), (1, "two"), (1, "three"), (1, "part"), (2, "four")]
    assert fleet.get(path, cursor=page["resume"])["items"] == []
    root.folder(job, 2).log_path(0).write_bytes(b"four\nfive\n")
    assert [line["text"] for line in fleet.get(path, cursor=page["resume"])["items"]] == ["five"]
    assert [line["text"] for line in fleet.get(path, tail=1)["items"]] == ["five"]
    assert fleet.get(path, rank=1)["items"] == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_rank_that_cannot_exist_names_those_that_do(fleet: ApiService, root: LogRoot, is_begun: bool) -> None:
    job = fleet.submit(gpus={"min": 1, "max": 2})
    if is_begun:
        begin(root, job, 1, b"hello\n")
    (error,) = fleet.refused("GET", f"/v1/jobs/{job}/logs?rank=99")["errors"]
    assert (error["field"], error["value"]) == ("rank", 99)
    assert error["allowed"] == ("0 to 1; with output: 0" if is_begun else "0 to 1")
    assert fleet.get(f"/v1/jobs/{job}/logs", rank=1)["items"] == []


def test_dropped_bytes_are_reported(fleet: ApiService, root: LogRoot, problem: Problem) -> None:
    job = fleet.submit()
    folder = begin(root, job, 1, b"".join(b"line %06d\n" % number for number in range(40_000)))
    trim_log_file(folder.log_path(0), 65_536)
    page = fleet.get(f"/v1/jobs/{job}/logs", cursor="1:0", limit=1)
    assert page["dropped_bytes"] + 12 == int(page["items"][0]["cursor"].split(":")[1])
    assert page["items"][0]["text"] == f"line {page['dropped_bytes'] // 12:06d}"
    for generation in (2, 3):
        begin(root, job, generation, b"later\n")
    assert fleet.get(f"/v1/jobs/{job}/logs", generation=1)["items"] == [], "of two generations is kept what they print"
    wrong = problem(fleet.http.get(f"/v1/jobs/{job}/logs", params={"cursor": "../1"}), 422)
    assert wrong["errors"][0]["field"] == "cursor"


def test_the_logs_of_an_old_job_are_a_404(fleet: ApiService, root: LogRoot, problem: Problem) -> None:
    job = fleet.submit()
    fleet.tick()
    fleet.tick()
    fleet.http.delete(f"/v1/jobs/{job}")
    fleet.tick()
    gone = problem(fleet.http.get(f"/v1/jobs/{job}/logs"), 404)
    assert gone["type"].endswith(":not-found")


def test_a_follower_gets_gaps_lines_generations_and_the_end(tmp_path: Path) -> None:
    root, job = LogRoot(tmp_path), "train"
    first = begin(root, job, 1, b"one\n")
    asked = 0

    def has_ended() -> bool:
        """Advance the job with every check."""
        nonlocal asked
        asked += 1
        steps: list[Callable[[], object]] = [
            lambda: None,
            lambda: first.log_path(0).write_bytes(b"one\ntwo\n"),
            lambda: begin(root, job, 2, b"three\n"),
            lambda: root.folder(job, 2).complete_path(0).touch(),
        ]
        steps[min(asked, len(steps)) - 1]()
        return asked >= len(steps)

    async def follow() -> list[str]:
        streams = StreamRegistry(
            MemoryStore(), streams_max=1, timings=StreamTimings(file_poll_s=0.01, heartbeat_s=0.01)
        )
        logs = JobLogReader(root, job, 0)
        return [chunk.decode() async for chunk in follow_logs(streams, logs, LogPosition(1), has_ended)]

    frames = [each for each in "".join(asyncio.run(follow())).split("\n\n") if each.startswith("id:")]
    assert [each.split("\n")[0] for each in frames] == ["id: 1:4", "id: 1:8", "id: 2:6", "id: 2:6"]
    assert "event: end" in frames[-1]


def test_a_generation_that_never_was_is_told_apart_from_deleted_logs(
    fleet: ApiService, root: LogRoot, problem: Problem
) -> None:
    job = fleet.submit()
    path = f"/v1/jobs/{job}/logs"
    (error,) = problem(fleet.http.get(path, params={"generation": 1}), 422)["errors"]
    assert error["field"] == "generation"
    fleet.tick()
    newest = fleet.store.load().snapshot.jobs[job].allocation.generation
    problem(fleet.http.get(path, params={"generation": newest}), 404)
    (error,) = problem(fleet.http.get(path, params={"generation": newest + 98}), 422)["errors"]
    assert (error["value"], error["allowed"]) == (newest + 98, f"1 to {newest}")


def test_logs_of_pods_are_a_501_with_the_kubectl_command(fleet: ApiService, root: LogRoot, problem: Problem) -> None:
    job = fleet.submit()
    fleet.tick()
    live = fleet.store.load().snapshot.jobs[job]
    fleet.run_log.begin_run(build_begun_run(live, (("t0", 0),), {(job, "t0"): "pod"}, 0.0, in_pods=True), epoch=1)
    body = problem(fleet.http.get(f"/v1/jobs/{job}/logs"), 501)
    assert body["type"] == "urn:ebbtide:problem:logs-elsewhere"
    assert f"kubectl logs --namespace default --selector ebbtide.dev/job={job}" in body["detail"]
