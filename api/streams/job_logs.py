"""JobLogs: what one rank of a job has printed, generation after generation, read from the run folder by place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from api.answers.logs import LogLineView
from scheduler.executors.local_records import RunRoot
from scheduler.executors.log_file import read_part, tail_offset

_CURSOR = re.compile(r"(\d{1,9}):(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Behind `offset` bytes of what the rank has printed in a generation."""

    generation: int
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.generation}:{self.offset}"


@dataclass(frozen=True, slots=True)
class LogRead:
    """Lines up to `place`, before which `dropped_bytes` are gone. `is_end`: nobody prints behind it any more, in the
    generations that have begun so far."""

    lines: tuple[LogLineView, ...]
    place: LogPlace
    dropped_bytes: int
    is_end: bool


def parse_place(text: str) -> LogPlace | None:
    """None for what no answer ever held."""
    found = _CURSOR.fullmatch(text)
    return LogPlace(int(found[1]), int(found[2])) if found else None


class JobLogs:
    """`only`: this generation alone; None: from one to the next."""

    def __init__(self, root: RunRoot, job_id: str, rank: int, *, only: int | None = None) -> None:
        self._root = root
        self._job_id = job_id
        self._rank = rank
        self._only = only

    def generations(self) -> list[int]:
        begun = self._root.generations(self._job_id)
        return begun if self._only is None else [each for each in begun if each == self._only]

    def tail(self, lines: int) -> LogPlace:
        """Where the last `lines` lines of the newest generation begin."""
        newest = self.newest()
        folder = self._root.folder(self._job_id, newest)
        is_over = folder.ended() is not None
        return LogPlace(newest, tail_offset(folder.log_path(self._rank), lines, is_over=is_over))

    def newest(self) -> int:
        return next(reversed(self.generations()), 0)

    def read(self, place: LogPlace, lines_max: int) -> LogRead:
        """The next lines, if there are any by now."""
        while True:
            folder = self._root.folder(self._job_id, place.generation)
            later = [each for each in self.generations() if each > place.generation]
            # Before the file is read: what was printed before the end is then always seen with it.
            is_over = bool(later) or folder.ended() is not None
            part = read_part(folder.log_path(self._rank), place.offset, lines_max=lines_max, is_over=is_over)
            place = LogPlace(place.generation, part.end)
            if part.lines or part.dropped_bytes or not later:
                lines = tuple(
                    LogLineView(
                        generation=place.generation,
                        rank=self._rank,
                        text=line.text,
                        cut=line.is_cut,
                        cursor=f"{place.generation}:{line.end}",
                    )
                    for line in part.lines
                )
                is_end = is_over and not (lines or part.dropped_bytes or later)
                return LogRead(lines, place, part.dropped_bytes, is_end)
            place = LogPlace(later[0])
