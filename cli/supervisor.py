"""Supervisor: runs child processes together and stops all of them when one of them exits.

Each child leads its own session, so that Ctrl-C in a terminal reaches it once, through the supervisor. The child's
standard input is a pipe that the supervisor holds open and never writes to. When the supervisor dies, even by SIGKILL,
the pipe closes and the child exits (`exit_with_parent`), so that no child is orphaned.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from cli.inputs import EXIT_FAILED, EXIT_OK
from scheduler.executors.run_outcome import signal_name

POLL_INTERVAL_S = 0.1
STOP_GRACE_S = 90.0

Children = Mapping[str, subprocess.Popen[bytes]]


def supervise(commands: Mapping[str, Sequence[str]], *, grace_s: float = STOP_GRACE_S) -> tuple[int, str]:
    """Run the commands until SIGTERM, SIGINT or the exit of one of them, then stop the others.

    `grace_s` is the time in seconds between SIGTERM and SIGKILL. Returns the exit code and the reason why it stopped.
    The code is 0 only if a signal requested the stop and every child exited cleanly.
    """
    children: dict[str, subprocess.Popen[bytes]] = {}
    with _stop_requests() as signals:
        try:
            for name, command in commands.items():
                children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            while not signals and not _find_exited(children):
                time.sleep(POLL_INTERVAL_S)
            first = _find_exited(children)
        finally:
            killed = _stop_children(children, grace_s)
    return _describe_outcome(children, first, killed, stop_requested=bool(signals))


def exit_with_parent() -> None:
    """Send SIGTERM to this process, a child of `supervise`, as soon as its parent is gone.

    Does nothing if standard input is not a pipe: the process then has no supervisor, for example in a container.
    """
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect the SIGTERM and SIGINT signals that arrive during the block instead of acting on them."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _find_exited(children: Children) -> str:
    """Return the name of a child that has exited, or an empty string."""
    return next((name for name, child in children.items() if child.poll() is not None), "")


def _stop_children(children: Children, grace_s: float) -> tuple[str, ...]:
    """Stop every child: SIGTERM, then SIGKILL after `grace_s` seconds. Returns the names of the killed children."""
    for child in children.values():
        if child.poll() is None:
            child.terminate()
    deadline_s = time.monotonic() + grace_s
    killed = []
    for name, child in children.items():
        try:
            child.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            killed.append(name)
        if child.stdin is not None:
            child.stdin.close()
    return tuple(killed)


def _describe_outcome(
    children: Children, first_exited: str, killed: tuple[str, ...], *, stop_requested: bool
) -> tuple[int, str]:
    if killed:
        return EXIT_FAILED, f"{' and '.join(killed)} did not exit in time and had to be killed"
    if first_exited and not stop_requested:
        exited = _describe_exit(children[first_exited])
        return EXIT_FAILED, f"the {first_exited} process exited unexpectedly ({exited}); the others were stopped"
    failed = [name for name, child in children.items() if child.returncode not in (0, -signal.SIGTERM)]
    if failed:
        return EXIT_FAILED, f"the {failed[0]} process failed ({_describe_exit(children[failed[0]])})"
    return EXIT_OK, "stopped"


def _describe_exit(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return signal_name(-code) if code < 0 else f"exit code {code}"
