"""The node agents of a local executor as their controller sees them: one per job and node, never waited for.

An agent is started as soon as a desired state wants its job on its node, so that it has loaded what the ranks need
while older runs still save, and ended when no desired state wants it and no run is left on it. What is said to it
and by it stands at the head of scheduler/worker/node_agent.py.
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
    """One agent process. `generation` is its job's when it was started; rank keys are (generation, rank)."""

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
        self._is_silent = False
        self._unsent = self._unread = b""
        assert process.stdin is not None, "it is started with pipes"
        assert process.stdout is not None, "it is started with pipes"
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
        """Raises OSError or ValueError where it cannot be started, or not with these variables."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,  # an interrupt from the keyboard is for the controller alone
            )
        return cls(process, node=node, generation=generation, started_at_s=started_at_s, log=log)

    @property
    def reports_fd(self) -> int:
        """Readable when it has reported something, or has closed its reports."""
        return self._reports_fd

    @property
    def has_closed_reports(self) -> bool:
        """It has closed its reports: it has ended, or is about to."""
        return self._is_silent

    @property
    def is_ending(self) -> bool:
        """It has closed its reports and is not reaped yet: that takes a moment."""
        return self._is_silent and self.exit_code is None

    @property
    def has_pending_reports(self) -> bool:
        if self._is_silent:
            return self.exit_code is None
        return bool(select.select([self._reports_fd], [], [], 0)[0])

    @property
    def is_lost(self) -> bool:
        """It was ended by somebody else, which is not its job's fault."""
        return self.exit_code in _EXTERNAL_SIGNALS

    def describe_end(self) -> str:
        assert self.exit_code is not None, "it has ended"
        if self.exit_code < 0:
            return f"the agent of node {self.node} was ended by {signal_name(-self.exit_code)}"
        return f"the agent of node {self.node} ended with exit code {self.exit_code}: {read_tail(self._log)}"

    def poll(self) -> None:
        """Send what is unsent, take in what it reports, and reap it once it has closed its reports."""
        self._flush()
        while not self._is_silent:
            try:
                part = os.read(self._reports_fd, _CHUNK_BYTES)
            except BlockingIOError:
                break
            self._is_silent = not part
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
        """Its ranks die with it; what they have started is found by its mark."""
        if self.exit_code is None:
            self._process.kill()

    def close(self, *, within_s: float) -> None:
        """Wait until it has ended, and release its pipes.

        Raises:
            TimeoutExpired: it is still there after `within_s` seconds.
        """
        self._process.wait(within_s)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "it was started with pipes"
            pipe.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._orders_fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = b""  # its end is seen by its silence

    def _handle_report(self, report: Mapping[str, dict[str, object]]) -> None:
        ((what, fields),) = report.items()
        if what == "ready":
            self.is_loading = False
            logger.info("the agent of node %s has loaded %s", self.node, fields["loaded"])
            return
        generation, rank = fields["generation"], fields["rank"]
        assert isinstance(generation, int), "the agent repeats what it was told"
        assert isinstance(rank, int), "the agent repeats what it was told"
        match what, fields:
            case "started", _:
                self.started.add((generation, rank))
            case "ended", {"code": int(code)}:
                self.exit_codes[generation, rank] = code
            case "failed", {"reason": str(reason)}:
                self.exit_codes[generation, rank] = _START_FAILED_CODE
                self.failures[generation, rank] = reason


