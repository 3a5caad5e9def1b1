"""Retention on a machine: deletes folders of ended runs, in a thread of its own.

A run is deleted once the control plane knows its end, its output was sent and no process of it is left. The newest
ended runs of each job stay for a while, so that their files can be looked at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from scheduler.agent.container_process import ContainerProcess
from scheduler.agent.folder_removal import delete_folder
from scheduler.agent.run_folder import AgentFolders, RunFolder
from scheduler.agent.supervised_run import SupervisedRun

logger = logging.getLogger(__name__)

_PERIOD_S = 60.0

HasSentLogs = Callable[[RunFolder], bool]
"""Whether all output of an ended run was sent to the control plane."""


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """How long files of ended runs stay.

    Args:
        runs: ended runs of each job that stay, the newest ones.
        period_s: time after its end at which a run is deleted in any case.
        checkpoints_s: time after the last run of a job was deleted at which its default checkpoint directory is
            deleted, too; None: never.
    """

    runs: int = 2
    period_s: float = 7 * 86_400.0
    checkpoints_s: float | None = None


class RunRetention:
    """Deletes what the limits do not keep.

    Args:
        delete_unused_directories: deletes unpacked archives that no run uses.
    """

    def __init__(
        self, folders: AgentFolders, limits: RetentionLimits, *, delete_unused_directories: Callable[[], None]
    ) -> None:
        self._folders = folders
        self._limits = limits
        self._delete_unused_directories = delete_unused_directories
        self._changed = threading.Condition()
        self._held = Counter[Path]()
        self._swept: Path | None = None
        self._is_closed = threading.Event()

    @contextmanager
    def hold(self, job_id: str) -> Iterator[None]:
        """Delete nothing of a job while a run of it is prepared. Waits for the end of a deletion."""
        job = self._folders.job_folder(job_id)
        with self._changed:
            self._changed.wait_for(lambda: self._swept != job)
            self._held[job] += 1
        try:
            yield
        finally:
            with self._changed:
                self._held[job] -= 1
                self._held += Counter()  # drops zeros

    def start(self, has_sent_logs: HasSentLogs) -> None:
        """Delete once a minute, until `close`."""
        threading.Thread(target=self._run, args=(has_sent_logs,), name="run-retention", daemon=True).start()

    def close(self) -> None:
        """Stop after the current job. A deletion that is interrupted by the agent's end is continued by the next."""
        self._is_closed.set()

    def sweep(self, has_sent_logs: HasSentLogs, now_s: float) -> None:
        """Look at all jobs once. What cannot be deleted is logged and tried again."""
        for job in self._folders.list_job_folders():
            with self._changed:
                if self._is_closed.is_set() or self._held[job]:
                    continue
                self._swept = job
            try:
                self._sweep_job(job, has_sent_logs, now_s)
            except OSError as error:
                logger.warning("cannot delete in %s: %s", job, error)
            finally:
                with self._changed:
                    self._swept = None
                    self._changed.notify_all()

    def _run(self, has_sent_logs: HasSentLogs) -> None:
        while True:
            self.sweep(has_sent_logs, time.time())
            try:
                self._delete_unused_directories()
            except OSError as error:
                logger.warning("cannot delete unused working directories: %s", error)
            if self._is_closed.wait(_PERIOD_S):
                return

    def _sweep_job(self, job: Path, has_sent_logs: HasSentLogs, now_s: float) -> None:
        self._delete_leftovers(job)
        runs = sorted(map(RunFolder, job.glob("gen-*@*")), key=_sort_key)
        for _, newest_first in groupby(runs, key=lambda run: _sort_key(run)[0]):
            is_superseded, ended = False, 0
            for run in newest_first:
                ended_at_s = run.settled_at_s
                if ended_at_s is not None:
                    ended += 1
                    is_expired = ended > self._limits.runs or ended_at_s < now_s - self._limits.period_s
                    if is_expired and _may_delete(run, has_sent_logs):
                        logger.info("deleting %s", run.path)
                        run.delete()
                    elif is_superseded and run.working_path.exists() and not _has_process(run):
                        delete_folder(run.working_path)
                is_superseded |= run.has_begun
        self._delete_job_folder(job, now_s)

    def _delete_leftovers(self, job: Path) -> None:
        """Delete what a crash has left: incomplete folders, and working directories without a run."""
        for path in [*job.glob(".*.part"), *job.glob("work-*")]:
            run = RunFolder(path.with_name(path.name.removeprefix("work-")))
            if path.name.startswith(".") or not run.path.exists():
                delete_folder(path)
        for path in job.glob("gen-*@*"):
            run = RunFolder(path)
            if not (path / "run.json").exists() and not ContainerProcess(run).is_alive():
                run.delete()

    def _delete_job_folder(self, job: Path, now_s: float) -> None:
        """Delete the checkpoints of a job without runs if a period is set for them, and its folder if it is empty."""
        if any(path.name != "checkpoints" for path in job.iterdir()):
            return
        checkpoints, period_s = job / "checkpoints", self._limits.checkpoints_s
        if period_s is not None and checkpoints.exists() and _find_change_s(job, checkpoints) < now_s - period_s:
            logger.info("deleting %s", checkpoints)
            delete_folder(checkpoints)
        for folder in (checkpoints, job):
            with suppress(OSError):  # it is not empty, or missing
                folder.rmdir()


def _find_change_s(*folders: Path) -> float:
    """Return when an entry of one of the folders was last created or deleted."""
    return max(folder.lstat().st_mtime for folder in folders)


def _sort_key(run: RunFolder) -> tuple[str, int]:
    """Return a key that sorts runs by node, and those of a node from the newest to the oldest."""
    return run.path.name.partition("@")[2], -run.generation


def _may_delete(run: RunFolder, has_sent_logs: HasSentLogs) -> bool:
    return (not run.has_begun or has_sent_logs(run)) and not _has_process(run)


def _has_process(run: RunFolder) -> bool:
    """Return whether a process of the run is left."""
    try:
        return not SupervisedRun.recover(run).poll().has_ended
    except ValueError:  # written by another version
        return ContainerProcess(run).is_alive()
