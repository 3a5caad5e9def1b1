"""Communication time of layers, for all types and spreads at once: arrays [T, B], of one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.solver.costs.collectives import Groups, all_reduce_s, all_to_all_s, send_s
from scheduler.solver.costs.layer_table import LayerTable
from scheduler.solver.costs.overlap import overlapped_s
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.spreads import Spreads
from scheduler.solver.instance import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Seconds of the activations' messages that computing does not hide.

    tensor, ulysses, expert: of one forward pass; the backward pass, where there is one, has as many. `ring_s` and
    `ring_back_s`: what ring attention adds to either pass. `attached_s`: of embedding and head, in both passes.
    """

    tensor_s: Floats
    ulysses_s: Floats
    ring_s: Floats
    ring_back_s: Floats
    expert_s: Floats
    attached_s: Floats


def messages(table: LayerTable, spread: Spreads, attention_s: Floats, setting: Setting) -> Messages:
    """Tensor-parallel all-reduces, Ulysses' all-to-alls, ring attention's exchange, and expert dispatch and combine.

    With the sequence sharded an all-reduce is a reduce-scatter and an all-gather, which take as long in a node.
    """
    one = np.ones_like(spread.tp)
    rows_bytes = table.boundary_bytes * (spread.samples / spread.context)
    message_s = all_reduce_s(rows_bytes, Groups.of(spread.tp, one, setting))
    exchange_s = _ring_s(table, rows_bytes / spread.tp, spread, setting)
    hidden = setting.hardware.overlap_coefficient
    return Messages(
        tensor_s=table.tensor_messages * message_s,
        ulysses_s=_ulysses_s(table, rows_bytes / spread.tp, spread, setting),
        ring_s=overlapped_s(attention_s, exchange_s, hidden) - attention_s,
        ring_back_s=overlapped_s(2 * attention_s, 2 * exchange_s, hidden) - 2 * attention_s,
        expert_s=_expert_s(table, rows_bytes, spread, setting),
        attached_s=table.attached_messages * message_s,
    )


def _ulysses_s(table: LayerTable, share_bytes: Floats, spread: Spreads, setting: Setting) -> Floats:
    """Queries, keys, values and the output change from split tokens to split heads and back: four all-to-alls
    (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2)."""
    groups = Groups.of(spread.ulysses, spread.tp, setting)
    if not (spread.ulysses > 1).any():
        return np.zeros(share_bytes.shape)
    attends = np.where(table.attention_flops > 0, 1.0, 0.0)
    ends_s = 2 * all_to_all_s(share_bytes * attends, groups)
    return ends_s + 2 * all_to_all_s(share_bytes * attends * table.key_value_share, groups)


def _ring_s(table: LayerTable, share_bytes: Floats, spread: Spreads, setting: Setting) -> Floats:
    """Keys and values travel once around the ring (ring - 1 hops) while attention works on the block at hand; the
    backward pass sends their gradients along (USP, arXiv 2405.07719, section 3)."""
    if not (spread.ring > 1).any():
        return np.zeros(share_bytes.shape)
    groups = Groups.of(spread.ring, spread.tp * spread.ulysses, setting)
    block_bytes = 2 * share_bytes * table.key_value_share * np.where(table.attention_flops > 0, 1.0, 0.0)
    hop_s = send_s(block_bytes, groups.nodes > 1, setting.hardware, setting.node_gpus_min)
    return np.where(block_bytes > 0, (spread.ring - 1) * hop_s, 0.0)


def _expert_s(table: LayerTable, rows_bytes: Floats, spread: Spreads, setting: Setting) -> Floats:
    """Dispatch and combine: each token's row goes to its experts and comes back (GShard, arXiv 2006.16668). The
    fullest rank takes `expert_imbalance` times the mean."""
    if not (spread.ep > 1).any():
        return np.zeros(rows_bytes.shape)
    share_bytes = rows_bytes * table.experts_per_token * np.where(table.experts > 0, 1.0, 0.0) / spread.tp
    moved = share_bytes * setting.hardware.expert_imbalance
    return 2 * all_to_all_s(moved, Groups.of(spread.ep, spread.tp, setting))
