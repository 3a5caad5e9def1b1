"""LocalRun: the processes of one generation of one job, from start to outcome."""

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

from scheduler.domain.checkpoints import CheckpointRequest
from scheduler.domain.gpu_sets import NO_GPUS, Gpus
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.observation import Run, RunPhase
from scheduler.executors import run_outcome
from scheduler.executors.local_agent import AgentRank
from scheduler.executors.local_records import GenerationFolder, RankStatuses, StartedRecord
from scheduler.executors.log_files import read_tail
from scheduler.executors.rank_launch import RUN_DIR_VARIABLE, RUN_ROOT_VARIABLE
from scheduler.executors.run_outcome import RankView, RunOutcome, build_run, read_oom_kills

_POLL_INTERVAL_S = 0.02


def find_marked_processes(folder: Path, *, variable: str = RUN_ROOT_VARIABLE) -> list[psutil.Process]:
    """Return live processes started with `variable` set to `folder`, except this process and its ancestors.

    RUN_ROOT_VARIABLE marks all processes of a run root, RUN_DIR_VARIABLE those of one generation.
    """
    own_pids = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        # Processes that end meanwhile, or belong to other users, are not ours.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid not in own_pids and process.environ().get(variable) == str(folder):
                found.append(process)
    return found


def kill_stray_processes(run_dir: Path) -> int:
    """Kill processes that ranks started in other process groups. Return how many there were."""
    strays = find_marked_processes(run_dir, variable=RUN_DIR_VARIABLE)
    for process in strays:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(strays)


def kill_marked_processes(run_root: Path, *, timeout_s: float) -> int:
    """Kill all marked processes, wait until they are gone, and return how many there were.

    Raises:
        TimeoutError: a process survives for `timeout_s`. Nothing may be started yet.
    """
    deadline_s = time.monotonic() + timeout_s
    killed: dict[int, psutil.Process] = {}
    while True:
        found = find_marked_processes(run_root)
        killed.update((process.pid, process) for process in found)
        alive = [process for process in killed.values() if _is_alive(process)]
        if not alive and not found:
            return len(killed)
        if time.monotonic() > deadline_s:
            pids = ", ".join(str(process.pid) for process in alive)
            raise TimeoutError(f"processes {pids} of {run_root} survive SIGKILL for {timeout_s:g} s")
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_INTERVAL_S)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. Zombies, which remain in containers without init, count as gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunTimeouts:
    """Timeouts of a run.

    `status_s`: after this time without a status, the script counts as one that never writes any. `teardown_s`: time to
    exit after rank 0's final status or a reported failure, and for agents to kill ranks. `close_s`: time to save and
    leave when the controller shuts down.
    """

    status_s: float = 10.0
    teardown_s: float = 10.0
    close_s: float = 5.0


