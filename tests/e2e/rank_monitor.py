"""Observation of ranks by their processes alone: what runs where, and whether two runs ever share a GPU.

Ranks are found in /proc by their environment, so nothing that the control plane records is trusted. Simulated GPUs
have no device, therefore the GPU of a rank is read from the document of its run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

PERIOD_S = 0.05
_STARTED_FIELD, _SESSION_FIELD = 19, 3  # of /proc/PID/stat, after the name of the program


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The first process of a rank. `started` tells two processes with the same id apart."""

    pid: int
    started: int
    job_id: str
    generation: int
    rank: str
    gpus: frozenset[tuple[str, int]]

    def conflicts_with(self, other: RankProcess) -> bool:
        """Return whether the two must not be alive at once."""
        is_other_run = (self.job_id, self.generation) != (other.job_id, other.generation)
        return is_other_run and (self.job_id == other.job_id or not self.gpus.isdisjoint(other.gpus))


class RankMonitor:
    """Looks at all processes below `folder` every PERIOD_S, in a thread of its own.

    Attributes:
        conflicts: pairs of ranks that were alive at once and must not be.
        seen: every rank that was ever seen.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self._is_closed = threading.Event()
        self._foreign: set[tuple[int, int]] = set()
        self._first_ticks = _read_stat(Path("/proc/self"))[0]
        self.conflicts: set[tuple[RankProcess, RankProcess]] = set()
        self.seen: set[RankProcess] = set()
        self.live: frozenset[RankProcess] = frozenset()
        self.samples = 0
        self.longest_gap_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def ranks_of(self, job_id: str) -> frozenset[RankProcess]:
        return frozenset(rank for rank in self.live if rank.job_id == job_id)

    def generations_of(self, job_id: str) -> set[int]:
        return {rank.generation for rank in self.seen if rank.job_id == job_id}

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._is_closed.wait(PERIOD_S):
            live = frozenset(self._find_ranks())
            # A process that was seen first may have ended before another was seen: both must be alive now.
            self.conflicts |= {pair for pair in find_conflicts(live) if all(map(_is_alive, pair))}
            self.live, self.seen, self.samples = live, self.seen | live, self.samples + 1
            now_s = time.monotonic()
            self.longest_gap_s, before_s = max(self.longest_gap_s, now_s - before_s), now_s

    def _find_ranks(self) -> Iterator[RankProcess]:
        known = {(rank.pid, rank.started): rank for rank in self.live}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                started, session = _read_stat(folder)
                key = (int(folder.name), started)
                if key in known:
                    yield known[key]
                elif started >= self._first_ticks and session == key[0] and (rank := self._read_rank(folder, started)):
                    yield rank
            except (FileNotFoundError, ProcessLookupError):
                continue

    def _read_rank(self, folder: Path, started: int) -> RankProcess | None:
        words = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
        env = dict(word.split("=", 1) for word in words if "=" in word)
        run_dir = env.get("EBBTIDE_RUN_DIR", "")
        if not run_dir.startswith(self._folder) or "EBBTIDE_GENERATION" not in env:
            return None
        document = json.loads((Path(run_dir) / "run.json").read_bytes())
        node, rank = env["EBBTIDE_NODE"], env.get("RANK", "")
        seats = [seat for seat in document["ranks"] if rank in ("", str(seat["rank"]))]
        gpus = frozenset((node, seat["gpu"]) for seat in seats)
        return RankProcess(int(folder.name), started, env["EBBTIDE_JOB_ID"], int(env["EBBTIDE_GENERATION"]), rank, gpus)


def find_conflicts(ranks: Iterable[RankProcess]) -> list[tuple[RankProcess, RankProcess]]:
    ordered = sorted(ranks, key=lambda rank: (rank.pid, rank.started))
    return [pair for pair in combinations(ordered, 2) if pair[0].conflicts_with(pair[1])]


def _is_alive(rank: RankProcess) -> bool:
    try:
        return _read_stat(Path(f"/proc/{rank.pid}"))[0] == rank.started
    except (FileNotFoundError, ProcessLookupError):
        return False


def _read_stat(folder: Path) -> tuple[int, int]:
    """Return start time and session of a process. Raises ProcessLookupError if it has ended."""
    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in b"ZX":
        raise ProcessLookupError
    return int(fields[_STARTED_FIELD]), int(fields[_SESSION_FIELD])
