"""Execution of API actions, in parallel, and of writes to custom resources and Events.

A failure is logged and does not stop other actions: the next converge computes the missing steps again. Only ambiguous
failures keep a state from counting as converged. Rejected requests changed nothing, so one job over its quota does not
hold up all others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import Random

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import EVENT, key_of
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.flow_control import KeyedBackoff
from scheduler.kubernetes.resource_writes import Create, Delete, Patch, Write, Writes
from scheduler.store.protocol import FencedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiAction:
    """One API call. `description` names it in logs."""

    description: str
    run: Callable[[], None]


class ActionPool:
    """A small thread pool: one call takes milliseconds, and a gang needs many."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="effect")

    def run_all(self, actions: Iterable[ApiAction]) -> int:
        """Run all actions, in no order, and return the number of ambiguous failures.

        Raises:
            FencedError: a newer leader has written, or this process no longer leads.
        """
        listed = list(actions)
        return self._count_ambiguous(listed, [self._pool.submit(step.run) for step in listed])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_ambiguous(self, actions: Sequence[ApiAction], running: Sequence[Future[None]]) -> int:
        ambiguous, fencing_error = 0, None
        for step, future in zip(actions, running, strict=True):
            try:
                future.result()
            except FencedError as error:
                fencing_error = fencing_error or error
            except ApiError as failure:
                ambiguous += failure.had_ambiguous_attempt or failure.is_ambiguous
                logger.warning("%s: %s", step.description, failure)
        if fencing_error is not None:
            raise fencing_error
        return ambiguous


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
            yield ApiAction(_describe_write(steps[0]), partial(self._apply, steps))

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
