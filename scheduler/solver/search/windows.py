"""Windows: the candidate stages of a chain of layers, equal ones counted once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler.solver.instance import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Two windows are equal if their layers have equal types in equal order and both or neither touch the same ends
    of the chain: they then cost the same at every position of a pipeline. With U different windows, T types:

        ids      [L+1, L+1]  number of the window of the layers a to b-1; -1 for a >= b
        counts   [U, T]      layers of each type in it, as floats for the sake of matrix products
        spans    [U, 2]      a and b of its first occurrence
    """

    types: Ints
    ids: Ints
    counts: Floats
    spans: Ints

    @property
    def lengths(self) -> Ints:
        return np.asarray(self.spans[:, 1] - self.spans[:, 0])


@lru_cache(maxsize=64)
def windows_of(types: tuple[int, ...], kinds: int) -> Windows:
    """All windows of the chain `types`, of which there are `kinds`."""
    layers = len(types)
    ids = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
    numbers: dict[tuple[bool, bool, tuple[int, ...]], int] = {}
    spans: list[tuple[int, int]] = []
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            key = (first == 0, end == layers, types[first:end])
            number = numbers.setdefault(key, len(numbers))
            if number == len(spans):
                spans.append((first, end))
            ids[first, end] = number
    single = np.eye(kinds)[np.array(types)]
    before = np.concatenate([np.zeros((1, kinds)), np.cumsum(single, axis=0)])
    cut = np.array(spans)
    return Windows(np.array(types, dtype=np.int64), ids, before[cut[:, 1]] - before[cut[:, 0]], cut)
