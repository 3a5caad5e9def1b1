"""A whole service, controller and API in one process, whose clock runs `RATE` times as fast as real time.

`python -m tests.e2e.fast_service FOLDER PORT` ends on SIGTERM. Pauses of minutes, such as the backoff after
out-of-memory failures, pass in seconds.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import uvicorn

from api.app import create_app
from cli.composition.service import build_local_controller, build_policies
from scheduler.runtime.clock import RealClock
from scheduler.settings import Settings, load_token_secret
from scheduler.store.sql_store import SqlStore

# The service gives up on a start after 900 s. At this rate a slow machine still has 75 s for one.
RATE = 12.0


class FastClock:
    """A clock on which `RATE` seconds pass per real second, from its creation on."""

    def __init__(self) -> None:
        self._real = RealClock()
        self._began_s = self._real.now_s()

    def now_s(self) -> float:
        return self._began_s + RATE * (self._real.now_s() - self._began_s)

    def elapsed_s(self) -> float:
        return self._real.elapsed_s()


def settings(folder: Path, port: int) -> Settings:
    """Return the settings. Durations are in seconds of the fast clock."""
    return Settings(
        database_url=f"sqlite:///{folder / 'ebbtide.sqlite'}",
        run_dir=folder / "run",
        port=port,
        auth="off",
        full_pass_period_s=10.0,
        reconfiguration_s=1.0,
        resize_pause_s=1.0,
        leave_grace_s=60.0 * RATE,
        tick_s_max=0.1 * RATE,
        lease_s=10.0 * RATE,
    )


def main(folder: Path, port: int) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    chosen, clock = settings(folder, port), FastClock()
    store = SqlStore(chosen.database_url)
    app = create_app(
        store,
        chosen,
        clock=clock,
        policies=build_policies(chosen),
        lease=store.get_lease,
        token_secret=load_token_secret(chosen.token_secret_path),
        run_log=store.run_log,
    )
    server = uvicorn.Server(uvicorn.Config(app, host=chosen.host, port=port, log_config=None, access_log=False))
    answering = threading.Thread(target=server.run)
    answering.start()
    try:
        build_local_controller(chosen, store, clock=clock).run(stop)
    finally:
        server.should_exit = True
        answering.join()
        store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
