"""LayerTable: the figures of layer types as columns, so that all strategies are costed at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler.solver.costs.chain import Layer
from scheduler.solver.instance import Floats


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """One row a layer type; every array is [T, 1], figures as in Layer.

    Attributes:
        expert_flops: forward, of the experts that a sample's tokens visit; part of `flops`.
        key_value_share: size of keys and values over that of queries (grouped queries have fewer heads of them).
        tied_inside, trained, backward, attached_trained: 1 or 0.
    """

    flops: Floats
    attention_flops: Floats
    attached_flops: Floats
    expert_flops: Floats
    traffic_bytes: Floats
    dense_parameters: Floats
    expert_parameters: Floats
    unit_parameters: Floats
    activation_bytes: Floats
    selective_bytes: Floats
    replicated_bytes: Floats
    boundary_bytes: Floats
    attached_bytes: Floats
    attached_traffic_bytes: Floats
    attached_messages: Floats
    product_parameters: Floats
    columns: Floats
    tied_parameters: Floats
    tied_inside: Floats
    tensor_messages: Floats
    experts: Floats
    experts_per_token: Floats
    key_value_share: Floats
    trained: Floats
    backward: Floats
    attached_trained: Floats
    trained_head_parameters: Floats


@lru_cache(maxsize=64)
def layer_table(kinds: tuple[Layer, ...]) -> LayerTable:
    """The columns of `kinds`, in their order."""
    rows = [
        (
            kind.flops,
            kind.attention_flops,
            kind.attached_flops,
            _expert_flops(kind),
            kind.traffic_bytes,
            kind.parameters - kind.expert_parameters,
            kind.expert_parameters,
            kind.unit_parameters,
            kind.activation_bytes,
            kind.selective_bytes,
            kind.replicated_bytes,
            kind.boundary_bytes,
            kind.attached_bytes,
            kind.attached_traffic_bytes,
            kind.attached_messages,
            kind.product_parameters,
            kind.columns,
            kind.tied_parameters,
            kind.tied_inside,
            kind.tensor_messages,
            kind.experts,
            kind.experts_per_token,
            kind.heads / kind.attention_heads,
            kind.trained,
            kind.backward,
            kind.attached_trained,
            kind.trained_head_parameters,
        )
        for kind in kinds
    ]
    return LayerTable(*np.array(rows, dtype=np.float64).T[:, :, None])


def _expert_flops(kind: Layer) -> float:
    """Two a weight and token, over the experts that a token visits."""
    if not kind.experts:
        return 0.0
    visited = kind.expert_parameters * kind.experts_per_token / kind.experts
    return min(kind.flops, 2.0 * kind.tokens * visited)
