"""GPU shapes: equality without node names, packing and canonical counts."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape, canonical_gpu_counts


def test_shapes_are_equal_in_any_order_of_nodes() -> None:
    assert GpuShape.from_node_counts([("a", 2), ("b", 8), ("a", 4), ("a", 2)]) == GpuShape(
        (GpuGroup("a", 1, 4), GpuGroup("a", 2, 2), GpuGroup("b", 1, 8))
    )
    assert GpuShape.from_node_counts([("a", 2), ("a", 4)]) == GpuShape.from_node_counts([("a", 4), ("a", 2)])


@pytest.mark.parametrize(("gpus", "text"), [(3, "1x3 a"), (8, "1x8 a"), (16, "2x8 a"), (20, "2x8 a + 1x4 a")])
def test_packed_shape_fills_all_nodes_except_the_last(gpus: int, text: str) -> None:
    shape = GpuShape.packed("a", gpus, 8)
    assert (str(shape), shape.gpus, shape.nodes) == (text, gpus, -(-gpus // 8))


@pytest.mark.parametrize(("nodes", "per_node"), [(0, 1), (1, 0), (-1, 8)])
def test_empty_group_is_rejected(nodes: int, per_node: int) -> None:
    with pytest.raises(ValueError, match="nodes and gpus_per_node must be at least 1"):
        GpuGroup("a", nodes, per_node)


@pytest.mark.parametrize(
    ("min_gpus", "max_gpus", "counts"),
    [
        (1, 4, (1, 2, 3, 4)),
        (3, 3, (3,)),
        (6, 20, (6, 7, 8, 16, 20)),
        (12, 40, (12, 16, 24, 32, 40)),
        (16, 16, (16,)),
    ],
)
def test_canonical_counts_are_the_ends_counts_within_a_node_and_whole_nodes(
    min_gpus: int, max_gpus: int, counts: tuple[int, ...]
) -> None:
    assert canonical_gpu_counts(min_gpus, max_gpus, 8) == counts


def test_pickled_shape_is_found_in_a_mapping_of_another_process() -> None:
    """Strings hash differently there, so a pickled hash would be wrong."""
    script = (
        "import pickle, sys; shape = pickle.load(sys.stdin.buffer); print(shape in {type(shape).packed('t4', 3, 2)})"
    )
    sent = pickle.dumps(GpuShape.packed("t4", 3, 2))
    done = subprocess.run([sys.executable, "-c", script], input=sent, capture_output=True, check=True)
    assert done.stdout.strip() == b"True"
