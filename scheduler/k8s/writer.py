"""Steps that concern custom resources and Events, as calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import Random

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.client import Cluster
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.effects import Effect
from scheduler.k8s.kinds import EVENT
from scheduler.k8s.objects import key_of
from scheduler.k8s.pace import Pauses
from scheduler.k8s.steps import Create, Delete, Patch, Step, Steps

PAUSE_BASE_S, PAUSE_CAP_S = 2.0, 60.0
AGAIN_MAX = 10


class Writer:
    """Carries steps out as they are. `mirrors` take in what the API server answers, ahead of the watch. What may not be
    made, in a namespace that is not there say, is asked for again after pauses that grow, and `AGAIN_MAX` of it at a
    time: thousands of such jobs would otherwise keep the loop from going round."""

    def __init__(
        self, cluster: Cluster, mirrors: ClusterMirrors, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._mirrors = mirrors
        self._monotonic_s = monotonic_s
        self._refused = Pauses(base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S, rng=Random(), monotonic_s=monotonic_s)

    def effects(self, every: Iterable[Steps]) -> Iterator[Effect]:
        """One a tuple of steps: they concern one object, and nothing is done after one that fails."""
        self._refused.forget_old()
        now_s, again = self._monotonic_s(), 0
        for steps in every:
            until_s = self._refused.until_s(_place(steps[0]))
            if until_s is not None:
                if now_s < until_s or again == AGAIN_MAX:
                    continue
                again += 1
            yield Effect(_named(steps[0]), partial(self._take, steps))

    def _take(self, steps: Steps) -> None:
        for step in steps:
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
                    self._mirrors.put_ahead(kind, answer)
                case Delete(kind=kind, namespace=namespace, name=name, uid=uid):
                    left = self._cluster.delete(kind, name, namespace, uid=uid)
                    if left is not None:
                        self._mirrors.put_ahead(kind, left)

    def _create(self, step: Create) -> None:
        try:
            self._mirrors.put_ahead(step.kind, self._cluster.create(step.kind, step.body))
        except ApiError as refused:
            # An Event is named by the number of what it tells of: it was told before, perhaps by an earlier leader.
            if step.kind is EVENT and refused.exists_already:
                return
            if refused.is_standing:
                self._refused.begin(_place(step))
            raise
        self._refused.end(_place(step))


def _place(step: Step) -> tuple[str, str, str] | None:
    """Of what is to be made."""
    return (step.kind.name, *key_of(step.body)) if isinstance(step, Create) else None


def _named(step: Step) -> str:
    if isinstance(step, Create):
        return f"create {step.kind.name} {step.body['metadata']['name']}"
    return f"{'change' if isinstance(step, Patch) else 'delete'} {step.kind.name} {step.name}"