class LocalRun:
    """A run. Once `end` is set, all its processes are gone and reaped.

    Rank 0's final status decides the outcome, not its exit code: communication libraries may abort during teardown
    after everything is saved. Ranks without a status are judged by exit code.
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
        self._timeouts = timeouts or RunTimeouts()
        self._on_crash_point = on_crash_point
        self._processes: list[AgentRank] = []
        self._statuses = RankStatuses(folder, range(record.world_size))
        self._ranks: list[RankView] = []
        self._leave_request: tuple[str, float] | None = None
        self._written_notice: tuple[str, float] | None = None
        self._checkpoint_requested_at_s = -math.inf
        self._terminated = False
        self._kill_reason = ""
        self._fault = ""
        self._permanent_fault: PermanentFault | None = None
        self._all_started_at_s = math.inf
        self._polled_at_s = -math.inf
        self._within_first_status_timeout = True
        self._final_status_at_s = math.inf
        self._is_killed = False
        self._killed_at_s = math.inf

    @classmethod
    def recover(cls, folder: GenerationFolder, *, reason: str) -> LocalRun:
        """Recover a run that has no processes any more from its folder."""
        run = cls(folder.read_started_record(), folder)
        run._kill_reason = reason
        run._statuses.refresh()
        run._ranks = [RankView(rank, run._statuses.by_rank.get(rank)) for rank in range(run.record.world_size)]
        run.end = folder.read_end() or run._conclude()
        return run

    @property
    def name(self) -> str:
        """Name for log messages."""
        return f"{self.record.job_id} generation {self.record.generation}"

    @property
    def is_live(self) -> bool:
        return self.end is None

    @property
    def is_leaving(self) -> bool:
        """Whether it was asked to leave."""
        return self._leave_request is not None

    @property
    def is_closing(self) -> bool:
        """Whether all ranks have ended and only their stray processes remain."""
        return self.is_live and bool(self._ranks) and all(rank_view.exit_code is not None for rank_view in self._ranks)

    @property
    def occupied_gpus(self) -> Gpus:
        """GPUs of ranks that were alive at the last poll."""
        gpus: dict[str, tuple[int, ...]] = {}
        for process, rank_view in zip(self._processes, self._ranks, strict=True):
            if rank_view.exit_code is None:
                place = process.place
                gpus[place.node] = tuple(sorted((*gpus.get(place.node, ()), place.gpu)))
        return gpus

    def start(self, ranks: Iterable[AgentRank]) -> None:
        """Start the ranks one by one. If one cannot be started, the run has failed."""
        try:
            for process in ranks:
                self._processes.append(process)
                self._ranks.append(RankView(process.place.rank))
                self._on_crash_point(
                    "between-two-spawns" if len(self._ranks) < self.record.world_size else "after-spawn"
                )
        except (OSError, ValueError) as error:
            self._fault = f"rank {len(self._ranks)} cannot be started: {error}"
            self._send_signal(signal.SIGKILL)

    def poll(self, now_s: float) -> None:
        """Read statuses and agent reports, and kill the rest of a failed run.

        Raises:
            OSError: the outcome cannot be written. The run counts as live until the next poll succeeds.
        """
        if self.end is not None:
            return
        codes: list[int | None] | None = None
        while codes != (codes := [process.poll() for process in self._processes]):
            # Read exit codes first, so that the final status of an ended rank is never missed.
            self._statuses.refresh()
            if self._has_ending_agent():
                return
        self._ranks = [
            RankView(process.place.rank, self._statuses.by_rank.get(process.place.rank), code)
            for process, code in zip(self._processes, codes, strict=True)
        ]
        if all(process.is_started for process in self._processes):
            self._all_started_at_s = min(self._all_started_at_s, now_s)
        self._polled_at_s = now_s
        self._within_first_status_timeout = now_s < self._all_started_at_s + self._timeouts.status_s
        self._check_failure(now_s)
        if None not in codes and not kill_stray_processes(self._folder.path):
            self.end = self._conclude()

    def request_leave(self, action: str, *, leave_by_s: float, now_s: float) -> None:
        """Ask the ranks to save and leave by `leave_by_s`. A changed request rewrites the notice.

        Ranks that never wrote a status do not read notices. They get SIGTERM, once.

        Raises:
            OSError: the notice cannot be written. The next call retries; the deadline applies anyway.
        """
        notice = (action, leave_by_s)
        if self.end is not None or self._written_notice == notice:
            return
        self._on_crash_point("before-notice")
        self._leave_request = notice
        self._folder.write_notice(action, seconds_left=max(0.0, leave_by_s - now_s))
        self._written_notice = notice
        if run_outcome.is_silent(self._ranks) and not self._terminated:
            self._terminated = True
            self._send_signal(signal.SIGTERM)
        self._on_crash_point("after-notice")

    def request_checkpoint(self, request: CheckpointRequest) -> None:
        """Ask the ranks to save and continue, once per request.

        Leaving runs save anyway. Raises OSError like `request_leave`.
        """
        is_new = request.steps is not None and request.asked_at_s != self._checkpoint_requested_at_s
        if self.end is None and self._leave_request is None and is_new:
            self._folder.write_notice("checkpoint", step=int(request.steps or 0))
            self._checkpoint_requested_at_s = request.asked_at_s

    def kill_if_late(self, now_s: float) -> None:
        if self._leave_request is not None and now_s >= self._leave_request[1]:
            self.kill("it was killed at its deadline")

    def kill(self, reason: str) -> None:
        """Kill all processes. The run is LOST, unless rank 0 has reported that it left or succeeded."""
        if self.end is None and not self._kill_reason:
            self._on_crash_point("before-kill")
            self._kill_reason = reason
            self._send_signal(signal.SIGKILL)
            self._on_crash_point("after-kill")

    def to_run(self) -> Run:
        """Return the run as of the last poll."""
        if self.end is not None:
            return self.end
        phase = run_outcome.find_live_phase(
            self._ranks, is_leaving=self.is_leaving, within_first_status_timeout=self._within_first_status_timeout
        )
        return self._build_run(RunOutcome(phase), gpus=self.occupied_gpus)

    def settle(self) -> None:
        self._folder.settle()

    def _has_ending_agent(self) -> bool:
        """Return whether an agent is being reaped, so that the run cannot be judged yet.

        Kill a run that lost ranks with an agent.

        Agents are polled after statuses. So when a rank failed because others died with their agent, that agent's end
        is known.
        """
        for process in self._processes:
            agent = process.agent
            agent.poll()
            if agent.is_ending:
                return True
            if agent.exit_code is not None and not process.has_exit_code:
                if not agent.is_lost and not self._kill_reason:
                    self._fault = self._fault or agent.describe_end()
                self.kill(agent.describe_end())
        return False

    def _check_failure(self, now_s: float) -> None:
        """Determine whether the run has failed, and kill ranks that stay too long."""
        faulty_ranks = run_outcome.find_faulty_ranks(self._ranks, terminated=self._terminated)
        if faulty_ranks and not self._fault and not self._kill_reason:
            self._fault = self._describe_fault(faulty_ranks[0])
        if faulty_ranks or run_outcome.find_final_phase(self._ranks):
            self._final_status_at_s = min(self._final_status_at_s, now_s)
        is_overdue = now_s >= self._final_status_at_s + self._timeouts.teardown_s
        if is_overdue or any(rank_view.exit_code is not None for rank_view in faulty_ranks):
            self._send_signal(signal.SIGKILL)
        if self._is_killed:
            self._killed_at_s = min(self._killed_at_s, now_s)
        if now_s >= self._killed_at_s + self._timeouts.teardown_s:
            for process in self._processes:
                process.agent.kill()

    def _describe_fault(self, culprit: RankView) -> str:
        if error := self._processes[culprit.rank].failure:
            return f"rank {culprit.rank} cannot be started: {error}"
        log_tail = read_tail(self._folder.log_path(culprit.rank))
        self._permanent_fault = run_outcome.find_permanent_fault(culprit, log_tail)
        return run_outcome.describe_fault(culprit, log_tail)

    def _conclude(self) -> Run:
        outcome = run_outcome.classify_outcome(
            self._ranks, fault=self._fault, killed_because=self._kill_reason, terminated=self._terminated
        )
        end = self._build_run(outcome)
        self._folder.write_ended(end)
        logger.info("%s %s %s", self.name, end.phase, end.reason)
        return end

    def _build_run(self, outcome: RunOutcome, *, gpus: Gpus = NO_GPUS) -> Run:
        cause = (
            run_outcome.find_failure_cause(self._ranks, oom_kills=_count_oom_kills)
            if outcome.phase is RunPhase.FAILED
            else None
        )
        record, has_failed = self.record, outcome.phase is RunPhase.FAILED
        return build_run(
            record.job_id,
            record.generation,
            outcome,
            self._statuses.by_rank,
            gpus=gpus,
            cause=cause,
            permanent_fault=self._permanent_fault if has_failed else None,
            ran_s=max(0.0, self._polled_at_s - self._all_started_at_s) if has_failed else None,
        )

    def _send_signal(self, number: signal.Signals) -> None:
        self._is_killed = self._is_killed or number is signal.SIGKILL
        for process in self._processes:
            process.send_signal(number)


def _count_oom_kills(rank_view: RankView) -> int | None:
    return None if rank_view.status is None else read_oom_kills(rank_view.status.memory_events)
