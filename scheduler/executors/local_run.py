"""The processes of a local executor, wherever they come from: found by the marks they bear, and ended.

One generation of one job as real processes on this machine: told, judged and ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from scheduler.domain.gpu_sets import NO_GPUS, Gpus
from scheduler.domain.job import CheckpointRequest
from scheduler.domain.observation import Run, RunPhase
from scheduler.executors import run_outcome
from scheduler.executors.local_agent import AgentRank
from scheduler.executors.local_records import GenerationFolder, RankStatuses, StartedRecord
from scheduler.executors.log_files import read_tail
from scheduler.executors.rank_launch import RUN_DIR_VARIABLE, RUN_ROOT_VARIABLE
from scheduler.executors.run_outcome import RankView, RunOutcome, build_run, read_oom_kills

_POLL_INTERVAL_S = 0.02


def find_marked_processes(folder: Path, *, variable: str = RUN_ROOT_VARIABLE) -> list[psutil.Process]:
    """Living processes that were started with `variable` naming `folder`: all of a run root, or with RUN_DIR_VARIABLE
    all of one generation. This process and those that it descends from are never among them."""
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        # A process that ends meanwhile, or that belongs to another user, is none of ours.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid not in ours and process.environ().get(variable) == str(folder):
                found.append(process)
    return found


def kill_stray_processes(run_dir: Path) -> int:
    """Kill what the ranks of a generation have started in groups of their own; how many still lived."""
    strays = find_marked_processes(run_dir, variable=RUN_DIR_VARIABLE)
    for process in strays:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(strays)


def kill_marked_processes(run_root: Path, *, timeout_s: float) -> int:
    """Kill every process that bears the mark and wait until all are gone; how many there were.

    Raises:
        TimeoutError: one is still there after `within_s` seconds, so nothing may be started yet.
    """
    limit_s = time.monotonic() + timeout_s
    doomed: dict[int, psutil.Process] = {}
    while True:
        fresh = find_marked_processes(run_root)
        doomed.update((process.pid, process) for process in fresh)
        alive = [process for process in doomed.values() if _is_alive(process)]
        if not alive and not fresh:
            return len(doomed)
        if time.monotonic() > limit_s:
            pids = ", ".join(str(process.pid) for process in alive)
            raise TimeoutError(f"processes {pids} of {run_root} were killed and are still there after {timeout_s:g} s")
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_INTERVAL_S)


def _is_alive(process: psutil.Process) -> bool:
    """A process that has ended and that nobody reaps (in a container without init) is gone all the same."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunTimeouts:
    """`status_s`: this long after the start without a word from any rank, the script is one that never says anything.
    `teardown_s`: after rank 0's last word, or a rank's word that it failed, the ranks have this long to end; and an
    agent this long to end ranks that are to be killed.
    `close_s`: workers have this long to save and leave when the controller itself is told to end."""

    status_s: float = 10.0
    teardown_s: float = 10.0
    close_s: float = 5.0


