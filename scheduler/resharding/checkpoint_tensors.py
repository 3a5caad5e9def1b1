"""The tensors of any checkpoint as the planner of resharding sees them, and the parts that each rank of a plan holds.

Layer and split of a tensor follow from its name. Any layout can be loaded from any checkpoint, so a name that is not
recognised costs bytes and never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.resharding.placement import TensorSpec, TensorSplit
from scheduler.resharding.shards import Shard, compute_shards

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")
_IN_FRONT = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe|\w*embd\w*)(?:\.|$)")
_BY_ROWS = re.compile(
    r"\.(?:[qkv]_proj|w[qkv]|qkv|query_key_value|gate_proj|up_proj|fc1|w1|w3|dense_h_to_4h)\.weight\b"
)
_BY_COLUMNS = re.compile(r"\.(?:o_proj|wo|out_proj|down_proj|fc2|w2|dense_4h_to_h)\.weight\b")
_GPT2_OUTWARD = re.compile(r"\.(?:[cq]_attn|c_fc)\.weight\b")
_GPT2_BACK = re.compile(r"\.c_proj\.weight\b")
_EXPERTS = re.compile(r"\.experts?\b")


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part of the tensor `name`: where it begins in each dimension, and its shape."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def describe_tensors(
    shapes: Mapping[str, tuple[int, ...]], element_bytes: Mapping[str, int], *, layers: int
) -> tuple[TensorSpec, ...]:
    """Return the tensors of a checkpoint for a plan of so many layers, without empty ones.

    Tensors of embeddings belong to the first layer, and others without a number, such as the head, to the last.

    Raises:
        ValueError: the names have another number of layers.
    """
    numbers = {name: int(match[1]) for name in shapes if (match := _LAYER.search(name))}
    found = max(numbers.values(), default=-1) + 1
    if found != layers:
        raise ValueError(f"the plan has {layers} layers, but the names of the checkpoint's tensors have {found}")
    outward = [shape for name, shape in shapes.items() if _GPT2_OUTWARD.search(name) and len(shape) == 2]
    # Transformers stores these matrices of GPT-2 as inputs by outputs (Conv1D), and others, such as nanoGPT, as usual.
    is_transposed = any(rows < columns for rows, columns in outward)
    specs = []
    for name, shape in sorted(shapes.items()):
        if prod(shape):
            layer = numbers.get(name, 0 if _IN_FRONT.search(name) else layers - 1)
            split = _find_split(name, is_transposed=is_transposed)
            specs.append(_describe_tensor(name, layer, shape, element_bytes[name], split))
    return tuple(specs)


def compute_held_parts(
    plan: ParallelPlan, tensors: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[NamedPart, ...], ...]:
    """Return the parts of the tensors that each rank of the plan holds, in the tensors' own dimensions.

    Raises:
        ValueError: the plan is inconsistent, or the tensors belong to other layers than it has.
    """
    return tuple(
        tuple(_describe_part(tensors[shard.tensor], shapes[tensors[shard.tensor].name], shard) for shard in shards)
        for shards in compute_shards(plan, tensors)
    )


def _find_split(name: str, *, is_transposed: bool) -> TensorSplit:
    """Return how tensor parallelism splits the matrix. `is_transposed`: matrices of GPT-2 are inputs by outputs."""
    if _BY_ROWS.search(name) or (_GPT2_BACK if is_transposed else _GPT2_OUTWARD).search(name):
        return TensorSplit.ROWS
    if _BY_COLUMNS.search(name) or (_GPT2_OUTWARD if is_transposed else _GPT2_BACK).search(name):
        return TensorSplit.COLUMNS
    return TensorSplit.NONE


def _describe_tensor(
    name: str, layer: int, shape: tuple[int, ...], element_bytes: int, split: TensorSplit
) -> TensorSpec:
    experts = shape[0] if len(shape) == 3 and _EXPERTS.search(name) else 0
    matrix = shape[1:] if experts else shape
    rows, columns = (matrix[0], prod(matrix[1:])) if matrix else (1, 1)
    split = split if len(matrix) == 2 else TensorSplit.NONE
    return TensorSpec(name, layer, (rows, columns), element_bytes, split, experts)


def _describe_part(tensor: TensorSpec, shape: tuple[int, ...], shard: Shard) -> NamedPart:
    if not shape:
        return NamedPart(tensor.name, (), ())
    axes: tuple[tuple[int, int], ...]
    if tensor.experts:
        axes = (shard.experts, shard.rows, shard.columns)
    elif len(shape) == 2:
        axes = (shard.rows, shard.columns)
    else:
        # Further dimensions are never split.
        axes = (shard.rows, *((0, length) for length in shape[1:]))
    return NamedPart(tensor.name, tuple(first for first, _ in axes), tuple(end - first for first, end in axes))
