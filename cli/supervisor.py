"""Supervisor: runs child processes together, restarts those that end, and stops all of them on request.

Each child leads its own session, so that Ctrl-C in a terminal reaches it once, through the supervisor. The child's
standard input is a pipe that the supervisor holds open and never writes to. When the supervisor dies, even by SIGKILL,
the pipe closes and the child exits (`exit_with_parent`), so that no child is orphaned.
"""

from __future__ import annotations

import logging
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

from cli.exit_codes import ExitCode
from scheduler.executors.run_outcome import signal_name

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
STOP_GRACE_S = 90.0
SHORT_LIFE_S = 20.0
"""A child that ends sooner after its start has probably failed to start."""
SHORT_LIVES_MAX = 3
_BACKOFF_S = 0.5
_CLEAN_EXITS = (0, -signal.SIGTERM, -signal.SIGINT)


class Child:
    """A supervised process. It is started again whenever it ends."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.short_lives = 0
        self._command = command
        self._restart_at_s: float | None = None
        self.start()

    def start(self) -> None:
        self._started_at_s = time.monotonic()
        self._restart_at_s = None
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended soon after its start several times in a row."""
        return self.short_lives >= SHORT_LIVES_MAX

    def check(self) -> None:
        """Notice the end of the process, and start it again after a pause that grows with each short life."""
        if self._restart_at_s is not None:
            if time.monotonic() >= self._restart_at_s:
                self.start()
            return
        if self.process.poll() is None:
            return
        now_s = time.monotonic()
        self.short_lives = self.short_lives + 1 if now_s - self._started_at_s < SHORT_LIFE_S else 0
        self._restart_at_s = now_s + _BACKOFF_S * 2.0**self.short_lives
        _close_stdin(self.process)
        if not self.has_failed:
            logger.warning("the %s process exited (%s) and is started again", self.name, describe_exit(self.process))


def supervise(commands: Mapping[str, Sequence[str]], *, grace_s: float = STOP_GRACE_S) -> tuple[int, str]:
    """Run the commands until SIGTERM or SIGINT, or until one of them repeatedly fails to start. Then stop all.

    They are stopped one after the other, the last one first. The last one gets the signal that was received, so that
    it can tell Ctrl-C from a stop by the system; the others get SIGTERM.

    Args:
        grace_s: time in seconds between the signal and SIGKILL.

    Returns:
        The exit code and the reason why it stopped. The code is 0 only if a signal requested the stop and every child
        exited cleanly.
    """
    children: list[Child] = []
    with _stop_requests() as signals:
        try:
            for name, command in commands.items():
                children.append(Child(name, command))  # one that cannot start must not hide the others
            while not signals and not any(child.has_failed for child in children):
                time.sleep(POLL_INTERVAL_S)
                for child in children:
                    child.check()
        finally:
            killed = _stop_children(children, signals, grace_s)
    return _describe_outcome(children, killed, stop_requested=bool(signals))


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


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return signal_name(-code) if code < 0 else f"exit code {code}"


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


def _stop_children(children: Sequence[Child], signals: Sequence[int], grace_s: float) -> tuple[str, ...]:
    """Stop the last child and then the others. Returns the names of those that had to be killed."""
    last, others = children[-1:], children[:-1]
    deadline_s = time.monotonic() + grace_s
    for child in last:
        _forward_signals(child.process, signals, deadline_s)
    killed = [child.name for child in last if not _has_ended(child.process, deadline_s)]
    for child in others:
        if child.process.poll() is None:
            child.process.terminate()
    deadline_s = time.monotonic() + grace_s
    return (*killed, *(child.name for child in others if not _has_ended(child.process, deadline_s)))


def _forward_signals(process: subprocess.Popen[bytes], signals: Sequence[int], deadline_s: float) -> None:
    """Send the received signals, and those that still arrive, until the process ends."""
    sent = 0
    while process.poll() is None and time.monotonic() < deadline_s:
        for number in (signals or [signal.SIGTERM])[sent:]:
            process.send_signal(number)
            sent += 1
        time.sleep(POLL_INTERVAL_S / 5)


def _has_ended(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    """Wait for the end of the process until the deadline, then kill it and return False."""
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    finally:
        _close_stdin(process)
    return True


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _describe_outcome(children: Sequence[Child], killed: tuple[str, ...], *, stop_requested: bool) -> tuple[int, str]:
    if killed:
        return ExitCode.FAILED, f"{' and '.join(killed)} did not exit in time and had to be killed"
    if not stop_requested:
        first = next(child for child in children if child.has_failed)
        reason = f"the {first.name} process exited {SHORT_LIVES_MAX} times soon after its start"
        return ExitCode.FAILED, f"{reason} ({describe_exit(first.process)}); the others were stopped"
    failed = [child for child in children if child.process.returncode not in _CLEAN_EXITS]
    if failed:
        return ExitCode.FAILED, f"the {failed[0].name} process failed ({describe_exit(failed[0].process)})"
    return ExitCode.OK, "stopped"
