"""The node agent: one process per job and node, which starts the job's ranks on that node.

`python -m scheduler.worker.node_agent [--preload MODULE ...]` imports the modules once and forks each rank of each
generation, so a rank starts without loading torch and shares no state with earlier generations. The agent has one
thread and never uses a GPU. If a preloaded module has started threads, ranks are executed instead of forked, and the
log says so.

The protocol is one JSON object per line. Orders, on standard input:

    {"start": {"generation", "rank", "argv": [...], "env": {...}, "log": path, "warm": true | false}}
        warm: fork; argv is `<interpreter> -m module ...` or `<interpreter> file.py ...`. Otherwise execute argv.
    {"signal": {"generation", "rank", "number"}}
        sent to the rank's process group; ignored if the rank has ended

Reports, on standard output:

    {"ready": {"loaded": [module ...], "after_s": seconds}}         once, before the first order is read
    {"started": {"generation", "rank", "pid"}}
    {"failed": {"generation", "rank", "reason"}}                     the rank could not be started
    {"ended": {"generation", "rank", "code"}}                        no process of its group is left

On SIGTERM the agent ends at once, and its ranks die with it. When its input closes, its controller is dead: it sends
SIGTERM to its ranks, kills the remaining ones after GRACE_S, and ends. With --die-with-parent it is killed as soon
as its parent ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.executors.log_files import LogLimits, trim_log, trim_log_file
from scheduler.worker.rank_process import (
    RankProcess,
    RankProgram,
    RunDirMarker,
    die_with_parent,
    execute_rank,
    fork_rank,
    run_program,
)

logger = logging.getLogger("scheduler.worker.node_agent")

GRACE_S = 5.0
_CHUNK_BYTES = 65536
_LOG_CHECK_PERIOD_S = 1.0
_STDERR = 2


def main() -> None:
    arguments = _parse_arguments()
    if arguments.die_with_parent:
        die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    # Redirect standard output, so that output of a preloaded module is not taken for a report.
    orders_fd, reports_fd = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    agent = Agent(orders_fd, reports_fd, RunDirMarker(), log_bytes=arguments.log_bytes)
    agent.preload(arguments.preload)
    program = agent.serve()
    if program is not None:
        run_program(program)


class Agent:
    """The node agent's state and event loop."""

    def __init__(self, orders_fd: int, reports_fd: int, run_dir_marker: RunDirMarker, *, log_bytes: int) -> None:
        self._orders_fd = orders_fd
        self._reports_fd = reports_fd
        self._run_dir_marker = run_dir_marker
        self._wake_read_fd, self._wake_write_fd = os.pipe()
        for descriptor in (self._wake_read_fd, self._wake_write_fd, orders_fd):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._buffer = b""
        self._ranks: dict[tuple[int, int], RankProcess] = {}
        self._kill_at_s: float | None = None
        self._log_bytes = log_bytes
        self._logs: dict[tuple[int, int], Path] = {}
        self._logs_checked_at_s = float("-inf")

    def preload(self, modules: Sequence[str]) -> None:
        """Import the modules that ranks need. A rank repeats a failed import and reports why it failed."""
        started_at_s = time.monotonic()
        loaded = []
        for name in modules:
            try:
                importlib.import_module(name)
                loaded.append(name)
            except Exception:
                logger.exception("Cannot preload %s", name)
        # Frozen objects are not touched by garbage collection, so their pages stay shared with the ranks.
        gc.collect()
        gc.freeze()
        self._report("ready", loaded=loaded, after_s=time.monotonic() - started_at_s)

    def serve(self) -> RankProgram | None:
        """Execute orders until the input is closed and no rank is left. In a forked rank, return the program to run."""
        while self._kill_at_s is None or self._ranks:
            self._wait()
            for order in self._read_orders():
                if "signal" in order:
                    self._signal(**order["signal"])
                elif (program := self._start(**order["start"])) is not None:
                    return program
            self._reap()
            self._truncate_logs()
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                self._signal_all(signal.SIGKILL)
        return None

    def _wait(self) -> None:
        """Wait for an order, the end of a child, the next check of log sizes, or the time to kill ranks."""
        if self._kill_at_s is None:
            period_s = _LOG_CHECK_PERIOD_S if self._ranks else None
            select.select([self._orders_fd, self._wake_read_fd], [], [], period_s)
        else:
            select.select([self._wake_read_fd], [], [], max(0.02, self._kill_at_s - time.monotonic()))
        while _read_available(self._wake_read_fd):
            pass

    def _read_orders(self) -> list[dict[str, Any]]:
        """Return the complete orders received. Orders received before the input closed are dropped."""
        while self._kill_at_s is None and (part := _read_available(self._orders_fd)) is not None:
            self._buffer += part
            if not part:
                self._begin_shutdown()
                return []
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def _start(
        self, *, generation: int, rank: int, argv: Sequence[str], env: Mapping[str, str], log: str, warm: bool
    ) -> RankProgram | None:
        """Start a rank and report it. In the forked rank, return its program."""
        program = RankProgram(generation, rank, argv, env, Path(log))
        try:
            process = self._fork(program) if warm and _is_single_threaded() else execute_rank(program)
        except (OSError, ValueError) as error:
            self._report("failed", generation=generation, rank=rank, reason=str(error))
            return None
        if process is None:
            return program
        self._ranks[generation, rank], self._logs[generation, rank] = process, program.log
        self._report("started", generation=generation, rank=rank, pid=process.pid)
        return None

    def _fork(self, program: RankProgram) -> RankProcess | None:
        own_fds = (self._orders_fd, self._reports_fd, self._wake_read_fd, self._wake_write_fd)
        return fork_rank(program, self._run_dir_marker, close_fds=own_fds)

    def _signal(self, *, generation: int, rank: int, number: int) -> None:
        if (generation, rank) in self._ranks:
            self._ranks[generation, rank].send_signal(number)

    def _reap(self) -> None:
        for (generation, rank), process in list(self._ranks.items()):
            code = process.reap()
            if code is not None:
                del self._ranks[generation, rank], self._logs[generation, rank]
                self._report("ended", generation=generation, rank=rank, code=code)

    def _truncate_logs(self) -> None:
        """Trim the logs of the ranks and of this agent. Warn once if the file system does not support it."""
        now_s = time.monotonic()
        if now_s < self._logs_checked_at_s + _LOG_CHECK_PERIOD_S:
            return
        self._logs_checked_at_s = now_s
        try:
            trim_log(_STDERR, self._log_bytes)
            for log in self._logs.values():
                with contextlib.suppress(FileNotFoundError):  # a user may delete a log to free space
                    trim_log_file(log, self._log_bytes)
        except OSError as error:
            logger.warning("Logs grow without limit, because the file system cannot trim them: %s", error)
            self._logs_checked_at_s = float("inf")

    def _begin_shutdown(self) -> None:
        if self._kill_at_s is None:
            logger.info("The controller has ended. Sending SIGTERM to %d ranks.", len(self._ranks))
            self._kill_at_s = time.monotonic() + GRACE_S
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for process in self._ranks.values():
            process.send_signal(number)

    def _report(self, kind: str, **fields: object) -> None:
        logger.info("%s %s", kind, fields)
        try:
            os.write(self._reports_fd, json.dumps({kind: fields}).encode() + b"\n")
        except BrokenPipeError:
            self._begin_shutdown()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.node_agent", description="Start a job's ranks.")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="module to import before forking ranks"
    )
    parser.add_argument("--log-bytes", type=int, default=LogLimits().bytes_max, help="maximum size of a log, in bytes")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")
    return parser.parse_args()


def _read_available(descriptor: int) -> bytes | None:
    """Return the available bytes: None if there are none yet, empty at the end of the stream."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def _is_single_threaded() -> bool:
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  # only the count is needed
    if threads > 1:
        logger.warning("Executing a rank instead of forking it, because the agent has %d threads.", threads)
    return threads == 1


if __name__ == "__main__":
    main()