class LocalRun:
    """Mutable on purpose: it stands for processes. Once `end` is set they are all gone and reaped.

    Rank 0's last word decides how the run ended, not the exit code: a collective library may abort in its
    teardown after all is saved. Ranks that never write a status are judged by their exit codes.
    """

    def __init__(
        self,
        record: StartedRecord,
        folder: GenerationFolder,
        *,
        timeouts: RunTimeouts | None = None,
        on_crash_point: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.record = record
        self.end: Run | None = None
        self.reported_at_generation: int | None = None
        self._folder = folder
        self._patience = timeouts or RunTimeouts()
        self._at = on_crash_point
        self._processes: list[AgentRank] = []
        self._statuses = RankStatuses(folder, range(record.world_size))
        self._ranks: list[RankView] = []
        self._asked: tuple[str, float] | None = None
        self._told: tuple[str, float] | None = None
        self._save_asked_at_s = -math.inf
        self._terminated = False
        self._killed_because = ""
        self._fault = ""
        self._all_started_at_s = math.inf
        self._patient = True
        self._last_word_at_s = math.inf
        self._is_doomed = False
        self._doomed_at_s = math.inf

    @classmethod
    def recover(cls, folder: GenerationFolder, *, reason: str) -> LocalRun:
        """A run that was begun earlier and has no processes (any more): how it ended, by what is on disk."""
        run = cls(folder.read_started_record(), folder)
        run._killed_because = reason
        run._statuses.refresh()
        run._ranks = [RankView(rank, run._statuses.by_rank.get(rank)) for rank in range(run.record.world_size)]
        run.end = folder.read_end() or run._conclude()
        return run

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.record.job_id} generation {self.record.generation}"

    @property
    def is_live(self) -> bool:
        return self.end is None

    @property
    def is_leaving(self) -> bool:
        """It was told to leave."""
        return self._asked is not None

    @property
    def is_closing(self) -> bool:
        """Its ranks have ended; what they started in groups of their own is being ended."""
        return self.is_live and bool(self._ranks) and all(view.exit_code is not None for view in self._ranks)

    @property
    def occupied_gpus(self) -> Gpus:
        """GPUs on which one of its processes was still there at the last look."""
        gpus: dict[str, tuple[int, ...]] = {}
        for process, view in zip(self._processes, self._ranks, strict=True):
            if view.exit_code is None:
                place = process.place
                gpus[place.node] = tuple(sorted((*gpus.get(place.node, ()), place.gpu)))
        return gpus

    def start(self, ranks: Iterable[AgentRank]) -> None:
        """Take over the ranks as their start is ordered one by one; when that cannot be done the run has failed."""
        try:
            for process in ranks:
                self._processes.append(process)
                self._ranks.append(RankView(process.place.rank))
                self._at("between-two-spawns" if len(self._ranks) < self.record.world_size else "after-spawn")
        except (OSError, ValueError) as failure:
            self._fault = f"rank {len(self._ranks)} cannot be started: {failure}"
            self._send_signal(signal.SIGKILL)

    def poll(self, now_s: float) -> None:
        """Read what the ranks say and what the agents reported of them, and end the rest of a run that has failed.

        Raises:
            OSError: how it ended cannot be written down. It counts as live until the next look can.
        """
        if self.end is not None:
            return
        codes: list[int | None] | None = None
        while codes != (codes := [process.poll() for process in self._processes]):
            # Exit codes first: what a rank wrote before it ended is then always seen with its end.
            self._statuses.refresh()
            if self._has_ending_agent():
                return
        self._ranks = [
            RankView(process.place.rank, self._statuses.by_rank.get(process.place.rank), code)
            for process, code in zip(self._processes, codes, strict=True)
        ]
        if all(process.is_started for process in self._processes):
            self._all_started_at_s = min(self._all_started_at_s, now_s)
        self._patient = now_s < self._all_started_at_s + self._patience.status_s
        self._check_failure(now_s)
        if None not in codes and not kill_stray_processes(self._folder.path):
            self.end = self._conclude()

    def request_leave(self, action: str, *, leave_by_s: float, now_s: float) -> None:
        """Tell the ranks to save and go by `leave_by_s`; asking again changes that and writes the notice again.

        A script that has said nothing so far does not read notices: it gets SIGTERM, once.

        Raises:
            OSError: the notice cannot be written, which the next call tries again. The deadline stands all the same.
        """
        wanted = (action, leave_by_s)
        if self.end is not None or self._told == wanted:
            return
        self._at("before-notice")
        self._asked = wanted
        self._folder.write_notice(action, seconds_left=max(0.0, leave_by_s - now_s))
        self._told = wanted
        if run_outcome.is_silent(self._ranks) and not self._terminated:
            self._terminated = True
            self._send_signal(signal.SIGTERM)
        self._at("after-notice")

    def request_checkpoint(self, request: CheckpointRequest) -> None:
        """Tell the ranks to save and go on, once for each wish; who leaves saves anyway. Raises OSError as `ask`."""
        asked = request.steps is not None and request.asked_at_s != self._save_asked_at_s
        if self.end is None and self._asked is None and asked:
            self._folder.write_notice("checkpoint", step=int(request.steps or 0))
            self._save_asked_at_s = request.asked_at_s

    def kill_if_late(self, now_s: float) -> None:
        if self._asked is not None and now_s >= self._asked[1]:
            self.kill("it was killed at its deadline")

    def kill(self, reason: str) -> None:
        """End all processes now. The run is then LOST, unless rank 0 has said that it left or succeeded."""
        if self.end is None and not self._killed_because:
            self._at("before-kill")
            self._killed_because = reason
            self._send_signal(signal.SIGKILL)
            self._at("after-kill")

    def to_run(self) -> Run:
        """The run as the last look found it."""
        if self.end is not None:
            return self.end
        phase = run_outcome.find_live_phase(
            self._ranks, is_leaving=self.is_leaving, within_first_status_timeout=self._patient
        )
        return self._build_run(RunOutcome(phase), gpus=self.occupied_gpus)

    def settle(self) -> None:
        self._folder.settle()

    def _has_ending_agent(self) -> bool:
        """Whether one is, so that nobody can be judged yet; a run whose ranks died with an agent is ended.

        The agents are looked at after what the ranks say of themselves: that a rank failed because others died with
        their agent is then always seen with that agent's end.
        """
        for process in self._processes:
            agent = process.agent
            agent.poll()
            if agent.is_ending:
                return True
            if agent.exit_code is not None and not process.has_exit_code:
                if not agent.is_lost and not self._killed_because:
                    self._fault = self._fault or agent.describe_end()
                self.kill(agent.describe_end())
        return False

    def _check_failure(self, now_s: float) -> None:
        """Find out whether the run has failed, and end what outstays its end."""
        faulty = run_outcome.find_faulty_ranks(self._ranks, terminated=self._terminated)
        if faulty and not self._fault and not self._killed_because:
            self._fault = self._describe_fault(faulty[0])
        if faulty or run_outcome.find_final_phase(self._ranks):
            self._last_word_at_s = min(self._last_word_at_s, now_s)
        overdue = now_s >= self._last_word_at_s + self._patience.teardown_s
        if overdue or any(view.exit_code is not None for view in faulty):
            self._send_signal(signal.SIGKILL)
        if self._is_doomed:
            self._doomed_at_s = min(self._doomed_at_s, now_s)
        if now_s >= self._doomed_at_s + self._patience.teardown_s:
            for process in self._processes:
                process.agent.kill()

    def _describe_fault(self, blamed: RankView) -> str:
        if failure := self._processes[blamed.rank].failure:
            return f"rank {blamed.rank} cannot be started: {failure}"
        return run_outcome.describe_fault(blamed, read_tail(self._folder.log_path(blamed.rank)))

    def _conclude(self) -> Run:
        verdict = run_outcome.classify_outcome(
            self._ranks, fault=self._fault, killed_because=self._killed_because, terminated=self._terminated
        )
        end = self._build_run(verdict)
        self._folder.write_ended(end)
        logger.info("%s %s %s", self.name, end.phase, end.reason)
        return end

    def _build_run(self, outcome: RunOutcome, *, gpus: Gpus = NO_GPUS) -> Run:
        cause = (
            run_outcome.find_failure_cause(self._ranks, oom_kills=_count_oom_kills)
            if outcome.phase is RunPhase.FAILED
            else None
        )
        record = self.record
        return build_run(record.job_id, record.generation, outcome, self._statuses.by_rank, gpus=gpus, cause=cause)

    def _send_signal(self, number: signal.Signals) -> None:
        self._is_doomed = self._is_doomed or number is signal.SIGKILL
        for process in self._processes:
            process.send_signal(number)


def _count_oom_kills(view: RankView) -> int | None:
    return None if view.status is None else read_oom_kills(view.status.memory_events)
