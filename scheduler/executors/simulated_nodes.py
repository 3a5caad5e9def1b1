"""SimulatedNodes: nodes of a simulated cluster, and the inference pods on them.

One pod has one GPU. Pods stay where they are: demand that grows starts pods on the first nodes with free GPUs, and
demand that falls ends pods that still start, then those on the last nodes. So the last nodes become idle first. Of
nodes that are lent in part, the GPUs that stay with inference are used first, and those that a loan takes last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from scheduler.domain.fleet import Loan, LoanState, Node, Pool
from scheduler.domain.observation import NodeFacts

UnservedSteps = list[tuple[float, float]]
"""GPUs of demand without a pod that serves, as steps (time in seconds, GPUs from then on)."""

_cached_facts = cache(NodeFacts)


@dataclass(slots=True)
class _PodGroup:
    """Pods on one node that serve from `ready_s` on."""

    node: str
    gpus: int
    ready_s: float


@dataclass(slots=True)
class _InferencePool:
    """Demand of a pool in GPUs, its nodes, its starting pods, and a record of demand that was not served."""

    nodes: list[Node] = field(default_factory=list)
    demand: float = 0.0
    starting: list[_PodGroup] = field(default_factory=list)
    unserved: UnservedSteps = field(default_factory=list)


class SimulatedNodes:
    """Nodes that inference pods and loans share.

    The pods of an offered node serve until they have drained. Their replacements start at once on other nodes, and
    serve after the pool's cold start. A returned node serves after a cold start, too. Pods of growing demand serve at
    once on other nodes: their start is the same without loans. Pods of a partially lent node stay, and new ones take
    the GPUs that the loan leaves to them. Only pods on its returned GPUs have a cold start.

    `drain_s` is the time in which pods leave an offered node. Calls must have ascending times.
    """

    def __init__(self, nodes: Iterable[Node], *, drain_s: float) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._drain_s = drain_s
        self._pools: dict[str, _InferencePool] = {}
        for node in self._nodes.values():
            self._pools.setdefault(node.pool, _InferencePool()).nodes.append(node)
        self._down: set[str] = set()
        self._loans: Mapping[str, Loan] = {}
        self._pods: dict[str, int] = dict.fromkeys(self._nodes, 0)
        self._draining: dict[str, _PodGroup] = {}
        self._cold_until_s: dict[str, tuple[int, float]] = {}  # GPUs that are warm, and when the others are
        self._facts: Mapping[str, NodeFacts] | None = None

    @property
    def drain_s(self) -> float:
        return self._drain_s

    def set_demand(self, pool: str, gpus: float, now_s: float) -> None:
        """Start or end pods so that the pool has one for each GPU of its demand, if there is room."""
        if pool in self._pools:
            self._settle(pool, now_s)
            self._pools[pool].demand = gpus
            self._adjust(pool, now_s)

    def mark_down(self, name: str, now_s: float) -> None:
        """Fail a node. Its pods start elsewhere."""
        pool = self._find_pool(name)
        self._settle(pool, now_s)
        self._down.add(name)
        self._draining.pop(name, None)
        self._remove_pods(pool, name)
        self._adjust(pool, now_s)

    def mark_up(self, name: str, now_s: float) -> None:
        pool = self._find_pool(name)
        self._settle(pool, now_s)
        self._down.discard(name)
        self._adjust(pool, now_s)

    def is_up(self, name: str) -> bool:
        return name in self._nodes and name not in self._down

    def apply_loans(self, loans: Mapping[str, Loan], pools: Mapping[str, Pool], now_s: float) -> tuple[str, ...]:
        """Apply the desired loans, and return the nodes that start to drain."""
        before = self._loans
        self._loans = {name: loan for name, loan in loans.items() if loan.is_in_effect and name in self._nodes}
        changed = [name for name in (*before, *self._loans) if (name in before) != (name in self._loans)]
        draining: list[str] = []
        for pool in dict.fromkeys(self._nodes[name].pool for name in changed):
            self._settle(pool, now_s)
            cold_start_s = pools[pool].lending.start_s if pool in pools else 0.0
            here = [name for name in changed if self._nodes[name].pool == pool]
            for name in here:
                if name in self._loans:
                    draining += self._leave_offered_node(self._loans[name], now_s)
                else:
                    self._take_back_node(before[name], now_s, cold_start_s)
            self._adjust(pool, now_s, start_s=cold_start_s if any(name in draining for name in here) else 0.0)
        return tuple(draining)

    def finish_drain(self, name: str, now_s: float) -> bool:
        """Remove the last pods of an offered node. Return False if the loan was withdrawn meanwhile."""
        if name not in self._draining or now_s < self._draining[name].ready_s:
            return False
        pool = self._nodes[name].pool
        self._settle(pool, now_s)
        del self._draining[name]
        self._record(pool, now_s)
        return True

    def get_facts(self) -> Mapping[str, NodeFacts]:
        if self._facts is None:
            pods = self._pods | {name: group.gpus for name, group in self._draining.items()}
            self._facts = {name: _cached_facts(name not in self._down, gpus) for name, gpus in pods.items()}
        return self._facts

    def list_unserved(self, now_s: float) -> Mapping[str, UnservedSteps]:
        """Return the demand without a pod that serves, by pool, until now.

        Demand above the GPUs of nodes that are up does not count.
        """
        for pool in self._pools:
            self._settle(pool, now_s)
        return {name: list(pool.unserved) for name, pool in self._pools.items()}

    def _find_pool(self, name: str) -> str:
        if name not in self._nodes:
            raise ValueError(f"unknown node {name!r}; the nodes are {', '.join(self._nodes)}")
        return self._nodes[name].pool

    def _leave_offered_node(self, loan: Loan, now_s: float) -> list[str]:
        """Let the pods of a node that was offered as a whole drain. Return the node if there are any that serve."""
        if loan.is_partial:
            return []
        name, pool = loan.node, self._pools[self._nodes[loan.node].pool]
        serving = self._pods[name] - sum(group.gpus for group in pool.starting if group.node == name)
        self._remove_pods(self._nodes[name].pool, name)
        if loan.state is not LoanState.OFFERED or serving <= 0:
            return []
        self._draining[name] = _PodGroup(name, serving, now_s + self._drain_s)
        return [name]

    def _take_back_node(self, loan: Loan, now_s: float, cold_start_s: float) -> None:
        """Give a node back to inference. The pods that still drain after a withdrawn offer go on serving."""
        if (group := self._draining.pop(loan.node, None)) is not None:
            self._pods[loan.node] += group.gpus
        if loan.state is not LoanState.OFFERED:
            self._cold_until_s[loan.node] = (loan.count_kept_gpus(self._nodes[loan.node]), now_s + cold_start_s)

    def _remove_pods(self, pool: str, node: str) -> None:
        self._pods[node] = 0
        self._pools[pool].starting = [group for group in self._pools[pool].starting if group.node != node]

    def _adjust(self, pool: str, now_s: float, *, start_s: float = 0.0) -> None:
        """Bring the pods of a pool to its demand. New ones serve after `start_s` and their node's cold start."""
        state, self._facts = self._pools[pool], None
        missing = math.ceil(state.demand) - sum(self._pods[node.name] for node in state.nodes)
        if missing < 0:
            self._end_pods(state, -missing)
        for node, most in self._list_rooms(state) if missing > 0 else ():
            added = max(0, min(missing, most - self._pods[node.name]))
            for gpus, ready_s in self._split_by_start(node, added, now_s, start_s):
                if gpus and ready_s > now_s:
                    state.starting.append(_PodGroup(node.name, gpus, ready_s))
            self._pods[node.name] += added
            missing -= added
        self._record(pool, now_s)

    def _list_rooms(self, state: _InferencePool) -> Iterator[tuple[Node, int]]:
        """Yield nodes with the pods that they can have, in the order of use."""
        for node, most in _order_by_use(state.nodes):
            yield node, min(most, self._count_room(node))

    def _count_room(self, node: Node) -> int:
        """Return the GPUs of the node that pods can use, those that they use included."""
        if node.name in self._down:
            return 0
        loan = self._loans.get(node.name)
        return node.gpus if loan is None else loan.count_kept_gpus(node)

    def _split_by_start(self, node: Node, gpus: int, now_s: float, start_s: float) -> Iterator[tuple[int, float]]:
        """Yield the numbers of new pods on a node, with the time from which they serve.

        Pods on GPUs that a partial loan left to inference start as elsewhere, the others once the node is warm again.
        """
        warm_gpus, cold_until_s = self._cold_until_s.get(node.name, (node.gpus, now_s))
        at_once = max(0, min(gpus, warm_gpus - self._pods[node.name]))
        yield at_once, now_s + start_s
        yield gpus - at_once, max(now_s + start_s, cold_until_s)

    def _end_pods(self, state: _InferencePool, gpus: int) -> None:
        """End so many pods: those that start last, then those on the last nodes."""
        for group in sorted(state.starting, key=lambda group: -group.ready_s):
            ended = min(gpus, group.gpus)
            group.gpus -= ended
            self._pods[group.node] -= ended
            gpus -= ended
        state.starting = [group for group in state.starting if group.gpus]
        for node, most in reversed(_order_by_use(state.nodes)):
            left = node.gpus - node.loan_gpus if most == node.gpus and node.lendable_gpus else 0
            ended = max(0, min(gpus, self._pods[node.name] - left))
            self._pods[node.name] -= ended
            gpus -= ended

    def _settle(self, pool: str, now_s: float) -> None:
        """Record what changed by time alone until now: the starts that have completed."""
        state = self._pools[pool]
        for ready_s in sorted({group.ready_s for group in state.starting if group.ready_s <= now_s}):
            state.starting = [group for group in state.starting if group.ready_s > ready_s]
            self._record(pool, ready_s)

    def _record(self, pool: str, at_s: float) -> None:
        state = self._pools[pool]
        self._facts = None
        capacity = sum(node.gpus for node in state.nodes if node.name not in self._down)
        pods = sum(self._pods[node.name] for node in state.nodes) - sum(group.gpus for group in state.starting)
        pods += sum(group.gpus for name, group in self._draining.items() if self._nodes[name].pool == pool)
        unserved = max(0.0, min(state.demand, capacity) - pods)
        if unserved != (state.unserved[-1][1] if state.unserved else 0.0):
            state.unserved.append((at_s, unserved))


def _order_by_use(nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    """Return nodes with a number of pods, in the order in which pods fill them up to it.

    GPUs that no loan takes come first, then whole nodes, then the parts of nodes that a loan takes.
    """
    partial = [node for node in nodes if node.lendable_gpus]
    whole = [(node, node.gpus) for node in nodes if not node.lendable_gpus]
    return [*((node, node.gpus - node.loan_gpus) for node in partial), *whole, *((node, node.gpus) for node in partial)]
