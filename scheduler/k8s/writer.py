"""Steps that concern custom resources and Events, as calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from scheduler.k8s.api_error import ApiError
from scheduler.k8s.client import Cluster
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.effects import Effect
from scheduler.k8s.kinds import EVENT
from scheduler.k8s.steps import Create, Delete, Patch, Step, Steps


class Writer:
    """Carries steps out as they are. `mirrors` take in what the API server answers, ahead of the watch."""

    def __init__(self, cluster: Cluster, mirrors: ClusterMirrors) -> None:
        self._cluster = cluster
        self._mirrors = mirrors

    def effects(self, every: Iterable[Steps]) -> Iterator[Effect]:
        """One a tuple of steps: they concern one object, and nothing is done after one that fails."""
        for steps in every:
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
            if not (step.kind is EVENT and refused.exists_already):
                raise


def _named(step: Step) -> str:
    if isinstance(step, Create):
        return f"create {step.kind.name} {step.body['metadata']['name']}"
    return f"{'change' if isinstance(step, Patch) else 'delete'} {step.kind.name} {step.name}"
