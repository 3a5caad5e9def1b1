"""Usage records: the GPU-seconds that jobs held, per hour, queue, owner, kind of GPU and model that they train.

A job's account is settled whenever its GPUs change, so it held the same GPUs between two settlements. A tick that
settles an account records exactly what the settlement adds, in the same commit. So nothing is recorded twice or lost,
whichever process fails. An unchanged job costs no write: readers add its unsettled usage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler.domain.fleet import PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_queue import HOUR_S, UsageEntry, UsageKey
from scheduler.domain.snapshot import Snapshot

UsageTuple = tuple[int, str, str, str, bool, str]
"""The fields of a `UsageKey`. Plain tuples are much faster dictionary keys than dataclasses."""
UsageSums = dict[UsageTuple, tuple[float, float, str]]
"""GPU-seconds held and lost, and the display name of the owner."""


def compute_usage_delta(previous: Snapshot, snapshot: Snapshot) -> tuple[UsageEntry, ...]:
    """Return GPU-seconds used and lost since `previous`. Call before ended jobs are archived."""
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
    """Return the usage of live jobs since their accounts were settled, between `from_s` and `now_s`."""
    sums: UsageSums = {}
    for job in snapshot.jobs.values():
        _add_held(sums, snapshot, job, max(from_s, job.account.settled_at_s), now_s)
    return _build_entries(sums)


def sum_usage(entries: Iterable[UsageEntry]) -> tuple[UsageEntry, ...]:
    """Merge entries with equal keys, and sort them by key."""
    sums: UsageSums = {}
    for entry in entries:
        key = entry.key
        kind = (key.hour_s, key.queue, key.owner_id, key.gpu, key.is_lent, key.model)
        _add(sums, kind, entry.gpu_s, entry.lost_gpu_s, entry.owner)
    return _build_entries(sums)


def _add_held(sums: UsageSums, snapshot: Snapshot, job: Job, from_s: float, to_s: float) -> None:
    if not (job.allocation.target or job.allocation.releasing):
        return
    held, hours = _count_held_gpus(snapshot, job), tuple(_split_by_hour(from_s, to_s))
    model = job.spec.model_label
    for (gpu, is_lent), count in held.items():
        for hour_s, elapsed_s in hours:
            kind = (hour_s, job.spec.queue, job.owner_key, gpu, is_lent, model)
            _add(sums, kind, count * elapsed_s, 0.0, job.owner)


def _add_lost(sums: UsageSums, snapshot: Snapshot, before: Job, after: Job) -> None:
    """Spread lost work over the GPUs that the job held, or count it on the model that the job requires."""
    lost_gpu_s = after.account.lost_gpu_s - before.account.lost_gpu_s
    if not lost_gpu_s:
        return
    held = _count_held_gpus(snapshot, before) or Counter({(before.spec.gpu, False): 1})
    hour_s = _hour_start_s(after.account.settled_at_s)
    for (gpu, is_lent), count in held.items():
        kind = (hour_s, before.spec.queue, before.owner_key, gpu, is_lent, before.spec.model_label)
        _add(sums, kind, 0.0, lost_gpu_s * count / held.total(), before.owner)


def _count_held_gpus(snapshot: Snapshot, job: Job) -> Counter[tuple[str, bool]]:
    """Count the GPUs that a job holds or is releasing, by model and by whether they are lent."""
    held: Counter[tuple[str, bool]] = Counter()
    nodes, pools = snapshot.nodes, snapshot.pools
    for gpus in (job.allocation.target, job.allocation.releasing):
        for name, indices in gpus.items():
            node = nodes[name]
            held[node.gpu, pools[node.pool].kind is PoolKind.INFERENCE] += len(indices)
    return held


def _split_by_hour(from_s: float, to_s: float) -> Iterator[tuple[int, float]]:
    """Yield the start of each hour that the time span touches, and the seconds of the span in it."""
    while from_s < to_s:
        hour_s = _hour_start_s(from_s)
        end_s = min(to_s, float(hour_s + HOUR_S))
        yield hour_s, end_s - from_s
        from_s = end_s


def _hour_start_s(at_s: float) -> int:
    return int(at_s // HOUR_S) * HOUR_S


def _add(sums: UsageSums, kind: UsageTuple, gpu_s: float, lost_gpu_s: float, owner: str) -> None:
    known = sums.get(kind, (0.0, 0.0, ""))
    sums[kind] = (known[0] + gpu_s, known[1] + lost_gpu_s, owner or known[2])


def _build_entries(sums: UsageSums) -> tuple[UsageEntry, ...]:
    return tuple(UsageEntry(UsageKey(*kind), *sums[kind]) for kind in sorted(sums))
