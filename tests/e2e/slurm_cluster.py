"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd on loopback, stopped by their ids.

Each node has two fake GPUs and two CPUs, to which tasks are bound. The partition `high` preempts the partition `low`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.loopback import find_free_port

NODES = ("n1", "n2")
KILL_WAIT_S = 5
ORDINARY_USER = 65534
_TIMEOUT_S = 60.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "setpriv", "bwrap")

_missing = [program for program in _PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
needs_slurm = pytest.mark.skipif(
    bool(_missing) or os.geteuid() != 0,
    reason=f"not installed: {', '.join(_missing)}" if _missing else "the daemons of Slurm need root",
)


class SlurmCluster:
    """The daemons of a cluster, and commands of Slurm for it. All of its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.config)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        folder.chmod(0o755)
        for name in ("state", "munge", *NODES):
            (folder / name).mkdir()
        for number in range(2):
            os.mknod(folder / f"gpu{number}", 0o020666, os.makedev(1, 3))
        self._write_config()

    def open_folder(self, name: str) -> Path:
        """Create a folder that every user may write to."""
        path = self.folder / name
        path.mkdir()
        path.chmod(0o1777)
        return path

    def start(self) -> None:
        munge, key = self.folder / "munge", self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        for path in (munge, key):
            shutil.chown(path, "munge")
        files = ("--socket=socket", "--pid-file=pid", "--seed-file=seed", "--log-file=log")
        options = [f"{name}={munge / value}" for name, value in (each.split("=") for each in files)]
        user = ("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups")
        self._start("munged", (*user, "munged", "--foreground", f"--key-file={key}", *options))
        self.wait((munge / "socket").exists)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%T %D", "-p", "low") == "idle 2")

    def start_controller(self) -> None:
        self._start("slurmctld", ("slurmctld", "-D", "-i", "-f", str(self.config)))
        self.wait(lambda: subprocess.run(("scontrol", "ping"), env=self.env, capture_output=True).returncode == 0)

    def start_node(self, node: str) -> None:
        self._start(node, ("slurmd", "-D", "-N", node, "-f", str(self.config)))

    def wait_for_saved_state(self) -> None:
        """Wait until slurmctld has saved the jobs that it knows now, which it does some seconds later."""
        now_s, state = time.time(), self.folder / "state" / "job_state"
        self.run("scontrol", "reconfigure")
        self.wait(lambda: state.exists() and state.stat().st_mtime > now_s)

    def kill(self, name: str) -> None:
        """Kill `slurmctld`, or the slurmd of a node, as a crash does."""
        process = self._daemons.pop(name)
        process.kill()
        process.wait()

    def run(self, *command: str) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def list_jobs(self) -> list[str]:
        """Return the ids of jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%A").split()

    def find_processes(self, *words: str) -> list[psutil.Process]:
        """Return the living processes of jobs, or those among them whose command line has all of these words."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = (
                    process.environ().get("SLURM_CONF") == str(self.config) and "SLURM_JOB_ID" in process.environ()
                )
                line = " ".join(process.cmdline())
                if is_ours and process.status() != psutil.STATUS_ZOMBIE and all(word in line for word in words):
                    found.append(process)
        return found

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not reached():
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(paths))

    def close(self) -> None:
        """Stop the daemons, and kill what is left of jobs."""
        if "slurmctld" in self._daemons:
            for user in ("root", str(ORDINARY_USER)):
                subprocess.run(("scancel", f"--user={user}"), env=self.env, capture_output=True, check=False)
        while self._daemons:
            name, daemon = self._daemons.popitem()
            daemon.send_signal(signal.SIGTERM if name == "munged" else signal.SIGKILL)
            daemon.wait()
        for process in self.find_processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.name() == "slurmstepd" and self._has_log_of(process.pid):
                    process.kill()

    def _has_log_of(self, pid: int) -> bool:
        """Return whether a process writes to a log of this cluster. A step's process has no other mark of it."""
        links = (link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir())
        return any(str(target).startswith(f"{self.folder}/") for target in links)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            environment = self.env | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
            self._daemons[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _write_config(self) -> None:
        host, folder = socket.gethostname(), self.folder
        node = "NodeHostname={} NodeAddr=127.0.0.1 CPUs=2 Sockets=1 CoresPerSocket=2 RealMemory=1000 Gres=gpu:2"
        nodes = "\n".join(f"NodeName={name} Port={find_free_port()} {node.format(host)}" for name in NODES)
        self.config.write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={find_free_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=15,socket={folder}/munge/socket
SchedulerParameters=sched_interval=2,bf_interval=2
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=Cores
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={KILL_WAIT_S}
SlurmdTimeout=10
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP
""")
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")


@contextmanager
def open_cluster() -> Iterator[SlurmCluster]:
    """Run a cluster in a folder that munged accepts and other users can enter."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        cluster = SlurmCluster(Path(name))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
