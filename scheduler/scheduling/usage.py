"""usage: the GPU-seconds that jobs held, as entries for the books.

A job's own account is the mark up to which it was booked. The account is settled whenever what the job holds changes,
so that between two settlements it held the same GPUs, and a tick that settles an account books exactly what it adds to
it, in the commit that stores the account: nothing is booked twice and nothing is lost, whoever dies when. A job that
nothing happens to costs no write; what it has held since is `unbooked`, which whoever reads the books adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler.domain.fleet import PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey
from scheduler.domain.snapshot import Snapshot

UsageTuple = tuple[int, str, str, str, bool]
"""The fields of a `UsageKey`: plain tuples are found in a dictionary much faster."""
UsageSums = dict[UsageTuple, tuple[float, float]]


def compute_usage_delta(previous: Snapshot, snapshot: Snapshot) -> tuple[UsageEntry, ...]:
    """What the accounts of `snapshot`, from which nothing was archived yet, have more than those of `previous`."""
    sums: UsageSums = {}
    if previous.jobs is not snapshot.jobs:
        jobs = previous.jobs
        for job_id, job in snapshot.jobs.items():
            before = jobs.get(job_id)
            if before is job or before is None or before.account is job.account:
                continue
            _add_held(sums, previous, before, before.account.settled_at_s, job.account.settled_at_s)
            _add_lost(sums, previous, before, job)
    return _build_entries(sums)


def compute_unsettled_usage(snapshot: Snapshot, now_s: float, *, from_s: float = 0.0) -> tuple[UsageEntry, ...]:
    """What live jobs hold since their accounts were settled, from `from_s` up to `now_s`."""
    sums: UsageSums = {}
    for job in snapshot.jobs.values():
        _add_held(sums, snapshot, job, max(from_s, job.account.settled_at_s), now_s)
    return _build_entries(sums)


def sum_usage(entries: Iterable[UsageEntry]) -> tuple[UsageEntry, ...]:
    """One entry a kind, in order."""
    sums: UsageSums = {}
    for entry in entries:
        kind = entry.key
        _add(sums, (kind.hour_s, kind.queue, kind.owner, kind.gpu, kind.is_lent), entry.gpu_s, entry.lost_gpu_s)
    return _build_entries(sums)


def _add_held(sums: UsageSums, snapshot: Snapshot, job: Job, from_s: float, to_s: float) -> None:
    if not (job.allocation.target or job.allocation.releasing):
        return
    held, hours = _count_held_gpus(snapshot, job), tuple(_split_by_hour(from_s, to_s))
    for (gpu, is_lent), count in held.items():
        for hour_s, elapsed_s in hours:
            _add(sums, (hour_s, job.spec.queue, job.owner, gpu, is_lent), count * elapsed_s, 0.0)


def _add_lost(sums: UsageSums, snapshot: Snapshot, before: Job, after: Job) -> None:
    """Lost work, spread over the GPUs that the job held; one that held none any more lost it on its own kind."""
    lost_gpu_s = after.account.lost_gpu_s - before.account.lost_gpu_s
    if not lost_gpu_s:
        return
    held = _count_held_gpus(snapshot, before) or Counter({(before.spec.gpu, False): 1})
    hour_s = _hour_start_s(after.account.settled_at_s)
    for (gpu, is_lent), count in held.items():
        kind = (hour_s, before.spec.queue, before.owner, gpu, is_lent)
        _add(sums, kind, 0.0, lost_gpu_s * count / held.total())


def _count_held_gpus(snapshot: Snapshot, job: Job) -> Counter[tuple[str, bool]]:
    """The GPUs of a job, those that it is leaving included, by model and whether they are lent."""
    held: Counter[tuple[str, bool]] = Counter()
    nodes, pools = snapshot.nodes, snapshot.pools
    for gpus in (job.allocation.target, job.allocation.releasing):
        for name, indices in gpus.items():
            node = nodes[name]
            held[node.gpu, pools[node.pool].kind is PoolKind.INFERENCE] += len(indices)
    return held


def _split_by_hour(from_s: float, to_s: float) -> Iterator[tuple[int, float]]:
    """The hours that a time span touches, and its seconds in each."""
    while from_s < to_s:
        hour_s = _hour_start_s(from_s)
        end_s = min(to_s, float(hour_s + HOUR_S))
        yield hour_s, end_s - from_s
        from_s = end_s


def _hour_start_s(at_s: float) -> int:
    return int(at_s // HOUR_S) * HOUR_S


def _add(sums: UsageSums, kind: UsageTuple, gpu_s: float, lost_gpu_s: float) -> None:
    known = sums.get(kind, (0.0, 0.0))
    sums[kind] = (known[0] + gpu_s, known[1] + lost_gpu_s)


def _build_entries(sums: UsageSums) -> tuple[UsageEntry, ...]:
    return tuple(UsageEntry(UsageKey(*kind), *sums[kind]) for kind in sorted(sums))
