"""Positions of a part of a tensor in its row-major bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

# Gaps smaller than this are read together with their runs (data sieving: Thakur, Gropp and Lusk, Frontiers 1999),
# because a system call per run takes longer than reading the gap.
_MAX_SIEVED_GAP_BYTES = 64


@dataclass(frozen=True)
class ByteRuns:
    """Equally spaced runs of bytes in a piece: `count` runs of `length` bytes, `stride` apart, the first at `begin`."""

    begin: int
    count: int
    length: int
    stride: int

    @property
    def is_sieved(self) -> bool:
        return self.count > 1 and self.stride - self.length < _MAX_SIEVED_GAP_BYTES

    @property
    def span(self) -> int:
        """Number of bytes from the first to the last, including gaps."""
        return (self.count - 1) * self.stride + self.length


def compute_byte_runs(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int
) -> Iterator[ByteRuns]:
    """Yield the positions of a part of a tensor in its row-major bytes, in the order of the part's elements.

    Args:
        shape: shape of the stored tensor.
        offsets: where the part begins in each dimension.
        lengths: shape of the part.
        item_bytes: bytes per element.
    """
    if prod(lengths) == 0:
        return
    strides = [item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # Everything behind the last axis that is cut is contiguous. The axis before it counts the runs.
    cut = max((axis for axis, length in enumerate(lengths) if length < shape[axis]), default=0)
    counted = max(cut - 1, 0)
    run_bytes = item_bytes * prod(lengths[cut:])
    count = lengths[counted] if counted < cut else 1
    stride = strides[counted] if counted < cut else run_bytes
    inner = sum(offset * step for offset, step in zip(offsets[counted:], strides[counted:], strict=True))
    for place in product(*(range(begin, begin + lengths[axis]) for axis, begin in enumerate(offsets[:counted]))):
        outer = sum(index * step for index, step in zip(place, strides[:counted], strict=True))
        yield ByteRuns(outer + inner, count, run_bytes, stride)


def compute_span(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int
) -> tuple[int, int, bool]:
    """Return the first byte of a part of a tensor, the end of its last byte, and whether it has no gaps."""
    size = item_bytes * prod(lengths)
    if size == 0:
        return 0, 0, True
    strides = [item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    begin = sum(offset * step for offset, step in zip(offsets, strides, strict=True))
    last = begin + sum((length - 1) * step for length, step in zip(lengths, strides, strict=True))
    return begin, last + item_bytes, last + item_bytes - begin == size
