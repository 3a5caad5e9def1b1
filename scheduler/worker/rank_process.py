"""One rank as a process: forked from a warm interpreter or executed anew, in a group of its own, reaped with it.

A fork has everything loaded that its agent has loaded, and nothing else of it: another session, other variables,
another log, no descriptor of the agent's. It dies with the agent (PR_SET_PDEATHSIG), and so does a rank that was
executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_RUN_DIR_VARIABLE = "EBBTIDE_RUN_DIR"
_LIBC = ctypes.CDLL(None)
_LIBC.getenv.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank is to run: a command with all its variables, printing to the end of `log`."""

    generation: int
    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    log: Path


class RankProcess:
    """A started rank. It leads its own group, so that whatever it starts can be ended with it."""

    def __init__(self, pid: int, wait: Callable[[], int]) -> None:
        self.pid = pid
        self._wait = wait

    def reap(self) -> int | None:
        """The exit code (minus the signal's number where one ended it), once; None while it lives.

        What the rank leaves behind in its group is ended before the rank is reaped: until then no other process
        can have the group's number.
        """
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.send_signal(signal.SIGKILL)
        return self._wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the whole group; to be called only before it was reaped."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # A fork that has not come to make its group yet has started nothing either.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork_rank(program: RankProgram, run_dir_marker: RunDirMarker, *, close_fds: Sequence[int]) -> RankProcess | None:
    """Start the rank as a copy of this process. Returns twice: in the copy it returns None.

    `closing` are descriptors that the copy must not keep. There must be no other thread in this process, for a lock
    that it holds would stay locked in the copy.

    Raises:
        OSError: the log cannot be written, or there can be no more processes.
        ValueError: the mark has no room for the program's run folder.
    """
    write_mark = run_dir_marker.make_writer(program.env.get(_RUN_DIR_VARIABLE, ""))
    log_fd = os.open(program.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    agent_pid = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _die_with_agent(agent_pid)
                _detach_from_agent(log_fd, close_fds)
                write_mark()
                _set_environment(program)
            except BaseException:
                # A copy that went on here would take itself for the agent.
                traceback.print_exc()
                os._exit(1)
            return None
    finally:
        os.close(log_fd)
    return RankProcess(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def execute_rank(program: RankProgram) -> RankProcess:
    """Start the rank in a process that loads everything itself.

    Raises:
        OSError: there is no such program, it cannot be executed, or the log cannot be written.
        ValueError: an argument or a variable holds something that no program can be given.
    """
    agent_pid = os.getpid()
    with program.log.open("ab") as log:
        process = subprocess.Popen(
            program.argv,
            env=dict(program.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _die_with_agent(agent_pid),
        )
    return RankProcess(process.pid, process.wait)


def run_program(program: RankProgram) -> None:
    """Become the program in a forked copy: `<interpreter> -m module ...` or `<interpreter> file.py ...`.

    Its end is the interpreter's own business: exit codes, tracebacks, threads and exit functions are as they would be.
    """
    words = list(program.argv[1:])
    sys.orig_argv = list(program.argv)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not sys.flags.safe_path:
        # For the agent, started by -m, the first entry is the working folder.
        sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


class RunDirMarker:
    """The value of EBBTIDE_RUN_DIR that /proc shows of this process, which is the one it was executed with.

    Processes are found by that mark. A fork shows what its agent was executed with, and so would all that it forks;
    therefore the agent is given a value that is long enough to be overwritten in place, where the kernel reads it.
    """

    def __init__(self) -> None:
        self._address = _LIBC.getenv(_RUN_DIR_VARIABLE.encode())
        self._capacity = len(os.environb.get(_RUN_DIR_VARIABLE.encode(), b""))

    def make_writer(self, value: str) -> Callable[[], None]:
        """What makes the process that calls it show `value`; the rest of the room becomes an entry without a name.

        Raises:
            ValueError: the room is too small for it.
        """
        text = os.fsencode(value)
        if len(text) > self._capacity:
            raise ValueError(f"{_RUN_DIR_VARIABLE}: this agent has room for {self._capacity} bytes, got {len(text)}")
        shown = (text + b"\0").ljust(self._capacity, b"-")[: self._capacity]

        def write() -> None:
            ctypes.memmove(self._address, shown, self._capacity)

        return write


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_agent(agent_pid: int) -> None:
    """Be killed when the agent ends, however that ends; where it has ended already, at once."""
    die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(128 + signal.SIGKILL)


def _detach_from_agent(log_fd: int, close_fds: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source_fd, target_fd in ((nothing_fd, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source_fd, target_fd)
    for descriptor in (nothing_fd, *close_fds):
        os.close(descriptor)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def _set_environment(program: RankProgram) -> None:
    """Variables and chance as a new process would have them; Python itself sees to `random`, and torch's default
    generator starts at the same number in every process."""
    os.environ.clear()
    os.environ.update(program.env)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
