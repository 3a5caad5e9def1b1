"""Nodes that a pool can lend, and how many of their GPUs jobs could use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

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
        """Return whether jobs want GPUs of the node, and count all that a loan takes as taken if so."""
        is_wanted = self.count(node.gpu) > 0
        self._wanted_gpus[node.gpu] -= node.loan_gpus * is_wanted
        return is_wanted


class LoanRoom:
    """Loans that a pool can still make: up to `nodes`, with up to `gpus` GPUs together."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self._nodes, self._gpus = nodes, gpus

    @property
    def is_empty(self) -> bool:
        return self._nodes <= 0 or self._gpus <= 0

    def has(self, gpus: int) -> bool:
        """Return whether a loan of so many GPUs is possible."""
        return self._nodes > 0 and self._gpus >= gpus

    def take(self, gpus: int) -> bool:
        """Count a loan of so many GPUs if it is possible. Return whether it is."""
        if not self.has(gpus):
            return False
        self.reserve(gpus)
        return True

    def reserve(self, gpus: int) -> None:
        """Count a loan of so many GPUs, possible or not."""
        self._nodes, self._gpus = self._nodes - 1, self._gpus - gpus


class LoanSupply:
    """Nodes that pools can lend, and the GPUs that jobs could use, each counted once for all pools."""

    def __init__(self, cycle: SchedulingCycle) -> None:
        self.wanted = WantedGpus(cycle)
        self._cycle = cycle

    def list_nodes(self, pool: str) -> Sequence[Node]:
        """Return the nodes that the pool can lend, on loan or not, those that inference has to leave least first.

        Among these, whole nodes come before parts: jobs run faster on them, and parts fill what is left.
        """
        return self._nodes_by_pool.get(pool, ())

    @cached_property
    def _nodes_by_pool(self) -> Mapping[str, list[Node]]:
        nodes: dict[str, list[Node]] = {}
        for node in self._cycle.snapshot.original.nodes.values():
            if is_lendable(node, self._cycle.now_s):
                nodes.setdefault(node.pool, []).append(node)
        for each in nodes.values():
            each.sort(key=_rank_supply)
        return nodes


def is_lendable(node: Node, now_s: float) -> bool:
    """Return whether the node can be lent.

    It is up and not cordoned, neither its owner nor a veto keeps it, and its standby replicas can be idle. Inference
    must already fit on the GPUs that a partial loan leaves to it, because no pod is moved for such a loan.
    """
    if node.state is not NodeState.UP or not node.lendable or node.cordoned or now_s < node.vetoed_until_s:
        return False
    if node.lendable_gpus and node.displaced_gpus:
        return False
    return node.standby is None or not node.find_standby_obstacle(now_s)


def _rank_supply(node: Node) -> tuple[int, bool, str]:
    if not node.lendable_gpus:  # fast, because a pass ranks all nodes
        return node.inference_gpus, False, node.name
    return node.displaced_gpus, True, node.name
