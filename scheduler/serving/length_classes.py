"""Runtimes by maximum length, and batches of requests with similar lengths.

A runtime that is compiled for one length pads each request to it. Arlo (ICPP'24) therefore runs several runtimes of
one model, each for requests up to its own maximum length. TurboTransformers (PPoPP'21, section 5) cuts a queue of
requests into batches so that little is padded. Both are exact dynamic programs here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np

from scheduler.serving.request_mix import Floats

CostFunction = Callable[[Floats], Floats]
"""Cost of requests of these lengths in tokens; positive, and at least as high for longer ones."""


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Requests of the lengths above `above` up to `limit` tokens, all padded to `limit`.

    `requests` is their number or weight, `cost` what they take when padded, `ideal` what they would take unpadded.
    """

    above: int
    limit: int
    requests: float
    cost: float
    ideal: float


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """All classes, ascending and adjoining."""

    classes: tuple[LengthClass, ...]

    @property
    def limits(self) -> tuple[int, ...]:
        return tuple(each.limit for each in self.classes)

    @property
    def padding_ratio(self) -> float:
        """Cost with padding over the cost without; 1 is no padding."""
        return sum(each.cost for each in self.classes) / sum(each.ideal for each in self.classes)


def compute_token_cost(lengths: Floats) -> Floats:
    """Return the length itself: cost in tokens, which matrix products are bound by."""
    return lengths


def choose_length_classes(
    counts: Mapping[int, float], classes: int, *, longest: int = 0, cost_of: CostFunction = compute_token_cost
) -> LengthClasses:
    """Return at most `classes` classes with the least padded cost.

    The dynamic program is exact over all lengths that occur. The best last border for a prefix of the lengths is the
    lowest of a set of lines whose slopes and query points are sorted, so a queue of the lines on their lower envelope
    makes it linear in the number of lengths.

    Args:
        counts: requests by length in tokens.
        longest: length that the last class must take, such as the model's context; 0 for the longest that occurs.

    Raises:
        ValueError: there is no length, one is below 1 or above `longest`, or `classes` is below 1.
    """
    if classes < 1:
        raise ValueError(f"`classes` is {classes}. Use a whole number of at least 1.")
    if not counts or min(counts) < 1:
        raise ValueError("`lengths` must contain at least one length, and each must be a whole number of at least 1.")
    if longest and max(counts) > longest:
        raise ValueError(f"`longest` is {longest}, but a request has {max(counts)} tokens. Use {max(counts)} or more.")
    lengths = np.array(sorted({*counts, *([longest] if longest else [])}))
    weights = np.array([counts.get(int(length), 0.0) for length in lengths])
    costs = np.asarray(cost_of(lengths.astype(np.float64)), dtype=np.float64)
    borders = _find_borders(np.concatenate([[0.0], np.cumsum(weights)]).tolist(), costs.tolist(), classes)
    ideals = np.concatenate([[0.0], np.cumsum(weights * costs)])
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    return LengthClasses(
        tuple(
            LengthClass(
                above=int(lengths[begin - 1]) if begin else 0,
                limit=int(lengths[end - 1]),
                requests=float(sums[end] - sums[begin]),
                cost=float((sums[end] - sums[begin]) * costs[end - 1]),
                ideal=float(ideals[end] - ideals[begin]),
            )
            for begin, end in pairwise(borders)
        )
    )


def _find_borders(sums: Sequence[float], costs: Sequence[float], classes: int) -> list[int]:
    """Return the borders of the classes as numbers of lengths below them, from 0 to all.

    `sums` are the requests of the first lengths, one entry more than `costs`, the cost of a request of each length.
    """
    size = len(costs)
    reached = [0.0] + [float("inf")] * size
    previous: list[list[int]] = []
    for _ in range(min(classes, size)):
        reached, chosen = _add_class(reached, sums, costs)
        previous.append(chosen)
        if len(previous) > 1 and chosen[size] == size:
            previous.pop()
            break
    borders = [size]
    for chosen in reversed(previous):
        borders.append(chosen[borders[-1]])
    return sorted(set(borders))


