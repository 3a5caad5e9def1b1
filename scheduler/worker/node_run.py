"""The ranks of one generation on one node: started by the node agent, told what to do, and reported."""

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
from scheduler.executors.local_processes import kill_strays
from scheduler.executors.local_records import GenerationFolder, RankStatuses, RunRoot, StartedRecord
from scheduler.executors.log_tail import tail
from scheduler.executors.memory_events import oom_kills
from scheduler.executors.render import RUN_DIR_VARIABLE, RUN_ROOT_VARIABLE, RankPlace, argv, can_be_warm, on_node
from scheduler.worker.pod_environment import PodEnvironment

logger = logging.getLogger(__name__)

_STATUS_S = 10.0
_SAME_DEADLINE_S = 1.0
_TEXT_LENGTH_MAX = 4000
"""The API refuses reports with much longer ones."""
_KILLED = -signal.SIGKILL


class NodeRun:
    """Mutable on purpose: it stands for processes."""

    def __init__(self, generation: int, numbers: Sequence[int], folder: GenerationFolder) -> None:
        self.generation = generation
        self._folder = folder
        self._numbers = tuple(numbers)
        self._ranks: dict[int, AgentRank] = {}
        self._codes: dict[int, int | None] = dict.fromkeys(self._numbers)
        self._statuses = RankStatuses(folder, numbers)
        self._oom_kills: dict[int, int | None] = {}
        self._tails: dict[int, str] = {}
        self._failure = ""
        self._killed = ""
        self._is_killed = self._is_terminated = False
        self._asked = self._save_request = ""
        self._leave_by_s = math.inf
        self._started_at_s = time.monotonic()

    @classmethod
    def start(cls, order: Mapping[str, Any], inner: NodeAgent, root: RunRoot, environment: PodEnvironment) -> NodeRun:
        """Have the agent start the ranks of an assignment. Where that cannot be done they have ended."""
        generation = int(order["generation"])
        folder = root.folder(environment.job_id, generation)
        run = cls(generation, [int(rank["rank"]) for rank in order["ranks"]], folder)
        ranks = ", ".join(map(str, run._numbers))
        logger.info("generation %d starts ranks %s of %d", generation, ranks, order["world_size"])
        if folder.exists:
            run.kill(f"generation {generation} was begun on node {environment.node} once before")
            return run
        try:
            run._begin(order, root, environment)
            for rank in order["ranks"]:
                run._start_rank(order, rank, inner, root, environment)
        except (OSError, ValueError, KeyError, TypeError) as failure:
            logger.exception("generation %d cannot be started", generation)
            run._failure = f"node {environment.node} cannot start its ranks: {failure}"
            run.kill()
        return run

    @property
    def is_over(self) -> bool:
        return None not in self._codes.values()

    @property
    def leave_by_s(self) -> float:
        """By when its ranks have to have left, on the monotonic clock; infinite while nobody says so."""
        return self._leave_by_s

    @property
    def log_paths(self) -> dict[int, Path]:
        """What each of its ranks prints."""
        return {rank: self._folder.log_path(rank) for rank in self._numbers}

    @property
    def standing(self) -> object:
        """What of its report should be told at once."""
        said = [
            (rank, status.phase, status.checkpoint_step, status.frozen_layers)
            for rank, status in sorted(self._statuses.known.items())
        ]
        return self.generation, tuple(self._codes.values()), tuple(said), self._failure, self._killed

    def look(self, inner: NodeAgent) -> None:
        """Take in what the agent reported and what the ranks say of themselves."""
        if self.is_over:
            return
        codes: dict[int, int | None] = {}
        # Exit codes first: what a rank wrote before it ended is then always seen with its end.
        while codes != (codes := self._polled()):
            self._statuses.read()
            inner.look()
        if None not in codes.values() and kill_strays(self._folder.path):
            return  # nothing of it may be left when it is said to have ended
        for rank, code in codes.items():
            if code is not None and rank not in self._tails:
                self._note_end(rank, code)
        self._codes = codes
        self._note_failures(inner)
        if None not in codes.values():
            ends = ", ".join(f"rank {rank} {_told(code)}" for rank, code in codes.items())
            logger.info("generation %d has ended: %s", self.generation, ends)
        self._urge()

    def ask(self, action: str, *, leave_by_s: float = math.inf) -> None:
        """Have the ranks save and go by then; asking again changes that."""
        same = abs(leave_by_s - self._leave_by_s) < _SAME_DEADLINE_S or leave_by_s == self._leave_by_s
        if self.is_over or (self._asked == action and same):
            return
        left_s = max(0.0, leave_by_s - _now_s())
        logger.info("generation %d is asked to %s within %.0f s", self.generation, action, left_s)
        self._leave_by_s = leave_by_s
        self._folder.write_notice(action, seconds_left=left_s)
        self._asked = action  # only now: what could not be written is tried again

    def ask_to_save(self, step: int, *, request: str) -> None:
        """Have the ranks save once `step` steps are done and go on, once for each request."""
        if not self.is_over and not self._asked and request != self._save_request:
            self._folder.write_notice("checkpoint", step=step)
            self._save_request = request

    def terminate(self) -> None:
        """Have the ranks leave by SIGTERM, once."""
        if not self.is_over and not self._is_terminated:
            self._is_terminated = True
            self._send(signal.SIGTERM)

    def kill(self, because: str = "") -> None:
        """End all ranks now. `because` is for what nobody but this agent has decided."""
        if self.is_over or self._is_killed:
            return
        logger.warning("generation %d is killed: %s", self.generation, because or self._failure or "as it was told")
        self._is_killed, self._killed = True, self._killed or because
        self._send(signal.SIGKILL)
        for rank in self._numbers:
            if rank not in self._ranks:
                self._codes[rank] = _KILLED

    def report(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "ranks": [self._rank_report(rank) for rank in self._numbers],
            "failure": self._failure[:_TEXT_LENGTH_MAX],
            "killed": self._killed[:_TEXT_LENGTH_MAX],
            "terminated": self._is_terminated,
        }

    def _begin(self, order: Mapping[str, Any], root: RunRoot, environment: PodEnvironment) -> None:
        record = StartedRecord(
            job_id=environment.job_id,
            generation=self.generation,
            gpus={environment.node: tuple(sorted(int(rank["gpu"]) for rank in order["ranks"]))},
            world_size=int(order["world_size"]),
            snapshot_generation=0,  # which state asked for it is known to the control plane alone
            started_at_s=time.time(),
        )
        root.begin(record, plan_from_json(order["plan"]))

    def _start_rank(
        self,
        order: Mapping[str, Any],
        rank: Mapping[str, Any],
        inner: NodeAgent,
        root: RunRoot,
        environment: PodEnvironment,
    ) -> None:
        job_id = environment.job_id
        checkpoints = environment.checkpoint_dir or order["checkpoint_dir"] or str(root.checkpoint_dir(job_id))
        folders = {
            RUN_ROOT_VARIABLE: str(root.path),
            RUN_DIR_VARIABLE: str(self._folder.path),
            "EBBTIDE_PLAN": str(self._folder.plan_path),
            "EBBTIDE_CHECKPOINT_DIR": checkpoints,
        }
        place = RankPlace(int(rank["rank"]), int(rank["local_rank"]), environment.node, int(rank["gpu"]))
        self._ranks[place.rank] = AgentRank.start(
            place,
            inner,
            generation=self.generation,
            argv=argv(order["command"], python=sys.executable),
            env=on_node(rank["env"], inherited=os.environ, folders=folders),
            log=self._folder.log_path(place.rank),
            warm=can_be_warm(order["command"]),
        )

    def _polled(self) -> dict[int, int | None]:
        return {n: self._ranks[n].poll() if n in self._ranks else self._codes[n] for n in self._numbers}

    def _note_end(self, rank: int, code: int) -> None:
        status = self._statuses.known.get(rank)
        ended_well = code == 0 if status is None else status.is_good_end
        self._tails[rank] = "" if ended_well else tail(self._folder.log_path(rank))[-_TEXT_LENGTH_MAX:]
        self._oom_kills[rank] = None if status is None else oom_kills(status.memory_events)

    def _note_failures(self, inner: NodeAgent) -> None:
        for number, rank in self._ranks.items():
            if rank.failure:
                self._failure = self._failure or f"rank {number} cannot be started: {rank.failure}"
        if inner.exit_code is None or self._is_killed or all(rank.has_code for rank in self._ranks.values()):
            return
        if inner.is_lost:
            self._killed = self._killed or inner.end_text()
        else:
            self._failure = self._failure or inner.end_text()

    def _urge(self) -> None:
        """A script that has said nothing for a while does not read notices: it gets SIGTERM, once."""
        is_mute = not self._statuses.known and _now_s() >= self._started_at_s + _STATUS_S
        if self._asked and is_mute:
            self.terminate()

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks.values():
            rank.send(number)

    def _rank_report(self, rank: int) -> dict[str, Any]:
        status = self._statuses.known.get(rank)
        return {
            "rank": rank,
            "exit_code": self._codes[rank],
            "status": None if status is None else encode(status),
            "written_at_ns": 0 if status is None else status.written_at_ns,
            "tail": self._tails.get(rank, ""),
            "oom_kills": self._oom_kills.get(rank),
        }


def _told(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


def _now_s() -> float:
    return time.monotonic()
