"""Watches one run for hangs: measures what its processes use, and collects stacks once a rank makes no progress.

The agent only reports. The control plane sees the ranks of all nodes and decides whether the run is hung: a rank that
waits for another one makes no progress either.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ebbtide.stack_dump import find_dump_signal
from scheduler.agent.gpu_use import read_busy_share
from scheduler.agent.liveness import RunActivity, RunLiveness
from scheduler.agent.process_tree import (
    ProcessUse,
    find_namespaced_pid,
    list_descendants,
    read_use,
    signal_handlers,
)
from scheduler.agent.rank_environment import list_processes
from scheduler.agent.shared_files import open_regular_file
from scheduler.agent.stack_traces import find_main_stack
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.observation import RankLiveness, RankStatus
from scheduler.domain.run_document import LaunchMode

logger = logging.getLogger(__name__)

_LOOKS_PER_TIMEOUT = 15.0
_LOOK_PERIOD_S_MAX = 1.0
DUMP_TIME_S = 0.5
"""Time in which a rank writes its stacks after the signal."""
_PYSPY_TIMEOUT_S = 5.0
_STACK_BYTES_MAX = 262_144
_STACK_LENGTH_MAX = 1000


class HangWatch:
    """The watch over a run on this machine.

    Args:
        timeout_s: the job's hang timeout.
    """

    def __init__(self, run: SupervisedRun, timeout_s: float) -> None:
        self._run = run
        self._liveness = RunLiveness((seat.rank for seat in run.document.ranks), timeout_s)
        self._meter = _ActivityMeter(run)
        self._dump: _StackDump | None = None
        self._period_s = min(_LOOK_PERIOD_S_MAX, timeout_s / _LOOKS_PER_TIMEOUT)
        self._looked_at_s = time.monotonic()
        self._reported: Mapping[int, tuple[RankLiveness, float]] = {}

    @classmethod
    def create(cls, run: SupervisedRun) -> HangWatch | None:
        """Return the watch over a run, None if its job has no hang timeout."""
        timeout_s = run.document.hang_timeout_s
        return None if timeout_s is None else cls(run, timeout_s)

    def look(self, statuses: Mapping[int, RankStatus]) -> None:
        """Judge the ranks anew, if it is time. Ask for stacks when the first of them stops making progress."""
        elapsed_s = time.monotonic() - self._looked_at_s
        if elapsed_s < self._period_s:
            return
        self._looked_at_s += elapsed_s
        if self._dump is not None and not self._dump.is_complete:
            if not self._dump.collect():
                return
            self._meter.ignore_output(self._dump.log_bytes)
        self._liveness.observe(elapsed_s, statuses, self._meter.read(elapsed_s))
        judged = {seat.rank: self._liveness.judge(seat.rank) for seat in self._run.document.ranks}
        is_inactive = any(liveness.is_inactive for liveness, _ in judged.values())
        if not is_inactive:
            self._dump = None
        elif self._dump is None:
            self._dump = _StackDump(self._run)
        if self._dump is None or self._dump.is_complete:
            self._reported = judged

    def describe(self, rank: int) -> dict[str, Any]:
        """Return what the report says of a rank's liveness."""
        liveness, inactive_s = self._reported.get(rank, (None, 0.0))
        stack = "" if self._dump is None or not inactive_s else self._dump.stacks.get(rank, "")
        return {"liveness": None if liveness is None else liveness.value, "inactive_s": inactive_s, "stack": stack}

    def abort(self) -> bool:
        """Let Python ranks that have no session write their stacks as they abort. Return whether there are any.

        Only for a run that is to be killed. Ranks without a handler of SIGABRT get no signal.
        """
        if self._dump is None or self._dump.stacks:
            return False
        roots = list(find_rank_processes(self._run).values())
        for pid in list_descendants(self._run.supervisor_pid):
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        return bool(signal_handlers(roots, signal.SIGABRT))


