"""A service without local ranks, and node agents that join it: separate processes on loopback addresses.

Each machine has a state folder of its own and simulated GPUs. Ranks write what they see to a folder that all jobs may
write to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbtide.client import Client
from scheduler.store.schema_migration import migrate
from tests.loopback import find_free_port

TIMEOUT_S = 90.0
_POLL_PERIOD_S = 0.05


class MachineSite:
    """One API, one controller and any number of machines. `shared` is a folder that ranks may write to.

    Without a `database_url`, the database is a file in `folder`.
    """

    def __init__(self, folder: Path, *, disconnect_s: float, database_url: str = "") -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        folder.chmod(0o711)
        self.shared.chmod(0o1777)
        self.port = find_free_port()
        self.client = Client(f"http://127.0.0.1:{self.port}")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.database_url = database_url or f"sqlite:///{folder / 'ebbtide.sqlite'}"
        if not database_url:
            migrate(self.database_url)
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")} | {
            "EBBTIDE_DATABASE_URL": self.database_url,
            "EBBTIDE_AUTH": "off",
            "EBBTIDE_EXECUTOR": "agents",
            "EBBTIDE_PORT": str(self.port),
            "EBBTIDE_RUN_DIR": str(folder / "run"),
            "EBBTIDE_LEAVE_GRACE_S": "5",
            "EBBTIDE_DISCONNECT_S": str(disconnect_s),
            "EBBTIDE_TEMPORARY_MACHINE_S": str(3.0 * disconnect_s),
        }

    def start(self, name: str, *arguments: str, **settings: str) -> None:
        """Start a process: `ebbtide` with these arguments and settings, under a name with which to stop it."""
        if arguments[0] == "api":
            arguments = ("api", "--force", *arguments[1:])  # whoever else can log in to the machine
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "cli", *arguments],
                env=self._env | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def open(self) -> None:
        """Start API and controller, and create the pool that machines join."""
        self.start("api", "api")
        self.start("controller", "controller")
        self.wait(self.client.is_ready)
        self.client.create_pool({"name": "training", "kind": "training"})

    def join(self, name: str, *arguments: str, gpus: int, address: str = "127.0.0.1", url: str = "") -> None:
        """Start the agent of a machine with simulated GPUs, and wait until its node is up.

        Args:
            arguments: further options of the agent.
            url: where the agent reaches the API, if not directly.
        """
        token = self.folder / f"{name}.token"
        token.write_text(self.client.create_join_token("training")["secret"])
        options = ("--join", url or f"http://127.0.0.1:{self.port}", "--token-file", str(token), "--name", name)
        hardware = ("--gpus", str(gpus), "--gpu", "cpu", "--gpu-memory", "1GiB", "--address", address)
        self.start(name, *self.agent_arguments(name), *options, *hardware, *arguments)
        self.wait(lambda: any(node["name"] == name and node["state"] == "up" for node in self.client.nodes()))

    def agent_arguments(self, name: str) -> Sequence[str]:
        return ("agent", "--state", str(self.folder / name), "--writable", str(self.shared))

    def run_command(self, *arguments: str) -> str:
        """Run `ebbtide` with these arguments as a user does, and return its output."""
        url = f"http://127.0.0.1:{self.port}"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cli", arguments[0], "--url", url, *arguments[1:]],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def stop(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(TIMEOUT_S)

    def submit(self, name: str, command: Sequence[str], *, gpus: int, gpus_max: int = 0, **fields: Any) -> str:
        """Submit a job for `gpus` to `gpus_max` GPUs and return its id."""
        document = {"name": name, "gpus": {"min": gpus, "max": gpus_max or gpus}, "command": list(command), **fields}
        return str(self.client.submit(document)["id"])

    def state(self, job_id: str) -> str:
        return str(self.client.job(job_id)["state"])

    def wait_for_success(self, job_id: str) -> None:
        self.wait(lambda: self.state(job_id) == "succeeded")

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached():
            assert time.monotonic() < deadline_s, self.logs()
            for name, process in self.processes.items():
                assert process.poll() is None, (name, self.logs())
            time.sleep(_POLL_PERIOD_S)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """Kill all processes, the supervisors included."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        for record in self.folder.glob("*/jobs/*/gen-*/supervisor.json"):
            _kill_supervisor(record)
        self.client.close()


def _kill_supervisor(record: Path) -> None:
    from scheduler.agent.run_folder import RunFolder
    from scheduler.agent.supervised_run import SupervisedRun

    with contextlib.suppress(ValueError, OSError):
        SupervisedRun.recover(RunFolder(record.parent)).kill()


@contextmanager
def open_site(folder: Path, *, disconnect_s: float = 4.0) -> Iterator[MachineSite]:
    site = MachineSite(folder, disconnect_s=disconnect_s)
    try:
        site.open()
        yield site
    finally:
        site.close()
