"""Shared state for the requests of node agents, so that a thousand agents do not overload the store.

Most reports and looks at what agents have to do change nothing. Reads are cached for CACHE_TTL_S. A changed report is
written at once. Otherwise one heartbeat per agent is written every HEARTBEAT_INTERVAL_S, in batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from scheduler.domain.job import Job
from scheduler.domain.observation import AgentReport, BegunRun, RankStatus
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import RunLog, Store

CACHE_TTL_S = 0.5
HEARTBEAT_INTERVAL_S = 10.0
AGENT_TIMEOUT_S = 3 * HEARTBEAT_INTERVAL_S
"""An agent that has not reported for this long is considered gone: a job may have left the node and come back."""
CONTACT_INTERVAL_S = 5.0
"""Time between two writes of the last contacts of machines."""
_BATCH_INTERVAL_S = 1.0


class AgentStateCache:
    """Cached reads and batched writes of one process.

    Thread-safe. Several processes may write the same report twice.
    """

    def __init__(self, store: Store, run_log: RunLog) -> None:
        self._store = store
        self._run_log = run_log
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._snapshot, self._epoch = Snapshot(), 0
        self._read_at_s = float("-inf")
        self._begun: dict[str, tuple[float, tuple[BegunRun, ...]]] = {}
        self._reported: dict[str, tuple[float, frozenset[str], bool]] = {}
        self._written: dict[tuple[str, str], _WrittenReport] = {}
        self._unwritten: dict[tuple[str, str], AgentReport] = {}
        self._written_at_s = float("-inf")

    def snapshot(self, now_s: float) -> Snapshot:
        """Return the newest committed snapshot, at most CACHE_TTL_S old."""
        return self.decisions(now_s)[0]

    def decisions(self, now_s: float) -> tuple[Snapshot, int]:
        """Return the newest committed snapshot, at most CACHE_TTL_S old, and the epoch of its leader, 0 without one.

        The epoch is read first, so that no decision of an earlier leader gets the epoch of a later one.
        """
        with self._lock:
            if not _is_fresh(self._read_at_s, now_s):
                lease = self._store.get_lease()
                self._snapshot, self._read_at_s = self._store.load().snapshot, now_s
                self._epoch = 0 if lease is None else lease.epoch
                self._drop_ended_jobs(self._snapshot)
            return self._snapshot, self._epoch

    @property
    def newest_snapshot(self) -> Snapshot:
        """The snapshot that was read last, of any age. Does not wait."""
        return self._snapshot

    def job(self, job_id: str, now_s: float) -> Job | None:
        """Return a live or ended job."""
        return self.snapshot(now_s).jobs.get(job_id) or self._store.get_ended_job(job_id)

    def begun_runs(self, job_id: str, now_s: float) -> tuple[BegunRun, ...]:
        """Return the job's begun runs in order of generation."""
        with self._lock:
            read_at_s, runs = self._begun.get(job_id, (float("-inf"), ()))
        if not _is_fresh(read_at_s, now_s):
            runs = self._run_log.list_begun_runs_of(job_id)
            with self._lock:
                self._begun[job_id] = now_s, runs
        return runs

    def have_all_prepared(self, job_id: str, nodes: Collection[str], now_s: float, generation: int) -> bool:
        """Return whether agents on all these nodes have prepared the generation, and have reported recently.

        Cached, because every agent asks.
        """
        wanted_nodes = frozenset(nodes)
        with self._lock:
            read_at_s, cached_nodes, cached_result = self._reported.get(job_id, (float("-inf"), wanted_nodes, False))
        if cached_nodes != wanted_nodes or not _is_fresh(read_at_s, now_s):
            reports = [self._run_log.get_report(job_id, node) for node in nodes]
            cached_result = all(
                report is not None
                and report.prepared >= generation
                and _is_fresh(report.at_s, now_s, max_age_s=AGENT_TIMEOUT_S)
                for report in reports
            )
            with self._lock:
                self._reported[job_id] = now_s, wanted_nodes, cached_result
        return cached_result

    def record_report(self, report: AgentReport) -> None:
        """Write the report if it has changed, or if the last written report is old."""
        key = (report.job_id, report.node)
        with self._lock:
            written = self._written.get(key)
        if written is None and (written := _WrittenReport.of(self._run_log.get_report(*key))) is not None:
            with self._lock:
                self._written[key] = written
        if written is not None and (written.report.pod, written.report.generation) == (report.pod, report.generation):
            report = replace(report, since_s=written.report.since_s)
            if written.comparable == _comparable_report(report):
                if _is_fresh(written.report.at_s, report.at_s, max_age_s=HEARTBEAT_INTERVAL_S):
                    return
                self._write(report, written.comparable, immediately=False)
                return
        self._write(report, _comparable_report(report), immediately=True)

    def _write(self, report: AgentReport, comparable: AgentReport, *, immediately: bool) -> None:
        with self._lock:
            key = (report.job_id, report.node)
            self._written[key], self._unwritten[key] = _WrittenReport(report, comparable), report
            if not immediately and _is_fresh(self._written_at_s, report.at_s, max_age_s=_BATCH_INTERVAL_S):
                return
        # One write for all pending reports: concurrent writers would starve each other on SQLite.
        with self._write_lock:
            with self._lock:
                self._written_at_s = report.at_s
                unwritten, self._unwritten = self._unwritten, {}
            try:
                self._run_log.record_reports(*unwritten.values())
            except BaseException:
                with self._lock:  # possibly not written, so the next reports count as changed
                    for key in unwritten:
                        self._written.pop(key, None)
                raise

    def _drop_ended_jobs(self, live: Snapshot) -> None:
        for cache in (self._begun, self._reported):
            for job_id in cache.keys() - live.jobs.keys():
                del cache[job_id]
        for reports in (self._written, self._unwritten):
            for key in [key for key in reports if key[0] not in live.jobs]:
                del reports[key]


