"""Putting steps into effect at the API server: several at a time, each failure told and none of them fatal.

What failed is seen again at the next converge, because steps come from what is missing. What was refused has changed
nothing, so that mirrors show what there is; only what may have been done unseen keeps the executor from saying that the
state is in effect. Otherwise one job whose pods are refused, by a quota say, would keep the GPUs of all others held.

Steps that concern custom resources and Events, as calls.
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
    """One step as a call. `what` names it in logs."""

    description: str
    run: Callable[[], None]


class ActionPool:
    """A small pool of threads: one call takes milliseconds, and a gang has many."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="effect")

    def run_all(self, actions: Iterable[ApiAction]) -> int:
        """Take all steps, in no order, and wait for them. How many failed and may have been carried out all the same.

        Raises:
            FencedError: something is there that a later leader has written, or this process leads no more.
        """
        listed = list(actions)
        return self._count_ambiguous(listed, [self._pool.submit(step.run) for step in listed])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_ambiguous(self, actions: Sequence[ApiAction], running: Sequence[Future[None]]) -> int:
        doubts, fenced = 0, None
        for step, future in zip(actions, running, strict=True):
            try:
                future.result()
            except FencedError as later:
                fenced = fenced or later
            except ApiError as failure:
                doubts += failure.had_ambiguous_attempt or failure.is_ambiguous
                logger.warning("%s: %s", step.description, failure)
        if fenced is not None:
            raise fenced
        return doubts


PAUSE_BASE_S, PAUSE_CAP_S = 2.0, 60.0
RETRIES_PER_ROUND_MAX = 10


class ResourceWriter:
    """Carries steps out as they are. `mirrors` take in what the API server answers, ahead of the watch. What may not be
    made, in a namespace that is not there say, is asked for again after pauses that grow, and `AGAIN_MAX` of it at a
    time: thousands of such jobs would otherwise keep the loop from going round."""

    def __init__(
        self, cluster: KubernetesClient, cache: ClusterCache, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._mirrors = cache
        self._monotonic_s = monotonic_s
        self._refused = KeyedBackoff(base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S, rng=Random(), monotonic_s=monotonic_s)

    def build_actions(self, writes_by_object: Iterable[Writes]) -> Iterator[ApiAction]:
        """One a tuple of steps: they concern one object, and nothing is done after one that fails."""
        self._refused.prune()
        now_s, again = self._monotonic_s(), 0
        for steps in writes_by_object:
            until_s = self._refused.get_retry_at_s(_creation_key(steps[0]))
            if until_s is not None:
                if now_s < until_s or again == RETRIES_PER_ROUND_MAX:
                    continue
                again += 1
            yield ApiAction(_describe_write(steps[0]), partial(self._apply, steps))

    def _apply(self, writes: Writes) -> None:
        for step in writes:
            match step:
                case Create():
                    self._create(step)
                case Patch(kind=kind):
                    answer = self._cluster.patch(
                        kind,
                        step.name,
                        step.namespace,
                        change=step.change,
                        resource_version=step.resource_version,
                        subresource="status" if step.status else "",
                    )
                    self._mirrors.assume(kind, answer)
                case Delete(kind=kind, namespace=namespace, name=name, uid=uid):
                    left = self._cluster.delete(kind, name, namespace, uid=uid)
                    if left is not None:
                        self._mirrors.assume(kind, left)

    def _create(self, write: Create) -> None:
        try:
            self._mirrors.assume(write.kind, self._cluster.create(write.kind, write.body))
        except ApiError as refused:
            # An Event is named by the number of what it tells of: it was told before, perhaps by an earlier leader.
            if write.kind is EVENT and refused.is_already_exists:
                return
            if refused.is_permanent:
                self._refused.record_failure(_creation_key(write))
            raise
        self._refused.record_success(_creation_key(write))


def _creation_key(write: Write) -> tuple[str, str, str] | None:
    """Of what is to be made."""
    return (write.kind.name, *key_of(write.body)) if isinstance(write, Create) else None


def _describe_write(write: Write) -> str:
    if isinstance(write, Create):
        return f"create {write.kind.name} {write.body['metadata']['name']}"
    return f"{'change' if isinstance(write, Patch) else 'delete'} {write.kind.name} {write.name}"
