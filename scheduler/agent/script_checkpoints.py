"""Checkpoints of a script that knows nothing of Ebbtide: `checkpoint.path` and `checkpoint.signal` of its job.

The script saves on a signal or at intervals, and resumes by itself from what it saved. The agent sends the signal,
waits for a new file that matches the path, and then ends the ranks. It trusts nothing of what ranks write: it reads
names, sizes and times of files only, and follows no link.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from scheduler.agent.hang_watch import find_rank_processes
from scheduler.agent.process_tree import signal_handlers
from scheduler.agent.supervised_run import SupervisedRun

logger = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Time without a change after which a file counts as complete."""
END_TIMEOUT_S = 20.0
"""Time that ranks have to end after their checkpoint is complete and they got SIGTERM."""
_LOOK_PERIOD_S = 0.5
_ENTRIES_MAX = 100_000
_SCAN_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class _Trace:
    """The newest change and the size of everything that matches the path."""

    changed_ns: int = 0
    size_bytes: int = 0
    entries: int = 0


class ScriptCheckpoints:
    """The checkpoints of one run on the machine of rank 0. Other machines send the signal and see no files.

    Args:
        folder: the job's directory for checkpoints; None where this machine does not watch it.
        pattern: path in the folder, with wildcards.
        signal_name: signal on which the script saves, or empty.
    """

    def __init__(self, run: SupervisedRun, folder: Path | None, pattern: str, signal_name: str) -> None:
        self._run = run
        self._folder, self._pattern = folder, pattern
        self._number = signal.Signals[signal_name] if signal_name else None
        self._scan = _Scan(folder, pattern.split("/"))
        self._trace = self._before_run = self._scan.read()
        self._trace_since_s = self._looked_at_s = time.monotonic()
        self._completed_at_s: float | None = None
        self._asked_at_s: float | None = None
        self._trace_when_asked = self._trace
        self._is_signalled = False

    @classmethod
    def create(cls, run: SupervisedRun) -> ScriptCheckpoints | None:
        """Return the checkpoints of a run, None if its job names no path."""
        document = run.document
        if not document.checkpoint_path:
            return None
        is_first = any(seat.rank == 0 for seat in document.ranks)
        folder = Path(run.checkpoint_dir) if is_first and run.checkpoint_dir else None
        return cls(run, folder, document.checkpoint_path, document.checkpoint_signal)

    @property
    def is_asked(self) -> bool:
        return self._asked_at_s is not None

    @property
    def is_signalled(self) -> bool:
        return self._is_signalled

    @property
    def age_s(self) -> float | None:
        """Seconds since the last checkpoint of this run was complete, None without one."""
        return None if self._completed_at_s is None else time.monotonic() - self._completed_at_s

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint was complete after the ranks were asked to save."""
        return self._asked_at_s is not None and (self._completed_at_s or -1.0) >= self._asked_at_s

    def ask(self) -> None:
        """Ask the ranks to save. `look` sends the signal as soon as one of them handles it."""
        if self._asked_at_s is None:
            self._asked_at_s = time.monotonic()
            self._trace_when_asked = self._scan.read()

    def look(self, exit_codes: Collection[int | None] | None) -> None:
        """Send the signal if it is due, and look at the files.

        Args:
            exit_codes: of all processes of the run, once all have ended; else None.
        """
        if self.is_asked and not self._is_signalled and exit_codes is None:
            self._send_signal()
        has_ended = exit_codes is not None
        if exit_codes is not None and not all(code in self._clean_exit_codes for code in exit_codes):
            return  # a rank that crashed may have left a part of a file
        now_s = time.monotonic()
        if self._folder is None or (now_s - self._looked_at_s < _LOOK_PERIOD_S and not has_ended):
            return
        self._looked_at_s = now_s
        trace = self._scan.read()
        if trace != self._trace:
            self._trace, self._trace_since_s = trace, now_s
        is_settled = has_ended or now_s - self._trace_since_s >= SETTLE_S
        if not is_settled or not trace.entries or trace == self._before_run:
            return
        if self._asked_at_s is not None and trace != self._trace_when_asked:
            self._completed_at_s = max(self._trace_since_s, self._asked_at_s)
        elif self._completed_at_s is None or self._completed_at_s < self._trace_since_s:
            self._completed_at_s = self._trace_since_s

    @property
    def _clean_exit_codes(self) -> tuple[int, ...]:
        """Exit codes of scripts that end because they were asked to."""
        numbers = {signal.SIGTERM, *([] if self._number is None else [self._number])}
        return (0, *(-number for number in numbers), *(128 + number for number in numbers))

    def describe_missing(self) -> str:
        """Say why the ranks have saved nothing since they were asked to."""
        wanted = f"no file of checkpoint.path ({self._pattern}) was written in time"
        if self._number is None:
            return f"{wanted}; shorten the script's own interval, or set checkpoint.signal if it saves on a signal"
        if not self._is_signalled:
            return f"no process of the script handles checkpoint.signal ({self._number.name}), and {wanted}"
        return f"{wanted} after checkpoint.signal ({self._number.name})"

    def _send_signal(self) -> None:
        """Send the signal to the ranks, not to their launchers. A script that still loads gets it later."""
        if self._number is None:
            return
        ranks = list(find_rank_processes(self._run).values())
        reached = signal_handlers(ranks, self._number, passes_launchers=True)
        if reached:
            self._is_signalled = True
            logger.info("%s: sent %s to %d processes", self._run, self._number.name, len(reached))


class _Scan:
    """Reads the files that match, in a thread: a file system that does not answer must not stop the agent."""

    def __init__(self, folder: Path | None, parts: list[str]) -> None:
        self._folder = folder
        self._parts = parts
        self._trace = _Trace()
        self._thread: threading.Thread | None = None
        self._is_overdue = False

    def read(self) -> _Trace:
        """Return what is there now. While the file system does not answer, return what was there before."""
        if self._folder is None:
            return self._trace
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._folder,), name="checkpoint-scan", daemon=True)
            self._thread.start()
        self._thread.join(0.0 if self._is_overdue else _SCAN_TIMEOUT_S)
        self._is_overdue = self._thread.is_alive()
        if not self._is_overdue:
            self._thread = None
        return self._trace

    def _run(self, folder: Path) -> None:
        changed_ns = size_bytes = entries = 0
        for status in _walk(folder, self._parts):
            changed_ns = max(changed_ns, status.st_mtime_ns)
            size_bytes += status.st_size
            entries += 1
            if entries >= _ENTRIES_MAX:
                break
        self._trace = _Trace(changed_ns, size_bytes, entries)


def _walk(folder: Path, parts: list[str]) -> Iterator[os.stat_result]:
    """Yield the status of everything that matches, and of all that matching directories contain."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if parts and not fnmatchcase(entry.name, parts[0]):
                continue
            with suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False)
                if len(parts) <= 1:
                    yield entry.stat(follow_symlinks=False)
                if is_folder:
                    yield from _walk(Path(entry.path), parts[1:])
