"""What the state of a model consists of: tensors, how parallelism may cut them, and what an element weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import isfinite

_LAYER_BYTES = 5040.0 * 2**18
"""Near a real layer's, so that rounding to whole bytes tells nothing apart; all usual degrees divide it."""

_COARSE_SIDE = 2**12 * 3**2 * 5 * 7
"""Rows and columns of tensors whose shape is not known: all usual degrees divide it, so that cuts are equal."""


class Split(StrEnum):
    """Which axis of a weight [rows, columns] = [outputs, inputs] tensor parallelism cuts (Megatron-LM, arXiv
    1909.08053, section 3): rows of a column-parallel linear, columns of a row-parallel one, none of what every tensor
    rank holds whole."""

    ROWS = "rows"
    COLUMNS = "columns"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Extent:
    """Shape and split of a tensor: tensors of equal extent are cut alike. `experts` is 0 for a dense tensor."""

    rows: int
    columns: int
    split: Split
    experts: int = 0


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One parameter with its optimizer state.

    `layer` counts as the plan counts. `shape` is (rows, columns); a vector has one column. With `experts` above 0 the
    tensor is a stack of as many such matrices, and expert parallelism cuts the stack. `element_bytes` is what one
    element weighs with its optimizer state: 12 under AdamW in fp32, 14 with bf16 weights and an fp32 master.
    """

    name: str
    layer: int
    shape: tuple[int, int]
    element_bytes: float
    split: Split = Split.NONE
    experts: int = 0

    def __post_init__(self) -> None:
        for field, value, least in (
            ("layer", self.layer, 0),
            ("experts", self.experts, 0),
            ("shape", min(self.shape), 1),
        ):
            if value < least:
                raise ValueError(f"tensor {self.name!r}: {field} is {value}; it must be {least} or more")
        if not (isfinite(self.element_bytes) and self.element_bytes >= 0):
            raise ValueError(f"tensor {self.name!r}: element_bytes is {self.element_bytes}; it must be 0 or more")

    @property
    def extent(self) -> Extent:
        return Extent(*self.shape, self.split, self.experts)

    @property
    def total_bytes(self) -> float:
        return self.shape[0] * self.shape[1] * max(1, self.experts) * self.element_bytes


def layer_tensors(layer_bytes: Sequence[float]) -> tuple[TensorFacts, ...]:
    """Coarse tensors for who knows only the bytes of state of each layer: one half column-parallel, one row-parallel.

    In a transformer layer that is nearly so: norms and biases are small. Experts count as dense.
    """
    elements = _COARSE_SIDE**2
    return tuple(
        TensorFacts(f"layer {layer} {split}", layer, (_COARSE_SIDE, _COARSE_SIDE), size_bytes / 2 / elements, split)
        for layer, size_bytes in enumerate(layer_bytes)
        for split in (Split.ROWS, Split.COLUMNS)
    )


@lru_cache(maxsize=256)
def equal_layers(layers: int) -> tuple[TensorFacts, ...]:
    """Coarse tensors of layers of one size, for who needs ratios alone."""
    return layer_tensors([_LAYER_BYTES] * layers)
