"""A leading controller process deletes records that are older than its settings allow, and ends on SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler.domain.events import Event, EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.retention import DAY_S
from scheduler.store.api_protocol import AuditFilter
from scheduler.store.protocol import Commit, Page
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore

pytestmark = pytest.mark.e2e

TIMEOUT_S = 120.0


def test_controller_deletes_old_records_and_ends_on_sigterm(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store, now_s = SqlStore(url), time.time()
    events = tuple(Event(now_s - days * DAY_S, EventCode.JOB_STATE, "job", "it happened") for days in (9, 8, 3, 1, 0))
    store.commit(Commit(Snapshot(), Snapshot(generation=1, now_s=now_s), epoch=0, events=events))
    env = {
        **os.environ,
        "EBBTIDE_DATABASE_URL": url,
        "EBBTIDE_RUN_DIR": str(tmp_path / "run"),
        "EBBTIDE_EVENTS_KEPT_DAYS": "2",
    }
    with (tmp_path / "log").open("wb") as log:
        controller = subprocess.Popen([sys.executable, "-m", "cli", "controller"], env=env, stderr=log)
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (entries := store.audit_log.list_entries(Page(), AuditFilter())):
            assert controller.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert [record.number for record in store.list_events(Page())] == [4, 5]
        assert entries[0].entry.after == {"events": {"rows": 3, "up_to_s": events[2].at_s}}
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(timeout=TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    finally:
        controller.kill()
        controller.wait()
        store.close()
