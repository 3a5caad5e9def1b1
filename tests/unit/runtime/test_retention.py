"""Retention: rounds of a leader, and the files of ended jobs that they keep."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from scheduler.domain.events import Event, EventCode
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.program import Program
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.stored_logs import LogRoot
from scheduler.runtime.background import run_in_background
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.retention import ARCHIVES, DAY_S, JOB_LOGS, DeletionLimits, Retention, RetentionPeriods
from scheduler.store.api_protocol import AuditFilter, HistoryLog
from scheduler.store.archives import ArchiveFolder
from scheduler.store.protocol import Commit, Page, UnavailableError
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_job

NOW_S = 100 * DAY_S
KEPT = RetentionPeriods({HistoryLog.EVENTS: 10 * DAY_S}, logs_s=30 * DAY_S, archives_s=20 * DAY_S)


class Site:
    """A store with 5 old events, a run root with two ended jobs (one long ago), and their retention."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder / 'state.sqlite'}"
        migrate(url)
        self.store, self.root = SqlStore(url), LogRoot(folder / "run")
        events = tuple(Event(at_s, EventCode.JOB_STATE, "job", "it happened") for at_s in (*range(5), NOW_S))
        ended = (self._ended("old/job", 5 * DAY_S), self._ended("new", 90 * DAY_S))
        self.archives = ArchiveFolder(folder / "archives")
        used = self.store_archive(b"used by a live job", 5 * DAY_S)
        live = {"live": a_job("live", program=Program(archive=used))}
        snapshot = Snapshot(generation=1, jobs=live)
        self.store.commit(Commit(Snapshot(), snapshot, epoch=0, events=events, ended_jobs=ended))
        self.epoch, self.clock, self.noted = 0, ManualClock(NOW_S), Counter[str]()
        self.retention = Retention(
            self.store,
            KEPT,
            clock=self.clock,
            epoch=lambda: self.epoch,
            run_root=self.root,
            archives=self.archives,
            on_deleted=self._note,
            limits=DeletionLimits(2, 1, 0.01),
        )

    def store_archive(self, content: bytes, used_at_s: float) -> str:
        digest = f"sha256:{sha256(content).hexdigest()}"
        with self.archives.upload(digest) as upload:
            upload.write(content)
            assert upload.complete()
        assert self.archives.mark_used(digest, used_at_s)
        return digest

    def lead(self) -> None:
        lease = self.store.acquire_lease("me", now_s=NOW_S, ttl_s=1e9)
        assert lease is not None
        self.epoch = lease.epoch

    @property
    def numbers(self) -> list[int]:
        return [each.number for each in self.store.list_events(Page())]

    @property
    def audit_entries(self) -> int:
        return len(self.store.audit_log.list_entries(Page(), AuditFilter()))

    def _note(self, kind: str, count: int) -> None:
        self.noted[kind] += count

    def _ended(self, job_id: str, at_s: float) -> Job:
        folder = self.root.folder(job_id, 1)
        folder.path.mkdir(parents=True)
        folder.log_path(0).write_text("loss 0.1\n")
        (folder.path.parent / "step-9").write_text("weights")
        return replace(a_job(job_id, 1, 1), state=JobState.SUCCEEDED, state_since_s=at_s)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def test_round_deletes_in_batches_writes_one_audit_entry_and_waits_a_day(site: Site) -> None:
    site.lead()
    site.retention.step()
    assert (site.numbers, site.audit_entries) == ([3, 4, 5, 6], 0)
    for _ in range(9):
        site.retention.step()
    assert (site.numbers, site.audit_entries, site.noted) == ([6], 1, {"events": 5, JOB_LOGS: 1, ARCHIVES: 0})
    previous = site.store.load().snapshot
    late = (Event(0.0, EventCode.JOB_STATE, "job", "late"), Event(NOW_S, EventCode.JOB_STATE, "job", "now"))
    following = replace(previous, generation=previous.generation + 1)
    site.store.commit(Commit(previous, following, epoch=site.epoch, events=late))
    site.clock.move_to(NOW_S + 11 * DAY_S)
    for _ in range(9):
        site.retention.step()
    assert (site.numbers, site.audit_entries) == ([8], 2)


def test_log_files_are_deleted_and_checkpoints_kept(site: Site) -> None:
    site.lead()
    for _ in range(9):
        site.retention.step()
    assert site.root.list_generations("old/job") == []
    assert (site.root.folder("old/job", 1).path.parent / "step-9").read_text() == "weights"
    assert site.root.folder("new", 1).log_path(0).read_text() == "loss 0.1\n"
    assert sorted(site.root.list_jobs()) == ["new"]


def test_archives_that_no_job_used_for_the_period_are_deleted(site: Site) -> None:
    old, recent = site.store_archive(b"old", 79 * DAY_S), site.store_archive(b"recent", 81 * DAY_S)
    [used] = [job.spec.program.archive for job in site.store.load().snapshot.jobs.values()]
    with site.archives.upload(old):  # of a process that was killed a day ago, and of one that runs
        [killed] = (site.archives.find(used) or Path()).parent.glob("upload-*")
        os.utime(killed, (NOW_S - 1.5 * DAY_S, NOW_S - 1.5 * DAY_S))
        site.lead()
        for _ in range(9):
            site.retention.step()
        assert not killed.exists()
    assert [site.archives.find(digest) is not None for digest in (used, old, recent)] == [True, False, True]
    assert site.noted[ARCHIVES] == 1
    following = replace(site.store.load().snapshot, generation=2, jobs={})
    site.store.commit(Commit(site.store.load().snapshot, following, epoch=site.epoch))
    for day in (5, 19, 21):  # the job has ended; its archive stays for the period after its last use
        site.clock.move_to(NOW_S + day * DAY_S)
        for _ in range(9):
            site.retention.step()
        assert (site.archives.find(used) is None) == (day == 21)


def test_only_the_leader_deletes(site: Site) -> None:
    site.retention.step()
    assert site.numbers == [1, 2, 3, 4, 5, 6]
    site.epoch = 7  # it slept, and another leads
    stop = threading.Event()
    with run_in_background(site.retention.run, stop, name="retention"):
        stop.wait(0.1)
        assert site.numbers == [1, 2, 3, 4, 5, 6]
        site.lead()
        while site.audit_entries == 0:
            stop.wait(0.01)
    assert site.numbers == [6]


def test_outage_is_not_logged_by_retention(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stop = threading.Event(), threading.Event()

    def away() -> None:
        asked.set()
        raise UnavailableError("no answer")

    monkeypatch.setattr(site.retention, "step", away)
    with run_in_background(site.retention.run, stop, name="retention"):
        assert asked.wait(60.0)
    assert caplog.messages == []
