"""Cuts of a sorted batch into micro-batches: shortest paths in a graph whose edges are candidate micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scheduler.solver.lengths.fluid_bound import SortedBatch, compute_range_bounds
from scheduler.solver.lengths.sequence_costs import Counts, Floats

POSITIONS_DENSE = 24
"""The longest sequences, between any two of which a batch may be cut."""
POSITIONS_SPREAD = 20
"""Further positions for cuts, spread geometrically over the other sequences."""


class Edge(NamedTuple):
    """A micro-batch from one node to another; it certainly contains the sequences from `begin` to `end`, exclusive."""

    source: int
    target: int
    begin: int
    end: int


class CutGraph:
    """A graph in which every path from the first to the last node stands for cuts of the batch.

    A node is a cut at one position, or a cut anywhere between two neighbouring positions (a cell). The costs of an edge
    are seconds with `micro_batch_s`: a lower bound, and an estimate, which is the time found where one was. An edge at
    a cell counts only the sequences that lie in the micro-batch wherever the cell is cut, so the shortest path by bound
    is a lower bound for all cuts at all positions.
    """

    def __init__(self, batch: SortedBatch, extra_positions: Sequence[int]) -> None:
        """Build the graph. `extra_positions` are added to the positions at which the batch may be cut."""
        positions = np.unique([*_choose_positions(len(batch.lengths)), *extra_positions])
        cells = positions[:-1][np.diff(positions) > 1]
        cell_ends = positions[1:][np.diff(positions) > 1]
        left, right = np.concatenate([positions, cells]), np.concatenate([positions, cell_ends])
        order = np.lexsort((right, left))
        self._left, self._right = left[order], right[order]
        self._fixed_s = batch.costs.micro_batch_s
        self.bounds = self._compute_bounds(batch)
        self.estimates = self.bounds.copy()

    @property
    def whole(self) -> Edge:
        """The edge of all sequences."""
        return Edge(0, len(self._left) - 1, 0, int(self._left[-1]))

    def _compute_bounds(self, batch: SortedBatch) -> Floats:
        sources, targets = np.triu_indices(len(self._left), 1)
        begins, ends = self._right[sources], self._left[targets]
        holds = begins < ends
        bounds = np.full((len(self._left),) * 2, np.inf)
        # Two cuts in one cell, or in neighbouring cells, may have any number of sequences between them.
        bounds[sources, targets] = self._fixed_s
        times = compute_range_bounds(batch, begins[holds], ends[holds])
        bounds[sources[holds], targets[holds]] = times + self._fixed_s
        return bounds

    def find_path(self, costs: Floats) -> tuple[float, list[Edge]]:
        """Return the length of the shortest path by `costs` (`bounds` or `estimates`), and its edges."""
        distances, previous = costs[0].copy(), np.zeros(len(costs), np.int64)
        for node in range(1, len(costs)):
            through = distances[1:node] + costs[1:node, node]
            if through.size and through.min() < distances[node]:
                previous[node] = through.argmin() + 1
                distances[node] = through.min()
        nodes = [len(costs) - 1]
        while nodes[-1]:
            nodes.append(int(previous[nodes[-1]]))
        path = nodes[::-1]
        edges = [Edge(u, v, int(self._right[u]), int(self._left[v])) for u, v in pairwise(path)]
        return float(distances[-1]), edges

    def record(self, edge: Edge, *, bound_s: float, time_s: float) -> None:
        """Record the bound and the time of an edge. The bound holds for each edge with the same sequences and more."""
        contains = np.ix_(self._right <= edge.begin, self._left >= edge.end)
        for costs in (self.bounds, self.estimates):
            costs[contains] = np.maximum(costs[contains], bound_s + self._fixed_s)
        self.estimates[edge.source, edge.target] = max(time_s, bound_s) + self._fixed_s


def _choose_positions(size: int) -> Counts:
    """Return ascending positions from 0 to `size`."""
    dense = np.arange(min(size, POSITIONS_DENSE) + 1)
    if size <= POSITIONS_DENSE:
        return dense
    spread = np.geomspace(POSITIONS_DENSE, size, POSITIONS_SPREAD + 1).round().astype(np.int64)
    return np.unique(np.concatenate([dense, spread]))


def balance_tokens(batch: SortedBatch, count: int) -> tuple[int, ...]:
    """Return the borders of `count` micro-batches, at most the number of sequences, with the fewest tokens in any.

    This is the published dynamic program (arXiv 2412.01523, section 4.2).
    """
    size = len(batch.lengths)
    if count == 1:
        return (0, size)
    tokens = (batch.token_sums[None, :] - batch.token_sums[:, None]).astype(np.float64)
    tokens[np.tril_indices(size + 1)] = np.inf
    reached, previous = tokens[0], []
    for _ in range(count - 1):
        through = np.maximum(reached[:, None], tokens)
        previous.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    borders = [size]
    for step in reversed(previous):
        borders.append(int(step[borders[-1]]))
    return (0, *reversed(borders))
