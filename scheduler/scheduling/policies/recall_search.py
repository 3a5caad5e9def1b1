"""Search for the nodes whose emptying costs their jobs least.

The nodes with the least shares of their jobs' costs are tried first: if their cost meets its bound, nothing is cheaper.
Otherwise, up to `CELLS_MAX`, every set is priced, which is exact: 12 nodes of 8 GPUs are always within it. Beyond that,
greedy walks over a narrow and a broad part of that ranking spare the most expensive nodes one by one. Exact search in
small windows, of expensive and cheap nodes or of nodes that share jobs, improves the better result. The work is bounded
only by counts, so that equal questions have equal answers.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate, product
from math import comb, inf

from scheduler.scheduling.policies.recall_cost import RecallCost

Bundle = tuple[int, ...]

CELLS_MAX = 1 << 17
"""Sets times nodes and jobs up to which every set is priced, a few ms of work: any 12 nodes, any 2 of 40."""
WINDOW, WINDOWS_MIN, WINDOWS_MAX = 10, 10, 50
"""Nodes per window, and bounds of the number of windows, which falls with the number of leaving nodes."""
RANKS, SKIPS = 48, (0, 3, 6, 9)
"""Bundles at each end of the ranking that windows are made of, and how many of them a window skips."""

BREADTHS = (1.2, 3.0)
"""Nodes that the greedy walks start from, as multiples of those that must leave."""
ROUNDING, CLOSE_ENOUGH = 1.0 + 1e-9, 1.01
"""Ratios to a bound that count as equal, and as close enough to end the search."""


def find_cheapest_nodes(cost: RecallCost, need: int, sizes: Sequence[int] = ()) -> set[int]:
    """Return nodes that cost least to empty, as far as the budget of work allows.

    Args:
        need: number of nodes, or with `sizes` the GPUs that they free together at least.
        sizes: GPUs that each node frees. Give them only if they differ.
    """
    nodes = cost.nodes
    if need >= (sum(sizes) or len(nodes)):
        return set(nodes)
    search = _Search(cost, need, 0.0 if cost.has_free_gpus else inf, sizes)
    if cost.compute(search.first) <= search.bound_gpu_s * ROUNDING:
        return search.first
    sets = 1 << len(nodes) if sizes else comb(len(nodes), need)
    if sets * (len(nodes) + len(cost.jobs)) <= CELLS_MAX:
        return cost.find_cheapest(nodes, need, sizes=sizes)
    walked = search.run_greedy()
    if cost.compute(walked) <= search.bound_gpu_s * CLOSE_ENOUGH:
        return walked
    found = [search.improve(walked)]
    if (
        cost.has_free_gpus and cost.compute(walked) > search.estimate_cost(walked) * ROUNDING
    ):  # some job found no free GPUs
        dearer = _Search(cost, need, cost.price_free_gpu(walked) or inf, sizes)
        found.append(dearer.improve(dearer.run_greedy()))
    return min(found, key=cost.compute)


class _Search:
    """One search, in which a free GPU to move to costs `free_gpu_price`.

    It is 0 while there are enough for all, and infinite if there are none. In between it is the Lagrange multiplier of
    the free GPUs, which no single job's cost contains. `first` are the nodes with the least shares of the cost per
    freed GPU, and `bound_gpu_s` is the least cost that any choice can have.
    """

    def __init__(self, cost: RecallCost, need: int, free_gpu_price: float, sizes: Sequence[int] = ()) -> None:
        self._cost, self._need, self._free_gpu_price, self._sizes = cost, need, free_gpu_price, sizes
        shares = self._compute_shares()
        self._ranked = sorted(cost.nodes, key=lambda node: shares[node] / (sizes[node] if sizes else 1))
        self.first: set[int] = set()
        self.bound_gpu_s, missing = 0.0, need
        for node in self._ranked:
            if missing <= 0:
                break
            self.bound_gpu_s += shares[node] * min(1.0, missing / self._measure([node]))
            self.first.add(node)
            missing -= self._measure([node])
        for node in sorted(self.first, key=lambda node: -self._measure([node])) if missing < 0 else ():
            if missing + self._measure([node]) <= 0:  # the others meet the need
                self.first.discard(node)
                missing += self._measure([node])
        self._costs: dict[int, dict[int, float]] = {}  # by job: its cost by how many GPUs it loses
        self._bundles: list[Bundle] = []
        self._bundles_of: defaultdict[int, list[int]] = defaultdict(list)  # by node
        self._considered: frozenset[int] = frozenset()  # the nodes of the current search

    def estimate_cost(self, leaving: Set[int]) -> float:
        """Return the cost at this price of free GPUs."""
        of_tenants = sum(self._costs[number][lost] for number, lost in self._cost.count_losses(leaving).items())
        return self._cost.transfer_cost(leaving) + of_tenants

    def run_greedy(self) -> set[int]:
        """Return the cheapest result of the greedy walks."""
        breadths = [int(breadth * len(self.first)) + WINDOW for breadth in BREADTHS]
        self._build_bundles(self._ranked[: max(breadths)])
        return min((self._walk_greedily(self._ranked[:breadth]) for breadth in breadths), key=self._cost.compute)

    def _measure(self, nodes: Collection[int]) -> int:
        """Return how much of the need these nodes meet: their number, or the GPUs that they free."""
        return sum([self._sizes[node] for node in nodes]) if self._sizes else len(nodes)

    def _compute_shares(self) -> list[float]:
        """Return, by node, its transfer cost and the minimum that emptying it adds for each of its jobs.

        The minimum holds for every choice of the other nodes.

        No set of nodes costs less than its shares together.
        """
        shares, price = list(self._cost.transfer_gpu_s), partial(self._cost.compute_for_job, minimal=True)
        room_gpu_s = self._free_gpu_price
        for job in self._cost.jobs:
            even = price(job, sum(job.gpus_by_node.values()), room_gpu_s) / len(job.gpus_by_node)
            if len(job.gpus_by_node) == 1:
                shares[next(iter(job.gpus_by_node))] += even
                continue
            sums = accumulate(sorted(job.gpus_by_node.values()))
            fitting = sum(lost <= job.spare_gpus for lost in sums)
            least = price(job, job.spare_gpus, room_gpu_s) / fitting if fitting else inf
            for node, gpus in job.gpus_by_node.items():
                shares[node] += min(even, least) if gpus <= job.spare_gpus else even
        return shares

    def _build_bundles(self, nodes: Sequence[int]) -> None:
        """Build sets of nodes to consider as one: each node, all nodes of each job, and all that a job can spare."""
        self._considered = frozenset(nodes)
        bundles: dict[Bundle, None] = {(node,): None for node in nodes}
        for number in sorted({number for node in nodes for number, _ in self._cost.jobs_on_node[node]}):
            job = self._cost.jobs[number]
            on = sorted([(gpus, node) for node, gpus in job.gpus_by_node.items() if node in self._considered])
            losses = {0}
            for gpus, _ in on:
                losses |= {lost + gpus for lost in losses}
            self._costs[number] = {lost: self._cost.compute_for_job(job, lost, self._free_gpu_price) for lost in losses}
            if len(on) > 1:
                spared = sum(gpus <= job.spare_gpus for gpus in accumulate([gpus for gpus, _ in on]))
                parts = [sorted(node for _, node in on[:count]) for count in (len(on), spared) if count > 1]
                bundles |= dict.fromkeys(map(tuple, parts))
        self._bundles = list(bundles)
        for number, bundle in enumerate(self._bundles):
            for node in bundle:
                self._bundles_of[node].append(number)

    def _walk_greedily(self, nodes: Sequence[int]) -> set[int]:
        """Start with all of `nodes` leaving, and spare the bundle that saves most while the rest meets the need."""
        leaving, lost = set(nodes), self._cost.count_losses(nodes)
        rates = [self._rate(bundle, leaving, -1, lost)[0] for bundle in self._bundles]
        heap = [(rate, number) for number, rate in enumerate(rates) if rate < inf]
        heapq.heapify(heap)
        left = self._measure(leaving)
        while left > self._need and heap:
            rate, number = heapq.heappop(heap)
            if rate != rates[number]:  # outdated: the bundle has been rated again
                continue
            rates[number] = inf
            spared = leaving.intersection(self._bundles[number])
            if left - self._measure(spared) < self._need:
                continue
            leaving -= spared
            left -= self._measure(spared)
            changes = self._cost.count_losses(spared)
            for user, gpus in changes.items():
                lost[user] -= gpus
            near = {node for user in changes for node in self._cost.jobs[user].gpus_by_node}
            for touched in {number for node in near for number in self._bundles_of[node]}:
                fresh = self._rate(self._bundles[touched], leaving, -1, lost)[0]
                if fresh != rates[touched]:
                    rates[touched] = fresh
                    heapq.heappush(heap, (fresh, touched))
        return leaving

    def _rate(self, bundle: Bundle, among: Set[int], sign: int, lost: Mapping[int, int]) -> tuple[float, Bundle]:
        """Return the added cost per node or GPU of emptying (1) or sparing (-1) the bundle's nodes in `among`.

        The nodes are returned too.
        """
        part = tuple([node for node in bundle if node in among])
        if not part:
            return inf, part
        changes: Iterable[tuple[int, int]] = self._cost.jobs_on_node[part[0]]
        if len(part) > 1:
            changes = self._cost.count_losses(part).items()
        added = sign * self._cost.transfer_cost(part) if self._cost.has_transfers else 0.0
        for user, gpus in changes:
            before, costs = lost[user], self._costs[user]
            added += costs[before + sign * gpus] - costs[before]
        return added / self._measure(part), part

    def improve(self, leaving: set[int]) -> set[int]:
        """Search exactly in windows until nothing more is gained or enough windows were searched."""
        windows_max = max(WINDOWS_MIN, WINDOWS_MAX - len(self.first) // 2)
        cost, tried, gained = self._cost.compute(leaving), set[frozenset[int]](), True
        while gained:
            gained = False
            for window in self._windows(leaving):
                if len(tried) >= windows_max:
                    return leaving
                if window in tried:
                    continue
                tried.add(window)
                rest, inside = leaving - window, sorted(window)
                missing = self._need - self._measure(rest)
                sizes = [self._sizes[node] for node in inside] if self._sizes else ()
                found = rest | self._cost.find_cheapest(inside, missing, leaving, sizes)
                if found != leaving and (least := self._cost.compute(found)) < cost:
                    leaving, cost, gained = found, least, True
        return leaving

    def _windows(self, leaving: Set[int]) -> Iterator[frozenset[int]]:
        """Yield windows of bundles, to exchange leaving bundles for staying ones.

        The first window has the most expensive leaving and the cheapest staying bundles. Then each expensive bundle
        comes with its neighbors.
        """
        lost, staying = self._cost.count_losses(leaving), self._considered - leaving
        gains = heapq.nsmallest(RANKS, (self._rate(bundle, leaving, -1, lost) for bundle in self._bundles))
        costs = heapq.nsmallest(RANKS, (self._rate(bundle, staying, 1, lost) for bundle in self._bundles))
        dear, cheap = [part for _, part in gains], [part for _, part in costs]
        for skip_dear, skip_cheap in sorted(product(SKIPS, repeat=2), key=sum):
            yield _window((dear[skip_dear:], WINDOW // 2), (cheap[skip_cheap:], WINDOW))
        for part in dear:
            yield _window(([part, *self._neighbors(part)], WINDOW - 2), (cheap, WINDOW))

    def _neighbors(self, part: Bundle) -> list[Bundle]:
        """Return other nodes of the same jobs, those with most of them first."""
        shared = Counter(node for user in self._cost.count_losses(part) for node in self._cost.jobs[user].gpus_by_node)
        near = sorted(self._considered.intersection(shared).difference(part), key=lambda node: (-shared[node], node))
        return [(node,) for node in near]


def _window(*ranked: tuple[Sequence[Bundle], int]) -> frozenset[int]:
    """Return the bundles of each ranking in turn, up to its limit of nodes."""
    window: dict[int, None] = {}
    for bundles, limit in ranked:
        for bundle in bundles:
            new = [node for node in bundle if node not in window]
            if new and len(window) + len(new) <= limit:
                window.update(dict.fromkeys(new))
            if len(window) == limit:
                break
    return frozenset(window)
