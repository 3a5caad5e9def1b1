"""Starting ranks on this machine: the rendezvous store, and the orders to agents."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_worker_token
from scheduler.executors import rank_launch
from scheduler.executors.local_agent import AgentPool, AgentRank
from scheduler.executors.local_records import RunRoot
from scheduler.executors.log_files import read_tail
from scheduler.executors.rank_launch import RUN_ROOT_VARIABLE, filter_inherited

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_STOP_TIMEOUT_S = 2.0


class RendezvousStore:
    """The rendezvous store as a child process of the controller.

    Starts on first use and after a crash; ends when its stdin closes.
    """

    def __init__(self, command: Sequence[str], *, run_root: Path) -> None:
        self._command = tuple(command)
        self._run_root = run_root
        self._port_file = run_root / "rendezvous.port"
        self._log = run_root / "rendezvous.log"
        self._process: subprocess.Popen[bytes] | None = None

    def port(self) -> int | None:
        """Return the port, or None while the store starts. Never blocks."""
        if self._process is not None and self._process.poll() is not None:
            logger.error("the rendezvous store exited: %s", read_tail(self._log) or "no output")
            self.close()
        if self._process is None:
            self._start()
        try:
            return int(self._port_file.read_text(encoding="ascii"))
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Terminate the process and wait, killing it after a timeout."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.communicate(timeout=_STOP_TIMEOUT_S)  # closes its stdin
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        environment = {**filter_inherited(os.environ), RUN_ROOT_VARIABLE: str(self._run_root)}
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                [*self._command, "--port-file", str(self._port_file)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # keyboard interrupts are for the controller only
            )


class Launcher:
    """Launcher of the ranks of a generation. `url` is the API URL for workers, `secret` signs their tokens."""

    def __init__(
        self, root: RunRoot, rendezvous: RendezvousStore, agents: AgentPool, *, url: str, secret: bytes | None
    ) -> None:
        self._root = root
        self._rendezvous = rendezvous
        self._agents = agents
        self._url = url
        self._secret = secret

    @property
    def is_ready(self) -> bool:
        """Whether the rendezvous store serves. The first call starts it."""
        return self._rendezvous.port() is not None

    def launch(self, job: Job, desired: Snapshot) -> Iterator[AgentRank]:
        """Order the start of the job's ranks, one per iteration of the result.

        Raises:
            ValueError: the job has no command, or an invalid environment variable.
            OSError: the rendezvous store has ended, or an agent could not be started.
        """
        generation = job.allocation.generation
        folder = self._root.folder(job.id, generation)
        command = rank_launch.build_argv(job.spec.command, python=sys.executable)
        spec = self._build_launch_spec(job)
        for slot in rank_launch.assign_rank_slots(desired.rank_placement(job.allocation)):
            yield AgentRank.start(
                slot,
                self._agents.get(job.id, slot.node),
                generation=generation,
                argv=command,
                env=rank_launch.build_rank_environment(spec, slot, inherited=os.environ),
                log=folder.log_path(slot.rank),
                warm=rank_launch.can_run_preloaded(job.spec.command),
            )

    def _build_launch_spec(self, job: Job) -> rank_launch.LaunchSpec:
        generation = job.allocation.generation
        folder = self._root.folder(job.id, generation)
        port = self._rendezvous.port()
        if port is None:
            raise OSError("the rendezvous store has just exited")
        return rank_launch.LaunchSpec(
            job_id=job.id,
            generation=generation,
            world_size=job.allocation.target_gpus,
            steps=job.spec.steps,
            store_host=HOST,
            store_port=port,
            run_root=str(self._root.path),
            run_dir=str(folder.path),
            plan_path=str(folder.plan_path),
            checkpoint_dir=job.spec.checkpoint.dir or str(self._root.checkpoint_dir(job.id)),
            url=self._url,
            token=issue_worker_token(self._secret, job.id, generation) if self._secret else "",
            frozen_layers=job.freezing.layers,
            checkpoint_step=int(job.progress.checkpoint_steps),
            checkpoint_interval_s=job.spec.checkpoint.interval_s,
            checkpoint_keep=job.spec.checkpoint.keep,
            env=job.spec.env,
        )
