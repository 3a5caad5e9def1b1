"""A whole controller that ends itself with SIGKILL at a named point: `python -m tests.e2e.killable_controller`.

Arguments: the folder of the test, the point (or `never`), at which passage of the point it dies, and how long
workers may take to leave.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from scheduler.settings import Settings
from scheduler.store.sql import SqlStore
from scheduler.wiring import build_controller


def settings(folder: Path, *, leave_grace_s: float = 0.6) -> Settings:
    return Settings(
        database_url=f"sqlite:///{folder / 'ebbtide.sqlite'}",
        run_dir=folder / "run",
        full_pass_period_s=0.5,
        reconfiguration_s=0.01,
        resize_pause_s=0.5,
        leave_grace_s=leave_grace_s,
        tick_s_max=0.1,
        lease_s=1.0,
    )


def killer(point: str, passage: int) -> Callable[[str], None]:
    passed = 0

    def at(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed >= passage:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def main(folder: Path, point: str, passage: int, leave_grace_s: float) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    chosen = settings(folder, leave_grace_s=leave_grace_s)
    store = SqlStore(chosen.database_url)
    build_controller(chosen, store, at=killer(point, passage)).run(stop)
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
