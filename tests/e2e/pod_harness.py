"""A training on pod agents: a real API, a rendezvous service and pod agents as processes. The test is the executor.

It makes the decisions itself and uses the functions that executors share (reported_runs).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job, JobSpec, Progress
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.observation import Run
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_agent_token
from scheduler.executors.local_run import find_marked_processes
from scheduler.executors.reported_runs import build_begun_run, can_begin, compute_reported_runs
from scheduler.settings import load_token_secret
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node
from tests.e2e.training_harness import losses
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
NODES = ("n0", "n1")
_TICK_S = 0.2


class PodHarness:
    """A job `train` on nodes n0 and n1.

    Attributes:
        runs: the runs as last observed, by generation.
    """

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self.folder = folder
        self.runs: dict[int, Run] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._pods: dict[str, str] = {}
        self._born: dict[int, psutil.Process] = {}
        self._api_port, self._store_port = find_free_port(), find_free_port()
        url = f"sqlite:///{folder / 'ebbtide.sqlite'}"
        migrate(url)
        self.store = SqlStore(url)
        lease = self.store.acquire_lease("test", now_s=time.time(), ttl_s=1e6)
        assert lease is not None
        self._epoch = lease.epoch
        self._secret = load_token_secret(folder / "token.secret")
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")},
            "EBBTIDE_DATABASE_URL": url,
            "EBBTIDE_RUN_DIR": str(folder),
            "EBBTIDE_PORT": str(self._api_port),
            "EBBTIDE_STORE_PORT": str(self._store_port),
        }
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self.start_api()
        self._service("rendezvous", "scheduler.worker.rendezvous", "--port", str(self._store_port))
        job = Job("train", spec, JobState.QUEUED, 0.0, 0.0, Progress(0.0))
        self._commit(Snapshot(nodes={name: a_node(name, gpus=1, gpu="cpu") for name in NODES}, jobs={"train": job}))
        self.wait(self._api_answers)

    @property
    def job(self) -> Job:
        return self.store.load().snapshot.jobs["train"]

    def want(self, plan: ParallelPlan | None, *nodes: str, leave_within_s: float = 60.0) -> None:
        """Decide that the next generation runs on these nodes, one GPU each, under this plan."""
        snapshot = self.store.load().snapshot
        gpus: Gpus = dict.fromkeys(nodes, (0,))
        leave_by_s = time.time() + leave_within_s
        before = self.job.allocation
        after = Allocation(before.generation + 1, gpus, plan=plan, leave_by_s=leave_by_s)
        self._commit(replace(snapshot, jobs={"train": replace(self.job, allocation=after)}))

    def finish(self) -> None:
        """Mark the job as succeeded, so that the agents end."""
        snapshot = self.store.load().snapshot
        ended = replace(self.job, state=JobState.SUCCEEDED, allocation=Allocation(self.job.allocation.generation + 1))
        self._commit(replace(snapshot, jobs={}), ended=(ended,))

    def start_agent(self, node: str) -> None:
        """Start an agent as a kubelet starts a pod. Pods share the checkpoint volume, but no other directory."""
        pod = self._pods[node] = f"{node}-{secrets.token_hex(2)}"
        own = self.folder / pod
        own.mkdir()
        env = {
            **{name: value for name, value in self._env.items() if not name.startswith("EBBTIDE_")},
            "EBBTIDE_JOB_ID": "train",
            "EBBTIDE_NODE": node,
            "EBBTIDE_POD": pod,
            "EBBTIDE_URL": f"http://127.0.0.1:{self._api_port}",
            "EBBTIDE_TOKEN": issue_agent_token(self._secret, "train"),
            "EBBTIDE_RUN_ROOT": str(own),
            "EBBTIDE_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
        }
        with (self.folder / f"{pod}.log").open("ab") as log:
            command = [sys.executable, "-m", "scheduler.worker.pod_agent"]
            self.agents[node] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def delete_agent(self, node: str) -> None:
        """Stop an agent as a kubelet deletes a pod."""
        self.agents[node].send_signal(signal.SIGTERM)

    def kill_agent(self, node: str) -> None:
        self._remember()
        self.agents[node].kill()
        self.agents[node].wait()

    def start_api(self) -> None:
        self._service("api", "cli", "api")

    def kill_api(self) -> None:
        _end(self._services.pop("api"))

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached():
            assert time.monotonic() < deadline_s, self.logs()
            self._tick()
            time.sleep(_TICK_S)

    def phase(self, generation: int) -> str:
        return self.runs[generation].phase.value if generation in self.runs else ""

    def losses(self) -> dict[int, float]:
        return losses(self.folder / "ledger")

    def has_reached(self, step: int) -> bool:
        return max(self.losses(), default=0) >= step

    def node_agent_pids(self) -> Mapping[str, int]:
        """Return the process that forks ranks, by node."""
        return {
            node: child.pid for node, agent in self.agents.items() for child in psutil.Process(agent.pid).children()
        }

    def run_dir(self, node: str, generation: int) -> Path:
        return self.folder / self._pods[node] / f"jobs/train/gen-{generation}"

    def logs(self) -> str:
        logs = (*self.folder.glob("*.log"), *self.folder.glob("*/jobs/train/gen-*/rank-*.log"))
        return "\n".join([str(self.runs), *(f"{path.name}: {path.read_text()[-3000:]}" for path in logs)])

    def check_no_process_is_left(self) -> None:
        """Wait until no process of the agents or their ranks is left."""
        self._remember()
        deadline_s = time.monotonic() + TIMEOUT_S
        while left := [process for process in self._born.values() if _lives(process)]:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.05)

    def close(self) -> None:
        self._remember()
        for process in (*self.agents.values(), *self._services.values()):
            _end(process)
        left = [process for pod in self.folder.iterdir() if pod.is_dir() for process in find_marked_processes(pod)]
        for each in (*self._born.values(), *left):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.store.close()

    def _tick(self) -> None:
        """Do what an executor does: observe runs, record their ends, and begin new ones."""
        self._remember()
        log, jobs, now_s = self.store.run_log, self.store.load().snapshot.jobs, time.time()
        agents = {("train", node): self._pods[node] for node, agent in self.agents.items() if agent.poll() is None}
        reports = log.list_reports()
        for seen in compute_reported_runs(log.list_begun_runs(), reports, agents, jobs, now_s):
            self.runs[seen.begun.generation] = seen.run
            if seen.kill_order is not None and seen.kill_order != seen.begun.doom:
                log.record_kill_order("train", seen.begun.generation, seen.kill_order, epoch=self._epoch)
            if seen.has_just_ended:
                log.record_end(seen.run, epoch=self._epoch)
        for job in jobs.values():
            if can_begin(job, log.list_begun_runs_of(job.id), reports, agents):
                slots = tuple((node, 0) for node in sorted(job.allocation.target))
                log.begin_run(build_begun_run(job, slots, agents, now_s), epoch=self._epoch)

    def _service(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *words]
            process = subprocess.Popen(command, cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self._services[name] = process

    def _api_answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._api_port}/healthz") as reply,
        ):
            return bool(json.load(reply)["status"] == "ok")
        return False

    def _commit(self, snapshot: Snapshot, *, ended: tuple[Job, ...] = ()) -> None:
        before = self.store.load().snapshot
        after = replace(snapshot, generation=before.generation + 1, now_s=time.time())
        self.store.commit(Commit(before, after, epoch=self._epoch, ended_jobs=ended))

    def _remember(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(agent.pid).children(recursive=True):
                    self._born.setdefault(process.pid, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
