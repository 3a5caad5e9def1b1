"""How the names and shapes of a checkpoint's tensors decide their split."""

from __future__ import annotations

import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.resharding.checkpoint_tensors import compute_held_parts, describe_tensors
from scheduler.resharding.placement import TensorSplit
from tests.builders_resharding import a_plan

ROWS, COLUMNS, NONE = TensorSplit.ROWS, TensorSplit.COLUMNS, TensorSplit.NONE
SHAPES = {
    "model.h.0.attn.c_attn.weight": (8, 24),
    "model.h.0.attn.c_proj.weight": (8, 8),
    "model.h.0.mlp.c_fc.weight": (8, 32),
    "model.h.0.mlp.c_proj.weight": (32, 8),
    "optimizer.state.h.0.mlp.c_proj.weight.exp_avg": (32, 8),
    "model.h.0.attn.c_attn.bias": (24,),
}
"""Tensors of GPT-2 in Transformers, whose Conv1D has inputs by outputs."""


def _find_splits(shapes: dict[str, tuple[int, ...]]) -> list[TensorSplit]:
    specs = {spec.name: spec for spec in describe_tensors(shapes, dict.fromkeys(shapes, 4), layers=1)}
    return [specs[name].split for name in shapes]


@pytest.mark.parametrize(
    ("shapes", "splits"),
    [
        pytest.param(SHAPES, [COLUMNS, ROWS, COLUMNS, ROWS, ROWS, NONE], id="Transformers"),
        pytest.param(
            {name: shape[::-1] for name, shape in SHAPES.items()},
            [ROWS, COLUMNS, ROWS, COLUMNS, COLUMNS, NONE],
            id="nanoGPT",
        ),
    ],
)
def test_projections_of_gpt2_are_split_along_their_outputs_or_inputs(
    shapes: dict[str, tuple[int, ...]], splits: list[TensorSplit]
) -> None:
    assert _find_splits(shapes) == splits


def test_ranks_of_a_plan_hold_halves_of_the_projections_of_gpt2() -> None:
    tensors = describe_tensors(SHAPES, dict.fromkeys(SHAPES, 4), layers=1)
    held = compute_held_parts(a_plan([[LayerStrategy(layers=1, tp=2)]]), tensors, SHAPES)
    parts = [{part.name: (part.offsets, part.lengths) for part in rank} for rank in held]
    name = "model.h.0.mlp.c_fc.weight"
    assert [rank[name] for rank in parts] == [((0, 0), (8, 16)), ((0, 16), (8, 16))]
    name = "model.h.0.mlp.c_proj.weight"
    assert [rank[name] for rank in parts] == [((0, 0), (16, 8)), ((16, 0), (16, 8))]
