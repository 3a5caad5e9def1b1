"""Trial creation of the pods of templates: whether the API server would accept them, and what it adds to them.

Its checks, admission webhooks, quota and pod security are more than any copy of its rules. A job whose pods it would
reject gets no GPUs, instead of taking them and failing. Requests and node selectors that it adds count where pods fit.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from scheduler.domain.job import Job
from scheduler.domain.placement_record import TemplateReview
from scheduler.domain.pod_requirements import AddedRequirements, find_added_requirements
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.agent_injection import AGENT_CONTAINER
from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import GPU_RESOURCE, POD, Object
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod
from scheduler.kubernetes.node_view import CONDITION_TAINT_KEYS
from scheduler.kubernetes.pod_changes import PodToCreate

logger = logging.getLogger(__name__)

REREAD_S = 10.0
"""Time after which a rejected template is tried again: a quota or a policy of the namespace may have changed."""
ATTEMPTS_MAX = 3
"""Trials in a row without an answer after which jobs start without one."""
_TRIAL_NAME = "ebbtide-trial"
_INIT_CONTAINER = re.compile(r"^spec\.initContainers\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class _Trial:
    """The outcome of trials of one pod. `review` is None while no answer came."""

    at_s: float
    review: TemplateReview | None
    attempts: int = 1

    def is_due(self, now_s: float) -> bool:
        is_settled = self.review is not None and not self.review.error
        return not is_settled and now_s - self.at_s >= (REREAD_S if self.review is not None else 0.0)


class TemplateReviews:
    """Reviews of the templates of pending jobs. Thread-safe, in memory only.

    Jobs whose pods differ in their names and variables alone share one trial.

    Args:
        context_for: returns the context of the job's manifests.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        context_for: Callable[[Job], ManifestContext],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._context_for = context_for
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._pods: dict[str, tuple[str, Object]] = {}
        self._trials: dict[str, _Trial] = {}

    def list_reviews(self) -> Mapping[str, TemplateReview]:
        """Return what is known, by job."""
        with self._lock:
            trials = {job_id: self._trials.get(key) for job_id, (key, _) in self._pods.items()}
        return {job_id: trial.review for job_id, trial in trials.items() if trial is not None and trial.review}

    def plan_trials(self, desired: Snapshot) -> Iterator[ApiAction]:
        """Yield a trial for each pod that is due among those of pending jobs with a template."""
        pending = [desired.jobs[job_id] for job_id in sorted(desired.index.waiting | desired.index.unsettled)]
        pods = {}
        for job in pending:
            if job.spec.template_json and not job.is_ended and not job.is_placed:
                pods[job.id] = self._pods.get(job.id) or self._build_pod(job)
        now_s, wanted = self._monotonic_s(), dict(pods.values()) if pods else {}
        with self._lock:
            self._pods = pods
            self._trials = {key: trial for key, trial in self._trials.items() if key in wanted}
            trials = dict(self._trials)
        for key, pod in wanted.items():
            trial = trials.get(key)
            if trial is None or trial.is_due(now_s):
                yield ApiAction(f"try pod {pod['metadata']['name']}", partial(self._try, key, pod))

    def _build_pod(self, job: Job) -> tuple[str, Object]:
        """Return a pod of the job as it is for all jobs with an equal template, and its key."""
        alike = replace(job, id=_TRIAL_NAME, spec=replace(job.spec, env={}))
        context = replace(self._context_for(job), epoch=0, resource_name="", owner_uid="")
        pod = build_agent_pod(alike, PodToCreate(_TRIAL_NAME, _TRIAL_NAME, _TRIAL_NAME, 1), context)
        key = sha256(json.dumps(pod, sort_keys=True).encode()).hexdigest()
        pod["metadata"]["name"] = f"{_TRIAL_NAME}-{key[:10]}"
        return key, pod

    def _try(self, key: str, pod: Object) -> None:
        review = self._review(pod)
        with self._lock:
            before = self._trials.get(key)
            attempts = 1 + (before.attempts if before is not None and before.review is None else 0)
            if review is None and attempts >= ATTEMPTS_MAX:
                logger.warning("pod %s: %d trials without an answer; its jobs start without one", pod, attempts)
                review = TemplateReview()
            self._trials[key] = _Trial(self._monotonic_s(), review, attempts)

    def _review(self, pod: Object) -> TemplateReview | None:
        """Return the answer of the API server, or None if it gave none."""
        try:
            admitted = self._cluster.create_dry(POD, pod)
            return TemplateReview(added=_find_added(pod, admitted))
        except ApiError as error:
            if error.lacks_dry_run:
                logger.warning("templates are not tried: %s", error)
            elif error.is_permanent:
                return TemplateReview(describe_rejection(error, pod))
            elif not error.is_already_exists:
                logger.warning("the trial of a template failed: %s", error)
                return None
        return TemplateReview()


def _find_added(pod: Object, admitted: Object) -> AddedRequirements:
    """Return what admission adds, except the tolerations that it adds to every pod with GPUs."""
    added = find_added_requirements(pod["spec"], admitted.get("spec") or pod["spec"])
    usual = {*CONDITION_TAINT_KEYS, GPU_RESOURCE}
    return replace(added, tolerations=tuple(each for each in added.tolerations if each.key not in usual))


def describe_rejection(error: ApiError, pod: Object) -> str:
    """Return what the API server rejects, with paths in the job's template."""
    if not error.field_errors:
        return f"template: the API server rejects its pod: {error.message}"
    has_agent = any(each.get("name") == AGENT_CONTAINER for each in pod["spec"].get("initContainers") or ())
    return "; ".join(f"template.{_shift(field, has_agent)}: {text}" for field, text in error.field_errors)


def _shift(field: str, has_agent: bool) -> str:
    """Return the path without the init container that Ebbtide adds before those of the template."""
    if not has_agent:
        return field
    return _INIT_CONTAINER.sub(lambda match: f"spec.initContainers[{int(match[1]) - 1}]", field)
