"""RequestMix: how often requests arrive at a pool, and how long their prompts and outputs are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

BINS_MAX = 1_024
"""Most rows of a histogram. More rows change a capacity by less than its error, but cost time."""
_SLICES = 32

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthCount:
    """Requests with one pair of lengths: mean prompt and output in tokens, at least 1, and their number or weight."""

    prompt: float
    output: float
    requests: float


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Demand for a model.

    Attributes:
        rate_per_s: requests per second, above 0.
        lengths: joint histogram of prompt and output lengths.
        arrival_scv: squared coefficient of variation of the times between arrivals; 1 is Poisson, more is bursty.
    """

    rate_per_s: float
    lengths: tuple[LengthCount, ...]
    arrival_scv: float = 1.0

    def __post_init__(self) -> None:
        for field, value in (("rate_per_s", self.rate_per_s), ("arrival_scv", self.arrival_scv)):
            if not (isfinite(value) and value > 0):
                raise ValueError(f"`{field}` is {value}. Use a finite number above 0.")
        if not self.lengths:
            raise ValueError("`lengths` is empty. Give at least one pair of prompt and output length.")
        for each in self.lengths:
            if not (each.prompt >= 1 and each.output >= 1 and each.requests > 0):
                raise ValueError(f"`lengths` contains {each}. Use tokens of at least 1, and requests above 0.")

    def with_rate(self, rate_per_s: float) -> RequestMix:
        return replace(self, rate_per_s=rate_per_s)

    @property
    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Prompts and outputs in tokens, and the shares of requests, which sum to 1; each of shape [rows]."""
        prompts = np.array([each.prompt for each in self.lengths], dtype=np.float64)
        outputs = np.array([each.output for each in self.lengths], dtype=np.float64)
        requests = np.array([each.requests for each in self.lengths], dtype=np.float64)
        return prompts, outputs, requests / requests.sum()


def build_request_mix(
    rate_per_s: float, pairs: Iterable[tuple[int, int]], *, arrival_scv: float = 1.0, repeats: Iterable[float] = ()
) -> RequestMix:
    """Return the mix of requests with the lengths of a sample.

    At most BINS_MAX rows are kept. Rows are merged where neither requests nor tokens are many, so that the long tail,
    which decides about waiting, stays exact.

    Args:
        pairs: (prompt, output) in tokens of each request.
        repeats: number of requests of each pair; by default 1.

    Raises:
        ValueError: there is no pair, a length is below 1, or rate or burstiness is out of range.
    """
    rows = np.array([*pairs], dtype=np.float64).reshape(-1, 2)
    counts = np.array([*repeats], dtype=np.float64)
    if not counts.size:
        counts = np.ones(len(rows))
    if len(rows) and len(counts) == len(rows):
        rows, counts = _merge_equal(rows, counts)
    if len(rows) > BINS_MAX:
        rows, counts = _merge_rows(rows, counts)
    lengths = tuple(
        LengthCount(float(prompt), float(output), float(count))
        for (prompt, output), count in zip(rows, counts, strict=True)
    )
    return RequestMix(rate_per_s, lengths, arrival_scv)


def _merge_equal(rows: Floats, counts: Floats) -> tuple[Floats, Floats]:
    found, inverse = np.unique(rows, axis=0, return_inverse=True)
    return found, np.bincount(inverse.ravel(), weights=counts, minlength=len(found)).astype(np.float64)


def _merge_rows(rows: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return the means of bins: slices of equal weight by output, and in each slice bins of equal weight by prompt."""
    slices = slice_by_weight(rows[:, 1], counts, _SLICES)
    bins = np.empty(len(rows), np.int64)
    per_slice = BINS_MAX // _SLICES
    for number in range(_SLICES):
        inside = np.flatnonzero(slices == number)
        if inside.size:
            bins[inside] = number * per_slice + slice_by_weight(rows[inside, 0], counts[inside], per_slice)
    _, bins = np.unique(bins, return_inverse=True)
    weights = np.bincount(bins, weights=counts).astype(np.float64)
    sums = [np.bincount(bins, weights=counts * rows[:, side]) for side in (0, 1)]
    return np.stack(sums, axis=1) / weights[:, None], weights


def slice_by_weight(tokens: Floats, counts: Floats, slices: int) -> NDArray[np.int64]:
    """Return the slice of each row; a slice has about as many requests plus tokens plus squared tokens as any other."""
    order = np.argsort(tokens, kind="stable")
    powers = [counts * tokens**power for power in (0, 1, 2)]
    weight = np.cumsum(sum(each / each.sum() for each in powers)[order])
    numbers = np.empty(len(tokens), np.int64)
    numbers[order] = np.minimum((weight - 1e-9) / weight[-1] * slices, slices - 1).astype(np.int64)
    return numbers
