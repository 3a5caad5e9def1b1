"""The real application on a socket with a simulated fleet behind it. Tests advance its clock tick by tick."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
from uvicorn import Config

from api.app import Server, create_app
from api.demo import DemoDay
from ebbtide.client import Client
from scheduler.domain.commands import Command, CommandBody, ForecastMade
from scheduler.domain.fleet import Forecast, Node
from scheduler.domain.tick_report import TickReport
from scheduler.domain.worker_token import issue_worker_token
from scheduler.executors.log_files import LogLimits
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.executors.stored_logs import LogRoot
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.solver.curve import build_curve_solved, solve_point
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Lease
from tests.memory_run_log import MemoryRunLog

SECRET = b"a secret that only tests know...."
QUANTILES = (0.5, 0.9, 0.99, 0.999)
STOP_TIMEOUT_S = 60.0


class ConsoleSite:
    """The application on a socket. `nodes` are the nodes of the simulated world."""

    def __init__(
        self,
        store: ApiStore,
        nodes: Iterable[Node],
        *,
        now_s: float,
        folder: Path,
        auth: Literal["on", "off"] = "off",
        port: int = 0,
        settings: Mapping[str, Any] | None = None,
        demo: DemoDay | None = None,
    ) -> None:
        self.store = store
        self.folder = folder
        self.clock = ManualClock(now_s)
        self.executor = SimulatedExecutor(nodes, now_s=now_s, delays=Delays(start_s=5.0, drain_s=5.0))
        self.policies = load_policy_set("ebbtide")
        self.leader: Lease | None = None
        self.app = create_app(
            store,
            Settings(auth=auth, run_dir=folder, rate_per_s=1e6, rate_burst=10**6, **(settings or {})),
            clock=self.clock,
            policies=self.policies,
            lease=lambda: self.leader,
            token_secret=SECRET,
            run_log=MemoryRunLog(),
            demo=demo,
        )
        self.jobs: dict[str, str] = {}
        self._learned: list[Command] = []
        self.port = port
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen, on the same port as before."""
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port = int(listening.getsockname()[1])
        config = Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self._server = Server(config, self.app.state.streams)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()

    def close(self) -> None:
        """Stop the server and close all connections and streams."""
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        assert not self._thread.is_alive()

    def client(self, token: str = "") -> Client:
        return Client(self.url, token=token)

    def learn(self, body: CommandBody) -> None:
        """Queue a planning input of the controller for the next tick."""
        self._learned.append(Command(f"test-{len(self._learned)}-{self.clock.now_s()}", self.clock.now_s(), body))

    def demand(self, pool: str, gpus: float) -> None:
        """Set the demand, with a forecast that expects it to stay constant."""
        self.executor.set_demand(pool, gpus)
        levels = tuple(math.ceil(10 * gpus * (1 + 0.04 * at)) / 10 for at in range(len(QUANTILES)))
        self.learn(ForecastMade(pool, Forecast(self.clock.now_s(), 600.0, QUANTILES, levels, "test")))
        with self.client() as client:
            client.report_demand(pool, gpus=gpus)

    def tick(self, *, after_s: float = 1.0) -> TickReport:
        """Advance the clock by `after_s` seconds and run one real tick."""
        self.clock.move_to(self.clock.now_s() + after_s)
        self.executor.advance_to(self.clock.now_s())
        leader = self.lead()
        learned, self._learned = tuple(self._learned), []
        return tick(self.store, self.executor, self.clock, self.policies, epoch=leader.epoch, planning_inputs=learned)

    def train(self, job_id: str, steps: Iterable[int]) -> None:
        """Act as rank 0 of a job: log and report each step, one every six seconds."""
        allocation = self.store.load().snapshot.jobs[job_id].allocation
        generation = allocation.generation
        root = LogRoot(self.folder, limits=LogLimits())
        folder = root.folder(job_id, generation)
        if not folder.path.exists():
            folder.path.mkdir(parents=True)
        headers = {"Authorization": f"Bearer {issue_worker_token(SECRET, job_id, generation)}"}
        for step in steps:
            self.tick(after_s=6.0)
            loss, speed = 1.5 + 4 / (1 + step / 50), 90.0 + step % 7
            with folder.log_path(0).open("a") as printed:
                printed.write(f"rank 0 INFO step {step}: loss {loss:.4f}, {speed:.1f} samples/s\n")
            text = {"generation": generation, "step": step, "loss": loss, "samples_per_s": speed}
            httpx.post(f"{self.url}/v1/jobs/{job_id}/progress", json=text, headers=headers).raise_for_status()
        self.tick()

    def lead(self) -> Lease:
        self.leader = self.store.acquire_lease("test", now_s=self.clock.now_s(), ttl_s=1e6)
        assert self.leader is not None
        return self.leader

    def solve_requested_points(self, report: TickReport) -> None:
        """Act as the solver processes: solve the curve points that a tick requested."""
        requests = self.store.load().snapshot.curve_requests()
        for wanted in report.wanted_shapes:
            point = solve_point(requests[wanted.curve_key], wanted.shape)
            self.learn(build_curve_solved(wanted.curve_key, wanted.shape, point))

    def ticks(self, count: int, *, every_s: float = 5.0) -> None:
        for _ in range(count):
            self.tick(after_s=every_s)
