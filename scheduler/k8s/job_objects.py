"""The objects of jobs at the API server: made, bound as gangs, deleted, swept up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from scheduler.domain.fleet import Node
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.api_error import ApiError
from scheduler.k8s.claims import claim_fault
from scheduler.k8s.client import Cluster
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.cluster_view import ClusterView
from scheduler.k8s.effects import Effect
from scheduler.k8s.gangs import Gang
from scheduler.k8s.kinds import CLAIM, CONFIG_MAP, POD, SECRET, SERVICE
from scheduler.k8s.manifests import JobSite, agent_pod, objects_name, plan_map, service, token_secret
from scheduler.k8s.objects import Object, name_of, uid_of
from scheduler.k8s.pod_changes import NewPod, OldPod
from scheduler.k8s.pod_facts import PodFacts
from scheduler.k8s.refusals import Refusal, Refusals, refusal_of
from scheduler.k8s.resources.elastic_job import job_of
from scheduler.k8s.resources.metadata import metadata

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteRules:
    """`namespace` for jobs that name none, `url` where agents reach the API, `image` for jobs that name none."""

    namespace: str
    url: str
    image: str


class JobObjects:
    """Steps for the objects of jobs. `mirrors` take in what the API server answers, ahead of the watch; `agent_token`
    makes the token of a job's agents. What is refused, by a quota say, is asked for again after pauses that grow, so
    that jobs which cannot run leave the pace of requests to those that can."""

    def __init__(
        self,
        cluster: Cluster,
        mirrors: ClusterMirrors,
        rules: SiteRules,
        *,
        epoch: Callable[[], int],
        agent_token: Callable[[str], str],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._mirrors = mirrors
        self._rules = rules
        self._epoch = epoch
        self._agent_token = agent_token
        self.refusals = Refusals(monotonic_s)

    def provide(
        self, job: Job, missing: Sequence[NewPod], view: ClusterView, nodes: Mapping[str, Node]
    ) -> Iterator[Effect]:
        """What a placed job lacks: its plan where it is of another generation, its service, its token, its pods."""
        tolerations = {new.node: view.tolerations.get(nodes[new.node].pool, ()) for new in missing if new.node in nodes}
        site = replace(self._site(job, view), tolerations=tolerations)
        key = (site.namespace, objects_name(job.id))
        generation = job.allocation.generation
        if self.refusals.is_left_alone(job):
            return
        if missing or key not in view.services or not _has_plan(view, key, generation):
            what = f"provide for {job.id} generation {generation}"
            yield Effect(what, partial(self._provide_unless_refused, job, missing, site, view))

    def bind_gang(self, gang: Gang) -> Effect:
        return Effect(f"bind the pods of {gang.job_id}", partial(self._bind_gang, gang))

    def delete_pod(self, old: OldPod) -> Effect:
        pod = old.pod
        assert pod.is_ours, f"pod {pod.namespace}/{pod.name} is somebody else's"
        return Effect(f"delete pod {pod.namespace}/{pod.name}", partial(self._delete_pod, pod, old.grace_s))

    def sweep(self, desired: Snapshot, view: ClusterView) -> Iterator[Effect]:
        """Services, plans and tokens of jobs that have no pods and are not to get any. The plan is made first and the
        service goes last, so that one of them is there while anything is."""
        busy = {pod.job_id for pod in view.pods if pod.is_ours}
        self.refusals.keep(desired.jobs)
        left = {**{key: plan.job_id for key, plan in view.plans.items()}, **view.services}
        for (namespace, name), job_id in left.items():
            job = desired.jobs.get(job_id)
            is_over = job_id not in busy and (job is None or job.is_ended)
            if is_over and name == objects_name(job_id):
                yield Effect(f"delete the objects of {job_id}", partial(self._delete_objects, namespace, name))

    def namespace_of(self, job: Job) -> str:
        return job.spec.namespace or self._rules.namespace

    def _site(self, job: Job, view: ClusterView) -> JobSite:
        """With its ElasticJob as owner, if it is the job's own: one that only claims the job would have the garbage
        collector delete its pods."""
        resource = view.resources.get((self.namespace_of(job), job.id))
        if resource is not None and job_of(metadata(resource), {job.id: job}, self._rules.namespace) is None:
            resource = None
        return JobSite(
            namespace=self.namespace_of(job),
            epoch=self._epoch(),
            url=self._rules.url,
            image=self._rules.image,
            resource_name=name_of(resource) if resource else "",
            owner_uid=uid_of(resource) if resource else "",
        )

    def _provide_unless_refused(self, job: Job, missing: Sequence[NewPod], site: JobSite, view: ClusterView) -> None:
        generation = job.allocation.generation
        try:
            fault = self._claim_fault(job, site) if missing else ""
            if not fault:
                self._provide(job, missing, site, view)
        except ApiError as error:
            self.refusals.note(job, refusal_of(generation, error))
            raise
        if fault:
            logger.warning("%s generation %d: %s", job.id, generation, fault)
        self.refusals.note(job, Refusal(generation, fault, is_final=False, is_fault=True) if fault else None)

    def _claim_fault(self, job: Job, site: JobSite) -> str:
        volume = job.spec.checkpoint.volume
        if volume is None:
            return ""
        claim = self._cluster.find(CLAIM, volume.claim, site.namespace)
        return claim_fault(claim, f"{site.namespace}/{volume.claim}", max_gpus=job.spec.max_gpus)

    def _provide(self, job: Job, missing: Sequence[NewPod], site: JobSite, view: ClusterView) -> None:
        """In the order in which they are needed; the plan first, because `sweep` finds the rest by it."""
        key = (site.namespace, objects_name(job.id))
        if not _has_plan(view, key, job.allocation.generation):
            self._mirrors.put_ahead(CONFIG_MAP, self._cluster.apply(CONFIG_MAP, plan_map(job, site)))
        if missing or key not in view.services:
            self._cluster.apply(SECRET, token_secret(job, site, self._agent_token(job.id)))
        if key not in view.services:
            self._mirrors.put_ahead(SERVICE, self._cluster.apply(SERVICE, service(job, site)))
        for new in missing:
            self._make_pod(agent_pod(job, new, site))

    def _make_pod(self, manifest: Object) -> None:
        try:
            self._mirrors.put_ahead(POD, self._cluster.create(POD, manifest))
        except ApiError as refused:
            if not refused.exists_already:
                raise
            # Made before, perhaps by an earlier leader: the watch is late, and the next converge sees it.

    def _bind_gang(self, gang: Gang) -> None:
        """All or none: where one pod cannot be bound, those bound here are deleted, and made anew at the next converge.

        Nothing runs in them yet: ranks start only once all pods of their generation run.
        """
        bound: list[PodFacts] = []
        for pod in gang.pods:
            try:
                self._bind(pod)
            except ApiError:
                for partner in bound:
                    self._delete_pod(partner, 0.0)
                raise
            bound.append(pod)

    def _bind(self, pod: PodFacts) -> None:
        self._cluster.bind(pod.as_object(), pod.wanted_node)
        self._mirrors.pod_bound(pod)

    def _delete_pod(self, pod: PodFacts, grace_s: float) -> None:
        left = self._cluster.delete(POD, pod.name, pod.namespace, uid=pod.uid, grace_s=math.ceil(grace_s))
        if left is None:
            self._mirrors.pod_gone(pod)
        else:
            self._mirrors.put_ahead(POD, left)

    def _delete_objects(self, namespace: str, name: str) -> None:
        """The service last: while it is there, `sweep` comes back for the rest."""
        for kind in (SECRET, CONFIG_MAP, SERVICE):
            self._cluster.delete(kind, name, namespace)


def _has_plan(view: ClusterView, key: tuple[str, str], generation: int) -> bool:
    plan = view.plans.get(key)
    return plan is not None and plan.generation == generation
