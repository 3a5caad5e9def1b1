"""Glances: how the nodes stood at the generations that were asked about last, so that a page learns what changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from api.answers.overview import NodeGlance, node_glance
from scheduler.domain.snapshot import Snapshot

KEPT = 32

Nodes = Mapping[str, NodeGlance]


@dataclass(frozen=True, slots=True)
class Changes:
    """`complete`: `nodes` are all nodes; else those that differ, and `gone` are no more."""

    nodes: list[NodeGlance]
    gone: list[str]
    complete: bool


class Glances:
    """Safe to use from several threads. A generation that was forgotten, or is another process's, costs a whole
    answer and nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Nodes] = OrderedDict()

    def since(self, generation: int | None, snapshot: Snapshot) -> Changes:
        """What has changed in the nodes of a committed snapshot since `generation`."""
        with self._lock:
            nodes = self._kept.get(snapshot.generation)
            before = None if generation is None else self._kept.get(generation)
        if nodes is None:
            nodes = {name: node_glance(node, snapshot) for name, node in snapshot.nodes.items()}
            self._keep(snapshot.generation, nodes)
        if before is None:
            return Changes(list(nodes.values()), [], complete=True)
        changed = [glance for name, glance in nodes.items() if before.get(name) != glance]
        return Changes(changed, [name for name in before if name not in nodes], complete=False)

    def _keep(self, generation: int, nodes: Nodes) -> None:
        with self._lock:
            self._kept[generation] = nodes
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
