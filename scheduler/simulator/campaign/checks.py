"""Invariants of a fault campaign: at every tick, in the world after every step, and at the end."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler.domain.fleet import Node, NodeState, PoolKind
from scheduler.domain.job_queue import find_limiting_queue
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.domain.tick_report import TickReport
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.store.api_protocol import ApiStore

INDEX_CHECK_PERIOD = 8
JOBS_MAX = 1_000_000
PREEMPTIONS_MAX = 100
"""Preemptions of one job, above which jobs preempt each other without end. No seed needs a tenth of it."""
_ROUNDING_GPU_S = 1e-3


@dataclass(frozen=True, slots=True)
class CaseViolation:
    """A broken invariant. `code` names it, and is what shrinking preserves."""

    at_s: float
    code: str
    detail: str

    @property
    def is_eventual(self) -> bool:
        """Whether it could only be found at the end, after all faults."""
        return self.code.startswith("end-")


class CaseChecks:
    """Collects violations of one run, the first of each code."""

    def __init__(self) -> None:
        self._found: dict[str, CaseViolation] = {}
        self._committed: set[int] = set()
        self._ticks = 0
        self._generations: dict[str, int] = {}

    @property
    def violations(self) -> tuple[CaseViolation, ...]:
        return tuple(self._found.values())

    def record(self, at_s: float, code: str, detail: str) -> None:
        self._found.setdefault(code, CaseViolation(at_s, code, detail))

    def check_report(self, report: TickReport) -> None:
        """Check a completed tick and the state that it committed."""
        self._ticks += 1
        before, after, at_s = report.before, report.after, report.now_s
        for violation in report.violations:
            self.record(at_s, f"illegal-{violation.invariant}", f"{violation.subject}: {violation.detail}")
        problems = [*_find_shared_gpus(after), *_find_exceeded_limits(before, after), *self._find_old_state(report)]
        if self._ticks % INDEX_CHECK_PERIOD == 0:
            problems += _find_index_differences(after)
        for code, detail in problems:
            self.record(at_s, code, detail)

    def check_world(self, world: SimulatedExecutor, stored: Snapshot) -> None:
        """Check what really runs: no GPU twice, and nothing on GPUs that inference can use.

        It uses none that the store takes to be down. After a stale observation, such a node may be up.
        """
        users: dict[tuple[str, int], str] = {}
        for run in world.list_live_runs():
            for node, indices in run.gpus.items():
                for index in indices:
                    other = users.setdefault((node, index), run.job_id)
                    if other != run.job_id:
                        detail = f"GPU {index} of {node} is used by {other} and {run.job_id}"
                        self.record(world.now_s, "gpu-used-twice", detail)
                known = stored.nodes.get(node)
                if known and (foreign := _list_inference_gpus(stored, known).intersection(indices)):
                    detail = f"{run.job_id} runs on GPUs {sorted(foreign)} of {node}, which are not lent"
                    self.record(world.now_s, "runs-on-unlent-node", detail)

    def check_end(self, store: ApiStore, submitted: Counter[str], *, fallible: set[str], now_s: float) -> None:
        """Check that everything ended and adds up. `fallible` are jobs that may fail, `submitted` those accepted."""
        snapshot = store.load().snapshot
        ended = {job.id: job for job in store.list_ended_jobs(limit=JOBS_MAX)}
        if snapshot.jobs:
            states = ", ".join(f"{job.id} {job.state}" for job in snapshot.jobs.values())
            self.record(now_s, "end-jobs-left", f"jobs that did not end: {states}")
        if lost := submitted.keys() - ended.keys() - snapshot.jobs.keys():
            self.record(now_s, "end-job-lost", f"jobs without a trace: {sorted(lost)}")
        for job in ended.values():
            if job.state is JobState.FAILED and job.id not in fallible:
                self.record(now_s, "end-job-failed", f"{job.id} failed: {job.message}")
            if job.account.preemptions > PREEMPTIONS_MAX:
                self.record(now_s, "end-preempted-too-often", f"{job.id} was preempted {job.account.preemptions} times")
        late = [loan.node for loan in snapshot.loans.values() if loan.return_by_s is not None]
        if late:
            self.record(now_s, "end-recall-left", f"recalled nodes that were not returned: {late}")
        for code, detail in _find_wrong_accounts(store):
            self.record(now_s, code, detail)

    def _find_old_state(self, report: TickReport) -> Iterator[tuple[str, str]]:
        after = report.after
        if not report.committed:
            return
        if report.generation in self._committed:
            yield "generation-repeated", f"generation {report.generation} was committed twice"
        is_newest = report.generation > max(self._committed, default=0)
        self._committed.add(report.generation)
        if not is_newest:
            return  # reported late, by a controller that was paused after its commit
        for job in after.jobs.values():
            known = self._generations.get(job.id, 0)
            if job.allocation.generation < known:
                yield "allocation-older", f"{job.id} went from generation {known} to {job.allocation.generation}"
            self._generations[job.id] = max(known, job.allocation.generation)
            if job.account.gpu_s < 0.0 or job.account.lost_gpu_s > job.account.gpu_s + _ROUNDING_GPU_S:
                yield "account-lost-too-much", f"{job.id} lost {job.account.lost_gpu_s} of {job.account.gpu_s} GPU-s"


def _list_inference_gpus(stored: Snapshot, node: Node) -> set[int]:
    """Return the GPUs of the node that inference can use: none of a node that is down or lent as a whole."""
    if stored.pools[node.pool].kind is PoolKind.TRAINING or node.state is NodeState.DOWN:
        return set()
    loan, gpus = stored.loans.get(node.name), set(range(node.gpus))
    if loan is None or not loan.is_in_effect:
        return gpus
    return gpus.difference(loan.indices) if loan.is_partial else set()


def _find_shared_gpus(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    holders: dict[tuple[str, int], str] = {}
    for job in snapshot.jobs.values():
        for node, indices in job.allocation.held.items():
            for index in indices:
                other = holders.setdefault((node, index), job.id)
                if other != job.id:
                    yield "gpu-held-twice", f"GPU {index} of {node} is held by {other} and {job.id}"


def _find_exceeded_limits(before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield limits that a tick exceeded. A limit that was exceeded already, such as a lowered one, may stay so."""
    held, held_before = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for job in after.jobs.values():
        queue, old = find_limiting_queue(job.spec.queue, after.queues), before.jobs.get(job.id)
        for key in ((queue, ""), (queue, f"user {job.owner}")):
            held[key] += job.allocation.target_gpus
            held_before[key] += old.allocation.target_gpus if old else 0
    for (name, user), gpus in held.items():
        if (queue_ := after.queues.get(name)) is None:
            continue
        limit = queue_.user_limit_gpus if user else queue_.limit_gpus
        if limit is not None and gpus > max(limit, held_before[name, user]):
            yield "limit-exceeded", f"queue {name} {user} holds {gpus} GPUs; its limit is {limit}"


