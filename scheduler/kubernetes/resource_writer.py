"""Writes to custom resources and Events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import Random

from scheduler.kubernetes.api_actions import ApiAction
from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import EVENT, key_of
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.flow_control import KeyedBackoff
from scheduler.kubernetes.resource_writes import Create, Delete, Patch, Write, Writes

PAUSE_BASE_S, PAUSE_CAP_S = 2.0, 60.0
RETRIES_PER_ROUND_MAX = 10


class ResourceWriter:
    """Executor of resource writes. `cache` receives the responses ahead of the watch.

    Rejected creations, for example in a missing namespace, are retried with backoff, at most `RETRIES_PER_ROUND_MAX`
    per round. Thousands of such jobs would otherwise stall the loop.
    """

    def __init__(
        self, cluster: KubernetesClient, cache: ClusterCache, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._monotonic_s = monotonic_s
        self._backoff = KeyedBackoff(base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S, rng=Random(), monotonic_s=monotonic_s)

    def build_actions(self, writes_by_object: Iterable[Writes]) -> Iterator[ApiAction]:
        """Yield one action per object. After a failed write, the remaining writes of that object are skipped."""
        self._backoff.prune()
        now_s, retries = self._monotonic_s(), 0
        for steps in writes_by_object:
            retry_at_s = self._backoff.get_retry_at_s(_creation_key(steps[0]))
            if retry_at_s is not None:
                if now_s < retry_at_s or retries == RETRIES_PER_ROUND_MAX:
                    continue
                retries += 1
            yield ApiAction(_describe_write(steps[0]), partial(self._apply, steps), requests=len(steps))

    def _apply(self, writes: Writes) -> None:
        for step in writes:
            match step:
                case Create():
                    self._create(step)
                case Patch(kind=kind):
                    response = self._cluster.patch(
                        kind,
                        step.name,
                        step.namespace,
                        change=step.change,
                        resource_version=step.resource_version,
                        subresource="status" if step.status else "",
                    )
                    self._cache.assume(kind, response)
                case Delete(kind=kind, namespace=namespace, name=name, uid=uid):
                    deleted = self._cluster.delete(kind, name, namespace, uid=uid)
                    if deleted is not None:
                        self._cache.assume(kind, deleted)

    def _create(self, write: Create) -> None:
        try:
            self._cache.assume(write.kind, self._cluster.create(write.kind, write.body))
        except ApiError as error:
            # Events are named by their number in the store. An existing one was written before, perhaps by the previous
            # leader.
            if write.kind is EVENT and error.is_already_exists:
                return
            if error.is_permanent:
                self._backoff.record_failure(_creation_key(write))
            raise
        self._backoff.record_success(_creation_key(write))


def _creation_key(write: Write) -> tuple[str, str, str] | None:
    return (write.kind.name, *key_of(write.body)) if isinstance(write, Create) else None


def _describe_write(write: Write) -> str:
    if isinstance(write, Create):
        return f"create {write.kind.name} {write.body['metadata']['name']}"
    return f"{'change' if isinstance(write, Patch) else 'delete'} {write.kind.name} {write.name}"
