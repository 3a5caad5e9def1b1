"""Lengths of samples: a file with one length in each line, and the histogram of them in a job document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from scheduler.domain.scaling_curve import LengthHistogram

BINS_MAX = 256
RATIO_STEP = 1.002


def read_lengths(file: Path, *, context: int = 0) -> tuple[int, ...]:
    """Return the lengths in a file, one in each line.

    Args:
        context: longest sequence of the model; 0 if it is not known.

    Raises:
        ValueError: the file cannot be read, holds no length, or a length is no whole number from 1 to `context`.
    """
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`--lengths` is {str(file)!r}, which cannot be read: {error}") from None
    if not lines:
        raise ValueError(f"`--lengths` is {str(file)!r}, which is empty. Write one length in tokens in each line.")
    for number, text in enumerate(lines, 1):
        if not text.isascii() or not text.isdigit() or int(text) < 1 or (context and int(text) > context):
            allowed = f"from 1 to {context}, the longest sequence of the model" if context else "of at least 1"
            raise ValueError(
                f"`--lengths`: length {number} of {str(file)!r} is {text!r}. Use a whole number {allowed}."
            )
    return tuple(map(int, lines))


def build_histogram(lengths: Iterable[int]) -> LengthHistogram:
    """Return the histogram with at most BINS_MAX bins. Lengths of a bin count as their mean; the longest stays exact.

    Bins of equal ratio keep the relative error of every length small, which FlexSP's bins by dynamic programming
    (arXiv 2412.01523, section 4.2) do for the sum of errors.
    """
    counts, ratio = Counter(lengths), 1.0
    while len(borders := _cut(counts, ratio)) - 1 > BINS_MAX:
        ratio *= RATIO_STEP
    return tuple(_merge(counts, begin, end) for begin, end in pairwise(borders))


def _cut(counts: Mapping[int, int], ratio: float) -> list[int]:
    """Return the shortest length of each bin and a last border above all lengths. The longest has its own bin."""
    longest, borders = max(counts), list[int]()
    for tokens in sorted(counts):
        if not borders or tokens > borders[-1] * ratio or tokens == longest:
            borders.append(tokens)
    return [*borders, longest + 1]


def _merge(counts: Mapping[int, int], begin: int, end: int) -> tuple[int, int]:
    """Return the mean length, and the number of samples, of the lengths from `begin` up to but not including `end`."""
    inside = {tokens: samples for tokens, samples in counts.items() if begin <= tokens < end}
    samples = sum(inside.values())
    return round(sum(tokens * count for tokens, count in inside.items()) / samples), samples
