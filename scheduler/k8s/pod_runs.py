"""Runs as pods show them, beside what agents report: generations that never began, and GPUs that a pod still keeps.

Pure. A generation begins when its agents may start ranks (see executors/reported_runs); before that, all that can be
seen of it are pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.observation import FailureCause, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.reported_runs import AgentEnd, AgentKey
from scheduler.k8s.cluster_view import ClusterView
from scheduler.k8s.pod_changes import pod_changes
from scheduler.k8s.pod_facts import PodFacts
from scheduler.k8s.refusals import Refusal

_NOT_ITS_FAULT = (
    "Evicted", "NodeAffinity", "NodeLost", "NodeShutdown", "OutOf", "Preempting", "Shutdown", "Terminated",
    "Unexpected",
)  # fmt: skip
_HOPELESS = (
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull", "ImageInspectError",
    "ImagePullBackOff", "InvalidImageName", "RunContainerError",
)  # fmt: skip
HOPE_S = 120.0
"""An image that cannot be pulled, or a container that cannot be made, gets this long: registries have bad minutes."""


def with_pods(
    job: Job,
    runs: Sequence[Run],
    pods: Sequence[PodFacts],
    now_s: float,
    *,
    crowded: Collection[str] = (),
    refusal: Refusal | None = None,
) -> tuple[Run, ...]:
    """The job's runs with the GPUs that its pods keep: a pod that has to go keeps its GPUs until it is gone.

    On `crowded` nodes there is no room for all that was decided: a pod that is not bound yet never will be. `refusal`:
    why the API server would not take the present generation's objects.
    """
    generation = job.allocation.generation
    changes = pod_changes(job, pods, now_s)
    staying = set(changes.gang or ())
    kept = gpus_kept(job, (pod for pod in pods if pod.wanted_node not in staying))
    newest_older = max((run.generation for run in runs if run.generation < generation), default=None)
    seen = tuple(_keeping(run, kept) if run.generation == newest_older else run for run in runs)
    if kept and newest_older is None:
        oldest = min((pod.generation for pod in pods if pod.holds_gpus), default=0)
        seen = (Run(job.id, min(oldest, generation - 1), RunPhase.LEAVING, kept), *seen)
    if job.allocation.target and all(run.generation != generation for run in runs):
        refused = None if refusal is None else _refused(job, refusal, now_s)
        coming = refused or _not_begun(job, (changes.gang or {}).values(), now_s, crowded)
        for run in seen:  # pods outlive generations: where one still works, its ranks have the GPUs, not those to come
            coming = replace(coming, gpus=gpu_sets.minus(coming.gpus, run.gpus))
        seen = (*seen, coming)
    return seen


def gpus_kept(job: Job, pods: Iterable[PodFacts]) -> Gpus:
    """The job's GPUs on the nodes of these pods, as far as they hold any."""
    held = job.allocation.held
    nodes = {pod.node for pod in pods if pod.holds_gpus}
    return {node: indices for node, indices in held.items() if node in nodes}


def _keeping(run: Run, kept: Gpus) -> Run:
    return replace(run, gpus=gpu_sets.union(run.gpus, kept)) if kept else run


def crowded_nodes(desired: Snapshot, view: ClusterView) -> frozenset[str]:
    """Nodes on which pods of others and all that was decided for jobs take more GPUs than there are: somebody else was
    faster. What is decided next knows of them."""
    wanted = Counter[str]()
    for pod in view.pods:
        if pod.holds_gpus and not pod.is_ours:
            wanted[pod.node] += pod.gpus
    if not wanted:
        return frozenset()
    for job in desired.jobs.values():
        for node, indices in job.allocation.target.items():
            wanted[node] += len(indices)
    return frozenset(name for name, gpus in wanted.items() if name in view.nodes and gpus > view.nodes[name].gpus)


def _not_begun(job: Job, pods: Iterable[PodFacts], now_s: float, crowded: Collection[str]) -> Run:
    """The present generation while its pods come up, or how they have failed to."""
    generation, found = job.allocation.generation, list(pods)
    if taken := sorted(pod.wanted_node for pod in found if not pod.node and pod.wanted_node in crowded):
        return Run(job.id, generation, RunPhase.LOST, reason=f"pods of others took GPUs of {', '.join(taken)} first")
    for pod in found:
        if pod.has_ended or _is_hopeless(pod, now_s - job.state_since_s):
            phase = RunPhase.LOST if pod.has_ended and _is_blameless(pod) else RunPhase.FAILED
            return Run(job.id, generation, phase, reason=_told(pod))
    return Run(job.id, generation, RunPhase.STARTING, gpus_kept(job, found))


def _refused(job: Job, refusal: Refusal, now_s: float) -> Run | None:
    """None while there is hope: somebody may give the namespace what it lacks."""
    if not refusal.is_final and now_s - job.state_since_s < HOPE_S:
        return None
    phase = RunPhase.FAILED if refusal.is_fault else RunPhase.LOST
    return Run(job.id, refusal.generation, phase, reason=refusal.why)


def _is_hopeless(pod: PodFacts, since_s: float) -> bool:
    return since_s >= HOPE_S and pod.fault.startswith(_HOPELESS)


def _told(pod: PodFacts) -> str:
    said = pod.fault or pod.reason or f"it ended in phase {pod.phase}"
    code = "" if pod.exit_code is None else f", exit code {pod.exit_code}"
    return f"pod {pod.namespace}/{pod.name} on {pod.wanted_node} could not work: {said}{code}"


def live_agents(pods: Iterable[PodFacts]) -> dict[AgentKey, str]:
    """The pods whose agents may be at work, as their agents call themselves, by job and node."""
    return {(pod.job_id, pod.node): pod.uid for pod in pods if pod.is_ours and pod.holds_gpus}


def agent_ends(pods: Iterable[PodFacts]) -> dict[str, AgentEnd]:
    """How agents ended whose pods are still there. One that ended by itself was at fault: it outlives its ranks, and
    ends well when its job has."""
    ends = {}
    for pod in pods:
        if pod.is_ours and pod.has_ended:
            out_of_memory = pod.fault.startswith("OOMKilled")
            cause = FailureCause.OUT_OF_MEMORY if out_of_memory else None
            ends[pod.uid] = AgentEnd(_told(pod), is_fault=out_of_memory or not _is_blameless(pod), cause=cause)
    return ends


def _is_blameless(pod: PodFacts) -> bool:
    """It was the node that ended it, or somebody who deleted or evicted it, not what ran in it."""
    return pod.is_deleting or pod.reason.startswith(_NOT_ITS_FAULT)
