"""Node agents of the local executor: one process per job and node, controlled without blocking.

An agent starts as soon as its job is wanted on its node, so that it can preload modules while older runs still save. It
ends when the job is no longer wanted there and has no run left. scheduler/worker/node_agent.py documents the messages.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from scheduler.domain.job import Job
from scheduler.executors.local_records import RunRoot
from scheduler.executors.log_files import read_tail
from scheduler.executors.rank_launch import RankSlot, build_agent_environment, can_run_preloaded
from scheduler.executors.run_outcome import signal_name

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 65536
_START_FAILED_CODE = 127
_CLOSE_TIMEOUT_S = 5.0
_LOAD_S_MAX = 60.0
_EXTERNAL_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM)


class NodeAgent:
    """An agent process. `generation` is the job's at the agent's start; ranks are keyed by (generation, rank)."""

    def __init__(
        self, process: subprocess.Popen[bytes], *, node: str, generation: int, started_at_s: float, log: Path
    ) -> None:
        self.node = node
        self.generation = generation
        self.started_at_s = started_at_s
        self.is_loading = True
        self.exit_code: int | None = None
        self.started: set[tuple[int, int]] = set()
        self.exit_codes: dict[tuple[int, int], int] = {}
        self.failures: dict[tuple[int, int], str] = {}
        self._process = process
        self._log = log
        self._has_closed_reports = False
        self._unsent = self._unread = b""
        assert process.stdin is not None, "the process has pipes"
        assert process.stdout is not None, "the process has pipes"
        self._orders_fd, self._reports_fd = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._orders_fd, False)
        os.set_blocking(self._reports_fd, False)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        node: str,
        generation: int,
        started_at_s: float,
        log: Path,
    ) -> NodeAgent:
        """Start an agent. Raises OSError or ValueError if it cannot be started, or not with these variables."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,  # keyboard interrupts are for the controller only
            )
        return cls(process, node=node, generation=generation, started_at_s=started_at_s, log=log)

    @property
    def reports_fd(self) -> int:
        """File descriptor that becomes readable on a report or when the agent closes its reports."""
        return self._reports_fd

    @property
    def has_closed_reports(self) -> bool:
        """Whether it has closed its reports: it has ended or is about to."""
        return self._has_closed_reports

    @property
    def is_ending(self) -> bool:
        """Whether it has closed its reports but is not reaped yet."""
        return self._has_closed_reports and self.exit_code is None

    @property
    def has_pending_reports(self) -> bool:
        if self._has_closed_reports:
            return self.exit_code is None
        return bool(select.select([self._reports_fd], [], [], 0)[0])

    @property
    def is_lost(self) -> bool:
        """Whether it was killed from outside, which is not the job's fault."""
        return self.exit_code in _EXTERNAL_SIGNALS

    def describe_end(self) -> str:
        assert self.exit_code is not None, "the agent has ended"
        if self.exit_code < 0:
            return f"the agent of node {self.node} was killed by {signal_name(-self.exit_code)}"
        return f"the agent of node {self.node} exited with code {self.exit_code}: {read_tail(self._log)}"

    def poll(self) -> None:
        """Send pending orders, read reports, and reap the process once it has closed its reports."""
        self._flush()
        while not self._has_closed_reports:
            try:
                part = os.read(self._reports_fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            self._has_closed_reports = not part
            self.is_loading &= bool(part)
            self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._handle_report(json.loads(line))
        if self.is_ending:
            self.exit_code = self._process.poll()

    def send_order(self, what: str, **fields: object) -> None:
        self._unsent += json.dumps({what: fields}).encode() + b"\n"
        self._flush()

    def kill(self) -> None:
        """Kill the agent and its ranks. Other descendants are found by their mark."""
        if self.exit_code is None:
            self._process.kill()

    def close(self, *, within_s: float) -> None:
        """Wait until it has ended, and close its pipes.

        Raises:
            TimeoutExpired: it still runs after `within_s` seconds.
        """
        self._process.wait(within_s)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "the process has pipes"
            pipe.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._orders_fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = b""  # the closed reports show that it has ended

    def _handle_report(self, report: Mapping[str, dict[str, object]]) -> None:
        ((what, fields),) = report.items()
        if what == "ready":
            self.is_loading = False
            logger.info("agent of node %s has preloaded %s", self.node, fields["loaded"])
            return
        generation, rank = fields["generation"], fields["rank"]
        assert isinstance(generation, int), "the agent echoes the order's fields"
        assert isinstance(rank, int), "the agent echoes the order's fields"
        match what, fields:
            case "started", _:
                self.started.add((generation, rank))
            case "ended", {"code": int(code)}:
                self.exit_codes[generation, rank] = code
            case "failed", {"reason": str(reason)}:
                self.exit_codes[generation, rank] = _START_FAILED_CODE
                self.failures[generation, rank] = reason


class AgentRank:
    """A rank that an agent was asked to start."""

    def __init__(self, place: RankSlot, agent: NodeAgent, *, generation: int) -> None:
        self.place = place
        self.agent = agent
        self._key = (generation, place.rank)

    @classmethod
    def start(
        cls,
        place: RankSlot,
        agent: NodeAgent,
        *,
        generation: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        warm: bool,
    ) -> AgentRank:
        fields = {"generation": generation, "rank": place.rank, "argv": argv, "env": env, "log": str(log), "warm": warm}
        agent.send_order("start", **fields)
        return cls(place, agent, generation=generation)

    @property
    def is_started(self) -> bool:
        """Whether the start was reported, successful or not."""
        return self._key in self.agent.started or self._key in self.agent.exit_codes

    @property
    def has_exit_code(self) -> bool:
        """Whether its exit code was reported, so that it did not die with its agent."""
        return self._key in self.agent.exit_codes

    @property
    def failure(self) -> str:
        """Why it could not be started, or an empty string."""
        return self.agent.failures.get(self._key, "")

    def poll(self) -> int | None:
        """Return the exit code (minus the signal number), or None if it was alive at the last poll."""
        code = self.agent.exit_codes.get(self._key)
        return -signal.SIGKILL if code is None and self.agent.exit_code is not None else code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process group.

        An agent that has not started the rank yet is killed instead: all its ranks belong to this run, and it may
        preload for seconds.
        """
        if number is signal.SIGKILL and not self.is_started:
            self.agent.kill()
        elif self.poll() is None:
            self.agent.send_order("signal", generation=self._key[0], rank=self._key[1], number=int(number))


class AgentPool:
    """The agents of all jobs by (job, node). `preload` lists modules for agents whose job can use them."""

    def __init__(
        self, root: RunRoot, *, command: Sequence[str], preload: Sequence[str], on_crash_point: Callable[[str], None]
    ) -> None:
        self._root = root
        self._command = tuple(command)
        self._preload = tuple(preload)
        self._on_crash_point = on_crash_point
        self._agents: dict[tuple[str, str], NodeAgent] = {}
        self._start_errors: dict[tuple[str, str], OSError | ValueError] = {}
        self._ending: list[NodeAgent] = []

    @property
    def has_pending_reports(self) -> bool:
        return any(agent.has_pending_reports for agent in self._agents.values())

    def get(self, job_id: str, node: str) -> NodeAgent:
        """Return the prepared agent.

        Raises:
            OSError, ValueError: it could not be started, or not with the job's variables.
        """
        if error := self._start_errors.pop((job_id, node), None):
            raise error
        return self._agents[job_id, node]

    def should_wait_for_agents(self, job: Job, now_s: float) -> bool:
        """Return whether an agent of the job still preloads and leaves enough time before the deadline."""
        leave_by_s = math.inf if job.allocation.leave_by_s is None else job.allocation.leave_by_s
        return any(
            agent.is_loading and now_s < min((agent.started_at_s + leave_by_s) / 2, agent.started_at_s + _LOAD_S_MAX)
            for (job_id, _), agent in self._agents.items()
            if job_id == job.id
        )

    def prepare(self, job: Job, nodes: Collection[str], *, now_s: float) -> None:
        """Start missing agents of the job.

        A dead agent is replaced only for a later generation, so that its end is reported.
        """
        for key in sorted((job.id, node) for node in nodes):
            agent = self._agents.get(key)
            if agent is not None and agent.exit_code is not None and agent.generation < job.allocation.generation:
                self._dismiss(key)
            if key not in self._agents and key not in self._start_errors:
                self._on_crash_point("before-agent-start")
                try:
                    self._agents[key] = self._start(job, key[1], now_s)
                except (OSError, ValueError) as error:
                    self._start_errors[key] = error
                self._on_crash_point("after-agent-start")

    def poll(self) -> None:
        for agent in self._agents.values():
            agent.poll()
        for agent in self._ending[:]:
            agent.poll()
            if agent.exit_code is not None:
                agent.close(within_s=0.0)
                self._ending.remove(agent)

    def retain(self, wanted: Collection[tuple[str, str]]) -> None:
        """Kill all other agents. They have nothing to save."""
        for key in self._agents.keys() - wanted:
            self._dismiss(key)
        for key in self._start_errors.keys() - wanted:
            del self._start_errors[key]

    def kill_on_node(self, node: str) -> None:
        for agent in self._agents.values():
            if agent.node == node:
                agent.kill()

    def close(self) -> None:
        """Kill all agents and wait for their end."""
        self.retain(())
        for agent in self._ending:
            agent.close(within_s=_CLOSE_TIMEOUT_S)
        self._ending.clear()

    def _dismiss(self, key: tuple[str, str]) -> None:
        agent = self._agents.pop(key)
        agent.kill()
        self._ending.append(agent)

    def _start(self, job: Job, node: str, now_s: float) -> NodeAgent:
        log = self._root.agent_log(job.id, node)
        log.parent.mkdir(parents=True, exist_ok=True)
        is_warm = can_run_preloaded(job.spec.command)
        preload = [argument for module in self._preload if is_warm for argument in ("--preload", module)]
        environment = build_agent_environment(
            job.spec.env if is_warm else {}, run_root=str(self._root.path), inherited=os.environ
        )
        return NodeAgent.start(
            [*self._command, *preload],
            environment,
            node=node,
            generation=job.allocation.generation,
            started_at_s=now_s,
            log=log,
        )
