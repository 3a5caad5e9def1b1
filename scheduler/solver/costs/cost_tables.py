"""CostTables: every cost of one (pipeline degree, micro-batches) pair as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.memory_cost import kept_bytes, state_bytes, working_bytes
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.time_cost import border_time_s, hand_over_time_s, layer_time_s, reshard_time_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Costs by layer type, because equal layers cost the same.

    Shapes, for L layers of T types, S strategies, K layouts (tensor degrees) and P stages:

        types          [L]        type of each layer
        layouts        [S]        layout of each strategy
        time_s         [T, S]     one micro-batch through one layer
        state_bytes    [T, S]     of one layer
        kept_bytes     [T, S]     of one layer and one micro-batch in flight
        working_bytes  [S]        buffer of a stage that uses the strategy; a stage needs the largest
        reshard_s      [T, K, K]  after a layer, from its layout to the next layer's
        border_s       [T, S]     gathering at a stage's border
        hand_over_s    [P-1, L+1] at border p if the next stage begins with layer a; infinite for a = 0 and a = L
    """

    strategies: tuple[LayerStrategy, ...]
    types: Ints
    layouts: Ints
    time_s: Floats
    state_bytes: Ints
    kept_bytes: Ints
    working_bytes: Ints
    reshard_s: Floats
    border_s: Floats
    hand_over_s: Floats


def cost_tables(layers: tuple[Layer, ...], options: tuple[LayerStrategy, ...], setting: Setting) -> CostTables:
    """Evaluates the cost model once per layer type and strategy."""
    number = {layer: index for index, layer in enumerate(dict.fromkeys(layers))}
    kinds = tuple(number)
    types = np.array([number[layer] for layer in layers], dtype=np.int64)
    degrees = sorted({option.tp for option in options})
    leaders = [next(option for option in options if option.tp == degree) for degree in degrees]
    return CostTables(
        strategies=options,
        types=types,
        layouts=np.array([degrees.index(option.tp) for option in options], dtype=np.int64),
        time_s=np.array([[layer_time_s(kind, option, setting) for option in options] for kind in kinds]),
        state_bytes=np.array([[state_bytes(kind, option, setting) for option in options] for kind in kinds]),
        kept_bytes=np.array([[kept_bytes(kind, option, setting) for option in options] for kind in kinds]),
        working_bytes=np.array([working_bytes(kinds, option, setting) for option in options]),
        reshard_s=np.array(
            [
                [[reshard_time_s(kind, before=one, after=two, setting=setting) for two in leaders] for one in leaders]
                for kind in kinds
            ]
        ),
        border_s=np.array([[border_time_s(kind, option, setting) for option in options] for kind in kinds]),
        hand_over_s=_hand_overs(kinds, types, setting),
    )


def _hand_overs(kinds: tuple[Layer, ...], types: Ints, setting: Setting) -> Floats:
    table = np.full((setting.stages - 1, len(types) + 1), np.inf)
    for cut in range(setting.stages - 1):
        by_kind = np.array([hand_over_time_s(kind, cut=cut, setting=setting) for kind in kinds])
        table[cut, 1:-1] = by_kind[types[:-1]]
    return table
