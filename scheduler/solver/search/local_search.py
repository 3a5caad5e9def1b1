"""Local search from a choice of strategies for the layers of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_problem import StageProblem

_MAX_PAIRS_TRIED = 8
"""Number of the best pairs of moves that are tried until one has two different layers."""
_MOVES_AT_ONCE = 2
"""Layers that one step of the local search moves at most."""


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Changes of one layer to another strategy of its layout, within the buffer in use; parallel arrays."""

    layer: Ints
    strategy: Ints
    gain_s: Floats
    growth_bytes: Ints


def improve_choice(problem: StageProblem, allowed: Ints, choice: Ints) -> Ints:
    """Improve a choice by local search.

    Trade time for memory until the choice fits, then move one or two layers while it gets faster.
    """
    choice, at = choice.copy(), np.arange(len(choice))
    step_s, memory = problem.step_s[:, allowed], problem.memory_bytes[:, allowed]
    layouts, working = problem.layouts[allowed], problem.working_bytes[allowed]
    for _ in range(2 * len(choice)):
        buffer_bytes = int(problem.working_bytes[choice].max())
        held = problem.memory_bytes[at, choice]
        slack = problem.capacity_bytes - buffer_bytes - int(held.sum())
        usable = (layouts == problem.layouts[choice][:, None]) & (working <= buffer_bytes)
        if problem.host_bytes is not None:
            growth = problem.host_bytes[:, allowed] - problem.host_bytes[at, choice][:, None]
            usable &= growth <= problem.compute_host_slack(choice) // _MOVES_AT_ONCE
        layer, column = np.nonzero(usable & (allowed != choice[:, None]))
        if not len(layer):
            break
        moves = _Moves(
            layer=layer,
            strategy=allowed[column],
            gain_s=problem.step_s[at, choice][layer] - step_s[layer, column],
            growth_bytes=memory[layer, column] - held[layer],
        )
        steps = _find_leaner_move(moves) if slack < 0 else _find_faster_moves(moves, slack)
        if not len(steps):
            break
        choice[moves.layer[steps]] = moves.strategy[steps]
    return choice


def fit_host(problem: StageProblem, choice: Ints) -> Ints:
    """Return the choice, or one near it that needs less host memory, as far as the host has too little.

    Layers move to the strategies that need the least additional memory of the GPU per byte of the host.
    """
    if problem.host_bytes is None:
        return choice
    choice, at = choice.copy(), np.arange(len(choice))
    while problem.compute_host_slack(choice) < 0:
        freed = problem.host_bytes[at, choice][:, None] - problem.host_bytes
        growth = problem.memory_bytes - problem.memory_bytes[at, choice][:, None]
        rate = np.where(freed > 0, growth / np.maximum(freed, 1), inf)
        layer, strategy = np.unravel_index(int(np.argmin(rate)), rate.shape)
        if rate[layer, strategy] == inf:
            break
        choice[layer] = strategy
    return choice


def _find_leaner_move(moves: _Moves) -> Ints:
    """Return the move that frees memory at the least cost in time per byte."""
    rate = np.where(moves.growth_bytes < 0, moves.gain_s / np.minimum(moves.growth_bytes, -1), inf)
    best = int(np.argmin(rate))
    return np.array([best] if rate[best] < inf else [], dtype=np.int64)


def _find_faster_moves(moves: _Moves, slack: int) -> Ints:
    """Return the move, or the pair of moves of two layers, that gains most and grows by at most `slack`."""
    alone_s = np.where(moves.growth_bytes <= slack, moves.gain_s, -inf)
    single = int(np.argmax(alone_s))
    order = np.argsort(moves.growth_bytes, kind="stable")
    growth, gain_s = moves.growth_bytes[order], moves.gain_s[order]
    leads = np.maximum.accumulate(gain_s)
    leader = np.maximum.accumulate(np.where(gain_s == leads, np.arange(len(order)), 0))
    partner = np.searchsorted(growth, slack - growth, side="right") - 1
    total_s = np.where(partner >= 0, gain_s + leads[partner], -inf)
    for one in np.argsort(-total_s, kind="stable")[:_MAX_PAIRS_TRIED]:
        if total_s[one] <= max(alone_s[single], 0.0):
            break
        pair = order[[one, leader[partner[one]]]]
        if moves.layer[pair[0]] != moves.layer[pair[1]]:
            return np.asarray(pair)
    return np.array([single] if alone_s[single] > 0 else [], dtype=np.int64)
