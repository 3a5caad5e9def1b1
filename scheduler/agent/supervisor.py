"""The supervisor of a generation on one node: PID 1 of its namespace, which starts, reaps and ends the ranks.

`python -P -m scheduler.agent.supervisor FOLDER [--reserve-port] [--preload MODULE ...]` outlives the agent that started
it and speaks with it by files in FOLDER (`scheduler.agent.run_folder` lists them):

    prepare     import the modules of --preload, reserve the master's port, write `port` and `prepared.json`
    wait        until `start.json` appears; SIGUSR1 asks to look at once
    run         start the ranks, write `started.json`, and `exit-<rank>.json` for each rank that ended
    end         after the last rank, or if one cannot start: kill what is left, write `ended`

SIGTERM goes on to the process groups of the ranks; before the start it ends the supervisor. The ranks are killed when
the lease ends, which the agent extends while it has contact with the control plane (`loss.json`). Ranks drop the
supervisor's privileges. The kernel kills all processes of the namespace when the supervisor ends for any reason.

The process has one thread, so that it can fork ranks of the reference trainer, which then need not load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from scheduler.agent.shared_files import write_json

_START_POLL_S = 0.02
_PERIOD_S = 1.0
_RECORD_TIMEOUT_S = 60.0
_LOCK_TIMEOUT_S = 5.0
_LOG_BYTES = 67_108_864
_STDERR = 2
_OOM_SCORE = "500"
_RANK_UMASK = 0o022
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 36, 38
_REASON_BYTES_MAX = 4096
_CANNOT_START = 127
_NOT_FOUND = "command-not-found"
"""The `PermanentFault` of a command that cannot be executed, which is too costly to import here."""
_NOT_FOUND_ERRORS = frozenset({
    errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
})  # fmt: skip
_HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)
_LIBC = ctypes.CDLL(None)

Process = Mapping[str, Any]
"""A process of `start.json`: `rank`, `argv` and `env`."""


def main() -> None:
    arguments = _parse_arguments()
    _close_inherited(keep=arguments.lock_fd)
    folder = Path(arguments.folder)
    lock = _lock(folder) if arguments.lock_fd is None else arguments.lock_fd
    os.set_inheritable(lock, False)
    supervisor = Supervisor(folder, lock, lease=arguments.lease, log_bytes=arguments.log_bytes)
    supervisor.prepare(preload=arguments.preload, reserves_port=arguments.reserve_port)
    run_forked_rank = supervisor.supervise()
    if run_forked_rank is None:
        os._exit(0)  # all is recorded, and the next generation waits for the end of this process
    run_forked_rank()


class Supervisor:
    """State of the supervisor.

    Args:
        lock: the locked descriptor that shows that the supervisor lives.
        lease: file with the time on the boot clock until which ranks may run; None for no limit.
    """

    def __init__(self, folder: Path, lock: int, *, lease: Path | None, log_bytes: int) -> None:
        self._folder = folder
        self._lock = lock
        self._lease = lease
        self._log_bytes = log_bytes
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        if os.getpid() != 1:
            # Without a PID namespace, orphans of the ranks become children of this process.
            _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._reserved: socket.socket | None = None
        self._ranks: dict[int, int] = {}
        self._logs: dict[int, int] = {}
        self._unwritten: dict[str, object] = {}
        self._is_terminated = self._is_expired = False
        self._logs_checked_at_s = time.monotonic()

    def prepare(self, *, preload: Sequence[str], reserves_port: bool) -> None:
        """Import the modules, reserve the port and record that the ranks may start."""
        loaded = [name for name in preload if _import(name)]
        if reserves_port:
            self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._reserved.bind(("", 0))
            # Set after bind: rank 0 can then listen on the port, and no other program can bind it.
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._record("port", self._reserved.getsockname()[1])
        self._record("prepared.json", {"loaded": loaded, "at": time.time()})

    def supervise(self) -> Callable[[], None] | None:
        """Run the ranks to their end. In a forked rank, return the function that runs its program."""
        order = self._wait_for_order()
        if order is not None:
            program = self._start(order)
            if program is not None:
                return program
            while self._ranks:
                self._wait(_PERIOD_S)
        self._end()
        return None

    def _wait_for_order(self) -> Mapping[str, Any] | None:
        """Return the order to start, None if SIGTERM comes first."""
        path = self._folder / "start.json"
        while not self._is_terminated:
            with contextlib.suppress(FileNotFoundError):
                order: Mapping[str, Any] = json.loads(path.read_bytes())
                return order
            self._wait(_START_POLL_S)
        return None

    def _start(self, order: Mapping[str, Any]) -> Callable[[], None] | None:
        """Start all ranks. If one cannot start, kill the others and record why."""
        pids = dict[str, int]()
        is_forked = order["is_reference_trainer"] and _is_single_threaded()
        try:
            # All logs exist before the first rank runs, so no rank can put a link in their place.
            for process in order["processes"]:
                self._logs[process["rank"]] = _create_log(self._folder / f"rank-{process['rank']}.log")
            secrets = _read_secrets(order.get("secrets", ""))
            for described in order["processes"]:
                process = {**described, "env": {**described["env"], **secrets}}
                pid = self._spawn(process, order, is_forked=is_forked)
                if pid == 0:
                    return partial(_run_module, process["argv"])
                self._ranks[pid], pids[str(process["rank"])] = process["rank"], pid
        except (OSError, RankStartError) as error:
            fault = error.permanent_fault if isinstance(error, RankStartError) else ""
            self._record("failure.json", {"reason": str(error), "permanent_fault": fault})
            self._signal_ranks(signal.SIGKILL)
        self._record("started.json", {"pids": pids, "at": time.time(), "is_forked": is_forked})
        return None

    def _spawn(self, process: Process, order: Mapping[str, Any], *, is_forked: bool) -> int:
        """Start a rank and return its process id. In a forked rank, return 0.

        Raises:
            RankStartError: the command cannot be executed; the message names the cause.
            OSError: the process limit is reached.
        """
        read_fd, write_fd = os.pipe()
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _become_rank(self._logs[process["rank"]], order, supervisor_pid)
                if not is_forked:
                    _execute(process["argv"], process["env"])
                self._forget_supervisor(process["env"], (read_fd, write_fd))
            except BaseException as error:
                # A copy that went on here would act as a second supervisor.
                fault = error.permanent_fault if isinstance(error, RankStartError) else ""
                os.write(write_fd, f"{fault}\n{error}".encode()[:_REASON_BYTES_MAX])
                os._exit(_CANNOT_START)
            return 0
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as pipe:
            failure = pipe.read().decode("utf-8", "replace")  # empty once the rank has executed its program
        if failure:
            fault, _, reason = failure.partition("\n")
            raise RankStartError(f"rank {process['rank']}: {reason}", permanent_fault=fault)
        return pid

    def _forget_supervisor(self, env: Mapping[str, str], pipe: Sequence[int]) -> None:
        """Give a forked rank its own environment and random state, and close the supervisor's descriptors."""
        _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else the rank could not read its own files below /proc
        os.environ.clear()
        os.environ.update(env)
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        if self._reserved is not None:
            self._reserved.close()
        for descriptor in (self._lock, self._wake_read, self._wake_write, *self._logs.values(), *pipe):
            os.close(descriptor)

    def _wait(self, timeout_s: float) -> None:
        """Wait for a signal or the timeout. Then reap, write what could not be written before, and trim logs."""
        select.select([self._wake_read], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self._wake_read, 4096):
                self._is_terminated = True
                self._signal_ranks(signal.SIGTERM)
        self._check_lease()
        self._reap(os.WNOHANG)
        self._write_records()
        if self._ranks and time.monotonic() >= self._logs_checked_at_s + _PERIOD_S:
            self._trim_logs()

    def _check_lease(self) -> None:
        """Kill the ranks once the lease has ended: the control plane may then start the job on another machine."""
        if self._lease is None or self._is_expired:
            return
        try:
            until_s = float(self._lease.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            _print_once(f"The lease {self._lease} cannot be read, so it does not end: {error}")
            return
        if time.clock_gettime(time.CLOCK_BOOTTIME) > until_s:
            self._is_expired = self._is_terminated = True
            self._record("loss.json", {"reason": "the machine had no contact with the control plane for too long"})
            self._signal_ranks(signal.SIGKILL)

    def _reap(self, options: int) -> None:
        """Reap every child that has ended, also orphans of ranks, and record the exits of ranks."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._ranks:
                # Before the rank is reaped, the kernel cannot use the number of its group again.
                _kill_group(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            rank = self._ranks.pop(ended.si_pid, None)
            if rank is not None:
                exit_record = {"code": os.waitstatus_to_exitcode(status), "at": time.time()}
                self._record(f"exit-{rank}.json", exit_record)

    def _end(self) -> None:
        """Kill what ranks have left, wait for it, and record the end once everything else is recorded."""
        while children := _list_children():
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap(0)
        deadline_s = time.monotonic() + _RECORD_TIMEOUT_S
        while self._unwritten and time.monotonic() < deadline_s:
            time.sleep(_PERIOD_S)
            self._write_records()
        self._record("ended", {"at": time.time()})

    def _signal_ranks(self, number: int) -> None:
        for pid in self._ranks:
            _kill_group(pid, number)

    def _record(self, name: str, document: object) -> None:
        """Write a file. If the disk is full or read-only, keep the document and retry later."""
        self._unwritten[name] = document
        self._write_records()

    def _write_records(self) -> None:
        for name, document in list(self._unwritten.items()):
            try:
                write_json(self._folder / name, document)
            except OSError as error:
                _print_once(f"{name} cannot be written and will be retried: {error}")
                return
            del self._unwritten[name]

    def _trim_logs(self) -> None:
        # Loaded here, because a rank's start does not need it.
        from scheduler.executors.log_files import trim_log

        self._logs_checked_at_s = time.monotonic()
        try:
            for descriptor in (_STDERR, *self._logs.values()):
                trim_log(descriptor, self._log_bytes)
        except OSError as error:
            _print_once(f"Logs grow without limit, because the file system cannot trim them: {error}")
            self._logs_checked_at_s = float("inf")


class RankStartError(Exception):
    """A rank could not be started. The message is for the job's owner.

    `permanent_fault` is why a retry cannot succeed, empty if it may.
    """

    def __init__(self, message: str, *, permanent_fault: str = "") -> None:
        super().__init__(message)
        self.permanent_fault = permanent_fault


def _read_secrets(path: str) -> Mapping[str, str]:
    """Return the variables with secrets, which are in a file of their own; none for a run without secrets.

    Raises:
        RankStartError: the file is missing.
    """
    if not path:
        return {}
    try:
        variables: Mapping[str, str] = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise RankStartError(f"the secrets of the run cannot be read: {type(error).__name__}") from None
    return variables


def _become_rank(log: int, order: Mapping[str, Any], supervisor_pid: int) -> None:
    """Turn a copy of the supervisor into a rank: own session, log, user and working directory.

    Raises:
        RankStartError: the working directory cannot be entered.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in _HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.umask(_RANK_UMASK)
    with contextlib.suppress(OSError):
        # At the memory limit, the kernel shall end a rank and not the supervisor, which records the exits.
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    if order["user"] is not None:
        os.setgroups(order["user"]["groups"])
        os.setresgid(*[order["user"]["gid"]] * 3)
        os.setresuid(*[order["user"]["uid"]] * 3)
    _LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which resets it
    if os.getppid() != supervisor_pid:
        os._exit(_CANNOT_START)
    try:
        os.chdir(order["directory"])
    except OSError as error:
        raise RankStartError(f"the working directory {order['directory']} cannot be entered: {error}") from None


def _execute(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Execute a program of PATH. Where `python` does not exist, `python3` is meant.

    Raises:
        RankStartError: it cannot be executed.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these two, and other programs do not expect that
    for name in ("python", "python3") if argv[0] == "python" else argv[:1]:
        try:
            os.execvpe(name, [name, *argv[1:]], env)
        except OSError as error:
            cause = os.strerror(error.errno or errno.ENOENT)
            fault = _NOT_FOUND if error.errno in _NOT_FOUND_ERRORS else ""
        except ValueError as error:  # a null byte
            cause, fault = str(error), _NOT_FOUND
    reason = f"command: {argv[0]!r} cannot be executed: {cause}. PATH is {env.get('PATH')!r}."
    raise RankStartError(reason, permanent_fault=fault)


def _run_module(argv: Sequence[str]) -> None:
    """Run `<interpreter> [-P] -m module ...` in a forked rank. It ends as a new interpreter would."""
    import runpy

    sys.orig_argv = list(argv)
    words = list(argv[argv.index("-m") + 1 :])
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _import(name: str) -> bool:
    """Import a module. A rank repeats a failed import, and reports why it failed."""
    try:
        importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        return False
    # Frozen objects are not touched by garbage collection, so their pages stay shared with the ranks.
    gc.collect()
    gc.freeze()
    return True


def _create_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _kill_group(pid: int, number: int) -> None:
    """Signal a rank's process group. A rank that has no group yet has no children either."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _list_children() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _is_single_threaded() -> bool:
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _close_inherited(*, keep: int | None) -> None:
    """Close descriptors that this process got from its parent by accident."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > _STDERR and int(entry.name) != keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(entry.name))


def _lock(folder: Path) -> int:
    """Lock the folder. The supervisor in a pod does it itself; an agent passes a locked descriptor."""
    descriptor = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                sys.exit(f"{folder} is locked: its supervisor already runs.")
            time.sleep(_START_POLL_S)  # an agent may be looking whether the lock is held
        else:
            return descriptor


@cache
def _print_once(message: str) -> None:
    """Write a message to standard error, which is the supervisor's log. A repeated one is not written again."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m scheduler.agent.supervisor", description="Run a job's ranks.")
    parser.add_argument("folder", help="folder of the generation")
    parser.add_argument("--reserve-port", action="store_true", help="reserve the master's port on this machine")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="module to import first")
    parser.add_argument("--lock-fd", type=int, help="descriptor of the locked supervisor.lock; default: lock it")
    parser.add_argument("--lease", type=Path, help="file with the time on the boot clock at which ranks are killed")
    parser.add_argument("--log-bytes", type=int, default=_LOG_BYTES, help="maximum size of a log, in bytes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
