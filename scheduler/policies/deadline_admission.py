"""Whose deadlines can be met together: ElasticFlow's admission control (ASPLOS'23, section 4.1), without a memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.policies.contenders import Contender
from scheduler.policies.horizon import Horizon

TOLERANCE_S = 1e-6
"""Being late by less is rounding."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A job that asks to be admitted, its deadline `left_s` seconds from now."""

    one: Contender
    left_s: float

    @property
    def key(self) -> tuple[float, float, str]:
        """Earliest deadline first."""
        return (self.left_s, self.one.job.submitted_at_s, self.one.job.id)


def asked_first(one: Contender) -> tuple[float, bool, float, str]:
    """The order in which jobs are asked: those that have GPUs, then those that wait, in order of submission."""
    job = one.job
    return (-job.spec.priority, not job.is_placed, job.submitted_at_s, job.id)


def minimum_shares(contenders: Iterable[Contender], gpus: int, now_s: float) -> dict[str, int]:
    """The jobs whose deadlines `gpus` GPUs can meet together, in order of their deadlines, each with its minimum
    satisfactory share of now (0: it begins later)."""
    book, asking = _Book(gpus), list[Asking]()
    for one in sorted(contenders, key=asked_first):
        left_s = one.job.deadline_at_s - now_s + TOLERANCE_S
        if left_s < inf and one.job.spec.steps and 0.0 < one.steps <= one.speeds[-1] * left_s:
            asking.append(Asking(one, left_s))
    book.admit(asking)
    return book.shares()


class _Book:
    """Who has been admitted to so many GPUs so far, in order of deadlines, and what each leaves of them."""

    def __init__(self, gpus: int) -> None:
        self._entries: list[Asking] = []
        self._horizons = [Horizon.of(gpus)]
        self._counts: list[int] = []

    def shares(self) -> dict[str, int]:
        return {entry.one.job.id: count for entry, count in zip(self._entries, self._counts, strict=True)}

    def admit(self, asking: Sequence[Asking]) -> None:
        """Whoever fits, in the order given. All at once where that goes, else one by one, then ever more at a time."""
        at, many = 0, len(asking)
        while at < len(asking):
            if self._admit_all(asking[at : at + many]):
                at, many = at + many, 2 * many
            elif many == 1:
                at += 1
            else:
                many = 1

    def _admit_all(self, asking: Sequence[Asking]) -> bool:
        first = bisect_left(self._entries, min(entry.key for entry in asking), key=lambda entry: entry.key)
        later = sorted([*self._entries[first:], *asking], key=lambda entry: entry.key)
        horizons, counts = self._horizons[: first + 1], self._counts[:first]
        for entry in later:
            if (claimed := horizons[-1].claim(entry.one, entry.left_s)) is None:
                return False
            horizons.append(claimed[0])
            counts.append(claimed[1])
        self._entries[first:], self._horizons, self._counts = later, horizons, counts
        return True
