"""Nodes that a pool can lend, and how many of their GPUs jobs could use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter

from scheduler.domain.fleet import Node, NodeState
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.lending import count_wanted_gpus


class WantedGpus:
    """GPUs that jobs could use beyond those that are coming, by GPU model. Each model is counted at its first use.

    Without `counts_proposed`, proposed loans do not count as coming.
    """

    def __init__(self, cycle: SchedulingCycle, *, counts_proposed: bool = True) -> None:
        self._cycle = cycle
        self._counts_proposed = counts_proposed
        self._wanted_gpus: dict[str, float] = {}

    def count(self, gpu: str) -> float:
        """Return how many GPUs of the model are wanted and not taken; below 0 if the last node had more than that."""
        if gpu not in self._wanted_gpus:
            policies = self._cycle.policies
            self._wanted_gpus[gpu] = count_wanted_gpus(
                self._cycle.view,
                gpu,
                self._cycle.settings,
                scales=policies.scales,
                mixes=policies.deal_nodes is not None,
                counts_proposed=self._counts_proposed,
            )
        return self._wanted_gpus[gpu]

    def take(self, node: Node) -> bool:
        """Return whether jobs want GPUs of the node, and count all of them as taken if so."""
        is_wanted = self.count(node.gpu) > 0
        self._wanted_gpus[node.gpu] -= node.gpus * is_wanted
        return is_wanted


class LoanSupply:
    """Nodes that pools can lend, and the GPUs that jobs could use, each counted once for all pools."""

    def __init__(self, cycle: SchedulingCycle) -> None:
        self.wanted = WantedGpus(cycle)
        self._cycle = cycle

    def list_nodes(self, pool: str) -> Sequence[Node]:
        """Return the nodes that the pool can lend, on loan or not, those that inference uses least first."""
        return self._nodes_by_pool.get(pool, ())

    @cached_property
    def _nodes_by_pool(self) -> Mapping[str, list[Node]]:
        nodes: dict[str, list[Node]] = {}
        for node in self._cycle.snapshot.original.nodes.values():
            if is_lendable(node, self._cycle.now_s):
                nodes.setdefault(node.pool, []).append(node)
        for each in nodes.values():
            each.sort(key=attrgetter("inference_gpus", "name"))
        return nodes


def is_lendable(node: Node, now_s: float) -> bool:
    """Return whether the node can be lent.

    It is up and not cordoned, neither its owner nor a veto keeps it, and its standby replicas can be idle.
    """
    if node.state is not NodeState.UP or not node.lendable or node.cordoned or now_s < node.vetoed_until_s:
        return False
    return node.standby is None or not node.standby.find_loan_obstacle(now_s)
