"""DeploymentWatch: Deployments and their autoscalers, mirrored for as long as some Pool's demand follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler.k8s.client import Cluster
from scheduler.k8s.demand_deployments import gpus_wanted, none_matches, scaling, serving
from scheduler.k8s.demand_reading import Demand, Gap, Known, Unknown
from scheduler.k8s.kinds import AUTOSCALER, DEPLOYMENT
from scheduler.k8s.mirror import Mirror
from scheduler.k8s.objects import Key, Object
from scheduler.k8s.watching import STOP_S, Watcher

_FACTS = "facts"
_KEPT = ("name", "namespace", "uid", "resourceVersion")


class DeploymentWatch:
    """Used by one thread. `on_change` is called by whichever thread brings a change."""

    def __init__(self, cluster: Cluster, *, on_change: Callable[[], None]) -> None:
        self._cluster = cluster
        self._on_change = on_change
        self._watchers: tuple[Watcher, ...] = ()

    def open(self) -> None:
        if self._watchers:
            return

        def told(_key: Key) -> None:
            self._on_change()

        mirrors = (
            Mirror(DEPLOYMENT, slim=_slim_deployment, on_change=told),
            Mirror(AUTOSCALER, slim=_slim_autoscaler, on_change=told),
        )
        self._watchers = tuple(Watcher(self._cluster, mirror) for mirror in mirrors)
        for watcher in self._watchers:
            watcher.start()

    def close(self, *, join_s: float = STOP_S) -> None:
        for watcher in self._watchers:
            watcher.stop(join_s=join_s)
        self._watchers = ()

    def demand(self, selector: Mapping[str, str], now_s: float) -> Known:
        """Of the Deployments with these labels, in all namespaces."""
        stale = [watcher.mirror.kind.plural for watcher in self._watchers if watcher.is_stale]
        if stale:
            return Unknown(Gap.STALE, f"the API server has not been heard of {' and '.join(stale)} for too long")
        if not all(watcher.mirror.is_synced for watcher in self._watchers):
            return Unknown(Gap.NOT_ASKED_YET, "Deployments are being listed")
        servings, scalings = ([item[_FACTS] for item in each.mirror.snapshot().values()] for each in self._watchers)
        gpus = gpus_wanted(selector, servings, scalings)
        if gpus is None:
            return Unknown(Gap.NO_DEPLOYMENT_MATCHES, none_matches(selector))
        return Demand(float(gpus), now_s)


def _slim_deployment(item: Object) -> Object:
    return {**_slim(item), _FACTS: serving(item)}


def _slim_autoscaler(item: Object) -> Object:
    return {**_slim(item), _FACTS: scaling(item)}


def _slim(item: Object) -> Object:
    return {"metadata": {name: item["metadata"][name] for name in _KEPT}}
