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

from scheduler.cli.failure import DONE, FAILED
from scheduler.executors.signal_names import signal_name

LOOK_EVERY_S = 0.1
GRACE_S = 90.0

Children = Mapping[str, subprocess.Popen[bytes]]


def supervise(commands: Mapping[str, Sequence[str]], *, grace_s: float = GRACE_S) -> tuple[int, str]:
    """Run the commands until we are asked to stop (SIGTERM, SIGINT) or one of them ends; then end the others.

    A child that was told to end has `grace_s` seconds before it is killed. Gives the exit code, 0 only where we were
    asked to stop and every child ended as it should, and a sentence on why it stopped.
    """
    children: dict[str, subprocess.Popen[bytes]] = {}
    with _requests() as asked:
        try:
            for name, command in commands.items():
                children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            while not asked and not _ended(children):
                time.sleep(LOOK_EVERY_S)
            first = _ended(children)
        finally:
            killed = _end(children, grace_s)
    return _verdict(children, first, killed, asked=bool(asked))


def end_with_parent() -> None:
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
def _requests() -> Iterator[list[int]]:
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


def _ended(children: Children) -> str:
    """The name of a child that has ended, or nothing."""
    return next((name for name, child in children.items() if child.poll() is not None), "")


def _end(children: Children, grace_s: float) -> tuple[str, ...]:
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


def _verdict(children: Children, first: str, killed: tuple[str, ...], *, asked: bool) -> tuple[int, str]:
    if killed:
        return FAILED, f"{' and '.join(killed)} did not end in time and had to be killed"
    if first and not asked:
        return FAILED, f"the {first} process ended by itself with {_ending(children[first])}; the rest was ended too"
    bad = [name for name, child in children.items() if child.returncode not in (0, -signal.SIGTERM)]
    if bad:
        return FAILED, f"the {bad[0]} process ended with {_ending(children[bad[0]])}"
    return DONE, "stopped as asked"


def _ending(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return signal_name(-code) if code < 0 else f"exit code {code}"
