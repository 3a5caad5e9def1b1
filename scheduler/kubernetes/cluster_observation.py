"""Observations from pods and nodes: runs that have not begun, GPUs that pods still hold, and node states. Pure.

Runs begin when their agents may start ranks (see executors/reported_runs). Before that, only their pods are visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import LoanState, Node, PoolKind
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.observation import FailureCause, NodeFacts, ReplicaStart, Run, RunPhase, StandbyFacts
from scheduler.domain.placement_record import PodRefusal
from scheduler.domain.pod_requirements import NodeCapacity
from scheduler.domain.prefetch import PrefetchResult
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import StandbyPhase
from scheduler.executors.reported_runs import AgentEnd, AgentKey
from scheduler.kubernetes.cluster_cache import ClusterView
from scheduler.kubernetes.node_lending import is_closed_to_inference
from scheduler.kubernetes.pod_changes import plan_pod_changes
from scheduler.kubernetes.pod_view import PodView
from scheduler.kubernetes.provisioning_errors import ProvisioningFailure
from scheduler.kubernetes.unplaced_replicas import assign_unplaced_replicas

_EXTERNAL_REASONS = (
    "Evicted", "NodeAffinity", "NodeLost", "NodePorts", "NodeShutdown", "OutOf", "Preempting", "Shutdown",
    "TaintToleration", "Terminated", "Unexpected",
)  # fmt: skip
_IMAGE_ERRORS = ("ErrImagePull", "ImagePullBackOff")
"""Errors that another node or a later attempt may not have."""
_CONTAINER_ERRORS = (
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull", "ImageInspectError",
    "ImagePullBackOff", "InvalidImageName", "RunContainerError",
)  # fmt: skip
NO_CAPACITIES: Mapping[str, NodeCapacity] = MappingProxyType({})
NO_STANDBY: Mapping[str, StandbyFacts] = MappingProxyType({})
NO_PREFETCHES: Mapping[str, tuple[PrefetchResult, ...]] = MappingProxyType({})
START_TIMEOUT_S = 120.0
"""Default of the setting `pod_start_timeout_s`. Registries and storage have short outages."""


@dataclass(frozen=True, slots=True)
class StartObstacles:
    """Obstacles to the start of pods, for all jobs of one observation.

    `overcommitted` are nodes without GPUs for all decided pods. An unbound pod there can never be bound. `shortages`
    are nodes without another resource for them, with the reason. `setup_errors` say why volumes or network of a pod
    are not ready, by its uid. A start that cannot proceed is given up after `timeout_s`.
    """

    overcommitted: Collection[str] = ()
    shortages: Mapping[str, PodRefusal] = field(default_factory=dict)
    setup_errors: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = START_TIMEOUT_S


NO_OBSTACLES = StartObstacles()


def merge_pod_runs(
    job: Job,
    runs: Sequence[Run],
    pods: Sequence[PodView],
    now_s: float,
    *,
    obstacles: StartObstacles = NO_OBSTACLES,
    failure: ProvisioningFailure | None = None,
) -> tuple[Run, ...]:
    """Return the job's runs with the GPUs that its pods hold. A pod holds its GPUs until it is gone.

    `failure` is why the API server rejected the objects of the current generation.
    """
    generation = job.allocation.generation
    changes = plan_pod_changes(job, pods, now_s)
    staying = set(changes.gang or ())
    held = find_held_gpus(job, (pod for pod in pods if pod.target_node not in staying))
    latest_older = max((run.generation for run in runs if run.generation < generation), default=None)
    seen = tuple(_with_gpus(run, held) if run.generation == latest_older else run for run in runs)
    if held and latest_older is None:
        oldest = min((pod.generation for pod in pods if pod.holds_gpus), default=0)
        seen = (Run(job.id, min(oldest, generation - 1), RunPhase.LEAVING, held), *seen)
    if job.allocation.target and all(run.generation != generation for run in runs):
        waited_s = now_s - job.state_since_s
        refused = None if failure is None else _build_failed_run(job, failure, is_over=waited_s >= obstacles.timeout_s)
        pending = refused or _build_pending_run(job, (changes.gang or {}).values(), waited_s, obstacles)
        for run in seen:  # pods outlive generations: GPUs of ranks that still run belong to the older run
            pending = replace(pending, gpus=gpu_sets.difference(pending.gpus, run.gpus))
        seen = (*seen, pending)
    return seen


def find_held_gpus(job: Job, pods: Iterable[PodView]) -> Gpus:
    """Return the job's GPUs on the nodes where these pods hold GPUs."""
    held = job.allocation.held
    nodes = {pod.node for pod in pods if pod.holds_gpus}
    return {node: indices for node, indices in held.items() if node in nodes}


