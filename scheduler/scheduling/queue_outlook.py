"""QueueOutlook: the facts about other jobs that explanations of pending jobs share.

An explanation looks at all jobs. Jobs that can use the same GPUs get the same facts, which are computed once for all
explanations of a snapshot: a page of explanations costs little more than one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from operator import itemgetter

from scheduler.domain.decisions import Reason
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot

_Terms = tuple[str, bool]
"""Required GPU model, empty for any, and whether lent nodes are accepted."""


class QueueOutlook:
    """Facts about the jobs of a snapshot. `waiting` is from the tick that made it."""

    def __init__(self, snapshot: Snapshot, waiting: Mapping[str, Reason]) -> None:
        self.snapshot = snapshot
        self.waiting = waiting
        self._placed = [job for job in snapshot.jobs.values() if job.allocation.held]
        self._holders: dict[_Terms, Mapping[str, int]] = {}
        self._releases: dict[_Terms, tuple[tuple[float, int], ...]] = {}
        self._needs: dict[str, tuple[list[float], list[int]]] = {}

    def list_holders(self, job: Job) -> Mapping[str, int]:
        """Return the GPUs that other jobs hold and this job could use, by job id, the most first."""
        terms = _get_terms(job)
        if terms not in self._holders:
            held = ((each.id, self._count_usable(terms, each.allocation.held)) for each in self._placed)
            ordered = sorted(held, key=lambda item: (-item[1], item[0]))
            self._holders[terms] = {name: gpus for name, gpus in ordered if gpus}
        holders = self._holders[terms]
        return {name: gpus for name, gpus in holders.items() if name != job.id} if job.id in holders else holders

    def list_expected_releases(self, job: Job) -> tuple[tuple[float, int], ...]:
        """Return when GPUs that the job could use come free: from releases, and from ends of jobs of known length."""
        terms = _get_terms(job)
        if terms not in self._releases:
            self._releases[terms] = tuple(sorted(self._find_releases(terms)))
        return self._releases[terms]

    def count_gpus_needed_before(self, job: Job) -> int:
        """Return the GPUs that jobs before this one in the queue need, if both can use the same GPU model."""
        reason = self.waiting.get(job.id)
        position = reason.numbers.get("position", 0.0) if reason is not None else 0.0
        positions, needed = self._list_needs(job.spec.gpu)
        before = bisect_left(positions, position)
        return needed[before - 1] if before else 0

    def _find_releases(self, terms: _Terms) -> list[tuple[float, int]]:
        now_s, releases = self.snapshot.now_s, list[tuple[float, int]]()
        for job in self._placed:
            left = job.allocation
            if left.leave_by_s is not None and left.releasing:
                releases.append((max(left.leave_by_s, now_s), self._count_usable(terms, left.releasing)))
            if job.state is JobState.RUNNING and (steps := job.remaining_steps(now_s)) is not None:
                releases.append((now_s + steps * job.step_time_s(), self._count_usable(terms, left.target)))
        return releases

    def _list_needs(self, gpu: str) -> tuple[list[float], list[int]]:
        """Return positions in the queue, ascending, and the GPUs needed up to each, of jobs that can use the model."""
        if gpu not in self._needs:
            found = []
            for job_id, reason in self.waiting.items():
                other, position = self.snapshot.jobs.get(job_id), reason.numbers.get("position")
                if (
                    other is not None
                    and position is not None
                    and ("" in (gpu, other.spec.gpu) or gpu == other.spec.gpu)
                ):
                    found.append((position, int(reason.numbers.get("needed_gpus", 0))))
            found.sort(key=itemgetter(0))
            self._needs[gpu] = [position for position, _ in found], list(accumulate(gpus for _, gpus in found))
        return self._needs[gpu]

    def _count_usable(self, terms: _Terms, gpus: Gpus) -> int:
        """Count the GPUs that a job of these terms could use if they were free."""
        gpu, accepts_lent_nodes = terms
        snapshot, count = self.snapshot, 0
        for name, indices in gpus.items():
            node = snapshot.nodes.get(name)
            if node is None or gpu not in ("", node.gpu) or not snapshot.serves_training(node):
                continue
            if accepts_lent_nodes or not snapshot.is_lent(node):
                count += len(indices)
        return count


def _get_terms(job: Job) -> _Terms:
    return job.spec.gpu, job.accepts_lent_nodes
