"""Lengths of requests from two histograms that a server exports: one of prompts, one of outputs.

A histogram counts requests in buckets. Inside a bucket, lengths are spread so that the mean of the whole histogram is
the measured one, which servers export as the sum of all tokens. The two histograms do not tell which prompts
have which outputs, so `join_lengths` takes a correlation. The GPUs needed grow with it, because a cache holds a prompt
for as long as its output takes. A correlation of 1 therefore errs on the side of too many GPUs, whatever the truth is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from scheduler.domain.serving import LengthSummary, RequestLength
from scheduler.serving.request_mix import Floats, slice_by_weight

POINTS_MAX = 24
"""Lengths that a histogram becomes. Two histograms become a joint one of at most their product."""
OPEN_BUCKET_FACTOR = 2.5
"""Longest length of the last bucket relative to its lower bound: the next step of bounds such as 1, 2, 5, 10, 20."""
_POINTS_PER_BUCKET, _CURVE_POINTS = 8, 33
_SKEW_MAX, _SKEW_STEPS = 64.0, 40
_WEIGHT_MIN = 1e-7


class HistogramError(ValueError):
    """Buckets that are no histogram of tokens. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class TokenHistogram:
    """Requests by number of tokens.

    Attributes:
        bounds: upper bounds of the buckets in tokens, ascending. The last one is infinite.
        requests: requests in each bucket, or their rate.
        tokens: tokens of all of them. None: not known.
    """

    bounds: tuple[float, ...]
    requests: tuple[float, ...]
    tokens: float | None = None

    @property
    def total(self) -> float:
        return sum(self.requests)


def build_histogram(cumulative: Mapping[float, float], tokens: float | None = None) -> TokenHistogram:
    """Return the histogram of cumulative buckets, by upper bound.

    A bucket that is missing or not a number merges with the next one. A bucket below the one before it, as sums over
    servers of which one has restarted may be, counts as equal to it.

    Raises:
        HistogramError: the bucket without an upper bound is missing or not a number.
    """
    if not isfinite(cumulative.get(inf, inf)):
        raise HistogramError('the bucket le="+Inf" is missing or not a number. Keep the label `le` and all buckets')
    known = sorted((bound, count) for bound, count in cumulative.items() if isfinite(count) and bound > 0)
    levels = np.maximum.accumulate(np.array([max(count, 0.0) for _, count in known]))
    requests = np.diff(levels, prepend=0.0)
    is_known = tokens is not None and isfinite(tokens) and tokens > 0
    return TokenHistogram(tuple(bound for bound, _ in known), tuple(requests.tolist()), tokens if is_known else None)


def join_lengths(
    prompts: TokenHistogram, outputs: TokenHistogram, *, correlation: float = 0.0
) -> tuple[RequestLength, ...]:
    """Return the lengths of requests with these histograms, with weights that sum to 1.

    Args:
        correlation: rank correlation of prompt and output, -1 to 1. A part of the requests as large as its absolute
            value has the longest outputs with the longest prompts, or with the shortest if it is negative. In the
            others, both are independent.

    Raises:
        HistogramError: a histogram has no requests, or no bucket with a bound and no sum of tokens.
    """
    (prompt_tokens, prompt_shares), (output_tokens, output_shares) = (
        _merge_points(*_spread(each)) for each in (prompts, outputs)
    )
    weights = (1 - abs(correlation)) * np.outer(prompt_shares, output_shares)
    if correlation:
        flip = slice(None, None, 1 if correlation > 0 else -1)
        ordered = _pair_in_order(prompt_shares, output_shares[flip])[:, flip]
        weights = weights + abs(correlation) * ordered
    rows: dict[tuple[int, int], float] = {}
    for at, prompt in enumerate(prompt_tokens.tolist()):
        for other, output in enumerate(output_tokens.tolist()):
            if (weight := float(weights[at, other])) > _WEIGHT_MIN:
                pair = max(round(prompt), 1), max(round(output), 1)
                rows[pair] = rows.get(pair, 0.0) + weight
    return tuple(RequestLength(prompt, output, weight) for (prompt, output), weight in sorted(rows.items()))


def clip_lengths(lengths: Iterable[RequestLength], kv_tokens: int) -> tuple[RequestLength, ...]:
    """Return the lengths without tokens that a cache of `kv_tokens` does not hold: a request that was served fits."""
    clipped: dict[tuple[int, int], float] = {}
    for each in lengths:
        prompt = min(each.prompt, max(kv_tokens - 1, 1))
        pair = prompt, min(each.output, max(kv_tokens - prompt, 1))
        clipped[pair] = clipped.get(pair, 0.0) + each.requests
    return tuple(RequestLength(prompt, output, weight) for (prompt, output), weight in clipped.items())