def _with_gpus(run: Run, held: Gpus) -> Run:
    return replace(run, gpus=gpu_sets.union(run.gpus, held)) if held else run


def find_overcommitted_nodes(desired: Snapshot, view: ClusterView) -> frozenset[str]:
    """Return nodes where foreign pods and the decided jobs need more GPUs than there are.

    The next decision accounts for it.
    """
    needed = Counter[str]()
    for pod in view.pods:
        if pod.holds_gpus and not pod.is_ours:
            needed[pod.node] += pod.gpus
    if not needed:
        return frozenset()
    for job in desired.jobs.values():
        for node, indices in job.allocation.target.items():
            needed[node] += len(indices)
    return frozenset(name for name, gpus in needed.items() if name in view.nodes and gpus > view.nodes[name].gpus)


def _build_pending_run(job: Job, pods: Iterable[PodView], waited_s: float, obstacles: StartObstacles) -> Run:
    """Return the current generation's run while its pods start, or the reason why they cannot."""
    generation, found = job.allocation.generation, list(pods)
    if taken := sorted(pod.target_node for pod in found if not pod.node and pod.target_node in obstacles.overcommitted):
        return Run(job.id, generation, RunPhase.LOST, reason=f"foreign pods took the GPUs of {', '.join(taken)}")
    for pod in found:
        shortage = None if pod.node else obstacles.shortages.get(pod.target_node)
        if refusal := shortage or _find_refusal(pod, waited_s, obstacles):
            return Run(job.id, generation, RunPhase.LOST, reason=str(refusal), refusal=refusal)
        if pod.has_ended or (waited_s >= obstacles.timeout_s and pod.error.startswith(_CONTAINER_ERRORS)):
            phase = RunPhase.LOST if pod.has_ended and _has_ended_externally(pod) else RunPhase.FAILED
            return Run(job.id, generation, phase, reason=_describe_end(pod))
    obstacle = next((text for pod in found if (text := _describe_obstacle(pod, obstacles))), "")
    return Run(job.id, generation, RunPhase.STARTING, find_held_gpus(job, found), reason=obstacle)


def _describe_obstacle(pod: PodView, obstacles: StartObstacles) -> str:
    """Return what keeps the pod's containers from starting now, or an empty string."""
    error = pod.error if pod.error.startswith(_CONTAINER_ERRORS) else ""
    if not pod.is_prepared:
        error = error or obstacles.setup_errors.get(pod.uid, "")
    return f"pod {pod.namespace}/{pod.name} on {pod.target_node} cannot start: {error}" if error else ""


def _build_failed_run(job: Job, failure: ProvisioningFailure, *, is_over: bool) -> Run | None:
    """Return the failed run, or None until the time is over in which the namespace can be fixed."""
    if not failure.is_permanent and not is_over:
        return None
    phase = RunPhase.FAILED if failure.is_job_error else RunPhase.LOST
    return Run(job.id, failure.generation, phase, reason=failure.message)


def _find_refusal(pod: PodView, waited_s: float, obstacles: StartObstacles) -> PodRefusal | None:
    """Return why the pod's node does not run it: it was not admitted, or its image or a volume does not arrive."""
    if pod.is_rejected:
        return PodRefusal(pod.target_node, pod.reason, pod.error.removeprefix(f"{pod.reason}: "))
    if waited_s < obstacles.timeout_s or pod.has_ended:
        return None
    if pod.error.startswith(_IMAGE_ERRORS):
        reason, _, message = pod.error.partition(": ")
        return PodRefusal(pod.target_node, reason, message or "its image cannot be pulled")
    if pod.node and not pod.is_prepared:
        reason, _, message = obstacles.setup_errors.get(pod.uid, "").partition(": ")
        message = message or f"its volumes or its network are not ready after {waited_s:.0f} s"
        return PodRefusal(pod.target_node, reason or "VolumesNotReady", message)
    return None


