"""Followers of a real API process, in the SDK and the command line: a restart of the service loses no event."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import pytest

from ebbtide.client import Client, ProblemError, RetryPolicy, UnreachableError
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.stored_logs import LogRoot
from tests.api.stream_process import StreamProcess, run_stream_process
from tests.builders import a_job

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamProcess]:
    with run_stream_process(tmp_path_factory.mktemp("following")) as made:
        made.commit(Snapshot(jobs={"train": a_job("train", 1, 1, state=JobState.RUNNING)}), "train")
        yield made


@pytest.fixture
def client(play: StreamProcess) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{play.port}") as made:
        yield made


def test_the_client_follows_events_across_a_restart(play: StreamProcess, client: Client) -> None:
    events = client.follow_events(after=play.store.get_last_event_number())
    play.commit(None, "a")
    assert next(events)["subject"] == "a"
    play.stop()
    play.commit(None, "b")
    restart = threading.Thread(target=play.start)
    restart.start()
    assert next(events)["subject"] == "b"
    restart.join()
    play.commit(None, "train", "c")
    assert [event["subject"] for event in islice(events, 2)] == ["train", "c"]
    assert [event["subject"] for event in islice(client.follow_events(job_id="train"), 2)] == ["train", "train"]


def test_following_fails_after_repeated_failures_and_at_once_on_a_refusal(client: Client) -> None:
    with pytest.raises(ProblemError, match="nobody"):
        next(client.follow_events(job_id="nobody"))
    with (
        Client("http://127.0.0.1:9", retries=RetryPolicy(sleep=lambda _: None)) as nobody,
        pytest.raises(UnreachableError),
    ):
        next(nobody.follow_events())


def test_logs_are_followed_to_the_end_of_the_job(play: StreamProcess, client: Client) -> None:
    root = LogRoot(play.folder)
    folder = root.folder("train", 1)
    folder.path.mkdir(parents=True)
    folder.log_path(0).write_bytes(b"zero\none\ntwo\n")
    assert [line["text"] for line in client.logs("train")] == ["zero", "one", "two"]
    lines = client.follow_logs("train", tail=2)
    assert [line["text"] for line in islice(lines, 2)] == ["one", "two"]
    with folder.log_path(0).open("ab") as log:
        log.write(b"three\n")
    assert next(lines)["text"] == "three"
    with _cli(play, "logs", "train", "-f", "--tail", "1") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "three\n"
        folder.complete_path(0).touch()
        play.end_job(replace(a_job("train", 1, 1), state=JobState.SUCCEEDED))
        assert list(lines) == []
        assert command.wait(60) == 0


@pytest.mark.parametrize("words", [["events", "-f", "-o", "json"], ["ps", "-w"], ["top", "-w"]])
def test_watching_exits_cleanly_on_ctrl_c(play: StreamProcess, words: Sequence[str]) -> None:
    with _cli(play, *words) as command:
        assert command.stdout is not None
        first = command.stdout.readline()
        if words[0] == "events":
            assert json.loads(first)["number"] == 1
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=60)
        assert (command.returncode, said) == (0, "")


@contextmanager
def _cli(play: StreamProcess, *words: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "EBBTIDE_URL": f"http://127.0.0.1:{play.port}"}
    command = [sys.executable, "-m", "cli", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
