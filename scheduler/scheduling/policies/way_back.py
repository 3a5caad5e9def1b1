"""WayBack: how long the nodes of a pool take from a recall until they serve inference again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.domain.fleet import LoanState, Pool
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.return_times import NO_RETURN_TIMES, bound_next_s, group_leave_times
from scheduler.domain.snapshot import Snapshot

_HORIZONS_S = (30, 60, 90, 120, 150, 180, 240, 300, 360, 480, 600, 720, 900, 1200, 1800, 2700, 3600, 5400, 7200)
"""Few horizons, because each needs a model of its own."""


@dataclass(frozen=True, slots=True)
class WayBack:
    """Seconds that training takes to leave a recalled node, and that an inference replica then takes to start or wake.

    Each is measured, and exceeded in at most one of 20 recalls, or else what the owner of the pool has declared.
    """

    leave_s: float
    start_s: float
    declared_s: float

    @property
    def horizon_s(self) -> float:
        """Time that a forecast looks ahead, rounded up to a few values, but not above what was declared for it."""
        needed_s = self.leave_s + self.start_s
        if needed_s >= self.declared_s:
            return needed_s if needed_s == self.declared_s else _round_up(needed_s)
        return min(self.declared_s, _round_up(needed_s))


def measure_way_back(snapshot: Snapshot, pool: Pool) -> WayBack:
    """Return the way back of the pool's nodes, as `measure_ways_back` does."""
    return measure_ways_back(snapshot, [pool])[pool.name]


def measure_ways_back(snapshot: Snapshot, pools: Iterable[Pool]) -> Mapping[str, WayBack]:
    """Return the way back of the nodes of inference pools, by pool, with the jobs that run on its lent nodes now.

    A job that left often enough is known by its own times. Any other may take as long as the jobs of the pool so far,
    or as those of all pools, but no less than it took itself. Without 19 of these, it may take until the deadline.
    """
    known_s = group_leave_times(snapshot.return_times)
    of_all_s = bound_next_s([each for times in known_s.values() for each in times])
    borrowers = _list_borrowers(snapshot) if known_s else {}
    ways = {}
    for pool in pools:
        times = snapshot.return_times.get(pool.name, NO_RETURN_TIMES)
        of_pool_s = bound_next_s([each.seconds for each in times.leave_times])
        typical_s = of_all_s if of_pool_s is None else of_pool_s
        bounds = [_bound_leave_s(known_s.get(job, ()), typical_s) for job in borrowers.get(pool.name, {""})]
        starts_s = times.start_times_s if pool.lending.standby is None else times.wake_times_s
        ways[pool.name] = _combine(pool.lending, max(bounds), bound_next_s(starts_s))
    return ways


def _combine(rules: LendingPolicy, leave_s: float, start_s: float | None) -> WayBack:
    leave_s = min(leave_s, rules.return_deadline_s)
    return WayBack(leave_s, rules.start_s if start_s is None else start_s, rules.horizon_s)


def _bound_leave_s(own_s: Sequence[float], typical_s: float | None) -> float:
    """Return the time within which a job leaves. Infinite if too little is known."""
    if (bound_s := bound_next_s(own_s)) is not None:
        return bound_s
    return inf if typical_s is None else max([typical_s, *own_s])


def _list_borrowers(snapshot: Snapshot) -> dict[str, set[str]]:
    """Return the jobs that hold GPUs of lent nodes, by pool."""
    holders, borrowers = snapshot.index.holders, dict[str, set[str]]()
    for name, loan in snapshot.loans.items():
        if loan.state in (LoanState.ACTIVE, LoanState.RECALLED) and (jobs := holders.get(name)):
            borrowers.setdefault(loan.pool, set()).update(jobs.values())
    return borrowers


def _round_up(seconds: float) -> float:
    return next((float(each) for each in _HORIZONS_S if each >= seconds), seconds)
