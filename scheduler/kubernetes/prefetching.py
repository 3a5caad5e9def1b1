"""Prefetches: loads images and weights onto nodes that are offered or recalled, and reports how that ended.

They delay nothing: their pods are created after all other steps of a converge, and a failure is only reported. All
state is in the cluster: the pod of a prefetch stays until its end is recorded and its loan has gone on. So nothing is
loaded twice for a loan.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.prefetch import PrefetchPolicy, PrefetchPurpose, PrefetchResult
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import LABEL_MAX_LENGTH, POD, POD_TEMPLATE, truncate_name
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterCache, ClusterView
from scheduler.kubernetes.pod_view import PodView
from scheduler.kubernetes.prefetch_pods import (
    ImageSet,
    Prefetch,
    PrefetchState,
    build_image_pod,
    build_weights_pod,
)

SETS_MAX = 3
"""Sets of images that are pulled onto one node. A set is that of a job, or of a replica."""
JOBS_MAX = 50
"""Jobs whose images are considered."""
OVERDUE_S = 60.0
"""Time after its deadline at which a prefetch counts as failed, although no kubelet has ended its pod."""

log = logging.getLogger(__name__)

_WINDOWS = {
    PrefetchPurpose.TRAINING: LoanState.OFFERED,
    PrefetchPurpose.SERVING: LoanState.RECALLED,
    PrefetchPurpose.WEIGHTS: LoanState.RECALLED,
}
"""State of the loan in which a prefetch begins. One that has begun goes on until it ends."""


@dataclass(frozen=True, slots=True)
class _Rejection:
    """A prefetch whose pod could not be created."""

    prefetch: Prefetch
    error: str


class Prefetches:
    """Plans the pods of prefetches. `plan` and `list_results` are called by one thread.

    Args:
        list_job_images: returns the images that the pods of a job need.
    """

    def __init__(
        self, cluster: KubernetesClient, cache: ClusterCache, *, list_job_images: Callable[[Job], ImageSet]
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._list_job_images = list_job_images
        self._serving: dict[str, tuple[ImageSet, ...]] = {}
        self._lock = threading.Lock()
        self._rejections: dict[str, _Rejection] = {}

    def plan(self, desired: Snapshot, view: ClusterView, now_s: float) -> Iterator[ApiAction]:
        """Yield actions that remove pods that are over, and create those that are missing."""
        policies = {name: pool.lending for name, pool in desired.pools.items() if pool.lending.prefetch is not None}
        if policies or view.prefetch_pods:
            yield from map(self._delete, _list_pods_that_are_over(desired, view, now_s))
        self._remember_serving_images(policies, desired, view)
        needed = {each.name: each for each in self._list_needed(policies, desired, view)}
        existing = {pod.name for pod in view.prefetch_pods}
        with self._lock:
            self._rejections = {name: each for name, each in self._rejections.items() if name in needed}
            missing = [each for name, each in needed.items() if name not in existing and name not in self._rejections]
        for prefetch in missing:
            description = f"prefetch for {prefetch.purpose} on node {prefetch.node}"
            pool = desired.nodes[prefetch.node].pool
            yield ApiAction(description, partial(self._create, prefetch, view, pool), requests=2)

    def list_results(
        self, desired: Snapshot, view: ClusterView, now_s: float
    ) -> Mapping[str, tuple[PrefetchResult, ...]]:
        """Return the ended prefetches whose pods still exist, by node."""
        results: dict[str, list[PrefetchResult]] = {}
        for pod in view.prefetch_pods:
            state = pod.prefetch
            if state is not None and state.node in desired.nodes and _is_over(state, now_s):
                results.setdefault(state.node, []).append(_build_result(pod, state, now_s))
        with self._lock:
            rejections = dict(self._rejections)
        for name, rejection in rejections.items():
            result = PrefetchResult(name, rejection.prefetch.purpose, now_s, 0.0, rejection.error)
            results.setdefault(rejection.prefetch.node, []).append(result)
        return {node: tuple(sorted(each, key=lambda result: result.id)) for node, each in results.items()}

    def _list_needed(
        self, policies: Mapping[str, LendingPolicy], desired: Snapshot, view: ClusterView
    ) -> Iterator[Prefetch]:
        """Yield the prefetches of loans that are offered or recalled, whether their pods exist or not."""
        training: dict[str, list[ImageSet]] = {}
        for name, loan in sorted(desired.loans.items()) if policies else ():
            node, seen = desired.nodes.get(name), view.nodes.get(name)
            rules = policies.get(loan.pool)
            if rules is None or rules.prefetch is None or node is None or seen is None or not seen.is_ready:
                continue
            if loan.state is LoanState.OFFERED and rules.prefetch.images:
                if node.gpu not in training:
                    training[node.gpu] = self._list_training_images(desired, node.gpu)
                for images in training[node.gpu]:
                    yield _pull(loan, PrefetchPurpose.TRAINING, rules.prefetch, images)
            elif loan.state is LoanState.RECALLED:
                yield from self._list_for_return(loan, rules.prefetch)

    def _list_for_return(self, loan: Loan, rules: PrefetchPolicy) -> Iterator[Prefetch]:
        for images in self._serving.get(loan.pool, ()) if rules.images else ():
            yield _pull(loan, PrefetchPurpose.SERVING, rules, images)
        if rules.weights is not None:
            yield Prefetch(loan.node, loan.id, PrefetchPurpose.WEIGHTS, rules.timeout_s, template=rules.weights)

    def _list_training_images(self, desired: Snapshot, gpu: str) -> list[ImageSet]:
        """Return the images of the first jobs that could use the GPUs: pending ones, then those that could grow."""
        index = desired.index
        pending, growing = (
            sorted((desired.jobs[job_id] for job_id in ids), key=lambda job: (job.submitted_at_s, job.id))
            for ids in (index.waiting, index.below_maximum)
        )
        usable = [job for job in chain(pending, growing) if job.accepts_lent_nodes and job.spec.gpu in ("", gpu)]
        return list(dict.fromkeys(map(self._list_job_images, usable[:JOBS_MAX])))[:SETS_MAX]

    def _remember_serving_images(
        self, policies: Mapping[str, LendingPolicy], desired: Snapshot, view: ClusterView
    ) -> None:
        """Keep the most common images of each pool's inference pods, also while none of these pods runs."""
        pulls = {name for name, rules in policies.items() if rules.prefetch is not None and rules.prefetch.images}
        self._serving = {name: sets for name, sets in self._serving.items() if name in pulls}
        counts: dict[str, Counter[ImageSet]] = {}
        for pod in view.pods if pulls else ():
            node = desired.nodes.get(pod.node)
            if pod.images is not None and node is not None and node.pool in pulls and pod.holds_gpus:
                counts.setdefault(node.pool, Counter())[pod.images] += 1
        for name, found in counts.items():
            self._serving[name] = tuple(images for images, _ in found.most_common(SETS_MAX))

    def _create(self, prefetch: Prefetch, view: ClusterView, pool: str) -> None:
        """Create the pod. A rejection is kept and reported, and not tried again for this loan."""
        node, tolerations = view.nodes[prefetch.node], view.tolerations.get(pool, ())
        try:
            if prefetch.template is None:
                pod = build_image_pod(prefetch, node, tolerations)
            else:
                place = prefetch.template.pod_template, prefetch.template.namespace
                pod = build_weights_pod(prefetch, node, tolerations, self._cluster.get(POD_TEMPLATE, *place))
            self._cache.assume(POD, self._cluster.create(POD, pod))
        except ApiError as error:
            if error.is_already_exists:
                return  # created, perhaps by the previous leader; the watch delivers it
            if error.is_transient or error.is_ambiguous:
                raise
            self._reject(prefetch, str(error))
        except ValueError as error:
            self._reject(prefetch, f"PodTemplate {prefetch.template}: {error}")

    def _reject(self, prefetch: Prefetch, error: str) -> None:
        log.warning("prefetch for %s on node %s failed: %s", prefetch.purpose, prefetch.node, error)
        with self._lock:
            self._rejections[prefetch.name] = _Rejection(prefetch, error)

    def _delete(self, pod: PodView) -> ApiAction:
        return ApiAction(f"delete pod {pod.namespace}/{pod.name}", partial(self._delete_pod, pod))

    def _delete_pod(self, pod: PodView) -> None:
        leftovers = self._cluster.delete(POD, pod.name, pod.namespace, uid=pod.uid, grace_period_s=0)
        if leftovers is None:
            self._cache.assume_deleted(pod)
        else:
            self._cache.assume(POD, leftovers)


