"""A training on pod agents: a real API and agent pods as processes. The test is the executor.

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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.observation import Run
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_agent_token
from scheduler.executors.reported_runs import compute_reported_runs
from scheduler.executors.run_ledger import RunLedger
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from scheduler.token_secret import load_token_secret
from tests.builders import a_node
from tests.e2e.training_harness import losses
from tests.loopback import find_free_port
from tests.processes import find_run_processes, kill_tree, wait_until_gone

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
        self._api_port = find_free_port()
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
        }
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self.start_api()
        job = Job("train", spec, JobState.QUEUED, 0.0, 0.0, Progress(0.0))
        nodes = {name: a_node(name, gpus=1, gpu="cpu") for name in NODES}
        pools = {"training": Pool("training", PoolKind.TRAINING)}
        self._commit(Snapshot(pools=pools, nodes=nodes, jobs={"train": job}))
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
        state = JobState.RESIZING if before.target else JobState.STARTING
        self._commit(
            replace(
                snapshot, jobs={"train": replace(self.job, state=state, state_since_s=time.time(), allocation=after)}
            )
        )

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
        (own / "token").write_text(issue_agent_token(self._secret, "train"))
        env = {
            **{name: value for name, value in self._env.items() if not name.startswith("EBBTIDE_")},
            "EBBTIDE_JOB_ID": "train",
            "EBBTIDE_NODE": node,
            "EBBTIDE_POD": pod,
            "EBBTIDE_URL": f"http://127.0.0.1:{self._api_port}",
            "EBBTIDE_TOKEN_FILE": str(own / "token"),
            "EBBTIDE_RUN_ROOT": str(own / "run"),
            "EBBTIDE_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
        }
        with (self.folder / f"{pod}.log").open("ab") as log:
            command = [sys.executable, "-P", "-m", "scheduler.agent.pod"]
            self.agents[node] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def delete_agent(self, node: str) -> None:
        """Stop an agent as a kubelet deletes a pod."""
        self.agents[node].send_signal(signal.SIGTERM)

    def kill_agent(self, node: str) -> None:
        """Kill the agent alone. The pod starts it again."""
        self._agent_process(node).kill()

    def kill_pod(self, node: str) -> None:
        """Kill all processes of a pod, as when its container is killed."""
        self._remember()
        kill_tree(self.agents[node])

    def start_api(self) -> None:
        self._service("api", "cli", "api")

    def kill_api(self) -> None:
        kill_tree(self._services.pop("api"))

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

    def rank_processes(self) -> list[int]:
        """Return the ids of the processes of all runs."""
        return sorted(process.pid for pod in self._pods.values() for process in find_run_processes(self._state(pod)))

    def run_dir(self, node: str, generation: int) -> Path:
        return self._state(self._pods[node]) / f"jobs/train/gen-{generation}@{node}"

    def _state(self, pod: str) -> Path:
        return self.folder / pod / "run"

    def _agent_process(self, node: str) -> psutil.Process:
        children = psutil.Process(self.agents[node].pid).children()
        return next(child for child in children if "scheduler.agent.pod_daemon" in child.cmdline())

    def logs(self) -> str:
        logs = (*self.folder.glob("*.log"), *self.folder.glob("*/run/jobs/train/gen-*/rank-*.log"))
        return "\n".join([str(self.runs), *(f"{path.name}: {path.read_text()[-3000:]}" for path in logs)])

    def check_no_process_is_left(self) -> None:
        """Wait until no process of the agents or their ranks is left."""
        self._remember()
        wait_until_gone(list(self._born.values()), TIMEOUT_S)

    def close(self) -> None:
        self._remember()
        for process in (*self.agents.values(), *self._services.values()):
            kill_tree(process)
        left = [process for pod in self._pods.values() for process in find_run_processes(self._state(pod))]
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
        ledger = RunLedger(log, epoch=lambda: self._epoch)
        desired = self.store.load().snapshot
        ledger.begin_generations(desired, log.list_begun_runs(), lambda _jobs: agents, now_s, in_pods=True)

    def _service(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *words]
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
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
