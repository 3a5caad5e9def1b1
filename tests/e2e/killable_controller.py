"""A controller that kills itself with SIGKILL at a named point: `python -m tests.e2e.killable_controller`.

Arguments: the folder of the test, the point (or `never`), at which passage of the point it dies, the grace period of
workers in seconds, and `--torchless` to use a fake rendezvous store if no rank needs torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from cli.composition.service import assemble_controller, build_local_controller, make_holder_id
from scheduler.executors.local_executor import LocalExecutor
from scheduler.executors.local_run import RunTimeouts
from scheduler.runtime.clock import RealClock
from scheduler.runtime.controller import Controller
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore
from tests.contract.local_rig import RENDEZVOUS


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


def torchless(chosen: Settings, store: SqlStore, at: Callable[[str], None]) -> Controller:
    """Build the controller like `build_local_controller`, without processes that load torch."""
    clock = RealClock()
    patience = RunTimeouts(close_s=chosen.leave_grace_s)
    executor = LocalExecutor(
        chosen.run_dir, now=clock.now_s, rendezvous_command=RENDEZVOUS, preload=(), timeouts=patience, on_crash_point=at
    )
    return assemble_controller(
        chosen,
        store,
        executor,
        clock,
        holder=make_holder_id(),
        has_news=executor.has_pending_changes,
        may_lead=executor.may_lead,
        at=at,
    )


def main(folder: Path, point: str, passage: int, leave_grace_s: float, *, has_torch: bool) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    chosen, at = settings(folder, leave_grace_s=leave_grace_s), killer(point, passage)
    store = SqlStore(chosen.database_url)
    controller = build_local_controller(chosen, store, at=at) if has_torch else torchless(chosen, store, at)
    controller.run(stop)
    store.close()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        float(sys.argv[4]),
        has_torch="--torchless" not in sys.argv[5:],
    )
