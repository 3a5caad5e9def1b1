"""Supervisor: child processes that live and die together.

Each child leads a session of its own, so that Ctrl-C in a terminal reaches it once, through us. Its standard input
is a pipe that we hold and never write to: when we die, however hard, the child sees it close and ends itself
(`end_with_parent`), so that no child is ever left.
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
    """Run the commands until we are asked to stop (SIGTERM, SIGINT) or one of them ends; then end the others.

    A child that was told to end has `grace_s` seconds before it is killed. Gives the exit code, 0 only where we were
    asked to stop and every child ended as it should, and a sentence on why it stopped.
    """
    children: dict[str, subprocess.Popen[bytes]] = {}
    with _stop_requests() as asked:
        try:
            for name, command in commands.items():
                children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            while not asked and not _find_exited(children):
                time.sleep(POLL_INTERVAL_S)
            first = _find_exited(children)
        finally:
            killed = _stop_children(children, grace_s)
    return _describe_outcome(children, first, killed, stop_requested=bool(asked))


def exit_with_parent() -> None:
    """For a child of `supervise`: end this process as SIGTERM would as soon as the parent is gone.

    Who is no such child has no pipe for its standard input: in a container it is /dev/null, which ends at once.
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
    """The SIGTERM and SIGINT that arrived, in place of what they would do."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find_exited(children: Children) -> str:
    """The name of a child that has ended, or nothing."""
    return next((name for name, child in children.items() if child.poll() is not None), "")


def _stop_children(children: Children, grace_s: float) -> tuple[str, ...]:
    """Tell every child to end, wait, and kill those that would not. Gives the names of the killed."""
    for child in children.values():
        if child.poll() is None:
            child.terminate()
    give_up_at = time.monotonic() + grace_s
    killed = []
    for name, child in children.items():
        try:
            child.wait(max(0.0, give_up_at - time.monotonic()))
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
        return EXIT_FAILED, f"{' and '.join(killed)} did not end in time and had to be killed"
    if first_exited and not stop_requested:
        return (
            EXIT_FAILED,
            f"the {first_exited} process ended by itself with {_describe_exit(children[first_exited])}; the rest was ended too",
        )
    bad = [name for name, child in children.items() if child.returncode not in (0, -signal.SIGTERM)]
    if bad:
        return EXIT_FAILED, f"the {bad[0]} process ended with {_describe_exit(children[bad[0]])}"
    return EXIT_OK, "stopped as asked"


def _describe_exit(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return signal_name(-code) if code < 0 else f"exit code {code}"
