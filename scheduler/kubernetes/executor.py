"""KubernetesExecutor: runs jobs in agent pods, and lends nodes by taints.

Level-triggered: each converge computes and takes the missing steps. Steps that free GPUs are taken at once, starts in
batches, so that hundreds of starts do not delay the next tick. All state is in the store or the cluster. Starting the
ranks of a generation is recorded in the run log first, so that it happens once, under any leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from scheduler.domain.job import Job
from scheduler.domain.observation import BegunRun, Observation, Run
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.reported_runs import AgentKey
from scheduler.executors.run_ledger import RunLedger
from scheduler.executors.standby_replicas import StandbyReplicas
from scheduler.kubernetes.api_actions import ActionPool, ApiAction
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.cluster_observation import (
    START_TIMEOUT_S,
    StartObstacles,
    find_agent_ends,
    find_live_agents,
    find_overcommitted_nodes,
    merge_pod_runs,
    observe_nodes,
)
from scheduler.kubernetes.job_objects import JobObjectActions
from scheduler.kubernetes.node_capacities import NodeCapacities, find_shortages, sum_all_requests
from scheduler.kubernetes.node_lending import NodeLending, plan_lending_steps
from scheduler.kubernetes.pod_changes import (
    FreeGpus,
    PodChanges,
    count_held_gpus,
    find_orphans,
    find_stranded_pods,
    plan_pod_changes,
    select_gang_to_bind,
)
from scheduler.kubernetes.prefetching import Prefetches
from scheduler.kubernetes.standby_orders import plan_standby_orders
from scheduler.store.protocol import RunLog

logger = logging.getLogger(__name__)


class KubernetesExecutor:
    """Executor on Kubernetes.

    `view` returns the cluster, own writes included; `epoch` is the leader's epoch, stamped on all writes. A start that
    cannot proceed is given up after `start_timeout_s`. `standby` keeps replicas of inference idle on lent nodes, and
    `prefetches` loads images and weights onto nodes before they change hands.
    """

    def __init__(
        self,
        objects: JobObjectActions,
        nodes: NodeLending,
        *,
        view: Callable[[], ClusterView],
        run_log: RunLog,
        now: Callable[[], float],
        epoch: Callable[[], int],
        actions: ActionPool,
        prefetches: Prefetches,
        standby: StandbyReplicas | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._objects = objects
        self._nodes = nodes
        self._view = view
        self._ledger = RunLedger(run_log, epoch=epoch)
        self._now = now
        self._actions = actions
        self._prefetches = prefetches
        self._standby = standby or StandbyReplicas()
        self._start_timeout_s = start_timeout_s
        self._capacities = NodeCapacities()
        self._desired = Snapshot()
        self._converged_generation = 0
        self._has_deferred_starts = False

    def observe(self) -> Observation:
        """Observe runs and nodes. Also records ended runs and kill orders in the run log, where agents read them.

        Raises:
            FencedError: a newer leader has written.
        """
        now_s, view = self._now(), self._verified_view()
        runs = tuple(self._all_runs(view, self._runs_from_agents(view, now_s), now_s))
        standby = self._standby.list_facts(now_s)
        prefetches = self._prefetches.list_results(self._desired, view, now_s)
        nodes = observe_nodes(self._desired, view, self._capacities.find(self._desired, view), standby, prefetches)
        return Observation(
            now_s,
            self._converged_generation,
            runs,
            nodes,
            self._objects.volumes.list_facts(),
            self._objects.templates.list_reviews(),
        )

    def converge(self, desired: Snapshot) -> None:
        """Take the missing steps towards `desired`. Ignores states older than the last one.

        Raises:
            FencedError: a newer leader has written; the remaining steps were not taken.
        """
        if desired.generation < self._converged_generation:
            logger.warning(
                "ignoring snapshot generation %d: generation %d is already applied",
                desired.generation,
                self._converged_generation,
            )
            return
        self._desired = desired
        now_s = self._now()
        ambiguous = sum(
            self._actions.run_all(steps(desired, self._verified_view(), now_s))
            for steps in (self._plan_lending, self._plan_deletions)
        )
        self._standby.follow(plan_standby_orders(desired, self._verified_view()), now_s)
        ambiguous += self._start_batch(desired, now_s)
        begun = self._ledger.list_begun_runs()
        self._begin_generations(desired, begun, now_s)
        self._ledger.prune(desired, begun)
        self._actions.run_batch(self._prefetches.plan(desired, self._view(), now_s))
        if not ambiguous:
            self._converged_generation = desired.generation

    @property
    def has_deferred_starts(self) -> bool:
        """Whether the last converge left starts to the next one."""
        return self._has_deferred_starts

    def has_news(self) -> bool:
        """Return whether the last converge left starts to the next one, or a standby replica changed its state."""
        return self._standby.has_news() or self._has_deferred_starts

    def close(self) -> None:
        """Stop the executor. Pods keep running, so that training continues without a leader."""
        self._actions.close()
        self._standby.close()

    def _verified_view(self) -> ClusterView:
        """Return the view in which a pod belongs to a job only in the job's namespace."""
        return self._view().with_verified_namespaces(
            {job.id: self._objects.namespace_for(job) for job in self._desired.jobs.values()}
        )

    def _runs_from_agents(self, view: ClusterView, now_s: float) -> Mapping[str, Sequence[Run]]:
        """Return begun runs by job, as reported by agents. Records new kill orders and ends."""
        agents, ends = find_live_agents(view.pods), find_agent_ends(view.pods)
        return self._ledger.update_runs(lambda _begun: agents, self._desired.jobs, now_s, ends=ends)

    def _all_runs(self, view: ClusterView, runs_by_job: Mapping[str, Sequence[Run]], now_s: float) -> Iterator[Run]:
        """Yield the runs of all desired jobs, from agent reports and pods."""
        pods = view.pods_by_job()
        obstacles = StartObstacles(
            overcommitted=find_overcommitted_nodes(self._desired, view),
            shortages=find_shortages(self._desired, view),
            setup_errors=self._objects.setup_errors.list_errors(),
            timeout_s=self._start_timeout_s,
        )
        for job in self._desired.jobs.values():
            runs, own = runs_by_job.get(job.id, ()), pods.get(job.id, ())
            if runs or own or job.allocation.target:
                failure = self._objects.failures.get(job)
                yield from merge_pod_runs(job, runs, own, now_s, obstacles=obstacles, failure=failure)

    def _start_batch(self, desired: Snapshot, now_s: float) -> int:
        """Take the next steps of starts, as many as the rate limit allows now. Return the ambiguous failures.

        Complete gangs are bound first. Pods that are created here are bound here too if the limit allows it. Jobs whose
        volumes or templates are read here start in the next tick.
        """
        batches = [
            self._actions.run_batch(steps(desired, self._verified_view(), now_s))
            for steps in (self._plan_bindings, self._plan_reads, self._plan_creations, self._plan_bindings)
        ]
        self._has_deferred_starts = any(batch.deferred for batch in batches) or batches[1].run > 0
        self._actions.run_batch(self._objects.setup_errors.plan_reads(self._verified_view()))
        return sum(batch.ambiguous for batch in batches)

    def _plan_lending(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[ApiAction]:
        return self._nodes.build_actions(plan_lending_steps(desired, view.nodes, view.pods))

    def _plan_reads(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[ApiAction]:
        yield from self._objects.volumes.plan_reads(desired)
        yield from self._objects.templates.plan_trials(desired)

    def _plan_deletions(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[ApiAction]:
        """Yield deletions of surplus pods, of replicas that failed to sleep or wake, and of what ended jobs left."""
        for _, changes in _iter_pod_changes(desired, view, now_s):
            yield from map(self._objects.delete_pod, changes.delete)
        yield from map(self._objects.delete_pod, find_orphans(view.pods, desired.jobs))
        yield from map(self._objects.delete_pod, find_stranded_pods(view.pods, view.nodes))
        yield from map(self._nodes.delete_replica, self._standby.list_failed())
        yield from self._objects.delete_leftovers(desired, view)

    def _plan_creations(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[ApiAction]:
        """Yield creations for placed jobs: plan, token, service and pods."""
        for job, changes in _iter_pod_changes(desired, view, now_s):
            if job.allocation.target and not job.is_ended:
                yield from self._objects.create_missing(job, changes.create, view, desired.nodes)

    def _plan_bindings(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[ApiAction]:
        """Yield bindings of gangs that are complete and fit."""
        unbound = {pod.job_id for pod in view.pods if pod.is_ours and not pod.node}
        if not unbound:
            return
        rooms = FreeGpus(view.nodes, count_held_gpus(view.pods), sum_all_requests(view))
        for job, changes in _iter_pod_changes(desired, view, now_s, only=unbound):
            gang = select_gang_to_bind(job.id, changes, rooms)
            if gang is not None:
                yield self._objects.bind_gang(gang)

    def _begin_generations(self, desired: Snapshot, begun: Sequence[BegunRun], now_s: float) -> None:
        """Begin each generation that all its pods have prepared and whose older ranks are all gone."""

        def find_agents(_jobs: Sequence[Job]) -> Mapping[AgentKey, str]:
            return find_live_agents(self._verified_view().pods)

        self._ledger.begin_generations(desired, begun, find_agents, now_s, in_pods=True)


def _iter_pod_changes(
    desired: Snapshot, view: ClusterView, now_s: float, *, only: Container[str] | None = None
) -> Iterator[tuple[Job, PodChanges]]:
    """Yield the changes of all jobs with pods or GPUs, or of those in `only`."""
    pods = view.pods_by_job()
    for job in desired.jobs.values():
        if only is not None and job.id not in only:
            continue
        own = pods.get(job.id, [])
        if own or job.allocation.target:
            yield job, plan_pod_changes(job, own, now_s)
