"""Local search: a good choice for a stage from one that the relaxation found, so that few labels are needed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.search.stage_problem import StageProblem

_PARTNERS = 8
"""Best pairs of moves to look through for one whose layers differ."""


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """One layer to another strategy of its layout, within the buffer in use; parallel arrays."""

    layer: Ints
    strategy: Ints
    gain_s: Floats
    growth_bytes: Ints


def improved(problem: StageProblem, allowed: Ints, choice: Ints) -> Ints:
    """Gives up time for memory until the choice fits; then moves one or two layers at once while it gets faster."""
    choice, at = choice.copy(), np.arange(len(choice))
    step_s, memory = problem.step_s[:, allowed], problem.memory_bytes[:, allowed]
    layouts, working = problem.layouts[allowed], problem.working_bytes[allowed]
    for _ in range(2 * len(choice)):
        buffer_bytes = int(problem.working_bytes[choice].max())
        held = problem.memory_bytes[at, choice]
        slack = problem.capacity_bytes - buffer_bytes - int(held.sum())
        usable = (layouts == problem.layouts[choice][:, None]) & (working <= buffer_bytes)
        layer, column = np.nonzero(usable & (allowed != choice[:, None]))
        if not len(layer):
            break
        moves = _Moves(
            layer=layer,
            strategy=allowed[column],
            gain_s=problem.step_s[at, choice][layer] - step_s[layer, column],
            growth_bytes=memory[layer, column] - held[layer],
        )
        steps = _leaner(moves) if slack < 0 else _faster(moves, slack)
        if not len(steps):
            break
        choice[moves.layer[steps]] = moves.strategy[steps]
    return choice


def _leaner(moves: _Moves) -> Ints:
    """The move that frees memory at the least cost in time a byte."""
    rate = np.where(moves.growth_bytes < 0, moves.gain_s / np.minimum(moves.growth_bytes, -1), inf)
    best = int(np.argmin(rate))
    return np.array([best] if rate[best] < inf else [], dtype=np.int64)


def _faster(moves: _Moves, slack: int) -> Ints:
    """The move, or the pair of moves of two layers, that gains most and grows by `slack` at most."""
    alone_s = np.where(moves.growth_bytes <= slack, moves.gain_s, -inf)
    single = int(np.argmax(alone_s))
    order = np.argsort(moves.growth_bytes, kind="stable")
    growth, gain_s = moves.growth_bytes[order], moves.gain_s[order]
    leads = np.maximum.accumulate(gain_s)
    leader = np.maximum.accumulate(np.where(gain_s == leads, np.arange(len(order)), 0))
    partner = np.searchsorted(growth, slack - growth, side="right") - 1
    total_s = np.where(partner >= 0, gain_s + leads[partner], -inf)
    for one in np.argsort(-total_s, kind="stable")[:_PARTNERS]:
        if total_s[one] <= max(alone_s[single], 0.0):
            break
        pair = order[[one, leader[partner[one]]]]
        if moves.layer[pair[0]] != moves.layer[pair[1]]:
            return np.asarray(pair)
    return np.array([single] if alone_s[single] > 0 else [], dtype=np.int64)
