"""Nodes of Slurm allocations, on a real slurmctld and two slurmd: they appear, serve jobs, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import ebbtide
from scheduler.slurm.slurm_client import find_job, manages_gpus
from tests.e2e.machine_site import MachineSite, open_site
from tests.e2e.slurm_cluster import KILL_WAIT_S, ORDINARY_USER, SlurmCluster, needs_slurm, open_cluster

RANK = Path(__file__).with_name("reporting_rank.py")
WAITING_STATES = ("queued", "preempted")
SYSTEM_PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).parents[2]
AS_ORDINARY_USER = (
    "setpriv",
    f"--reuid={ORDINARY_USER}",
    f"--regid={ORDINARY_USER}",
    "--clear-groups",
    "env",
    "HOME=/",
)
HARDWARE = ("--gpu", "cpu", "--gpu-memory", "1GiB", "--address", "127.0.0.1")

pytestmark = needs_slurm


class PilotSite:
    """A service and a Slurm cluster."""

    def __init__(self, site: MachineSite, cluster: SlurmCluster) -> None:
        self.site = site
        self.cluster = cluster
        self.states = cluster.open_folder("pilots")
        self.logs = cluster.open_folder("logs")

    def ebbtide(self, *arguments: str, command: Sequence[str] = (sys.executable, "-P", "-m", "cli")) -> str:
        """Run `ebbtide slurm` as a user does, and return its output."""
        words = [*command, "slurm", *arguments]
        done = subprocess.run(words, env=self.cluster.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def install_for_everyone(self) -> Path:
        """Return a program that runs `ebbtide` in a virtual environment that every user may read."""
        venv, program = self.cluster.folder / "venv", self.cluster.folder / "ebbtide"
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", venv], check=True)
        [site_packages] = venv.glob("lib/python3.*/site-packages")
        packages = (ROOT, Path(ebbtide.__file__).parents[1], sysconfig.get_path("purelib"))
        (site_packages / "ebbtide.pth").write_text("".join(f"{package}\n" for package in packages))
        program.write_text(f'#!/bin/sh\nexec {venv}/bin/python -P -m cli "$@"\n')
        program.chmod(0o755)
        if subprocess.run([*AS_ORDINARY_USER, program, "--help"], capture_output=True, check=False).returncode:
            pytest.skip(f"an ordinary user cannot import this project with {SYSTEM_PYTHON}")
        return program

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.site.port}"

    def options(self, *agent_options: str, gpus: int = 2) -> tuple[str, ...]:
        agent = (*HARDWARE, "--state", str(self.states), "--writable", str(self.site.shared), "--check-every", "1s")
        log = ("--log", str(self.logs / "pilot-%j.log"))
        urls = ("--url", self.url, "--join", self.url)
        stated = ("--gpus-per-node", str(gpus)) if gpus else ()
        return (*stated, *urls, *log, "--", *agent, *agent_options)

    def submit_pilot(self, *options: str, nodes: int = 1, agent: tuple[str, ...] = ()) -> str:
        """Submit a pilot, wait until its nodes are up, and return its Slurm job id."""
        before = set(self.cluster.list_jobs())
        stated = ("--nodes", str(nodes), "--partition", "low", *options)
        self.ebbtide("submit", *stated, *self.options("--leave-within", "2s", *agent))
        (job_id,) = set(self.cluster.list_jobs()) - before
        self.wait_for_nodes(job_id, nodes)
        return job_id

    def wait_for_nodes(self, job_id: str, nodes: int) -> None:
        prefix = f"slurm-{job_id}-"
        try:
            self.site.wait(lambda: sum(name.startswith(prefix) for name in self.up_nodes()) == nodes)
        except AssertionError as error:
            error.add_note(self.describe())
            raise

    def describe(self) -> str:
        """Return what Slurm and the pilots say of themselves."""
        logs = "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.logs.glob("*.log")))
        return "\n".join((self.cluster.run("squeue", "-l"), self.cluster.logs(), logs))

    def up_nodes(self) -> list[str]:
        return [node["name"] for node in self.site.client.nodes() if node["state"] == "up" and not node["draining"]]

    def submit(self, name: str, *, gpus: int, seconds: float) -> str:
        script = self.site.shared / RANK.name
        shutil.copy(RANK, script)
        script.chmod(0o644)
        return self.site.submit(name, ["python3", str(script), str(self.site.shared), str(seconds)], gpus=gpus)

    def generations(self, job_id: str) -> set[int]:
        return {int(path.name.split("-")[-2]) for path in self.site.shared.glob(f"{job_id}-*.json")}

    def find_last_node(self, job_id: str) -> str:
        """Return a node of the newest generation that has started."""
        newest = max(self.generations(job_id))
        path = next(self.site.shared.glob(f"{job_id}-{newest}-*.json"))
        return str(json.loads(path.read_text())["EBBTIDE_NODE"])

    def wait_for_ranks(self, job_id: str, *, ranks: int, generation: int = 1) -> None:
        self.site.wait(lambda: len(list(self.site.shared.glob(f"{job_id}-{generation}-*.json"))) == ranks)

    def wait_until_silent(self, job_id: str, *, generation: int = 1) -> None:
        """Wait until no rank of a generation shows that it is alive."""
        marks = list(self.site.shared.glob(f"{job_id}-{generation}-*.alive"))
        self.site.wait(lambda: all(time.time() - float(mark.read_text()) > 1.0 for mark in marks))

    def wait_until_gone(self, *, nodes: int = 0) -> None:
        """Wait until only this many nodes are left, without a machine, process or folder of an ended pilot."""
        self.site.wait(lambda: len(self.site.client.nodes()) == nodes)
        self.site.wait(lambda: sum(each["revoked_at_s"] is None for each in self.site.client.machines()) == nodes)
        if not nodes:
            self.cluster.wait(lambda: not self.cluster.find_processes())
            assert not list(self.states.glob("*"))


@pytest.fixture
def pilots(monkeypatch: pytest.MonkeyPatch) -> Iterator[PilotSite]:
    with open_cluster() as cluster, open_site(cluster.open_folder("site")) as site:
        monkeypatch.setenv("SLURM_CONF", str(cluster.config))
        try:
            yield PilotSite(site, cluster)
        finally:
            cluster.close()


def test_two_nodes_appear_run_a_job_and_vanish_with_scancel(pilots: PilotSite) -> None:
    job = pilots.submit_pilot(nodes=2)
    assert {node["gpus"] for node in pilots.site.client.nodes()} == {2}
    inventory = pilots.site.client.machine(f"slurm-{job}-n1")["inventory"]
    assert inventory is not None
    assert inventory["cpus"] == 2, "ranks would share one core"
    first, second = (pilots.submit("both", gpus=4, seconds=seconds) for seconds in (0.5, 600.0))
    pilots.site.wait_for_success(first)
    pilots.wait_for_ranks(second, ranks=4)
    assert job in pilots.ebbtide("list")
    pilots.ebbtide("cancel", job)
    pilots.wait_until_gone()
    pilots.wait_until_silent(second)
    assert pilots.site.state(second) in WAITING_STATES
    assert find_job("99999") is None
    assert manages_gpus()


@pytest.mark.full
def test_pilot_of_an_ordinary_user_offers_the_gpus_of_its_whole_node(pilots: PilotSite) -> None:
    program = str(pilots.install_for_everyone())
    options = ("--partition", "low", "--command", program, *pilots.options(gpus=0))
    pilot = json.loads(pilots.ebbtide("submit", "-o", "json", *options, command=(*AS_ORDINARY_USER, program)))["job"]
    pilots.wait_for_nodes(pilot, 1)
    job_id = pilots.submit("ordinary", gpus=2, seconds=600.0)
    pilots.wait_for_ranks(job_id, ranks=2)
    assert {path.stat().st_uid for path in pilots.site.shared.glob(f"{job_id}-*.json")} == {ORDINARY_USER}
    assert pilots.cluster.run("squeue", "-h", "-o", "%U") == str(ORDINARY_USER)
    pilots.ebbtide("cancel", pilot, command=(*AS_ORDINARY_USER, program))
    pilots.wait_until_gone()
    pilots.wait_until_silent(job_id)


@pytest.mark.full
def test_preempted_pilot_leaves_and_its_job_goes_on_elsewhere(pilots: PilotSite) -> None:
    pilots.submit_pilot(nodes=2)
    job_id = pilots.submit("moved", gpus=2, seconds=600.0)
    pilots.wait_for_ranks(job_id, ranks=2)
    pilots.site.join("m1", gpus=2)
    pilots.cluster.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    pilots.site.wait(lambda: pilots.find_last_node(job_id) == "m1")
    pilots.wait_until_silent(job_id)
    pilots.wait_until_gone(nodes=1)
    pilots.site.wait(lambda: pilots.site.state(job_id) == "running")
    pilots.cluster.wait(lambda: pilots.cluster.run("squeue", "-h", "-p", "high", "-o", "%T") == "RUNNING")


@pytest.mark.full
def test_pilot_leaves_before_its_time_limit(pilots: PilotSite) -> None:
    started_s = time.monotonic()
    pilots.submit_pilot("--time", "1", agent=("--leave-before", "40s"))
    job_id = pilots.submit("limited", gpus=2, seconds=600.0)
    pilots.wait_for_ranks(job_id, ranks=2)
    pilots.site.wait(lambda: not pilots.up_nodes())
    pilots.wait_until_gone()
    assert time.monotonic() - started_s < 60.0 + KILL_WAIT_S
    pilots.wait_until_silent(job_id)
    assert pilots.site.state(job_id) in WAITING_STATES


@pytest.mark.full
def test_node_that_is_taken_from_a_job_leaves_nothing(pilots: PilotSite) -> None:
    job = pilots.submit_pilot(nodes=2)
    job_id = pilots.submit("resized", gpus=4, seconds=600.0)
    pilots.wait_for_ranks(job_id, ranks=4)
    pilots.cluster.run("scontrol", "update", f"JobId={job}", "NumNodes=1")
    pilots.wait_until_silent(job_id)
    pilots.wait_until_gone(nodes=1)
    assert pilots.up_nodes() == [f"slurm-{job}-n1"]
    assert pilots.site.state(job_id) in WAITING_STATES


@pytest.mark.full
def test_restart_of_slurmctld_changes_nothing(pilots: PilotSite) -> None:
    pilots.submit_pilot(nodes=2)
    job_id = pilots.submit("steady", gpus=4, seconds=20.0)
    pilots.wait_for_ranks(job_id, ranks=4)
    pilots.cluster.wait_for_saved_state()
    pilots.cluster.kill("slurmctld")
    time.sleep(3.0)  # several looks at the job fail
    pilots.cluster.start_controller()
    pilots.site.wait_for_success(job_id)
    assert pilots.generations(job_id) == {1}
    assert len(pilots.up_nodes()) == 2


@pytest.mark.full
def test_ranks_on_a_node_whose_slurmd_was_killed_end_with_the_allocation(pilots: PilotSite) -> None:
    pilots.submit_pilot(nodes=2)
    job_id = pilots.submit("orphan", gpus=4, seconds=600.0)
    pilots.wait_for_ranks(job_id, ranks=4)
    pilots.cluster.kill("n2")
    pilots.cluster.wait(lambda: not pilots.cluster.list_jobs())
    pilots.wait_until_silent(job_id)
    pilots.site.wait(lambda: not pilots.site.client.nodes())
    pilots.cluster.wait(lambda: not pilots.cluster.find_processes("cli", "agent"))


@pytest.mark.full
def test_ranks_of_a_killed_agent_end_at_once_and_its_node_is_removed(pilots: PilotSite) -> None:
    pilots.submit_pilot()
    job_id = pilots.submit("killed", gpus=2, seconds=600.0)
    pilots.wait_for_ranks(job_id, ranks=2)
    for process in pilots.cluster.find_processes("cli agent --slurm"):
        if "srun" not in process.cmdline()[0]:
            os.kill(process.pid, signal.SIGKILL)
    killed_s = time.time()
    pilots.cluster.wait(lambda: not pilots.cluster.list_jobs())
    marks = list(pilots.site.shared.glob(f"{job_id}-1-*.alive"))
    pilots.wait_until_silent(job_id)
    assert max(float(mark.read_text()) for mark in marks) - killed_s < 1.0
    pilots.site.wait(lambda: not pilots.site.client.nodes())
    pilots.submit_pilot()
    assert len(list(pilots.states.glob("*"))) == 1, "the folder of the killed agent was not deleted"


@pytest.mark.full
def test_pending_job_gets_a_pilot_within_the_cap_and_the_idle_pilot_is_returned(pilots: PilotSite) -> None:
    job_id = pilots.submit("demand", gpus=4, seconds=1.0)
    watch = ("watch", "--once", "--nodes-max", "2", "--partition", "low")
    assert "2 more nodes" in pilots.ebbtide(*watch, *pilots.options())
    assert not pilots.cluster.list_jobs()
    for _ in range(2):  # the second look finds the pilot of the first, although its nodes have not joined yet
        pilots.ebbtide(*watch, "--submit", *pilots.options("--return-idle", "3s"))
        assert len(pilots.cluster.list_jobs()) == 1
    pilots.site.wait_for_success(job_id)
    pilots.cluster.wait(lambda: not pilots.cluster.list_jobs())
    pilots.wait_until_gone()
