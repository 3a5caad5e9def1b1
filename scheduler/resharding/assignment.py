"""The best assignment under several objectives, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def best_assignment(gains: Sequence[Floats]) -> list[int]:
    """The column of each row, each column once. Of all assignments with the most of `gains[0]` [n, n] those with the
    most of `gains[1]`, and so on.

    Gains are whole numbers whose sums stay below 2^53, so that nothing is rounded. An assignment is optimal under one
    objective if and only if all its edges are tight under that objective's dual (complementary slackness), so each
    later objective chooses among the tight edges of those before it.
    """
    cost = -gains[0]
    columns = _cheapest(cost)
    for gain in gains[1:]:
        cost = np.where(_tight(cost, columns), -gain, np.inf)
        columns = _cheapest(cost)
    return columns


def _cheapest(cost: Floats) -> list[int]:
    # Imported once a job is resized: it takes as long as a quarter of all else that a process has to import.
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # scipy ships no types

    return list(map(int, linear_sum_assignment(cost)[1]))


def _tight(cost: Floats, columns: Sequence[int]) -> NDArray[np.bool_]:
    """[n, n]: edges without reduced cost. Row i taking the column of row k instead of its own, and k being paid back
    what it loses, costs detour[i, k]; at an optimum no round trip of detours gains, so shortest paths over them exist
    and are a dual (Bellman-Ford)."""
    taken = cost[:, columns]
    detour = taken - np.diagonal(taken)
    price = detour.min(axis=1)
    for _ in range(len(cost)):
        shorter = (detour + price).min(axis=1)
        if np.array_equal(shorter, price):
            break
        price = shorter
    else:
        raise AssertionError("an optimal assignment has a dual")
    tight = np.empty(cost.shape, dtype=np.bool_)
    tight[:, columns] = detour - price[:, None] + price == 0
    return tight
