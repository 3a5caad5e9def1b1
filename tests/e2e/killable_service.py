"""API and controller in one process, for tests: `python -m tests.e2e.killable_service FOLDER PORT [options]`.

    --grace SECONDS     time that workers have to save
    --die-at POINT:N    send SIGKILL to itself at the Nth passage of a point of the tick

It ends on SIGTERM. `scheduler.runtime.reconciler` names the points.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from api.app import create_app
from cli.composition.service import build_controller, build_policies
from scheduler.runtime.clock import RealClock
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore
from scheduler.token_secret import load_token_secret

GRACE_S = 60.0


def build_settings(folder: Path, port: int, *, grace_s: float = GRACE_S) -> Settings:
    """Return settings with short periods."""
    return Settings(
        database_url=f"sqlite:///{folder / 'ebbtide.sqlite'}",
        run_dir=folder / "run",
        port=port,
        auth="off",
        full_pass_period_s=0.5,
        reconfiguration_s=0.01,
        resize_pause_s=0.5,
        leave_grace_s=grace_s,
        tick_s_max=0.1,
        lease_s=1.0,
        undeclared_queues="allow",
    )


def build_killer(die_at: str) -> Callable[[str], None]:
    """Return a hook that kills this process at `POINT:N`; never if the text is empty."""
    point, _, passage = die_at.partition(":")
    passed = 0

    def at(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed >= int(passage):
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def main() -> None:
    arguments = _parse_arguments()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = build_settings(arguments.folder, arguments.port, grace_s=arguments.grace)
    clock = RealClock()
    store = SqlStore(settings.database_url)
    app = create_app(
        store,
        settings,
        clock=clock,
        policies=build_policies(settings),
        lease=store.get_lease,
        token_secret=load_token_secret(settings.token_secret_path),
        run_log=store.run_log,
    )
    server = uvicorn.Server(uvicorn.Config(app, host=settings.host, port=settings.port, log_config=None))
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        build_controller(settings, store, clock=clock, at=build_killer(arguments.die_at)).run(stop)
    finally:
        server.should_exit = True
        serving.join()
        store.close()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--die-at", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
