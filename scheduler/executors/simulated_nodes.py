"""The nodes of a simulated cluster: which are up, and where inference sits on those that are not lent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache

from scheduler.domain.fleet import Node
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.observation import NodeFacts

_facts = cache(NodeFacts)


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

    def demand(self, pool: str, gpus: float) -> None:
        self._demand[pool] = gpus
        self._facts = None

    def down(self, name: str) -> None:
        self._known(name)
        self._down.add(name)
        self._leaving.pop(name, None)
        self._facts = None

    def up(self, name: str) -> None:
        self._known(name)
        self._down.discard(name)
        self._facts = None

    def is_up(self, name: str) -> bool:
        return name in self._nodes and name not in self._down

    def lend(self, loans: Mapping[str, Loan]) -> tuple[str, ...]:
        """Take over the loans of the desired state; the nodes whose pods have to drain first, from now on."""
        before, facts = self._loans, self.facts()
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

    def drained(self, name: str) -> bool:
        """The last pods have left an offered node. False where it was taken back meanwhile."""
        if name not in self._leaving:
            return False
        del self._leaving[name]
        self._facts = None
        return True

    def facts(self) -> Mapping[str, NodeFacts]:
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
                facts[name] = _facts(False, 0)
            elif name in self._loans:
                facts[name] = _facts(True, self._leaving.get(name, 0))
            elif (needed := left.get(node.pool, 0)) > 0:
                taken = min(node.gpus, needed)
                left[node.pool] = needed - taken
                facts[name] = _facts(True, taken)
            else:
                facts[name] = _facts(True, 0)
        return facts

    def _known(self, name: str) -> None:
        if name not in self._nodes:
            raise ValueError(f"node: got {name!r}, allowed are {', '.join(self._nodes)}")
