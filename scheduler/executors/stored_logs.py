"""Where the service stores the output of ranks.

<run dir>/jobs/<job>/gen-<n>/rank-<r>.log         output of a rank
                             rank-<r>.complete    empty: no more output follows
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from scheduler.executors.log_files import LogLimits


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The logs of one generation."""

    path: Path

    def log_path(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def list_ranks(self) -> list[int]:
        """Return the ranks that have output."""
        return sorted(int(path.stem.removeprefix("rank-")) for path in self.path.glob("rank-*.log"))

    def complete_path(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.complete"

    def is_complete(self, rank: int) -> bool:
        """Return whether no output of the rank can follow."""
        return self.complete_path(rank).exists()


class LogRoot:
    """The logs of all jobs."""

    def __init__(self, run_dir: Path, *, limits: LogLimits | None = None) -> None:
        self.path = run_dir.resolve()
        self._limits = limits or LogLimits()

    def folder(self, job_id: str, generation: int) -> LogFolder:
        """Return the folder of a generation, which need not exist."""
        return LogFolder(self._job_folder(job_id) / f"gen-{generation}")

    def list_generations(self, job_id: str) -> list[int]:
        """Return the generations with a folder, in order."""
        return sorted(int(path.name.removeprefix("gen-")) for path in self._job_folder(job_id).glob("gen-*"))

    def list_jobs(self) -> Iterator[str]:
        """Yield the ids of all jobs with logs."""
        for path in self.path.glob("jobs/*"):
            if next(path.glob("gen-*"), None) is not None:
                yield unquote(path.name)

    def delete_old_logs(self, job_id: str) -> None:
        """Delete the output of all generations before the newest ones that the limits keep."""
        for generation in self.list_generations(job_id)[: -self._limits.generations]:
            for log in self.folder(job_id, generation).path.glob("rank-*.log"):
                log.unlink(missing_ok=True)

    def find_last_write_s(self, job_id: str) -> float:
        """Return when the logs of a job were last written; infinity if it has none."""
        times = [path.stat().st_mtime for path in self._job_folder(job_id).glob("gen-*/*")]
        return max(times, default=float("inf"))

    def delete_job(self, job_id: str) -> int:
        """Delete all logs of a job, and nothing else in its folder. Return the number of jobs that had logs."""
        generations = self.list_generations(job_id)
        for generation in generations:
            shutil.rmtree(self.folder(job_id, generation).path)
        with suppress(OSError):  # it holds something else, or does not exist
            self._job_folder(job_id).rmdir()
        return int(bool(generations))

    def _job_folder(self, job_id: str) -> Path:
        # Job ids can hold any character. File names must not contain a slash or be `.` or `..`.
        return self.path / "jobs" / quote(job_id, safe="").replace(".", "%2E")