def _find_index_differences(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    kept, built = snapshot.index, SnapshotIndex.build(replace(snapshot, cached_index=None))
    for name in ("waiting", "running", "holders", "recalled", "offered", "free_by_node", "overused_loans"):
        if getattr(kept, name) != getattr(built, name):
            yield "index-differs", f"{name}: carried {getattr(kept, name)}, built {getattr(built, name)}"


def _find_wrong_accounts(store: ApiStore) -> Iterator[tuple[str, str]]:
    usage = store.load_usage(from_s=-math.inf, to_s=math.inf)
    recorded: defaultdict[str, float] = defaultdict(float)
    held: defaultdict[str, float] = defaultdict(float)
    for entry in usage.entries:
        recorded[entry.key.owner_id] += entry.gpu_s
    jobs = {job.id: job for job in store.list_ended_jobs(limit=JOBS_MAX)} | dict(usage.snapshot.jobs)
    for job in jobs.values():
        held[job.owner_key] += job.account.gpu_s
    for owner in held.keys() | recorded.keys():
        if abs(held[owner] - recorded[owner]) > _ROUNDING_GPU_S * (1.0 + held[owner] / 1e6):
            yield "end-usage-differs", f"{owner} used {held[owner]} GPU-s, and {recorded[owner]} were recorded"
