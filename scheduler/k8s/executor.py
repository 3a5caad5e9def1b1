"""KubernetesExecutor: agent pods, loans as taints. Level-triggered: each converge takes the steps that are missing.

Nothing is remembered that is not in the store or in the cluster. What begins (the ranks of a generation) is written
into the run log first, so that it begins once, whoever leads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from scheduler.domain.agent_report import BegunRun
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation, Run
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.reported_runs import begun_run, may_begin, reported_runs
from scheduler.k8s.cluster_view import ClusterView
from scheduler.k8s.effects import Effect, Effects
from scheduler.k8s.gangs import Rooms, gang_to_bind
from scheduler.k8s.job_objects import JobObjects
from scheduler.k8s.lent_nodes import lending_steps
from scheduler.k8s.node_lending import NodeLending
from scheduler.k8s.pod_changes import PodChanges, gpus_held, orphans, pod_changes, stranded
from scheduler.k8s.pod_runs import agent_ends, crowded_nodes, live_agents, with_pods
from scheduler.k8s.seen_nodes import node_facts
from scheduler.store.run_log import RunLog

logger = logging.getLogger(__name__)


_TO_BEGIN = (JobState.STARTING, JobState.RESIZING)


class KubernetesExecutor:
    """See Executor. `view` gives the cluster as it was last seen, our own writes included; `epoch` is the store's
    lease's, which all that is written bears."""

    def __init__(
        self,
        objects: JobObjects,
        nodes: NodeLending,
        *,
        view: Callable[[], ClusterView],
        run_log: RunLog,
        now: Callable[[], float],
        epoch: Callable[[], int],
        effects: Effects,
    ) -> None:
        self._objects = objects
        self._nodes = nodes
        self._view = view
        self._run_log = run_log
        self._now = now
        self._epoch = epoch
        self._effects = effects
        self._desired = Snapshot()
        self._converged_generation = 0
        self._reported: Mapping[str, int] = {}

    def observe(self) -> Observation:
        """See the protocol. Also writes down how runs have ended, and which have to, so that their agents hear of it.

        Raises:
            FencedError: a later leader has written already.
        """
        now_s, view = self._now(), self._seen()
        runs = tuple(self._runs(view, self._told(view, now_s), now_s))
        return Observation(now_s, self._converged_generation, runs, node_facts(self._desired, view))

    def converge(self, desired: Snapshot) -> None:
        """See the protocol. A state older than the last one is ignored.

        Raises:
            FencedError: a later leader has written already; nothing more was done.
        """
        if desired.generation < self._converged_generation:
            logger.warning("state %d is older than state %d", desired.generation, self._converged_generation)
            return
        self._desired = desired
        now_s = self._now()
        doubts = sum(
            self._effects.take(list(steps(desired, self._seen(), now_s)))
            for steps in (self._lending, self._leaving, self._coming, self._binding)
        )
        begun = self._run_log.begun()
        self._begin(desired, begun, now_s)
        self._forget(desired, begun)
        if not doubts:
            self._converged_generation = desired.generation

    def close(self) -> None:
        """Pods stay: training goes on while nobody leads."""
        self._effects.close()

    def _seen(self) -> ClusterView:
        """The cluster, with each pod that says it is ours in the namespace of its job."""
        return self._view().trusting({job.id: self._objects.namespace_of(job) for job in self._desired.jobs.values()})

    def _told(self, view: ClusterView, now_s: float) -> Mapping[str, Sequence[Run]]:
        """Begun runs by job, by what agents say."""
        agents, ends = live_agents(view.pods), agent_ends(view.pods)
        log, jobs = self._run_log, self._desired.jobs
        told: dict[str, list[Run]] = {}
        reports = log.reports()
        oldest_first = sorted(reports, key=lambda report: report.generation)
        self._reported = {report.job_id: report.generation for report in oldest_first}
        for seen in reported_runs(log.begun(), reports, agents, jobs, now_s, ends=ends):
            run = seen.run
            if seen.doom is not None and seen.doom != seen.begun.doom:
                log.doom(run.job_id, run.generation, seen.doom, epoch=self._epoch())
            if seen.has_just_ended:
                log.end(run, epoch=self._epoch())
            told.setdefault(run.job_id, []).append(run)
        return told

    def _runs(self, view: ClusterView, told: Mapping[str, Sequence[Run]], now_s: float) -> Iterator[Run]:
        """Runs of all jobs of the desired state, by what agents say and by what pods show."""
        pods, crowded = view.pods_of(), crowded_nodes(self._desired, view)
        for job in self._desired.jobs.values():
            runs, own = told.get(job.id, ()), pods.get(job.id, ())
            if runs or own or job.allocation.target:
                refusal = self._objects.refusals.of(job)
                yield from with_pods(job, runs, own, now_s, crowded=crowded, refusal=refusal)

    def _lending(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[Effect]:
        return self._nodes.steps(lending_steps(desired, view.nodes, view.pods))

    def _leaving(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[Effect]:
        """Pods that have to go, and what is left of jobs that are gone."""
        for _, changes in _changes(desired, view, now_s):
            yield from map(self._objects.delete_pod, changes.delete)
        yield from map(self._objects.delete_pod, orphans(view.pods, desired.jobs))
        yield from map(self._objects.delete_pod, stranded(view.pods, view.nodes))
        yield from self._objects.sweep(desired, view)

    def _coming(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[Effect]:
        """What placed jobs lack: plan, token, service and pods."""
        for job, changes in _changes(desired, view, now_s):
            if job.allocation.target and not job.is_ended:
                yield from self._objects.provide(job, changes.make, view, desired.nodes)

    def _binding(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[Effect]:
        """Every gang that is whole and has room."""
        rooms = Rooms(view.nodes, gpus_held(view.pods))
        for job, changes in _changes(desired, view, now_s):
            gang = gang_to_bind(job.id, changes, rooms)
            if gang is not None:
                yield self._objects.bind_gang(gang)

    def _begin(self, desired: Snapshot, begun: Sequence[BegunRun], now_s: float) -> None:
        """Let the ranks of each generation start whose agents are all there and whose older ranks are all gone."""
        waiting = [job for job in desired.jobs.values() if job.state in _TO_BEGIN and job.allocation.target]
        if not waiting:
            return
        agents, reports = live_agents(self._seen().pods), self._run_log.reports()
        for job in waiting:
            if may_begin(job, begun, reports, agents):
                run = begun_run(job, desired.seats_of(job.allocation), agents, now_s)
                if self._run_log.begin(run, epoch=self._epoch()):
                    logger.info("%s generation %d may start its ranks", job.id, run.generation)

    def _forget(self, desired: Snapshot, begun: Sequence[BegunRun]) -> None:
        """Drop what the run log has of jobs that are gone, whether their ranks ever began or not, and of generations
        before one that runs."""
        for run in begun:
            job = desired.jobs.get(run.job_id)
            runs = job is not None and job.state is JobState.RUNNING
            if job is None or (runs and run.generation < job.allocation.generation):
                self._run_log.forget(run.job_id, up_to_generation=run.generation, epoch=self._epoch())
        for job_id in self._reported.keys() - desired.jobs.keys() - {run.job_id for run in begun}:
            self._run_log.forget(job_id, up_to_generation=self._reported[job_id], epoch=self._epoch())


def _changes(desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[tuple[Job, PodChanges]]:
    pods = view.pods_of()
    for job in desired.jobs.values():
        own = pods.get(job.id, [])
        if own or job.allocation.target:
            yield job, pod_changes(job, own, now_s)
