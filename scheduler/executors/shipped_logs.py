"""Output of ranks that node agents send. The API stores it below the log root (see stored_logs).

jobs/<job>/gen-<n>/machines.json    the agent of each rank; the folder appears complete
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from scheduler.domain.codec import decode, encode
from scheduler.domain.observation import BegunRun
from scheduler.executors.log_files import LogLimits, trim_log
from scheduler.executors.stored_logs import LogFolder, LogRoot

LAST_OUTPUT_S = 10.0
"""Time in which machines are expected to send the last output of a run that has ended or was replaced."""
_MACHINES = "machines.json"
_FOLDER_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LogGapError(Exception):
    """Bytes are missing between the end of a stored log, at the offset `expected`, and new output."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"output was sent for a later offset than {expected}, where the stored log ends")
        self.expected = expected


class LogsDeletedError(Exception):
    """The logs of this generation were deleted, so that no output is added to them."""


@dataclass(frozen=True, slots=True)
class RunMachines:
    """The machines of a generation: `agents` is the id of the node agent of each rank, in the order of ranks."""

    begun_at_s: float
    agents: tuple[str, ...]

    @classmethod
    def of(cls, run: BegunRun) -> RunMachines:
        return cls(run.begun_at_s, tuple(run.pods[node] for node, _ in run.seats))


def read_run_machines(folder: LogFolder) -> RunMachines | None:
    """Return the machines that send the output of a generation. None if it runs elsewhere, or sends none yet."""
    try:
        text = (folder.path / _MACHINES).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return decode(RunMachines, json.loads(text))


class ShippedLogs:
    """Stored output of ranks on other machines. Processes that share the run root may write at the same time."""

    def __init__(self, run_root: Path, limits: LogLimits) -> None:
        self._root = LogRoot(run_root, limits=limits)
        self._limits = limits

    def begin(self, job_id: str, generation: int, machines: RunMachines) -> None:
        """Create the generation's folder, unless it exists, and delete the logs of generations beyond the limit.

        Raises:
            OSError: the disk is full or read-only, or a part of the path is a link.
        """
        name = self._root.folder(job_id, generation).path.name
        with self._open_job_folder(job_id) as parent:
            part = f".{name}.{secrets.token_hex(8)}.part"
            os.mkdir(part, dir_fd=parent)  # pathlib opens nothing relative to a descriptor
            try:
                with _open_folder(part, parent) as folder:
                    _create(_MACHINES, json.dumps(encode(machines)).encode(), folder)
                os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError as error:
                with suppress(FileNotFoundError), _open_folder(part, parent) as folder:
                    for file in os.listdir(folder):  # noqa: PTH208  # a descriptor, which Path cannot list
                        os.unlink(file, dir_fd=folder)
                    os.rmdir(part, dir_fd=parent)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        self._root.delete_old_logs(job_id)

    def append(
        self, job_id: str, generation: int, rank: int, data: bytes, *, offset: int, is_complete: bool = False
    ) -> int:
        """Add output that begins at `offset` of the rank's log, and return the offset at which the log ends.

        Output that is stored already is skipped. Trimming releases the front of the file and keeps its length, so that
        offsets never change and the expected one is always the length.

        Raises:
            LogGapError: the log ends before `offset`.
            LogsDeletedError: only newer generations keep logs.
            FileNotFoundError: the generation has no folder.
            OSError: the disk is full or read-only, the file system cannot trim, or a part of the path is a link.
        """
        path = self._root.folder(job_id, generation)
        with self._open_job_folder(job_id) as parent, _open_folder(path.path.name, parent) as folder:
            descriptor = self._open_log(job_id, generation, path.log_path(rank).name, folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                if offset > size:
                    raise LogGapError(size)
                if added := data[size - offset :]:
                    trim_log(descriptor, self._limits.bytes_max)
                    size = _write_at(descriptor, added, size)
            finally:
                os.close(descriptor)
            if is_complete:
                with suppress(FileExistsError):
                    _create(path.complete_path(rank).name, b"", folder)
        return size

    def _open_log(self, job_id: str, generation: int, name: str, folder: int) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            if generation not in self._root.list_generations(job_id)[-self._limits.generations :]:
                raise LogsDeletedError(f"generation {generation} of job {job_id} keeps no logs any more") from None
            descriptor = os.open(name, flags | os.O_CREAT, 0o666, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "the log is not a regular file", name)
        return descriptor

    @contextmanager
    def _open_job_folder(self, job_id: str) -> Iterator[int]:
        """Open the job's folder below the run root, and create it if it is missing. No link is followed."""
        self._root.path.mkdir(parents=True, exist_ok=True)
        below = self._root.folder(job_id, 0).path.parent.relative_to(self._root.path)
        descriptor = os.open(self._root.path, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in below.parts:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
                child = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = child
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def _open_folder(name: str, parent: int) -> Iterator[int]:
    descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create(name: str, data: bytes, folder: int) -> None:
    """Create a file. Raises FileExistsError, or OSError if the disk is full or read-only."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _write_at(descriptor: int, data: bytes, offset: int) -> int:
    """Write all data, and return the offset after it."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    return offset
