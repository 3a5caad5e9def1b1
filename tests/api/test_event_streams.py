"""Event streams of a real API process: every committed event arrives once and in order, across restarts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice

import psutil
import pytest

from scheduler.domain.snapshot import Snapshot
from tests.api.stream_process import StreamProcess, run_stream_process
from tests.builders import a_job

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamProcess]:
    with run_stream_process(tmp_path_factory.mktemp("streams"), streams_max="60") as made:
        yield made


def test_a_stream_continues_after_the_last_event_id(play: StreamProcess) -> None:
    play.commit(None, "before")
    with play.follow("/v1/events") as reader:
        assert reader.status == 200
        assert reader.headers["content-type"].startswith("text/event-stream")
        assert reader.headers["cache-control"] == "no-store"
        messages = reader.messages()
        play.commit(None, "a", "b")
        first = next(messages)
        assert (first["data"]["subject"], first["retry"]) == ("a", "1000")
        assert first["data"]["number"] == int(first["id"]) == play.store.get_last_event_number() - 1
    play.commit(None, "c")  # while no stream is open
    with play.follow("/v1/events", last_id=first["id"]) as reader:
        messages = reader.messages()
        play.commit(None, "d")
        assert [message["data"]["subject"] for message in islice(messages, 3)] == ["b", "c", "d"]


def test_a_job_stream_starts_with_the_jobs_first_event_and_has_no_others(play: StreamProcess) -> None:
    play.commit(Snapshot(jobs={"train": a_job("train", 1, 1)}), "train", "other")
    begun = play.store.get_last_event_number()
    with play.follow("/v1/jobs/train/events") as reader:
        messages = reader.messages()
        assert next(messages)["id"] == str(begun - 1)
        play.commit(None, "other", "train")
        assert next(messages)["id"] == str(begun + 2)
    with play.follow("/v1/jobs/nobody/events") as reader:
        assert (reader.status, reader.problem()["type"]) == (404, "urn:ebbtide:problem:not-found")


def test_streams_continue_at_the_next_process_without_gap_or_duplicate(play: StreamProcess) -> None:
    with play.follow("/v1/events") as reader:
        messages = reader.messages()
        play.commit(None, "a")
        last = next(messages)["id"]
        play.stop()  # waits until the process has ended
        assert list(messages) == []
    assert play.log() == ""
    play.commit(None, "b")
    play.start()
    with play.follow("/v1/events", last_id=last) as reader:
        play.commit(None, "c")
        assert [message["data"]["subject"] for message in islice(reader.messages(), 2)] == ["b", "c"]


def test_all_streams_get_the_same_events_and_one_too_many_is_refused(play: StreamProcess) -> None:
    with ExitStack() as stack:
        readers = [stack.enter_context(play.follow("/v1/events")) for _ in range(60)]
        with play.follow("/v1/events") as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "10")
            assert "60 streams are open" in refused.problem()["detail"]
        subjects = [str(number) for number in range(20)]
        for number in subjects:
            play.commit(None, number)
        for reader in readers:
            assert [message["data"]["subject"] for message in islice(reader.messages(), 20)] == subjects
    while True:  # slots are freed once the service notices the disconnects
        with play.follow("/v1/events") as reader:
            if reader.status == 200:
                return


def test_a_slow_reader_delays_no_other_and_misses_nothing(play: StreamProcess) -> None:
    long, ticks, each = "x" * 2000, 15, 400
    with play.follow("/v1/events", buffer_bytes=4096) as slow, play.follow("/v1/events") as quick:
        before = psutil.Process(play.api.pid).memory_info().rss
        subjects = [str(number) for number in range(each)]
        for _ in range(ticks):
            play.commit(None, *subjects, message=long)
        wanted = subjects * ticks
        assert [message["data"]["subject"] for message in islice(quick.messages(), each * ticks)] == wanted
        assert psutil.Process(play.api.pid).memory_info().rss - before < 64e6
        assert [message["data"]["subject"] for message in islice(slow.messages(), each * ticks)] == wanted


def test_an_invalid_last_event_id_is_refused(play: StreamProcess) -> None:
    newest = play.store.get_last_event_number()
    for wrong, words in (("abc", "the id of an event of this stream"), (str(newest + 1), f"at most {newest}")):
        with play.follow("/v1/events", last_id=wrong) as reader:
            assert reader.status == 422
            problem = reader.problem()
            assert problem["errors"][0]["field"] == "Last-Event-ID"
            assert words in problem["detail"]