def _describe_end(pod: PodView) -> str:
    description = pod.error or pod.reason or f"it ended in phase {pod.phase}"
    code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
    return f"pod {pod.namespace}/{pod.name} on {pod.target_node} failed: {description}{code}"


def find_live_agents(pods: Iterable[PodView]) -> dict[AgentKey, str]:
    """Return the uid of the pod whose agent may be running, by job and node."""
    return {(pod.job_id, pod.node): pod.uid for pod in pods if pod.is_ours and pod.holds_gpus}


def find_agent_ends(pods: Iterable[PodView]) -> dict[str, AgentEnd]:
    """Return how agents ended whose pods still exist.

    An agent that exited by itself is at fault: agents outlive their ranks, and exit with 0 when their job has ended.
    """
    ends = {}
    for pod in pods:
        if pod.is_ours and pod.has_ended:
            out_of_memory = pod.error.startswith("OOMKilled")
            cause = FailureCause.OUT_OF_MEMORY if out_of_memory else None
            ends[pod.uid] = AgentEnd(
                _describe_end(pod), is_fault=out_of_memory or not _has_ended_externally(pod), cause=cause
            )
    return ends


def _has_ended_externally(pod: PodView) -> bool:
    """Return whether the node, a deletion or an eviction ended the pod, and not its own processes."""
    return pod.is_deleting or pod.reason.startswith(_EXTERNAL_REASONS)


def observe_nodes(
    desired: Snapshot,
    view: ClusterView,
    capacities: Mapping[str, NodeCapacity] = NO_CAPACITIES,
    standby: Mapping[str, StandbyFacts] = NO_STANDBY,
    prefetches: Mapping[str, tuple[PrefetchResult, ...]] = NO_PREFETCHES,
) -> dict[str, NodeFacts]:
    """Return the state of every node in `desired`. A node that the cluster does not have is down.

    GPUs of foreign pods count as inference on inference pools, else as other use. An offered node counts as used until
    it is closed to inference, because inference pods can still be scheduled there. A partially offered node is never
    closed, and its pods count as they are. So do pods that found no GPUs and would fit on it without training. Standby
    replicas that are awake use all GPUs of their node, and an offered node counts as used until they sleep.
    """
    foreign_gpus: dict[str, int] = {}
    starts: dict[str, ReplicaStart] = {}
    for pod in view.pods:
        if pod.holds_gpus and not pod.is_ours:
            foreign_gpus[pod.node] = foreign_gpus.get(pod.node, 0) + pod.gpus
            if pod.gpus and pod.replica_start is not None:
                starts[pod.node] = max(starts.get(pod.node, pod.replica_start), pod.replica_start, key=_ready_at_s)
    for name, gpus in assign_unplaced_replicas(desired, view).items():
        foreign_gpus[name] = foreign_gpus.get(name, 0) + gpus
    facts = {}
    for name, node in desired.nodes.items():
        seen, used, loan = view.nodes.get(name), foreign_gpus.get(name, 0), desired.loans.get(name)
        serves = desired.pools[node.pool].kind is PoolKind.INFERENCE
        asleep = standby.get(name)
        if seen is not None and loan is not None and loan.state is LoanState.OFFERED and not loan.is_partial:
            is_free = is_closed_to_inference(loan, seen) and (asleep is None or asleep.phase is StandbyPhase.ASLEEP)
            used = used if is_free else max(used, 1)
        elif asleep is not None and not (loan is not None and loan.is_in_effect):
            used = max(used, node.gpus) if _has_awake_replicas(node, asleep) else used
        facts[name] = NodeFacts(
            up=seen is not None and seen.is_ready,
            inference_gpus=used if serves else 0,
            other_gpus=0 if serves else used,
            capacity=capacities.get(name),
            replica_start=starts.get(name) if serves else None,
            standby=asleep,
            prefetches=prefetches.get(name, ()),
        )
    return facts


def _has_awake_replicas(node: Node, facts: StandbyFacts) -> bool:
    """Return whether standby replicas on the node serve, as observed now or else before."""
    known = None if node.standby is None else node.standby.phase
    return (facts.phase or known) is StandbyPhase.AWAKE


def _ready_at_s(start: ReplicaStart) -> float:
    return start.ready_at_s