def _add_class(
    reached: Sequence[float], sums: Sequence[float], costs: Sequence[float]
) -> tuple[list[float], list[int]]:
    """Return the least cost of each prefix with one class more, and the prefix before that class.

    A prefix may also stay as it is, without the further class.
    """
    lines: deque[tuple[float, float, int]] = deque()
    result, chosen = list(reached), list(range(len(reached)))
    for end in range(1, len(reached)):
        begin = end - 1
        if reached[begin] < float("inf"):
            line = (-sums[begin], reached[begin], begin)
            while len(lines) > 1 and _is_covered(lines[-2], lines[-1], line):
                lines.pop()
            lines.append(line)
        cost = costs[end - 1]
        while len(lines) > 1 and lines[1][0] * cost + lines[1][1] <= lines[0][0] * cost + lines[0][1]:
            lines.popleft()
        if lines and (value := lines[0][0] * cost + lines[0][1] + cost * sums[end]) < result[end]:
            result[end], chosen[end] = value, lines[0][2]
    return result, chosen


def _is_covered(
    first: tuple[float, float, int], middle: tuple[float, float, int], last: tuple[float, float, int]
) -> bool:
    """Return whether the middle of three lines with falling slopes is nowhere below both others."""
    return (last[1] - first[1]) * (first[0] - middle[0]) <= (middle[1] - first[1]) * (first[0] - last[0])


def split_replicas(loads: Sequence[float], replicas: int) -> tuple[int, ...]:
    """Return replicas for each class, so that the most loaded replica of any class has the least load.

    Giving each further replica to the class that is most loaded is optimal for the largest load over replicas.

    Args:
        loads: work per second of each class, as rate times cost; a class without load gets none.

    Raises:
        ValueError: there are fewer replicas than classes with load.
    """
    active = [number for number, load in enumerate(loads) if load > 0]
    if replicas < len(active):
        raise ValueError(
            f"`replicas` is {replicas}, but {len(active)} classes have requests. Use {len(active)} or more."
        )
    counts = [int(load > 0) for load in loads]
    heap = [(-loads[number], number) for number in active]
    heapify(heap)
    for _ in range(replicas - len(active) if active else 0):
        number = heap[0][1]
        counts[number] += 1
        heapreplace(heap, (-loads[number] / counts[number], number))
    return tuple(counts)


def cut_batches(
    lengths: Iterable[int], cost_of_batch: Callable[[Floats, int], Floats], *, requests_max: int = 0
) -> list[list[int]]:
    """Return the lengths in batches that take the least time in total, each batch ascending.

    Requests are sorted, because a batch of neighbours pads least. The dynamic program then tries every last batch of
    every prefix (TurboTransformers, PPoPP'21, algorithm 3).

    Args:
        cost_of_batch: cost of batches of these numbers of requests, of shape [sizes], padded to one length.
        requests_max: most requests of a batch; 0 for any number.

    Raises:
        ValueError: a length is below 1.
    """
    ordered = sorted(lengths)
    if ordered and ordered[0] < 1:
        raise ValueError(f"`lengths` contains {ordered[0]}. Use whole numbers of at least 1.")
    reached, previous = np.zeros(len(ordered) + 1), [0]
    for end, length in enumerate(ordered, 1):
        begin = max(end - requests_max, 0) if requests_max else 0
        sizes = np.arange(end - begin, 0, -1, dtype=np.float64)
        through = reached[begin:end] + cost_of_batch(sizes, length)
        best = int(through.argmin())
        reached[end] = through[best]
        previous.append(begin + best)
    batches, end = [], len(ordered)
    while end:
        batches.append(ordered[previous[end] : end])
        end = previous[end]
    return batches[::-1]
