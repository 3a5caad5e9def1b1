"""API calls for the objects of jobs: create, bind as a gang, delete, clean up."""

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
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import CONFIG_MAP, POD, SECRET, SERVICE, VOLUME_CLAIM, Object, name_of, uid_of
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterCache, ClusterView
from scheduler.kubernetes.job_volumes import JobVolumes
from scheduler.kubernetes.manifests import (
    ManifestContext,
    build_agent_pod,
    build_plan_config_map,
    build_service,
    build_token_secret,
    job_object_name,
)
from scheduler.kubernetes.pod_changes import Gang, PodToCreate, PodToDelete
from scheduler.kubernetes.pod_view import PodView
from scheduler.kubernetes.prefetch_pods import ImageSet, list_images
from scheduler.kubernetes.provisioning_errors import (
    ProvisioningFailure,
    ProvisioningFailures,
    classify_api_error,
    describe_claim_error,
)
from scheduler.kubernetes.resources.elastic_job import find_job
from scheduler.kubernetes.resources.meta import parse_metadata
from scheduler.kubernetes.setup_errors import SetupErrors
from scheduler.kubernetes.template_reviews import TemplateReviews

logger = logging.getLogger(__name__)

_REQUESTS_PER_JOB = 4
"""Requests to create the objects of a job besides its pods: plan, token, service and a read of its claim."""


@dataclass(frozen=True, slots=True)
class JobDefaults:
    """Defaults for jobs: namespace, API URL for agents, image, image with the node agent, and Secrets to pull them."""

    namespace: str
    url: str
    image: str
    agent: AgentImage
    pull_secrets: tuple[str, ...] = ()


