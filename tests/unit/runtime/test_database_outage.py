"""Database outages: log lines and backoff."""

from __future__ import annotations

import logging
import threading

import pytest

from scheduler.runtime.controller import RETRY_PAUSE_S_MAX, DatabaseOutage, open_when_available
from scheduler.store.protocol import UnavailableError

LOCKED = UnavailableError("database is locked")


def test_start_and_end_of_an_outage_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    outage = DatabaseOutage(lambda: now_s)
    with caplog.at_level(logging.INFO):
        outage.record_recovery()
        assert (caplog.messages, outage.duration_s) == ([], 0.0)
        pauses_s = [outage.record_failure(LOCKED) for _ in range(7)]
        now_s = 112.0
        assert outage.duration_s == 12.0
        outage.record_recovery()
        outage.record_recovery()
    assert len(caplog.messages) == 2
    assert "database is locked" in caplog.messages[0]
    assert "after 12.0 s" in caplog.messages[1]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == RETRY_PAUSE_S_MAX
    assert outage.duration_s == 0.0


def test_store_is_opened_once_the_database_is_available() -> None:
    tries: list[int] = []

    def open_store() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise LOCKED
        return "opened"

    assert open_when_available(open_store, threading.Event(), lambda: 0.0) == "opened"


def test_stop_ends_the_wait() -> None:
    stop = threading.Event()
    stop.set()
    assert open_when_available(lambda: "opened", stop, lambda: 0.0) is None
