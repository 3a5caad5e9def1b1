"""Pending: what is still to come of one kind, in order of time, seen one item ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """Draws items when they are needed, so that the iterator may be endless."""

    def __init__(self, items: Iterator[T], at_s: Callable[[T], float]) -> None:
        self._items = items
        self._at_s = at_s
        self._next: T | None = next(items, None)
        self.taken = 0

    @property
    def next_s(self) -> float:
        """When the next item is due; infinite where there is none."""
        return math.inf if self._next is None else self._at_s(self._next)

    def take(self) -> T:
        """The next item.

        Raises:
            IndexError: nothing is left.
        """
        if self._next is None:
            raise IndexError("nothing is left to come")
        item, self._next = self._next, next(self._items, None)
        self.taken += 1
        return item
