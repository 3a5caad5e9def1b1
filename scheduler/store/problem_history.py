"""History of problems: when each began and ended, as the leader recorded it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from scheduler.domain.problems import ProblemEpisode, ProblemKey, get_problem_key


class ProblemHistory(Protocol):
    """Every method may raise UnavailableError."""

    def put_episodes(self, episodes: Sequence[ProblemEpisode], *, epoch: int) -> None:
        """Store the episodes in one transaction. Each replaces the stored one of its id.

        Raises:
            FencedError: the lease has another epoch. Nothing was written.
        """

    def list_open(self) -> tuple[ProblemEpisode, ...]:
        """Return the episodes that are not closed, by begin and id."""

    def list_ended(self, *, since_s: float, limit: int) -> tuple[ProblemEpisode, ...]:
        """Return up to `limit` episodes that ended at `since_s` or later, the latest end first."""

    def find_last_end(self, key: ProblemKey) -> float:
        """Return when the last episode of a problem ended; minus infinity if none did."""


class MemoryProblemHistory:
    """ProblemHistory in memory. Nothing is deleted."""

    def __init__(self) -> None:
        self._episodes: dict[str, ProblemEpisode] = {}
        self._lock = threading.Lock()

    def put_episodes(self, episodes: Sequence[ProblemEpisode], *, epoch: int) -> None:
        del epoch  # no other process can write to this store
        with self._lock:
            self._episodes.update((each.id, each) for each in episodes)

    def list_open(self) -> tuple[ProblemEpisode, ...]:
        with self._lock:
            found = [each for each in self._episodes.values() if not each.is_closed]
        return tuple(sorted(found, key=lambda each: (each.begin_s, each.id)))

    def list_ended(self, *, since_s: float, limit: int) -> tuple[ProblemEpisode, ...]:
        with self._lock:
            ended = [(each.end_s, each.id, each) for each in self._episodes.values() if each.end_s is not None]
        newest = sorted((each for each in ended if each[0] >= since_s), reverse=True)[:limit]
        return tuple(episode for _, _, episode in newest)

    def find_last_end(self, key: ProblemKey) -> float:
        with self._lock:
            alike = [each.end_s for each in self._episodes.values() if get_problem_key(each) == key]
        return max((end_s for end_s in alike if end_s is not None), default=float("-inf"))
