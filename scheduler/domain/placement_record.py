"""Facts from the cluster about the pods of a job: refusals by nodes, its volume claims, and the API server's answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.domain.node_selection import NodeTerms
from scheduler.domain.pod_requirements import NOTHING_ADDED, AddedRequirements

FREE_REFUSALS = 2
"""Refused starts in a row that cost no retry."""
_BACKOFF_S, _BACKOFF_S_MAX = 5.0, 300.0
_AVOIDANCE_S, _AVOIDANCE_S_MAX = 120.0, 3600.0
_DOUBLINGS_MAX = 20
_MESSAGE_LENGTH_MAX = 300


@dataclass(frozen=True, slots=True)
class PodRefusal:
    """A pod that its node rejected, or could not start because of an image or a volume.

    `reason` is a word such as `OutOfcpu`, `message` a sentence.
    """

    node: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.node} refused its pod ({self.reason}): {self.message}"


@dataclass(frozen=True, slots=True)
class AvoidedNode:
    """A node on which the job is not placed before `until_s`. `count` is how often it refused pods of the job."""

    node: str
    count: int
    until_s: float


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """State of the claims that a job mounts.

    `error` is why they cannot be mounted. `terms` are the node affinities of their volumes, all of which a node must
    match. `needs_one_node`: one of them can be mounted by a single node at a time.
    """

    reason: str = ""
    error: str = ""
    terms: tuple[NodeTerms, ...] = ()
    needs_one_node: bool = False


@dataclass(frozen=True, slots=True)
class TemplateReview:
    """Answer of the API server to a trial of a job's pod.

    `error` is why it would reject the pod. `added` is what it adds to the pod's requirements.
    """

    error: str = ""
    added: AddedRequirements = NOTHING_ADDED


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """Refusals of a job's pods, and its volumes.

    `streak` counts the starts in a row that were refused, `last` is the latest refusal. The job does not start before
    `retry_at_s`. `volumes` is None until they were read, `review` until the API server has answered.
    """

    avoided: tuple[AvoidedNode, ...] = ()
    streak: int = 0
    last: PodRefusal | None = None
    retry_at_s: float | None = None
    volumes: VolumeFacts | None = None
    review: TemplateReview | None = None

    @property
    def costs_retry(self) -> bool:
        """Whether the last refused start counts as a failed run."""
        return self.streak > FREE_REFUSALS

    def find_avoided(self, now_s: float) -> tuple[str, ...]:
        """Return the nodes on which the job is not placed now."""
        return tuple(sorted(each.node for each in self.avoided if now_s < each.until_s))

    def with_refusal(self, refusal: PodRefusal, now_s: float) -> PlacementRecord:
        """Return the record with one more refused start. Backoff and avoidance of the node double with each one."""
        refusal = replace(refusal, message=refusal.message[:_MESSAGE_LENGTH_MAX])
        before = next((each.count for each in self.avoided if each.node == refusal.node), 0)
        avoidance_s = min(_AVOIDANCE_S_MAX, _AVOIDANCE_S * 2.0 ** min(before, _DOUBLINGS_MAX))
        others = (
            each for each in self.avoided if each.node != refusal.node and now_s < each.until_s + _AVOIDANCE_S_MAX
        )
        avoided = (*others, AvoidedNode(refusal.node, before + 1, now_s + avoidance_s))
        pause_s = min(_BACKOFF_S_MAX, _BACKOFF_S * 2.0 ** min(self.streak, _DOUBLINGS_MAX))
        return PlacementRecord(avoided, self.streak + 1, refusal, now_s + pause_s, self.volumes, self.review)

    def with_start(self) -> PlacementRecord:
        """Return the record after all pods of the job started."""
        return replace(self, streak=0, last=None, retry_at_s=None) if self.streak else self


NO_PLACEMENT_RECORD = PlacementRecord()
