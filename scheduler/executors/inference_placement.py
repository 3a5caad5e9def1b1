"""Placement of inference demand on nodes, for executors without real inference pods."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from scheduler.domain.fleet import Loan, LoanState, Node, PoolKind
from scheduler.domain.observation import NodeFacts
from scheduler.domain.snapshot import Snapshot


def place_inference(desired: Snapshot, *, down: Collection[str]) -> dict[str, NodeFacts]:
    """Return all nodes of `desired` with the GPUs that inference occupies.

    Demand fills nodes that are up and not lent, in name order, so that the last ones become idle first. Excess demand
    is dropped. An offered node is free of inference at once.
    """
    remaining = {pool: math.ceil(reading.gpus) for pool, reading in desired.demand.items()}
    facts = {}
    for name, node in sorted(desired.nodes.items()):
        loan = desired.loans.get(name)
        serves_inference = desired.pools[node.pool].kind is PoolKind.INFERENCE and not (
            loan is not None and loan.is_in_effect
        )
        used = min(node.gpus, remaining.get(node.pool, 0)) if serves_inference and name not in down else 0
        remaining[node.pool] = remaining.get(node.pool, 0) - used
        facts[name] = NodeFacts(up=name not in down, inference_gpus=used)
    return facts


_cached_facts = cache(NodeFacts)


class SimulatedNodes:
    """Nodes of a simulated cluster. Demand fills nodes in order, so that the last ones become idle first.

    An offered node keeps its pods until they have drained. A lent node has none.
    """

    def __init__(self, nodes: Iterable[Node], *, drain_s: float) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._drain_s = drain_s
        self._down: set[str] = set()
        self._demand: dict[str, float] = {}
        self._loans: Mapping[str, Loan] = {}
        self._draining: dict[str, int] = {}
        self._facts: Mapping[str, NodeFacts] | None = None

    def set_demand(self, pool: str, gpus: float) -> None:
        self._demand[pool] = gpus
        self._facts = None

    def mark_down(self, name: str) -> None:
        self._check_node(name)
        self._down.add(name)
        self._draining.pop(name, None)
        self._facts = None

    def mark_up(self, name: str) -> None:
        self._check_node(name)
        self._down.discard(name)
        self._facts = None

    def is_up(self, name: str) -> bool:
        return name in self._nodes and name not in self._down

    def apply_loans(self, loans: Mapping[str, Loan]) -> tuple[str, ...]:
        """Apply the desired loans, and return the nodes that start to drain."""
        before, facts = self._loans, self.get_facts()
        self._loans = {name: loan for name, loan in loans.items() if loan.is_in_effect}
        offered = [
            name
            for name, loan in self._loans.items()
            if loan.state is LoanState.OFFERED
            and name not in before
            and facts[name].inference_gpus
            and self.is_up(name)
        ]
        self._draining = {name: gpus for name, gpus in self._draining.items() if name in self._loans}
        self._draining.update((name, facts[name].inference_gpus) for name in offered)
        self._facts = None
        return tuple(offered)

    @property
    def drain_s(self) -> float:
        return self._drain_s

    def finish_drain(self, name: str) -> bool:
        """Remove the last pods of an offered node. Return False if the loan was withdrawn meanwhile."""
        if name not in self._draining:
            return False
        del self._draining[name]
        self._facts = None
        return True

    def get_facts(self) -> Mapping[str, NodeFacts]:
        if self._facts is None:
            self._facts = self._place_inference()
        return self._facts

    def _place_inference(self) -> Mapping[str, NodeFacts]:
        remaining = {pool: math.ceil(gpus) for pool, gpus in self._demand.items()}
        for name, gpus in self._draining.items():
            remaining[self._nodes[name].pool] -= gpus
        facts: dict[str, NodeFacts] = {}
        for name, node in self._nodes.items():
            if name in self._down:
                facts[name] = _cached_facts(False, 0)
            elif name in self._loans:
                facts[name] = _cached_facts(True, self._draining.get(name, 0))
            elif (demanded := remaining.get(node.pool, 0)) > 0:
                used = min(node.gpus, demanded)
                remaining[node.pool] = demanded - used
                facts[name] = _cached_facts(True, used)
            else:
                facts[name] = _cached_facts(True, 0)
        return facts

    def _check_node(self, name: str) -> None:
        if name not in self._nodes:
            raise ValueError(f"unknown node {name!r}; the nodes are {', '.join(self._nodes)}")
