"""Where the inference of a local cluster sits: there it is a demand signal, not processes.

The nodes of a simulated cluster: which are up, and where inference sits on those that are not lent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from scheduler.domain.fleet import Loan, LoanState, Node, PoolKind
from scheduler.domain.observation import NodeFacts
from scheduler.domain.snapshot import Snapshot


def place_inference(desired: Snapshot, *, down: Collection[str]) -> dict[str, NodeFacts]:
    """Every node of `desired`, with the GPUs that its pool's demand takes.

    The demand fills the pool's nodes that are up and not lent, by name, so that the last ones fall idle first; what
    does not fit serves nowhere. A node is free of inference the moment it is offered.
    """
    left = {pool: math.ceil(reading.gpus) for pool, reading in desired.demand.items()}
    facts = {}
    for name, node in sorted(desired.nodes.items()):
        loan = desired.loans.get(name)
        serves = desired.pools[node.pool].kind is PoolKind.INFERENCE and not (loan is not None and loan.is_live)
        taken = min(node.gpus, left.get(node.pool, 0)) if serves and name not in down else 0
        left[node.pool] = left.get(node.pool, 0) - taken
        facts[name] = NodeFacts(up=name not in down, inference_gpus=taken)
    return facts


_cached_facts = cache(NodeFacts)


class SimulatedNodes:
    """Inference fills the nodes of its pool in their order, so that the last ones fall idle first.

    An offered node keeps its pods until they have drained; a lent one has none.
    """

    def __init__(self, nodes: Iterable[Node], *, drain_s: float) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._drain_s = drain_s
        self._down: set[str] = set()
        self._demand: dict[str, float] = {}
        self._loans: Mapping[str, Loan] = {}
        self._leaving: dict[str, int] = {}
        self._facts: Mapping[str, NodeFacts] | None = None

    def set_demand(self, pool: str, gpus: float) -> None:
        self._demand[pool] = gpus
        self._facts = None

    def mark_down(self, name: str) -> None:
        self._check_node(name)
        self._down.add(name)
        self._leaving.pop(name, None)
        self._facts = None

    def mark_up(self, name: str) -> None:
        self._check_node(name)
        self._down.discard(name)
        self._facts = None

    def is_up(self, name: str) -> bool:
        return name in self._nodes and name not in self._down

    def apply_loans(self, loans: Mapping[str, Loan]) -> tuple[str, ...]:
        """Take over the loans of the desired state; the nodes whose pods have to drain first, from now on."""
        before, facts = self._loans, self.get_facts()
        self._loans = {name: loan for name, loan in loans.items() if loan.is_live}
        offered = [
            name
            for name, loan in self._loans.items()
            if loan.state is LoanState.OFFERED
            and name not in before
            and facts[name].inference_gpus
            and self.is_up(name)
        ]
        self._leaving = {name: gpus for name, gpus in self._leaving.items() if name in self._loans}
        self._leaving.update((name, facts[name].inference_gpus) for name in offered)
        self._facts = None
        return tuple(offered)

    @property
    def drain_s(self) -> float:
        return self._drain_s

    def finish_drain(self, name: str) -> bool:
        """The last pods have left an offered node. False where it was taken back meanwhile."""
        if name not in self._leaving:
            return False
        del self._leaving[name]
        self._facts = None
        return True

    def get_facts(self) -> Mapping[str, NodeFacts]:
        if self._facts is None:
            self._facts = self._place_inference()
        return self._facts

    def _place_inference(self) -> Mapping[str, NodeFacts]:
        left = {pool: math.ceil(gpus) for pool, gpus in self._demand.items()}
        for name, gpus in self._leaving.items():
            left[self._nodes[name].pool] -= gpus
        facts: dict[str, NodeFacts] = {}
        for name, node in self._nodes.items():
            if name in self._down:
                facts[name] = _cached_facts(False, 0)
            elif name in self._loans:
                facts[name] = _cached_facts(True, self._leaving.get(name, 0))
            elif (needed := left.get(node.pool, 0)) > 0:
                taken = min(node.gpus, needed)
                left[node.pool] = needed - taken
                facts[name] = _cached_facts(True, taken)
            else:
                facts[name] = _cached_facts(True, 0)
        return facts

    def _check_node(self, name: str) -> None:
        if name not in self._nodes:
            raise ValueError(f"node: got {name!r}, allowed are {', '.join(self._nodes)}")
