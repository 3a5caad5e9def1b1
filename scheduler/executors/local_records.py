"""Files of the local executor, from which the next controller learns which runs have begun.

<run root>/executor.lock                      held while an executor uses the run root
<run root>/jobs/<job>/checkpoints/            default checkpoint directory
<run root>/jobs/<job>/agent-<node>.log        output of the agent on a node
<run root>/jobs/<job>/gen-<n>/started.json    written before the first process; the folder appears complete
                              plan.json       the ParallelPlan
                              rank-<r>.log    output of a rank
                              status-<r>.json status of a rank, written by the rank
                              notice.json     the notice to the ranks
                              ended.json      how the run ended
                              settled         empty: the desired state has moved on
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from scheduler.domain.codec import decode, encode
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.observation import RankStatus, Run
from scheduler.domain.parallel_plan import ParallelPlan, plan_to_json
from scheduler.executors.disk_writes import write_json_atomically
from scheduler.executors.log_files import LogLimits
from scheduler.executors.rank_status import read_rank_status

logger = logging.getLogger(__name__)


class RunRootLockedError(ValueError):
    """Another running controller uses this run root."""


@dataclass(frozen=True, slots=True)
class StartedRecord:
    """A generation that has begun and will never begin again.

    `snapshot_generation` is the desired state that started it; the store fences it by the leader's epoch.
    """

    job_id: str
    generation: int
    gpus: Gpus
    world_size: int
    snapshot_generation: int
    started_at_s: float


@dataclass(frozen=True, slots=True)
class GenerationFolder:
    """The folder of one generation, shared by its ranks."""

    path: Path

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @property
    def is_settled(self) -> bool:
        return (self.path / "settled").exists()

    def log_path(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def read_started_record(self) -> StartedRecord:
        return decode(StartedRecord, _read_json(self.path / "started.json"))

    def read_status(self, rank: int) -> RankStatus | None:
        """Return the rank's status, None without one.

        Raises:
            ValueError: the file is invalid; the message names the field.
        """
        return read_rank_status(self.path / f"status-{rank}.json")

    def read_end(self) -> Run | None:
        path = self.path / "ended.json"
        return decode(Run, _read_json(path)) if path.exists() else None

    def write_notice(self, action: str, *, seconds_left: float = math.inf, step: int | None = None) -> None:
        left = seconds_left if math.isfinite(seconds_left) else None
        write_json_atomically(self.path / "notice.json", {"action": action, "step": step, "seconds_left": left})

    def write_ended(self, run: Run) -> None:
        write_json_atomically(self.path / "ended.json", encode(run), durable=True)

    def settle(self) -> None:
        (self.path / "settled").touch()


class RunRoot:
    """The folder of one executor. `path` is absolute, because processes are found by it."""

    def __init__(self, path: Path, *, logs: LogLimits | None = None) -> None:
        self.path = path.resolve()
        self._logs = logs or LogLimits()
        self._lock: int | None = None

    def lock(self) -> None:
        """Lock the run root. The lock ends with the process.

        Raises:
            RunRootLockedError: another process holds the lock.
        """
        if self._lock is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        # A record lock, not flock: forked children must not keep it.
        lock = os.open(self.path / "executor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(lock, 32).decode().strip()
            os.close(lock)
            raise RunRootLockedError(
                f"run_dir: {self.path} is in use by the controller with process id {holder}. Stop that one first."
            ) from None
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        self._lock = lock

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def checkpoint_dir(self, job_id: str) -> Path:
        return self._job_dir(job_id) / "checkpoints"

    def agent_log(self, job_id: str, node: str) -> Path:
        return self._job_dir(job_id) / f"agent-{quote(node, safe='')}.log"

    def folder(self, job_id: str, generation: int) -> GenerationFolder:
        return GenerationFolder(self._job_dir(job_id) / f"gen-{generation}")

    def begin(self, record: StartedRecord, plan: ParallelPlan) -> GenerationFolder:
        """Create the generation's folder with record and plan, atomically."""
        folder = self.folder(record.job_id, record.generation)
        part = folder.path.with_name(f".{folder.path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        # The next controller needs these files. A file emptied by a power failure would keep it from starting.
        write_json_atomically(part / "plan.json", plan_to_json(plan), durable=True)
        write_json_atomically(part / "started.json", encode(record), durable=True)
        self.checkpoint_dir(record.job_id).mkdir(exist_ok=True)
        part.rename(folder.path)
        self.drop_old_logs(record.job_id)
        return folder

    def drop_old_logs(self, job_id: str) -> None:
        """Delete the output of ranks of all generations before the newest ones that `logs` keeps."""
        for generation in self.list_generations(job_id)[: -self._logs.generations]:
            for log in self.folder(job_id, generation).path.glob("rank-*.log"):
                log.unlink(missing_ok=True)

    def list_generations(self, job_id: str) -> list[int]:
        """Return the generations that have begun, in order."""
        return sorted(int(path.name.removeprefix("gen-")) for path in self._job_dir(job_id).glob("gen-*"))

    def list_jobs(self) -> Iterator[str]:
        """Yield the ids of all jobs with generations."""
        for path in self.path.glob("jobs/*"):
            if next(path.glob("gen-*"), None) is not None:
                yield unquote(path.name)

    def remove_runs(self, job_id: str) -> int:
        """Delete logs and records of a job whose runs are all settled, but never checkpoints.

        Return the number of jobs deleted.
        """
        folders = [self.folder(job_id, generation) for generation in self.list_generations(job_id)]
        if not folders or not all(folder.is_settled for folder in folders):
            return 0
        for log in self._job_dir(job_id).glob("agent-*.log"):
            log.unlink()
        for folder in folders:
            shutil.rmtree(folder.path)
        for empty in (self.checkpoint_dir(job_id), self._job_dir(job_id)):
            with suppress(OSError):  # the folder is not empty
                empty.rmdir()
        return 1

    def list_unsettled(self) -> Iterator[GenerationFolder]:
        """Yield folders of generations that the desired state has not moved on from."""
        for path in sorted(self.path.glob("jobs/*/gen-*")):
            folder = GenerationFolder(path)
            if not folder.is_settled:
                yield folder

    def _job_dir(self, job_id: str) -> Path:
        # Job ids can hold any character. File names must not contain a slash or be `.` or `..`.
        return self.path / "jobs" / quote(job_id, safe="").replace(".", "%2E")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
