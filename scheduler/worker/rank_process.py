"""The process of one rank: forked from the node agent or executed, in its own process group, and reaped with the group.

A forked rank keeps the modules that the agent has loaded and nothing else: it has its own session, environment and
log, and none of the agent's descriptors. Every rank dies with the agent (PR_SET_PDEATHSIG).
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
    """The command of one rank, with its complete environment. Output is appended to `log`."""

    generation: int
    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    log: Path


class RankProcess:
    """A started rank. It leads its process group, so that its child processes can be signalled with it."""

    def __init__(self, pid: int, wait: Callable[[], int]) -> None:
        self.pid = pid
        self._wait = wait

    def reap(self) -> int | None:
        """Return the exit code once (negative signal number if a signal ended it), None while the rank lives.

        The rest of its process group is killed before the rank is reaped: until then the kernel cannot reuse the
        group's number.
        """
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.send_signal(signal.SIGKILL)
        return self._wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the whole group. Call it only before the rank is reaped."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # A fork that has not created its group yet has no child processes either.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork_rank(program: RankProgram, run_dir_marker: RunDirMarker, *, close_fds: Sequence[int]) -> RankProcess | None:
    """Start the rank as a copy of this process. Returns twice: in the copy it returns None.

    This process must have no other thread, because a lock held by that thread would stay locked in the copy.

    Args:
        close_fds: descriptors to close in the copy.

    Raises:
        OSError: the log cannot be written, or the process limit is reached.
        ValueError: the run directory is too long for the marker.
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
                # If the copy continued here, it would act as a second agent.
                traceback.print_exc()
                os._exit(1)
            return None
    finally:
        os.close(log_fd)
    return RankProcess(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def execute_rank(program: RankProgram) -> RankProcess:
    """Start the rank as a new process that loads everything itself.

    Raises:
        OSError: the program cannot be executed, or the log cannot be written.
        ValueError: an argument or a variable contains a null byte.
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
    """Run the program in a forked copy: `<interpreter> -m module ...` or `<interpreter> file.py ...`.

    Exit codes, tracebacks, threads and exit functions behave as in a new interpreter.
    """
    words = list(program.argv[1:])
    sys.orig_argv = list(program.argv)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not sys.flags.safe_path:
        # In the agent, which was started with -m, the first entry is the working directory.
        sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


class RunDirMarker:
    """The value of EBBTIDE_RUN_DIR that /proc shows for this process: the one it was executed with.

    The executor finds processes by this value. A forked process shows its agent's value. The agent is therefore
    executed with a value that is long enough to be overwritten in place, where the kernel reads it.
    """

    def __init__(self) -> None:
        self._address = _LIBC.getenv(_RUN_DIR_VARIABLE.encode())
        self._capacity = len(os.environb.get(_RUN_DIR_VARIABLE.encode(), b""))

    def make_writer(self, value: str) -> Callable[[], None]:
        """Return a function that makes its process show `value`. The unused bytes become an entry without a name.

        Raises:
            ValueError: `value` is too long.
        """
        text = os.fsencode(value)
        if len(text) > self._capacity:
            raise ValueError(
                f"`{_RUN_DIR_VARIABLE}` has {len(text)} bytes, but the agent supports {self._capacity}. "
                "Use a shorter run directory."
            )
        shown = (text + b"\0").ljust(self._capacity, b"-")[: self._capacity]

        def write() -> None:
            ctypes.memmove(self._address, shown, self._capacity)

        return write


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_agent(agent_pid: int) -> None:
    """Die when the agent ends, at once if it has already ended."""
    die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(128 + signal.SIGKILL)


def _detach_from_agent(log_fd: int, close_fds: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source_fd, target_fd in ((null_fd, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source_fd, target_fd)
    for descriptor in (null_fd, *close_fds):
        os.close(descriptor)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def _set_environment(program: RankProgram) -> None:
    """Give the rank its environment and the random state of a new process.

    Python reseeds `random` after a fork, and torch's default generator has the same seed in every process.
    """
    os.environ.clear()
    os.environ.update(program.env)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
