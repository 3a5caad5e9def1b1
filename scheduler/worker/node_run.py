"""The ranks of one generation on one node: start them through the node agent, control them, and report their state."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.domain.codec import encode
from scheduler.domain.parallel_plan import plan_from_json
from scheduler.executors.local_agent import AgentRank, NodeAgent
from scheduler.executors.local_records import GenerationFolder, RankStatuses, RunRoot, StartedRecord
from scheduler.executors.local_run import kill_stray_processes
from scheduler.executors.log_files import read_tail
from scheduler.executors.rank_launch import (
    RUN_DIR_VARIABLE,
    RUN_ROOT_VARIABLE,
    RankSlot,
    build_argv,
    build_node_environment,
    can_run_preloaded,
)
from scheduler.executors.run_outcome import read_oom_kills
from scheduler.worker.environment import PodEnvironment

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 10.0
_DEADLINE_TOLERANCE_S = 1.0
_TEXT_LENGTH_MAX = 4000  # the API rejects reports with much longer texts
_KILLED = -signal.SIGKILL


class NodeRun:
    """The ranks of one generation on one node."""

    def __init__(self, generation: int, rank_numbers: Sequence[int], folder: GenerationFolder) -> None:
        self.generation = generation
        self._folder = folder
        self._rank_numbers = tuple(rank_numbers)
        self._ranks: dict[int, AgentRank] = {}
        self._exit_codes: dict[int, int | None] = dict.fromkeys(self._rank_numbers)
        self._statuses = RankStatuses(folder, rank_numbers)
        self._oom_kills: dict[int, int | None] = {}
        self._tails: dict[int, str] = {}
        self._failure = ""
        self._kill_reason = ""
        self._is_killed = self._is_terminated = False
        self._requested_action = self._checkpoint_request_id = ""
        self._leave_by_s = math.inf
        self._started_at_s = time.monotonic()

    @classmethod
    def start(
        cls, assignment: Mapping[str, Any], node_agent: NodeAgent, root: RunRoot, environment: PodEnvironment
    ) -> NodeRun:
        """Start the ranks of an assignment. If that is impossible, the returned run has already ended."""
        generation = int(assignment["generation"])
        folder = root.folder(environment.job_id, generation)
        run = cls(generation, [int(rank["rank"]) for rank in assignment["ranks"]], folder)
        ranks = ", ".join(map(str, run._rank_numbers))
        logger.info("Starting ranks %s of %d, generation %d", ranks, assignment["world_size"], generation)
        if folder.exists:
            run.kill(f"generation {generation} has already been started on node {environment.node}")
            return run
        try:
            run._record_start(assignment, root, environment)
            for rank in assignment["ranks"]:
                run._start_rank(assignment, rank, node_agent, root, environment)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.exception("Cannot start generation %d", generation)
            run._failure = f"node {environment.node} cannot start its ranks: {error}"
            run.kill()
        return run

    @property
    def has_ended(self) -> bool:
        return None not in self._exit_codes.values()

    @property
    def leave_by_s(self) -> float:
        """Deadline of the ranks to leave, on the monotonic clock; infinite without one."""
        return self._leave_by_s

    @property
    def log_paths(self) -> dict[int, Path]:
        """Log file of each rank."""
        return {rank: self._folder.log_path(rank) for rank in self._rank_numbers}

    @property
    def urgent_state(self) -> object:
        """The part of the report whose changes are reported at once."""
        statuses = [
            (rank, status.phase, status.checkpoint_step, status.frozen_layers)
            for rank, status in sorted(self._statuses.by_rank.items())
        ]
        return self.generation, tuple(self._exit_codes.values()), tuple(statuses), self._failure, self._kill_reason

    def update(self, node_agent: NodeAgent) -> None:
        """Process the reports of the node agent and the status files of the ranks."""
        if self.has_ended:
            return
        codes: dict[int, int | None] = {}
        # Poll exit codes before status files, so that the end of a rank is never seen without its last status.
        while codes != (codes := self._poll_exit_codes()):
            self._statuses.refresh()
            node_agent.poll()
        if None not in codes.values() and kill_stray_processes(self._folder.path):
            return  # a generation has ended only when none of its processes is left
        for rank, code in codes.items():
            if code is not None and rank not in self._tails:
                self._record_end(rank, code)
        self._exit_codes = codes
        self._record_failures(node_agent)
        if None not in codes.values():
            exits = ", ".join(f"rank {rank} {_describe_exit(code)}" for rank, code in codes.items())
            logger.info("Generation %d has ended: %s", self.generation, exits)
        self._terminate_if_unresponsive()

    def request_exit(self, action: str, *, leave_by_s: float = math.inf) -> None:
        """Ask the ranks to save and leave before the deadline. A later call may change the deadline."""
        is_same_deadline = leave_by_s == self._leave_by_s or abs(leave_by_s - self._leave_by_s) < _DEADLINE_TOLERANCE_S
        if self.has_ended or (self._requested_action == action and is_same_deadline):
            return
        left_s = max(0.0, leave_by_s - _now_s())
        logger.info("Requesting %s of generation %d within %.0f s", action, self.generation, left_s)
        self._leave_by_s = leave_by_s
        self._folder.write_notice(action, seconds_left=left_s)
        self._requested_action = action  # set after the write, so that a failed write is retried

    def request_checkpoint(self, step: int, *, request_id: str) -> None:
        """Ask the ranks to save after `step` steps and continue, once per request."""
        if not self.has_ended and not self._requested_action and request_id != self._checkpoint_request_id:
            self._folder.write_notice("checkpoint", step=step)
            self._checkpoint_request_id = request_id

    def terminate(self) -> None:
        """Send SIGTERM to the ranks, once."""
        if not self.has_ended and not self._is_terminated:
            self._is_terminated = True
            self._signal_all(signal.SIGTERM)

    def kill(self, reason: str = "") -> None:
        """Kill all ranks. `reason` is set if the agent itself has decided it."""
        if self.has_ended or self._is_killed:
            return
        cause = reason or self._failure or "requested by the control plane"
        logger.warning("Killing generation %d: %s", self.generation, cause)
        self._is_killed, self._kill_reason = True, self._kill_reason or reason
        self._signal_all(signal.SIGKILL)
        for rank in self._rank_numbers:
            if rank not in self._ranks:
                self._exit_codes[rank] = _KILLED

    def report(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "ranks": [self._rank_report(rank) for rank in self._rank_numbers],
            "failure": self._failure[:_TEXT_LENGTH_MAX],
            "killed": self._kill_reason[:_TEXT_LENGTH_MAX],
            "terminated": self._is_terminated,
        }

    def _record_start(self, assignment: Mapping[str, Any], root: RunRoot, environment: PodEnvironment) -> None:
        record = StartedRecord(
            job_id=environment.job_id,
            generation=self.generation,
            gpus={environment.node: tuple(sorted(int(rank["gpu"]) for rank in assignment["ranks"]))},
            world_size=int(assignment["world_size"]),
            snapshot_generation=0,  # known to the control plane alone
            started_at_s=time.time(),
        )
        root.begin(record, plan_from_json(assignment["plan"]))

    def _start_rank(
        self,
        assignment: Mapping[str, Any],
        rank: Mapping[str, Any],
        node_agent: NodeAgent,
        root: RunRoot,
        environment: PodEnvironment,
    ) -> None:
        job_id = environment.job_id
        checkpoints = environment.checkpoint_dir or assignment["checkpoint_dir"] or str(root.checkpoint_dir(job_id))
        folders = {
            RUN_ROOT_VARIABLE: str(root.path),
            RUN_DIR_VARIABLE: str(self._folder.path),
            "EBBTIDE_PLAN": str(self._folder.plan_path),
            "EBBTIDE_CHECKPOINT_DIR": checkpoints,
        }
        slot = RankSlot(int(rank["rank"]), int(rank["local_rank"]), environment.node, int(rank["gpu"]))
        self._ranks[slot.rank] = AgentRank.start(
            slot,
            node_agent,
            generation=self.generation,
            argv=build_argv(assignment["command"], python=sys.executable),
            env=build_node_environment(rank["env"], inherited=os.environ, overrides=folders),
            log=self._folder.log_path(slot.rank),
            warm=can_run_preloaded(assignment["command"]),
        )

    def _poll_exit_codes(self) -> dict[int, int | None]:
        return {n: self._ranks[n].poll() if n in self._ranks else self._exit_codes[n] for n in self._rank_numbers}

    def _record_end(self, rank: int, code: int) -> None:
        status = self._statuses.by_rank.get(rank)
        is_clean_exit = code == 0 if status is None else status.is_clean_exit
        self._tails[rank] = "" if is_clean_exit else read_tail(self._folder.log_path(rank))[-_TEXT_LENGTH_MAX:]
        self._oom_kills[rank] = None if status is None else read_oom_kills(status.memory_events)

    def _record_failures(self, node_agent: NodeAgent) -> None:
        for number, rank in self._ranks.items():
            if rank.failure:
                self._failure = self._failure or f"cannot start rank {number}: {rank.failure}"
        if node_agent.exit_code is None or self._is_killed or all(rank.has_exit_code for rank in self._ranks.values()):
            return
        if node_agent.is_lost:
            self._kill_reason = self._kill_reason or node_agent.describe_end()
        else:
            self._failure = self._failure or node_agent.describe_end()

    def _terminate_if_unresponsive(self) -> None:
        """Send SIGTERM to a script that has written no status and therefore does not read notices."""
        is_silent = not self._statuses.by_rank and _now_s() >= self._started_at_s + _STATUS_TIMEOUT_S
        if self._requested_action and is_silent:
            self.terminate()

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks.values():
            rank.send_signal(number)

    def _rank_report(self, rank: int) -> dict[str, Any]:
        status = self._statuses.by_rank.get(rank)
        return {
            "rank": rank,
            "exit_code": self._exit_codes[rank],
            "status": None if status is None else encode(status),
            "written_at_ns": 0 if status is None else status.written_at_ns,
            "tail": self._tails.get(rank, ""),
            "oom_kills": self._oom_kills.get(rank),
        }


def _describe_exit(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


def _now_s() -> float:
    return time.monotonic()