class AgentRank:
    """One rank that an agent was told to start."""

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
        """It was started, or could not be."""
        return self._key in self.agent.started or self._key in self.agent.exit_codes

    @property
    def has_exit_code(self) -> bool:
        """Its end was reported: it did not die with its agent."""
        return self._key in self.agent.exit_codes

    @property
    def failure(self) -> str:
        """Why it could not be started; empty where it could."""
        return self.agent.failures.get(self._key, "")

    def poll(self) -> int | None:
        """The exit code (minus the signal's number where one ended it), None while it lives, as of the last look."""
        code = self.agent.exit_codes.get(self._key)
        return -signal.SIGKILL if code is None and self.agent.exit_code is not None else code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank's whole group. An agent that has not come to start it is killed in its place:
        all its ranks are of this run, and it may be loading for seconds to come."""
        if number is signal.SIGKILL and not self.is_started:
            self.agent.kill()
        elif self.poll() is None:
            self.agent.send_order("signal", generation=self._key[0], rank=self._key[1], number=int(number))


class AgentPool:
    """The agents of all jobs, by (job, node). `preload` is what an agent loads whose job can use it."""

    def __init__(
        self, root: RunRoot, *, command: Sequence[str], preload: Sequence[str], on_crash_point: Callable[[str], None]
    ) -> None:
        self._root = root
        self._command = tuple(command)
        self._preload = tuple(preload)
        self._at = on_crash_point
        self._agents: dict[tuple[str, str], NodeAgent] = {}
        self._refused: dict[tuple[str, str], OSError | ValueError] = {}
        self._leaving: list[NodeAgent] = []

    @property
    def has_pending_reports(self) -> bool:
        return any(agent.has_pending_reports for agent in self._agents.values())

    def get(self, job_id: str, node: str) -> NodeAgent:
        """The agent that was prepared there.

        Raises:
            OSError, ValueError: it could not be started, or not with the job's variables.
        """
        if failure := self._refused.pop((job_id, node), None):
            raise failure
        return self._agents[job_id, node]

    def should_wait_for_agents(self, job: Job, now_s: float) -> bool:
        """Whether one of the job's still loads, and there will be time enough to leave when it has."""
        leave_by_s = math.inf if job.allocation.leave_by_s is None else job.allocation.leave_by_s
        return any(
            agent.is_loading and now_s < min((agent.started_at_s + leave_by_s) / 2, agent.started_at_s + _LOAD_S_MAX)
            for (job_id, _), agent in self._agents.items()
            if job_id == job.id
        )

    def prepare(self, job: Job, nodes: Collection[str], *, now_s: float) -> None:
        """Start the job's agents that are missing there. One that died is replaced for a later generation only, so
        that its end is told.
        """
        for key in sorted((job.id, node) for node in nodes):
            agent = self._agents.get(key)
            if agent is not None and agent.exit_code is not None and agent.generation < job.allocation.generation:
                self._dismiss(key)
            if key not in self._agents and key not in self._refused:
                self._at("before-agent-start")
                try:
                    self._agents[key] = self._start(job, key[1], now_s)
                except (OSError, ValueError) as failure:
                    self._refused[key] = failure
                self._at("after-agent-start")

    def poll(self) -> None:
        for agent in self._agents.values():
            agent.poll()
        for agent in self._leaving[:]:
            agent.poll()
            if agent.exit_code is not None:
                agent.close(within_s=0.0)
                self._leaving.remove(agent)

    def retain(self, wanted: Collection[tuple[str, str]]) -> None:
        """End all others: nothing of theirs is left to be saved."""
        for key in self._agents.keys() - wanted:
            self._dismiss(key)
        for key in self._refused.keys() - wanted:
            del self._refused[key]

    def kill_on_node(self, node: str) -> None:
        for agent in self._agents.values():
            if agent.node == node:
                agent.kill()

    def close(self) -> None:
        """End all agents and wait for it."""
        self.retain(())
        for agent in self._leaving:
            agent.close(within_s=_CLOSE_TIMEOUT_S)
        self._leaving.clear()

    def _dismiss(self, key: tuple[str, str]) -> None:
        agent = self._agents.pop(key)
        agent.kill()
        self._leaving.append(agent)

    def _start(self, job: Job, node: str, now_s: float) -> NodeAgent:
        log = self._root.agent_log(job.id, node)
        log.parent.mkdir(parents=True, exist_ok=True)
        is_warm = can_run_preloaded(job.spec.command)
        preload = [word for module in self._preload if is_warm for word in ("--preload", module)]
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
