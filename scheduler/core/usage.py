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
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.usage import HOUR_S, UsageEntry, UsageKind

Kind = tuple[int, str, str, str, bool]
"""The fields of a UsageKind: plain tuples are found in a dictionary much faster."""
Sums = dict[Kind, tuple[float, float]]


def booked(previous: Snapshot, snapshot: Snapshot) -> tuple[UsageEntry, ...]:
    """What the accounts of `snapshot`, from which nothing was archived yet, have more than those of `previous`."""
    sums: Sums = {}
    if previous.jobs is not snapshot.jobs:
        jobs = previous.jobs
        for job_id, job in snapshot.jobs.items():
            before = jobs.get(job_id)
            if before is job or before is None or before.account is job.account:
                continue
            _hold(sums, previous, before, before.account.settled_at_s, job.account.settled_at_s)
            _lose(sums, previous, before, job)
    return _entries(sums)


def unbooked(snapshot: Snapshot, now_s: float, *, from_s: float = 0.0) -> tuple[UsageEntry, ...]:
    """What live jobs hold since their accounts were settled, from `from_s` up to `now_s`."""
    sums: Sums = {}
    for job in snapshot.jobs.values():
        _hold(sums, snapshot, job, max(from_s, job.account.settled_at_s), now_s)
    return _entries(sums)


def summed(entries: Iterable[UsageEntry]) -> tuple[UsageEntry, ...]:
    """One entry a kind, in order."""
    sums: Sums = {}
    for entry in entries:
        kind = entry.kind
        _add(sums, (kind.hour_s, kind.queue, kind.owner, kind.gpu, kind.is_lent), entry.gpu_s, entry.lost_gpu_s)
    return _entries(sums)


def _hold(sums: Sums, snapshot: Snapshot, job: Job, from_s: float, to_s: float) -> None:
    if not (job.allocation.target or job.allocation.releasing):
        return
    held, hours = _held(snapshot, job), tuple(_hours(from_s, to_s))
    for (gpu, is_lent), count in held.items():
        for hour_s, elapsed_s in hours:
            _add(sums, (hour_s, job.spec.queue, job.owner, gpu, is_lent), count * elapsed_s, 0.0)


def _lose(sums: Sums, snapshot: Snapshot, before: Job, after: Job) -> None:
    """Lost work, spread over the GPUs that the job held; one that held none any more lost it on its own kind."""
    lost_gpu_s = after.account.lost_gpu_s - before.account.lost_gpu_s
    if not lost_gpu_s:
        return
    held = _held(snapshot, before) or Counter({(before.spec.gpu, False): 1})
    hour_s = _hour(after.account.settled_at_s)
    for (gpu, is_lent), count in held.items():
        kind = (hour_s, before.spec.queue, before.owner, gpu, is_lent)
        _add(sums, kind, 0.0, lost_gpu_s * count / held.total())


def _held(snapshot: Snapshot, job: Job) -> Counter[tuple[str, bool]]:
    """The GPUs of a job, those that it is leaving included, by model and whether they are lent."""
    held: Counter[tuple[str, bool]] = Counter()
    nodes, pools = snapshot.nodes, snapshot.pools
    for gpus in (job.allocation.target, job.allocation.releasing):
        for name, indices in gpus.items():
            node = nodes[name]
            held[node.gpu, pools[node.pool].kind is PoolKind.INFERENCE] += len(indices)
    return held


def _hours(from_s: float, to_s: float) -> Iterator[tuple[int, float]]:
    """The hours that a time span touches, and its seconds in each."""
    while from_s < to_s:
        hour_s = _hour(from_s)
        end_s = min(to_s, float(hour_s + HOUR_S))
        yield hour_s, end_s - from_s
        from_s = end_s


def _hour(at_s: float) -> int:
    return int(at_s // HOUR_S) * HOUR_S


def _add(sums: Sums, kind: Kind, gpu_s: float, lost_gpu_s: float) -> None:
    known = sums.get(kind, (0.0, 0.0))
    sums[kind] = (known[0] + gpu_s, known[1] + lost_gpu_s)


def _entries(sums: Sums) -> tuple[UsageEntry, ...]:
    return tuple(UsageEntry(UsageKind(*kind), *sums[kind]) for kind in sorted(sums))
