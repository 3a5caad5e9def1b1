"""The process of a container: started with the lock of its run, known again after a restart, signalled safely.

Bubblewrap stays as a process of its own until the kernel has ended the whole namespace of the supervisor. Both hold
the lock, so a free lock means that no process of the run is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from scheduler.agent.run_folder import RunFolder
from scheduler.agent.shared_files import open_regular_file, read_end

LOCK_FD, STATUS_FD = 3, 4
"""Descriptors of a container: the lock for the supervisor, and a copy to which bubblewrap writes its status."""

_HIGH_FD = 64
_STATUS_BYTES_MAX = 4096
_START_TIMEOUT_S = 10.0
_POLL_S = 0.001
_ENTER_GROUPS = """
umask 022
count=$1
shift
while [ "$count" -gt 0 ]; do
    echo $$ > "$1" || exit 125
    shift
    count=$((count - 1))
done
exec "$@"
"""
"""Shell script that joins the control groups before it becomes the container, so that no process is outside of them.

The ranks' user must be able to enter the mount points that bubblewrap creates, whatever the agent's umask is.
"""


class ContainerProcess:
    """The supervisor of a run, as the machine sees it.

    Args:
        pid, start_ticks: the process and when it started, 0 while they are unknown. A process that got the same id
            later has other ticks.
    """

    def __init__(self, folder: RunFolder, *, pid: int = 0, start_ticks: int = 0) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self._folder = folder
        self._child: int | None = None

    def launch(
        self, command: Sequence[str], *, env: Mapping[str, str], procs_files: Sequence[Path], is_contained: bool
    ) -> None:
        """Start the container, and wait until the supervisor's process exists or bubblewrap has failed.

        Args:
            procs_files: files of the control groups that the container joins.
            is_contained: whether `command` runs bubblewrap; else it is the supervisor itself.

        Raises:
            OSError: the process cannot be started, or the run has been started before.
        """
        lock, log = _open_high(self._folder.lock_path), _open_high(self._folder.supervisor_log)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            argv = tuple(command)
            if is_contained or procs_files:  # a pod has neither, and its image may have no shell
                argv = build_entering_command(argv, procs_files)
            targets = ((log, 1), (log, 2), (lock, LOCK_FD), (lock, STATUS_FD))
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                *((os.POSIX_SPAWN_DUP2, source, target) for source, target in targets),
            ]
            self._child = os.posix_spawnp(argv[0], argv, env, file_actions=actions, setsid=True)
        finally:
            os.close(lock)
            os.close(log)
        self._identify(self._wait_for_supervisor() if is_contained else self._child)

    def find(self) -> bool:
        """Return whether the process is known.

        Looks for it if not: its container started slowly, or the agent ended before it could record it.
        """
        if self.pid == 0 and self._is_locked():
            self._identify(self._read_supervisor_pid())
        return self.pid != 0

    def is_alive(self) -> bool:
        """Return whether a process of the run is left: bubblewrap, or the supervisor if bubblewrap was killed."""
        self._reap()
        return self._is_locked() or self._is_same_process()

    def send_signal(self, number: int) -> None:
        """Signal the supervisor, unless it has ended. SIGKILL also ends a container that does not have one yet."""
        if not self.find():
            if self._child is not None and number == signal.SIGKILL:
                os.killpg(self._child, number)  # it is not reaped, so no other process has its number
            return
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self._is_same_process():
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def _identify(self, pid: int) -> None:
        ticks = _read_start_ticks(pid)
        if ticks is not None:
            self.pid, self.start_ticks = pid, ticks

    def _wait_for_supervisor(self) -> int:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._reap()
            pid = self._read_supervisor_pid()
            if pid or self._child is None:
                return pid
            time.sleep(_POLL_S)
        return 0

    def _read_supervisor_pid(self) -> int:
        """Return the process id in the first line of bubblewrap's status, 0 before it is written."""
        line = read_end(self._folder.lock_path, _STATUS_BYTES_MAX).partition(b"\n")[0]
        with suppress(ValueError, KeyError):
            return int(json.loads(line)["child-pid"])
        return 0

    def _reap(self) -> None:
        """Reap the container, if it is a child of this agent and has ended."""
        if self._child is not None:
            with suppress(ChildProcessError):
                if os.waitpid(self._child, os.WNOHANG)[0] == 0:
                    return
            self._child = None

    def _is_locked(self) -> bool:
        descriptor = open_regular_file(self._folder.lock_path, owner=os.geteuid())
        if descriptor is None:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _is_same_process(self) -> bool:
        return self.pid != 0 and _read_start_ticks(self.pid) == self.start_ticks


def build_entering_command(command: Sequence[str], procs_files: Sequence[Path]) -> tuple[str, ...]:
    """Return the command line that joins control groups and becomes `command`."""
    return ("/bin/sh", "-c", _ENTER_GROUPS, "sh", str(len(procs_files)), *map(str, procs_files), *command)


def _open_high(path: Path) -> int:
    """Open a file of the agent for appending, with a descriptor above those that the container gets."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    finally:
        os.close(descriptor)


def _read_start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine started. None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
