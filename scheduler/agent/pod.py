"""`python -I -m scheduler.agent.pod`: PID 1 of an agent pod, which keeps the agent running and does nothing else.

    pod               starts the agent again when it dies, adopts and reaps orphans, forwards SIGTERM
      agent           the node agent with the identity of the pod (`pod_daemon`)
      supervisor ...  of each generation; after the death of the agent that started it, a child of this process

So the death of an agent restarts no rank. The pod ends when the agent says so: with 0 once its job has ended or after
SIGTERM, with 1 if the job has failed, with 2 if the environment is invalid. It also ends, with 70, if the agent has
died again and again for ten minutes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from scheduler.agent.start_variables import read_start_variables

logger = logging.getLogger("scheduler.agent.pod")

DONE, INVALID_ENVIRONMENT, JOB_FAILED = 0, 2, 3
"""Exit codes of an agent that shall not be started again. Python ends with 1 after an unhandled exception."""
_EXIT_CODES = {DONE: 0, JOB_FAILED: 1, INVALID_ENVIRONMENT: 2}
_GAVE_UP = 70
_AGENT_COMMAND = (sys.executable, "-I", "-m", "scheduler.agent.pod_daemon")
_SET_CHILD_SUBREAPER = 36
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_STABLE_S = 60.0
"""An agent that has run for this long has started well."""
_GIVE_UP_S = 600.0


class Pod:
    """The processes of a pod. `command` starts the agent."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._agent = 0
        self._stopping_since_s: float | None = None
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stop())
        if os.getpid() != 1:
            # Where pods share the process ids of the node or of each other, orphans become children of this process.
            ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self) -> int:
        """Run the agent until it says that the pod shall end, and return the exit code of the pod."""
        backoff_s, failing_since_s = _MIN_BACKOFF_S, time.monotonic()
        while True:
            started_at_s = time.monotonic()
            code = self._run_agent()
            if code in _EXIT_CODES:
                return _EXIT_CODES[code]
            now_s = time.monotonic()
            if now_s - started_at_s >= _STABLE_S:
                backoff_s, failing_since_s = _MIN_BACKOFF_S, now_s
            if now_s - failing_since_s >= _GIVE_UP_S:
                logger.error("The agent has ended with %d again and again. The pod ends.", code)
                return _GAVE_UP
            logger.warning("The agent has ended with %d. Ranks continue. It starts again in %.1f s.", code, backoff_s)
            self._pause(backoff_s)
            backoff_s = min(_MAX_BACKOFF_S, 2.0 * backoff_s)

    def _run_agent(self) -> int:
        """Run one agent to its end, and return its exit code, negative for a signal."""
        stopping = () if self._stopping_since_s is None else ("--stopping-since", f"{self._stopping_since_s:.3f}")
        argv = (*self._command, *stopping)
        self._agent = os.posix_spawn(argv[0], argv, read_start_variables())
        if self._stopping_since_s is not None and not stopping:
            self._forward()  # SIGTERM came while the agent was started
        while (code := self._reap()) is None:
            select.select([self._wake_read], [], [])
            self._drain()
        return code

    def _pause(self, seconds: float) -> None:
        """Wait before the next start, but not once the pod has to end. Reap orphans meanwhile."""
        deadline_s = time.monotonic() + seconds
        while self._stopping_since_s is None and (left_s := deadline_s - time.monotonic()) > 0:
            select.select([self._wake_read], [], [], left_s)
            self._drain()
            self._reap()

    def _reap(self) -> int | None:
        """Reap all children that have ended. Return the exit code of the agent if it is one of them."""
        code = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._agent:
                    self._agent, code = 0, os.waitstatus_to_exitcode(ended[1])
        return code

    def _stop(self) -> None:
        if self._stopping_since_s is None:
            self._stopping_since_s = time.monotonic()
        self._forward()

    def _forward(self) -> None:
        if self._agent:
            with suppress(ProcessLookupError):
                os.kill(self._agent, signal.SIGTERM)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s pod %(levelname)s %(message)s")
    return Pod((*_AGENT_COMMAND, *sys.argv[1:])).run()


if __name__ == "__main__":
    sys.exit(main())