@lru_cache(maxsize=256)
def summarize_lengths(lengths: tuple[RequestLength, ...]) -> LengthSummary:
    """Return means and 95th percentiles of at least one length."""
    shares = np.array([each.requests for each in lengths])
    shares = shares / shares.sum()
    sides = (np.array([each.prompt for each in lengths]), np.array([each.output for each in lengths]))
    (prompt_mean, prompt_p95), (output_mean, output_p95) = (_summarize_side(tokens, shares) for tokens in sides)
    return LengthSummary(prompt_mean, prompt_p95, output_mean, output_p95)


def _summarize_side(tokens: NDArray[np.int64], shares: Floats) -> tuple[float, float]:
    order = np.argsort(tokens, kind="stable")
    at = int(np.searchsorted(np.cumsum(shares[order]), 0.95 - 1e-12))
    return float(tokens @ shares), float(tokens[order][min(at, len(tokens) - 1)])


def _spread(histogram: TokenHistogram) -> tuple[Floats, Floats]:
    """Return lengths and their shares, with the measured mean as far as the buckets allow it.

    The positions in a bucket, from 0 to 1, follow a smooth curve through the cumulative shares at all bounds. They are
    raised to one power for all buckets that gives the mean. Without a sum of tokens, the power is 1.
    """
    if not histogram.total > 0:
        raise HistogramError("the histogram has no requests")
    mean = None if histogram.tokens is None else histogram.tokens / histogram.total
    uppers = np.array(histogram.bounds)
    lowers = np.concatenate([[0.0], uppers[:-1]])
    if lowers[-1] <= 0:
        if mean is None:
            raise HistogramError("the histogram has no bucket with an upper bound, and no sum of tokens")
        return np.array([mean]), np.ones(1)
    uppers[-1] = OPEN_BUCKET_FACTOR * lowers[-1]
    shares = np.repeat(np.array(histogram.requests) / histogram.total, _POINTS_PER_BUCKET) / _POINTS_PER_BUCKET
    positions = _find_positions(uppers, np.cumsum(histogram.requests) / histogram.total)

    def place(skew: float) -> Floats:
        return np.asarray(lowers[:, None] + (uppers - lowers)[:, None] * positions**skew).ravel()

    tokens = place(1.0 if mean is None else _find_skew(lambda skew: float(place(skew) @ shares), mean))
    if mean is not None and histogram.requests[-1] > 0:
        missing = max(mean - float(tokens @ shares), 0.0)  # lengths beyond what the open bucket was taken to hold
        tokens[-_POINTS_PER_BUCKET:] += missing * histogram.total / histogram.requests[-1]
    used = shares > 0
    return tokens[used], shares[used]


def _find_positions(uppers: Floats, cumulative: Floats) -> Floats:
    """Return where lengths lie in their buckets, 0 to 1, of shape [buckets, _POINTS_PER_BUCKET]."""
    from scipy.interpolate import PchipInterpolator  # slow to load, and most processes read no histograms

    ends = np.concatenate([[min(0.5, uppers[0] / 2)], uppers])
    levels = np.concatenate([[0.0], cumulative])
    curve = PchipInterpolator(np.log(ends), levels)
    evenly = (np.arange(_POINTS_PER_BUCKET) + 0.5) / _POINTS_PER_BUCKET
    rows = []
    for low, high, start, end in zip(ends, ends[1:], levels, levels[1:], strict=False):
        grid = np.linspace(low, high, _CURVE_POINTS)
        wanted = start + evenly * (end - start)
        rows.append((np.interp(wanted, curve(np.log(grid)), grid) - low) / (high - low))
    return np.stack(rows)


def _find_skew(compute_mean: Callable[[float], float], mean: float) -> float:
    """Return the exponent that gives the mean, or the nearest one. The mean falls as the exponent grows."""
    low, high = 1 / _SKEW_MAX, _SKEW_MAX
    for _ in range(_SKEW_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if compute_mean(middle) > mean else (low, middle)
    return low


def _merge_points(tokens: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Return at most POINTS_MAX lengths, ascending, with the same mean."""
    if len(tokens) > POINTS_MAX:
        slices = slice_by_weight(tokens, shares, POINTS_MAX)
        _, slices = np.unique(slices, return_inverse=True)
        merged = np.bincount(slices, weights=shares).astype(np.float64)
        tokens, shares = np.bincount(slices, weights=shares * tokens) / merged, merged
    return tokens, shares


def _pair_in_order(rows: Floats, columns: Floats) -> Floats:
    """Return the joint shares, of shape [rows, columns], that pair small with small and large with large."""
    row_ends, column_ends = np.cumsum(rows), np.cumsum(columns)
    row_starts, column_starts = row_ends - rows, column_ends - columns
    ends = np.minimum(row_ends[:, None], column_ends[None, :])
    return np.asarray(np.clip(ends - np.maximum(row_starts[:, None], column_starts[None, :]), 0.0, None))
