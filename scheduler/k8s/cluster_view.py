"""ClusterView: the cluster as mirrors have it, in the forms that the executor works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.k8s.node_view import NodeView
from scheduler.k8s.objects import Object
from scheduler.k8s.pod_changes import by_job
from scheduler.k8s.pod_facts import PodFacts
from scheduler.k8s.taints import Toleration


@dataclass(frozen=True, slots=True)
class SeenPlan:
    """The ConfigMap of a job's plan, and the generation that the plan is of."""

    job_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All pods that ask for GPUs or are ours, nodes by name, ElasticJobs by namespace and the job id that they claim,
    and of our own services and plans what they are called, (namespace, name): services with the id of their job.
    `tolerations` are those of Pools by their names."""

    pods: tuple[PodFacts, ...] = ()
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    resources: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    services: Mapping[tuple[str, str], str] = field(default_factory=dict)
    plans: Mapping[tuple[str, str], SeenPlan] = field(default_factory=dict)
    tolerations: Mapping[str, tuple[Toleration, ...]] = field(default_factory=dict)

    def pods_of(self) -> dict[str, list[PodFacts]]:
        return by_job(self.pods)

    def trusting(self, homes: Mapping[str, str]) -> ClusterView:
        """The same, but that a pod is a job's only in the namespace that `homes` has for the job: who may make pods in
        another namespace can write our labels there, and such a pod is somebody else's, whatever it says."""
        pods = tuple(
            pod if homes.get(pod.job_id, pod.namespace) == pod.namespace else replace(pod, job_id="")
            for pod in self.pods
        )
        return replace(self, pods=pods)