@dataclass(frozen=True, slots=True)
class _WrittenReport:
    report: AgentReport
    comparable: AgentReport

    @classmethod
    def of(cls, report: AgentReport | None) -> _WrittenReport | None:
        return None if report is None else cls(report, _comparable_report(report))


def _is_fresh(read_at_s: float, now_s: float, *, max_age_s: float = CACHE_TTL_S) -> bool:
    return 0.0 <= now_s - read_at_s < max_age_s


def _comparable_report(report: AgentReport) -> AgentReport:
    """Return the report without the fields that change all the time: the ranks' progress and speed."""
    ranks = tuple(
        replace(rank, status=None if rank.status is None else _comparable_status(rank.status)) for rank in report.ranks
    )
    return replace(report, at_s=0.0, ranks=ranks)


def _comparable_status(status: RankStatus) -> RankStatus:
    step = int(status.has_loaded_state)
    return replace(status, step=step, loss=None, samples_per_s=None, written_at_ns=0, peak_bytes=None, oom_kills=None)


class MachineContacts:
    """When each machine last reported, written in batches: the executor needs it to the nearest seconds only.

    Thread-safe. `record_seen` stores the times of several machines at once.
    """

    def __init__(self, record_seen: Callable[[Mapping[str, float]], None]) -> None:
        self._record_seen = record_seen
        self._lock = threading.Lock()
        self._unwritten: dict[str, float] = {}
        self._written_at_s = float("-inf")

    def record(self, machine: str, now_s: float) -> None:
        """Record a contact. Raises UnavailableError if it is time to write and the database does not respond."""
        with self._lock:
            self._unwritten[machine] = now_s
            if _is_fresh(self._written_at_s, now_s, max_age_s=CONTACT_INTERVAL_S):
                return
            self._written_at_s = now_s
            unwritten, self._unwritten = self._unwritten, {}
        self._record_seen(unwritten)
