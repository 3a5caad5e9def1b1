"""Binding a gang: all pods of a job's target are bound, or none is. Pure.

Kubernetes has no call that binds several pods at once, so a gang is bound only when every node has room for its pod,
and what was bound of it is let go again where one call fails (see executor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.k8s.node_view import NodeView
from scheduler.k8s.pod_changes import PodChanges
from scheduler.k8s.pod_facts import PodFacts


@dataclass(frozen=True, slots=True)
class Gang:
    """Pods of one job that are to be bound together, each to the node that the decision names."""

    job_id: str
    pods: tuple[PodFacts, ...]


class Rooms:
    """GPUs that are left on each node while gangs are dealt out: mutable on purpose, for one round of it."""

    def __init__(self, nodes: Mapping[str, NodeView], held: Mapping[str, int]) -> None:
        self._left = {name: node.gpus - held.get(name, 0) for name, node in nodes.items() if node.is_ready}

    def take(self, pods: tuple[PodFacts, ...]) -> bool:
        """Take the room of all these pods, or of none where one node lacks it."""
        if any(self._left.get(pod.wanted_node, -1) < pod.gpus for pod in pods):
            return False
        for pod in pods:
            self._left[pod.wanted_node] -= pod.gpus
        return True


def gang_to_bind(job_id: str, changes: PodChanges, rooms: Rooms) -> Gang | None:
    """The job's pods that still have to be bound, if all of its pods are there and every node has room."""
    if not changes.is_gang_whole or changes.gang is None:
        return None
    unbound = tuple(pod for pod in changes.gang.values() if not pod.node)
    return Gang(job_id, unbound) if unbound and rooms.take(unbound) else None