class _ActivityMeter:
    """What the processes of a run have used since the watch began. The supervisor itself does not count."""

    def __init__(self, run: SupervisedRun) -> None:
        self._run = run
        self._last: dict[int, ProcessUse] = {}
        self._cpu_s = self._gpu_s = 0.0
        self._io_bytes = self._ignored_bytes = 0

    def read(self, elapsed_s: float) -> RunActivity:
        uses = {pid: use for pid in list_descendants(self._run.supervisor_pid) if (use := read_use(pid)) is not None}
        for pid, use in uses.items():
            before = self._last.get(pid, ProcessUse(0.0, 0))
            self._cpu_s += max(0.0, use.cpu_s - before.cpu_s)
            self._io_bytes += max(0, use.io_bytes - before.io_bytes)
        self._last = uses
        self._gpu_s += elapsed_s * read_busy_share(self._run.gpu_ids)
        return RunActivity(self._cpu_s, self._io_bytes, _count_log_bytes(self._run) - self._ignored_bytes, self._gpu_s)

    def ignore_output(self, log_bytes: int) -> None:
        """Ignore output that the ranks wrote because they were asked to."""
        self._ignored_bytes += log_bytes


class _StackDump:
    """Stacks that ranks were asked for. `log_bytes` is how much the logs grew by them."""

    def __init__(self, run: SupervisedRun) -> None:
        self._run = run
        self._asked_at_s = time.monotonic()
        self._sizes = {seat.rank: _measure_log(run, seat.rank) for seat in list_processes(run.document)}
        self.stacks: dict[int, str] = {}
        self.log_bytes = 0
        self.is_complete = False
        processes, number = find_rank_processes(run), find_dump_signal()
        reached = [] if number is None else signal_handlers(list(processes.values()), number)
        self._thread: threading.Thread | None = None
        if not reached and shutil.which("py-spy"):
            self._thread = threading.Thread(target=_run_pyspy, args=(run, processes), name="py-spy", daemon=True)
            self._thread.start()

    def collect(self) -> bool:
        """Read the stacks, and return whether the ranks had the time to write them."""
        if time.monotonic() < self._asked_at_s + DUMP_TIME_S or (self._thread is not None and self._thread.is_alive()):
            return False
        for rank, size in self._sizes.items():
            text = _read_log_from(self._run, rank, size)
            self.log_bytes += max(0, _measure_log(self._run, rank) - size)
            if stack := find_main_stack(text):
                self.stacks[rank] = stack[:_STACK_LENGTH_MAX]
        if self._run.document.launch is LaunchMode.NODE:
            self.stacks = {}  # the ranks of the node share a log, so the stacks cannot be told apart
        self.is_complete = True
        return True


def find_rank_processes(run: SupervisedRun) -> dict[int, int]:
    """Return the ids, on the machine, of the processes that the supervisor has started, by rank."""
    ranks = run.folder.read_ranks()
    inner = {find_namespaced_pid(pid): pid for pid in list_descendants(run.supervisor_pid)}
    return {rank: inner[pid] for pid, rank in ranks.items() if pid in inner}


def _run_pyspy(run: SupervisedRun, processes: Mapping[int, int]) -> None:
    """Append the stacks that py-spy sees from outside to the logs of the ranks."""
    for rank, pid in processes.items():
        try:
            command = ["py-spy", "dump", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, timeout=_PYSPY_TIMEOUT_S, check=False)
            if done.returncode == 0:
                _append_to_log(run.folder.log_path(rank), done.stdout)
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.warning("py-spy cannot read the stacks of rank %d of %s: %s", rank, run, error)


def _append_to_log(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _count_log_bytes(run: SupervisedRun) -> int:
    return sum(_measure_log(run, seat.rank) for seat in list_processes(run.document))


def _measure_log(run: SupervisedRun, rank: int) -> int:
    with suppress(FileNotFoundError):
        return run.folder.log_path(rank).lstat().st_size
    return 0


def _read_log_from(run: SupervisedRun, rank: int, start: int) -> str:
    descriptor = open_regular_file(run.folder.log_path(rank))
    if descriptor is None:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(start)
        return file.read(_STACK_BYTES_MAX).decode("utf-8", "replace")