class JobObjectActions:
    """Builder of actions for the objects of jobs.

    `cache` receives the responses ahead of the watch; `agent_token` issues the token of a job's agents. Rejected
    objects are retried with backoff, so that jobs that cannot run leave the request rate to those that can.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        cache: ClusterCache,
        defaults: JobDefaults,
        *,
        epoch: Callable[[], int],
        agent_token: Callable[[str], str],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._defaults = defaults
        self._epoch = epoch
        self._agent_token = agent_token
        self.failures = ProvisioningFailures(monotonic_s)
        self.volumes = JobVolumes(cluster, self.namespace_for, monotonic_s)
        self.setup_errors = SetupErrors(cluster, monotonic_s)
        self.templates = TemplateReviews(cluster, self._trial_context, monotonic_s)

    def create_missing(
        self, job: Job, missing: Sequence[PodToCreate], view: ClusterView, nodes: Mapping[str, Node]
    ) -> Iterator[ApiAction]:
        """Yield an action that creates missing objects of a placed job.

        These are the plan of this generation, service, token and pods.
        """
        tolerations = {pod.node: view.tolerations.get(nodes[pod.node].pool, ()) for pod in missing if pod.node in nodes}
        context = replace(self._manifest_context(job, view), tolerations=tolerations)
        key = (context.namespace, job_object_name(job.id))
        generation = job.allocation.generation
        if self.failures.is_backing_off(job):
            return
        if missing or key not in view.services or not _has_plan(view, key, generation):
            description = f"create the objects of {job.id} generation {generation}"
            create = partial(self._create_or_record_failure, job, missing, context, view)
            yield ApiAction(description, create, requests=_REQUESTS_PER_JOB + len(missing))

    def bind_gang(self, gang: Gang) -> ApiAction:
        description = f"bind the pods of {gang.job_id}"
        return ApiAction(description, partial(self._bind_gang, gang), requests=len(gang.pods))

    def delete_pod(self, surplus: PodToDelete) -> ApiAction:
        pod = surplus.pod
        assert pod.is_ours, f"pod {pod.namespace}/{pod.name} does not belong to Ebbtide"
        return ApiAction(
            f"delete pod {pod.namespace}/{pod.name}", partial(self._delete_pod, pod, surplus.grace_period_s)
        )

    def delete_leftovers(self, desired: Snapshot, view: ClusterView) -> Iterator[ApiAction]:
        """Yield actions that delete services, plans and tokens of ended jobs without pods.

        The plan is created first and the service is deleted last, so one of them exists while anything is left.
        """
        job_ids_with_pods = {pod.job_id for pod in view.pods if pod.is_ours}
        self.failures.prune(desired.jobs)
        leftovers = {**{key: plan.job_id for key, plan in view.plans.items()}, **view.services}
        for (namespace, name), job_id in leftovers.items():
            job = desired.jobs.get(job_id)
            is_over = job_id not in job_ids_with_pods and (job is None or job.is_ended)
            if is_over and name == job_object_name(job_id):
                yield ApiAction(f"delete the objects of {job_id}", partial(self._delete_objects, namespace, name))

    def namespace_for(self, job: Job) -> str:
        return job.spec.namespace or self._defaults.namespace

    def list_images(self, job: Job) -> ImageSet:
        """Return the images that the pods of the job need."""
        pod = build_agent_pod(job, PodToCreate(job.id, job.id, "", 1), self._trial_context(job))
        return list_images(self.namespace_for(job), pod["spec"])

    def _trial_context(self, job: Job) -> ManifestContext:
        return self._manifest_context(job, ClusterView())

    def _manifest_context(self, job: Job, view: ClusterView) -> ManifestContext:
        """Return the manifest context, owned by the job's ElasticJob.

        An ElasticJob that merely claims the job must not be the owner: the garbage collector would delete the pods with
        it.
        """
        resource = view.elastic_jobs.get((self.namespace_for(job), job.id))
        if resource is not None and find_job(parse_metadata(resource), {job.id: job}, self._defaults.namespace) is None:
            resource = None
        return ManifestContext(
            namespace=self.namespace_for(job),
            epoch=self._epoch(),
            url=self._defaults.url,
            image=self._defaults.image,
            agent=self._defaults.agent,
            pull_secrets=self._defaults.pull_secrets,
            resource_name=name_of(resource) if resource else "",
            owner_uid=uid_of(resource) if resource else "",
        )

    def _create_or_record_failure(
        self, job: Job, missing: Sequence[PodToCreate], context: ManifestContext, view: ClusterView
    ) -> None:
        generation = job.allocation.generation
        try:
            claim_error = self._describe_claim_error(job, context) if missing else ""
            if not claim_error:
                self._create_objects(job, missing, context, view)
        except ApiError as error:
            self.failures.record(job, classify_api_error(generation, error))
            raise
        if claim_error:
            logger.warning("%s generation %d: %s", job.id, generation, claim_error)
        self.failures.record(
            job,
            ProvisioningFailure(generation, claim_error, is_permanent=False, is_job_error=True)
            if claim_error
            else None,
        )

    def _describe_claim_error(self, job: Job, context: ManifestContext) -> str:
        volume = job.spec.checkpoint.volume
        if volume is None:
            return ""
        claim = self._cluster.get_or_none(VOLUME_CLAIM, volume.claim, context.namespace)
        return describe_claim_error(claim, f"{context.namespace}/{volume.claim}", max_gpus=job.spec.max_gpus)

    def _create_objects(
        self, job: Job, missing: Sequence[PodToCreate], context: ManifestContext, view: ClusterView
    ) -> None:
        """Create the objects in dependency order.

        The plan comes first, because `delete_leftovers` finds the others by it.
        """
        key = (context.namespace, job_object_name(job.id))
        if not _has_plan(view, key, job.allocation.generation):
            self._cache.assume(CONFIG_MAP, self._cluster.apply(CONFIG_MAP, build_plan_config_map(job, context)))
        if missing or key not in view.services:
            self._cluster.apply(SECRET, build_token_secret(job, context, self._agent_token(job.id)))
        if key not in view.services:
            self._cache.assume(SERVICE, self._cluster.apply(SERVICE, build_service(job, context)))
        for pod in missing:
            self._create_pod(build_agent_pod(job, pod, context))

    def _create_pod(self, manifest: Object) -> None:
        try:
            self._cache.assume(POD, self._cluster.create(POD, manifest))
        except ApiError as error:
            if not error.is_already_exists:
                raise
            # Already created, perhaps by the previous leader. The watch will deliver it before a later converge.

    def _bind_gang(self, gang: Gang) -> None:
        """Bind all pods or none: if one binding fails, delete the pods bound here. The next converge recreates them.

        Nothing runs in them yet, because ranks start only when all pods of their generation run.
        """
        bound: list[PodView] = []
        for pod in gang.pods:
            try:
                self._bind(pod)
            except ApiError:
                for partner in bound:
                    self._delete_pod(partner, 0.0)
                raise
            bound.append(pod)

    def _bind(self, pod: PodView) -> None:
        self._cluster.bind(pod.to_object_reference(), pod.target_node)
        self._cache.assume_bound(pod)

    def _delete_pod(self, pod: PodView, grace_period_s: float) -> None:
        leftovers = self._cluster.delete(
            POD, pod.name, pod.namespace, uid=pod.uid, grace_period_s=math.ceil(grace_period_s)
        )
        if leftovers is None:
            self._cache.assume_deleted(pod)
        else:
            self._cache.assume(POD, leftovers)

    def _delete_objects(self, namespace: str, name: str) -> None:
        """Delete the service last: `delete_leftovers` finds the others by it."""
        for kind in (SECRET, CONFIG_MAP, SERVICE):
            self._cluster.delete(kind, name, namespace)


def _has_plan(view: ClusterView, key: tuple[str, str], generation: int) -> bool:
    plan = view.plans.get(key)
    return plan is not None and plan.generation == generation
