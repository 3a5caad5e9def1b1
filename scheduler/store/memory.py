"""MemoryStore: the store of the simulator, of dry runs and of tests. It lives and dies with its process."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort_right
from itertools import islice
from operator import attrgetter

from scheduler.domain.command import Command
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.sample import Sample
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.usage import HOUR_S, UsageEntry, UsageKind
from scheduler.store.front import AuditEntry, Books, HistoryLog
from scheduler.store.memory_front import MemoryAudit, MemoryTokens
from scheduler.store.protocol import (
    Commit,
    ConflictError,
    FencedError,
    Lease,
    Loaded,
    Page,
    StoredDecision,
    StoredEvent,
)
from scheduler.store.queries import JobQuery, LoanQuery, Place, first_after, place_of_job, place_of_loan

_NOBODY = Lease(holder="", epoch=0, expires_at_s=float("-inf"))


class MemoryStore:
    """Safe to use from several threads. It may start from a snapshot that was taken elsewhere."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._lock = threading.Lock()
        self._snapshot = snapshot or Snapshot()
        self._inbox: dict[str, Command] = {}
        self._sent: dict[str, Command] = {}
        self._lease = _NOBODY
        self._events: list[StoredEvent] = []
        self._decisions: list[StoredDecision] = []
        self._ended_jobs: list[Job] = []
        self._ended_loans: list[Loan] = []
        self._readings: dict[str, list[DemandReading]] = {}
        self._samples: dict[str, dict[int, Sample]] = {}
        self._usage: dict[UsageKind, tuple[float, float]] = {}
        self.audit_log = MemoryAudit()
        self.tokens = MemoryTokens(self.audit_log)

    def load(self) -> Loaded:
        with self._lock:
            return Loaded(self._snapshot, tuple(self._inbox.values()))

    def commit(self, commit: Commit) -> None:
        assert commit.snapshot.generation == commit.previous.generation + 1, "a commit moves on by one generation"
        with self._lock:
            if self._lease.epoch != commit.epoch:
                raise FencedError(f"epoch {commit.epoch} no longer leads; nothing was written")
            if self._snapshot.generation != commit.previous.generation:
                raise ConflictError(f"the stored generation is no longer {commit.previous.generation}")
            self._snapshot = commit.snapshot
            for command_id in commit.consumed:
                self._inbox.pop(command_id, None)
            self._append(commit)

    def send(self, command: Command, *, audit: AuditEntry | None = None) -> bool:
        with self._lock:
            if command.id in self._sent:
                return False
            if audit is not None:
                self.audit_log.append(audit)
            self._sent[command.id] = self._inbox[command.id] = command
            return True

    def command(self, command_id: str) -> Command | None:
        with self._lock:
            return self._sent.get(command_id)

    def inbox_size(self) -> int:
        with self._lock:
            return len(self._inbox)

    def acquire(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        assert holder, "the lease needs a holder with a name"
        with self._lock:
            held = self._lease
            if held.holder not in ("", holder) and held.expires_at_s > now_s:
                return None
            epoch = held.epoch if held.holder == holder else held.epoch + 1
            self._lease = Lease(holder, epoch, now_s + ttl_s)
            return self._lease

    def lease(self) -> Lease | None:
        with self._lock:
            return self._lease if self._lease.holder else None

    def release(self, holder: str) -> None:
        with self._lock:
            if self._lease.holder == holder:
                self._lease = Lease("", self._lease.epoch + 1, self._lease.expires_at_s)

    def events(self, page: Page, *, subject: str = "") -> tuple[StoredEvent, ...]:
        with self._lock:
            after = (self._events[at] for at in range(page.after, len(self._events)))
            return tuple(islice((each for each in after if subject in ("", each.event.subject)), page.limit))

    def last_events(self, subject: str, *, limit: int) -> tuple[StoredEvent, ...]:
        with self._lock:
            newest = islice((each for each in reversed(self._events) if each.event.subject == subject), limit)
            return tuple(newest)[::-1]

    def newest_event(self) -> int:
        with self._lock:
            return len(self._events)

    def decisions(self, page: Page) -> tuple[StoredDecision, ...]:
        with self._lock:
            return tuple(self._decisions[page.after : page.after + page.limit])

    def ended_job(self, job_id: str) -> Job | None:
        with self._lock:
            return next((job for job in reversed(self._ended_jobs) if job.id == job_id), None)

    def ended_jobs(self, *, limit: int) -> tuple[Job, ...]:
        with self._lock:
            return tuple(islice(reversed(self._ended_jobs), limit))

    def find_ended_jobs(self, wanted: JobQuery, *, after: Place | None, limit: int) -> tuple[Job, ...]:
        with self._lock:
            return first_after(list(filter(wanted.matches, self._ended_jobs)), place_of_job, after=after, limit=limit)

    def ended_loans(self, *, limit: int) -> tuple[Loan, ...]:
        with self._lock:
            return tuple(islice(reversed(self._ended_loans), limit))

    def find_ended_loans(self, wanted: LoanQuery, *, after: Place | None, limit: int) -> tuple[Loan, ...]:
        with self._lock:
            return first_after(list(filter(wanted.matches, self._ended_loans)), place_of_loan, after=after, limit=limit)

    def readings(self, pool: str, *, since_s: float) -> tuple[DemandReading, ...]:
        with self._lock:
            recorded = self._readings.get(pool, [])
            return tuple(recorded[bisect_left(recorded, since_s, key=attrgetter("at_s")) :])

    def samples(self, job_id: str) -> tuple[Sample, ...]:
        with self._lock:
            return tuple(sorted(self._samples.get(job_id, {}).values(), key=attrgetter("at_s")))

    def usage(self, *, from_s: float, to_s: float) -> Books:
        with self._lock:
            entries = [
                UsageEntry(kind, *sums)
                for kind, sums in self._usage.items()
                if from_s < kind.hour_s + HOUR_S and kind.hour_s < to_s
            ]
            return Books(tuple(sorted(entries)), self._snapshot)

    def swept_up_to(self, swept: HistoryLog) -> int:
        """Nothing lives longer than its process."""
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def _append(self, commit: Commit) -> None:
        generation, now_s = commit.snapshot.generation, commit.snapshot.now_s
        for event in commit.events:
            self._events.append(StoredEvent(len(self._events) + 1, generation, event))
        for decision in commit.decisions:
            self._decisions.append(StoredDecision(len(self._decisions) + 1, generation, now_s, decision))
        self._ended_jobs.extend(commit.ended_jobs)
        self._ended_loans.extend(commit.ended_loans)
        for entry in commit.usage:
            gpu_s, lost_gpu_s = self._usage.get(entry.kind, (0.0, 0.0))
            self._usage[entry.kind] = (gpu_s + entry.gpu_s, lost_gpu_s + entry.lost_gpu_s)
        for placed in commit.samples:
            self._samples.setdefault(placed.job_id, {})[placed.place] = placed.sample
        for pool, reading in commit.readings:
            insort_right(self._readings.setdefault(pool, []), reading, key=attrgetter("at_s"))
