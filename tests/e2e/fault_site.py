"""Two machines, two API processes, two controllers and PostgreSQL, with links between them that can fail.

machine m1, m2 --link--> load balancer --> api-1, api-2 --link--> PostgreSQL <--link-- controller-1, controller-2
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from ebbtide.client import Client, ProblemError, RetryPolicy, UnreachableError
from scheduler.store.sql_store import SqlStore
from tests.e2e.faulty_link import FaultyLink, connect_to_healthy, connect_unix
from tests.e2e.machine_site import MachineSite
from tests.e2e.rank_monitor import RankMonitor, RankProcess
from tests.loopback import find_free_port
from tests.postgres_server import SOCKET_NAME, PostgresServer

API = ("api-1", "api-2")
CONTROLLERS = ("controller-1", "controller-2")
ADDRESSES = {"m1": "127.0.0.2", "m2": "127.0.0.3"}
GPUS = 6
RANK = "import time\nfor _ in range(int({seconds} / 0.2)): print('.', flush=True); time.sleep(0.2)"
WIDE_GPUS, NARROW_GPUS = 8, 2
_REQUEST_TIMEOUT_S = 3.0


class FaultSite:
    """The processes, their links, and the monitor of all ranks.

    Attributes:
        steady: jobs that run all the time, by id: one across both machines, one on a single machine.
    """

    def __init__(self, folder: Path, server: PostgresServer, *, disconnect_s: float, lease_s: float) -> None:
        self.server = server
        self.database_url = server.new_database()
        self.site = MachineSite(folder, disconnect_s=disconnect_s, database_url=self.database_url)
        self.store = SqlStore(self.database_url)
        self._settings = {"EBBTIDE_LEASE_S": str(lease_s)}
        self.ports = {name: find_free_port() for name in API}
        self.database_links = {name: self._open_database_link(name) for name in (*API, *CONTROLLERS)}
        port, connect = find_free_port(), partial(connect_to_healthy, tuple(self.ports.values()))
        self.machine_links = {
            name: FaultyLink(socket.create_server((address, port)), connect) for name, address in ADDRESSES.items()
        }
        self._machine_port = port
        self._user_link = FaultyLink(socket.create_server(("127.0.0.1", port)), connect)
        self.url = f"http://127.0.0.1:{port}"
        self.site.client.close()
        self.site.client = Client(self.url)
        self.site.port = port
        self.monitor = RankMonitor(folder)
        self.steady: dict[str, int] = {}

    def open(self) -> None:
        for name in (*API, *CONTROLLERS):
            self.start(name)
        self.site.wait(self.site.client.is_ready)
        self.site.client.create_pool({"name": "training", "kind": "training"})
        for name, address in ADDRESSES.items():
            self.site.join(name, gpus=GPUS, address=address, url=f"http://{address}:{self._machine_port}")
        for name, gpus in (("wide", WIDE_GPUS), ("narrow", NARROW_GPUS)):
            self.steady[self.submit(name, seconds=36_000, gpus=gpus)] = gpus

    def start(self, name: str) -> None:
        """Start a process of the control plane, or the agent of a machine that has joined."""
        if name in ADDRESSES:
            self.site.start(name, *self.site.agent_arguments(name))
            return
        folder = self.site.folder / "links" / name
        settings = {"EBBTIDE_DATABASE_URL": f"postgresql+psycopg://postgres@/{self._database_name}?host={folder}"}
        if name in API:
            settings["EBBTIDE_PORT"] = str(self.ports[name])
        self.site.start(name, name.partition("-")[0], **self._settings, **settings)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.site.processes[name].send_signal(number)

    def submit(self, name: str, *, seconds: float, gpus: int) -> str:
        command = ["python3", "-c", RANK.format(seconds=seconds)]
        return self.site.submit(name, command, gpus=gpus)

    def find_leader(self) -> str:
        """Return the controller that has the lease."""
        found: list[str] = []

        def has_leader() -> bool:
            lease = self.store.get_lease()
            pids = {str(self.site.processes[name].pid): name for name in CONTROLLERS}
            found[:] = [pids[part] for part in ("" if lease is None else lease.holder).split("-") if part in pids]
            return bool(found)

        self.site.wait(has_leader)
        return found[0]

    def find_supervisor(self, rank: RankProcess) -> psutil.Process:
        parent = psutil.Process(rank.pid).parent()
        assert parent is not None
        return parent

    def wait_until_steady(self) -> frozenset[RankProcess]:
        """Wait until the control plane answers and the steady jobs run on all their GPUs, and return their ranks."""
        self.wait(self._is_steady)
        return frozenset(rank for job_id in self.steady for rank in self.monitor.ranks_of(job_id))

    def wait(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition that requests may fail to tell while the control plane recovers."""

        def is_reached() -> bool:
            try:
                return reached()
            except (ProblemError, UnreachableError):
                return False

        self.site.wait(is_reached)

    def measure_takeover(self, since_s: float, key: str) -> tuple[float, str]:
        """Submit a job, and return the seconds from `since_s` (monotonic) until a leader has decided about it."""
        document = {"name": key, "gpus": {"min": 1, "max": 1}, "command": ["true"]}
        job_id = ""
        while True:
            # A client of its own, because the connection of another one may be to a stopped process.
            with Client(self.url, timeout_s=_REQUEST_TIMEOUT_S, retries=RetryPolicy(attempts=1)) as client:
                try:
                    job_id = job_id or str(client.submit(document, key=key)["id"])
                    if client.job(job_id)["state"] != "submitted":
                        return time.monotonic() - since_s, job_id
                except (ProblemError, UnreachableError):
                    pass
            assert time.monotonic() - since_s < 120.0, self.site.logs()
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.site.processes.values():
            process.send_signal(signal.SIGCONT)
        self.site.close()
        self.monitor.close()
        for link in (*self.database_links.values(), *self.machine_links.values(), self._user_link):
            link.close()
        self.store.close()

    @property
    def _database_name(self) -> str:
        return self.database_url.partition("?")[0].rpartition("/")[2]

    def _is_steady(self) -> bool:
        counts = {job_id: len(self.monitor.ranks_of(job_id)) for job_id in self.steady}
        return counts == self.steady and all(self.site.state(job_id) == "running" for job_id in self.steady)

    def _open_database_link(self, name: str) -> FaultyLink:
        folder = self.site.folder / "links" / name
        folder.mkdir(parents=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen()
        return FaultyLink(listener, partial(connect_unix, str(self.server.socket_path)))


@contextmanager
def open_fault_site(
    folder: Path, server: PostgresServer, *, disconnect_s: float, lease_s: float
) -> Iterator[FaultSite]:
    site = FaultSite(folder, server, disconnect_s=disconnect_s, lease_s=lease_s)
    try:
        site.open()
        yield site
    finally:
        site.close()
