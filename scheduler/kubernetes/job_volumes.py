"""State of the volume claims that jobs mount: whether they can be mounted, and on which nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from scheduler.domain.job import Job
from scheduler.domain.node_selection import NodeTerms, parse_terms
from scheduler.domain.placement_record import VolumeFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import PERSISTENT_VOLUME, VOLUME_CLAIM
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.provisioning_errors import describe_claim_error, is_for_one_node

logger = logging.getLogger(__name__)

REREAD_S = 10.0
"""Time between two reads of the claims of a job that waits."""


class JobVolumes:
    """Reader of the claims of pending jobs. Thread-safe, in memory only.

    Claims are read one by one, so that the operator needs no permission to list the claims of others.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        namespace_for: Callable[[Job], str],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._namespace_for = namespace_for
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._facts: dict[str, VolumeFacts] = {}
        self._read_at_s: dict[str, float] = {}

    def list_facts(self) -> Mapping[str, VolumeFacts]:
        """Return what is known, by job."""
        with self._lock:
            return dict(self._facts)

    def plan_reads(self, desired: Snapshot) -> Iterator[ApiAction]:
        """Yield an action for each job without GPUs whose claims must be read."""
        with self._lock:
            self._facts = {job_id: facts for job_id, facts in self._facts.items() if job_id in desired.jobs}
            self._read_at_s = {job_id: at_s for job_id, at_s in self._read_at_s.items() if job_id in desired.jobs}
            read_at_s = dict(self._read_at_s)
        node_gpus = max((node.gpus for node in desired.nodes.values()), default=0)
        for job_id in sorted(desired.index.waiting | desired.index.unsettled):
            job = desired.jobs[job_id]
            is_due = self._monotonic_s() - read_at_s.get(job_id, float("-inf")) >= REREAD_S
            if not job.is_ended and not job.is_placed and job.spec.pod_requirements.claims and is_due:
                yield ApiAction(f"read the volume claims of {job_id}", partial(self._read, job, node_gpus))

    def _read(self, job: Job, node_gpus: int) -> None:
        try:
            facts = self._find_facts(job, node_gpus)
        except ApiError as error:
            logger.warning("cannot read the volume claims of %s: %s", job.id, error)
            return
        with self._lock:
            self._facts[job.id] = facts
            self._read_at_s[job.id] = self._monotonic_s()

    def _find_facts(self, job: Job, node_gpus: int) -> VolumeFacts:
        namespace, terms, needs_one_node = self._namespace_for(job), list[NodeTerms](), False
        checkpoints = job.spec.checkpoint.volume
        for name in job.spec.pod_requirements.claims:
            claim = self._cluster.get_or_none(VOLUME_CLAIM, name, namespace)
            is_checkpoints = checkpoints is not None and checkpoints.claim == name
            error = describe_claim_error(
                claim,
                f"{namespace}/{name}",
                max_gpus=job.spec.max_gpus,
                field="checkpoint.volume" if is_checkpoints else "template",
                node_gpus=None if is_checkpoints else node_gpus,
            )
            if error:
                return VolumeFacts("ClaimNotFound" if claim is None else "ClaimUnusable", error)
            needs_one_node = needs_one_node or (claim is not None and is_for_one_node(claim))
            if claim is not None and (affinity := self._find_affinity(claim["spec"].get("volumeName") or "")):
                terms.append(affinity)
        return VolumeFacts(terms=tuple(terms), needs_one_node=needs_one_node)

    def _find_affinity(self, volume: str) -> NodeTerms:
        """Return the nodes that can mount the volume. Empty if these are all."""
        found = self._cluster.get_or_none(PERSISTENT_VOLUME, volume) if volume else None
        required = ((found or {}).get("spec", {}).get("nodeAffinity") or {}).get("required")
        return parse_terms(required) if required else ()
