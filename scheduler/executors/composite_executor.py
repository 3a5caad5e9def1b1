"""CompositeExecutor: one cluster whose nodes belong to several executors.

Each node belongs to exactly one part. Each part sees its own nodes, and the jobs that hold or have run on them. A
generation runs in one part: the controller is told that a generation on nodes of two parts has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.domain.fleet import Loan, Node
from scheduler.domain.job import Job
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.executor import Executor


@dataclass(slots=True)
class ExecutorPart:
    """One executor, and the nodes that it hosts.

    `observed_jobs` are the jobs with a run in its last observation.
    """

    executor: Executor
    hosts: Callable[[Node], bool]
    observed_jobs: frozenset[str] = frozenset()
    _moved: dict[str, tuple[Job, Job]] = field(default_factory=dict)

    def select(self, desired: Snapshot) -> Snapshot:
        """Return the desired state of this part's nodes.

        A job without GPUs is in every part, so that none forgets its progress. A job whose GPUs are elsewhere is in
        this part without a target for as long as a run of it exists here.
        """
        nodes = {name: node for name, node in desired.nodes.items() if self.hosts(node)}
        chosen = {job.id: self._select_job(job, nodes) for job in desired.jobs.values()}
        jobs = {job_id: job for job_id, job in chosen.items() if job is not None}
        self._moved = {job_id: pair for job_id, pair in self._moved.items() if jobs.get(job_id) is pair[1]}
        return replace(desired, nodes=nodes, jobs=jobs, loans=_select_loans(desired, nodes), cached_index=None)

    def _select_job(self, job: Job, nodes: Mapping[str, Node]) -> Job | None:
        held = job.allocation.held
        if all(node in nodes for node in held):
            return job
        if any(node in nodes for node in held) or job.id in self.observed_jobs:
            return self._without_target(job)
        return None

    def _without_target(self, job: Job) -> Job:
        """Return the job without a place, the same object for the same job."""
        before = self._moved.get(job.id)
        if before is None or before[0] is not job:
            elsewhere = replace(job.allocation, target={}, plan=None, seats=())
            before = self._moved[job.id] = job, replace(job, allocation=elsewhere)
        return before[1]


class CompositeExecutor:
    """Executor of a cluster whose nodes several executors host.

    A job whose GPUs are in two parts, because it moves from one to the other, starts in the new part once the old one
    no longer holds it. Nodes that no part hosts are not observed.
    """

    def __init__(self, parts: Sequence[ExecutorPart]) -> None:
        self._parts = tuple(parts)
        self._desired = Snapshot()

    def observe(self) -> Observation:
        """Return the observations of all parts as one.

        It is as old as the oldest of them, and confirms only generations that all parts have converged to.
        """
        observed = [part.executor.observe() for part in self._parts]
        for part, observation in zip(self._parts, observed, strict=True):
            part.observed_jobs = frozenset(run.job_id for run in observation.runs)
        known = self._desired.nodes
        return Observation(
            at_s=min(each.at_s for each in observed),
            converged_generation=min(each.converged_generation for each in observed),
            runs=(*(run for each in observed for run in each.runs), *self._list_spanning_runs()),
            nodes={name: facts for each in observed for name, facts in each.nodes.items() if name in known},
            volumes={job: facts for each in observed for job, facts in each.volumes.items()},
            reviews={job: review for each in observed for job, review in each.reviews.items()},
        )

    def converge(self, desired: Snapshot) -> None:
        """Converge every part to its share of the desired state, in order. An error leaves the later parts as is."""
        self._desired = desired
        for part in self._parts:
            part.executor.converge(part.select(desired))

    def close(self) -> None:
        for part in self._parts:
            part.executor.close()

    def _list_spanning_runs(self) -> Iterable[Run]:
        """Yield a failed run for each generation on nodes of several parts."""
        for job in self._desired.jobs.values():
            target, nodes = job.allocation.target, self._desired.nodes
            hosting = [any(name in nodes and part.hosts(nodes[name]) for name in target) for part in self._parts]
            if sum(hosting) > 1:
                reason = f"no executor hosts all of its nodes: {', '.join(sorted(target))}"
                yield Run(job.id, job.allocation.generation, RunPhase.FAILED, reason=reason)


def _select_loans(desired: Snapshot, nodes: Mapping[str, Node]) -> dict[str, Loan]:
    return {name: loan for name, loan in desired.loans.items() if name in nodes}
