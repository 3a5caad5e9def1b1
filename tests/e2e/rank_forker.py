"""A process with torch loaded that forks the ranks of tests. Loading torch takes seconds, a fork none.

`python -m tests.e2e.rank_forker [MODULE ...]` imports modules, by default those of the reference trainer. It reads one
JSON object per line from standard input, `{"start": {...}}` or `{"signal": {...}}`, and writes
`{"generation", "rank", "code"}` for each rank that has ended. It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import sys
from typing import Any

from ebbtide import notice

PRELOAD = "scheduler.trainer.preload"
_POLL_S = 0.02
notice._BOUNDARIES_MAX = 1  # ranks of tests leave at exact steps, so they agree after each
notice.FILE_PERIOD_S = 0.0


class Forker:
    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._ranks: dict[int, tuple[int, int]] = {}

    def serve(self) -> dict[str, Any] | None:
        """Serve until the input ends. In a forked rank, return what it has to run."""
        pending = b""
        while True:
            if select.select([0], [], [], _POLL_S)[0]:
                part = os.read(0, 65536)
                if not part:
                    self._kill_all()
                    return None
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    ((kind, order),) = json.loads(line).items()
                    if kind == "signal":
                        self._signal(order)
                    elif self._start(order):
                        return dict(order)
            self._reap()

    def report(self, document: dict[str, Any]) -> None:
        os.write(self._reports, json.dumps(document).encode() + b"\n")

    def _start(self, order: dict[str, Any]) -> bool:
        pid = os.fork()
        if pid:
            self._ranks[pid] = order["generation"], order["rank"]
            return False
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(self._reports)
        return True

    def _signal(self, order: dict[str, Any]) -> None:
        wanted = order["generation"], order["rank"]
        for pid, rank in self._ranks.items():
            if rank == wanted:
                os.kill(pid, order["number"])

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            generation, rank = self._ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self.report({"generation": generation, "rank": rank, "code": code})

    def _kill_all(self) -> None:
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    reports = os.dup(1)
    os.dup2(2, 1)
    for name in sys.argv[1:] or [PRELOAD]:
        importlib.import_module(name)
    forker = Forker(reports)
    forker.report({"ready": True})
    order = forker.serve()
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["env"])
    if order["argv"][1] == "-m":
        sys.argv = order["argv"][2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        os.chdir(order["cwd"])
        sys.argv = order["argv"][1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