def _pull(loan: Loan, purpose: PrefetchPurpose, rules: PrefetchPolicy, images: ImageSet) -> Prefetch:
    return Prefetch(loan.node, loan.id, purpose, rules.timeout_s, images=images)


def _list_pods_that_are_over(desired: Snapshot, view: ClusterView, now_s: float) -> Iterable[PodView]:
    """Return the pods whose end is recorded, and whose loan is not in the state any more in which they began."""
    found = []
    for pod in view.prefetch_pods:
        state = pod.prefetch
        if state is None or pod.is_deleting or not _is_over(state, now_s):
            continue
        node = desired.nodes.get(state.node)
        is_recorded = node is None or any(result.id == pod.uid for result in node.prefetches)
        if is_recorded and not _is_in_window(state, desired.loans.get(state.node)):
            found.append(pod)
    return found


def _is_in_window(state: PrefetchState, loan: Loan | None) -> bool:
    return loan is not None and _label(loan) == state.loan and loan.state is _WINDOWS[state.purpose]


def _is_over(state: PrefetchState, now_s: float) -> bool:
    return state.has_ended or now_s >= state.created_at_s + state.timeout_s + OVERDUE_S


def _build_result(pod: PodView, state: PrefetchState, now_s: float) -> PrefetchResult:
    error = ""
    if not state.is_complete:
        default = "its pod ended before all was loaded" if state.has_ended else "no kubelet has ended it"
        error = state.error or default
    return PrefetchResult(pod.uid, state.purpose, now_s, max(0.0, now_s - state.created_at_s), error)


def _label(loan: Loan) -> str:
    return truncate_name(loan.id, LABEL_MAX_LENGTH)
