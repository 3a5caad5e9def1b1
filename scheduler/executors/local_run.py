"""One generation of one job as real processes on this machine: told, judged and ended."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.domain.gpus import NO_GPUS, Gpus
from scheduler.domain.observation import Run, RunPhase
from scheduler.domain.saving import SaveWish
from scheduler.executors import run_verdict
from scheduler.executors.local_agent import AgentRank
from scheduler.executors.local_processes import kill_strays
from scheduler.executors.local_records import GenerationFolder, RankStatuses, StartedRecord
from scheduler.executors.log_tail import tail
from scheduler.executors.memory_events import oom_kills
from scheduler.executors.run_verdict import RankView, Verdict, run_as_told

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
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
        patience: Patience | None = None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.record = record
        self.end: Run | None = None
        self.told_at_generation: int | None = None
        self._folder = folder
        self._patience = patience or Patience()
        self._at = at
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
    def found(cls, folder: GenerationFolder, *, reason: str) -> LocalRun:
        """A run that was begun earlier and has no processes (any more): how it ended, by what is on disk."""
        run = cls(folder.record(), folder)
        run._killed_because = reason
        run._statuses.read()
        run._ranks = [RankView(rank, run._statuses.known.get(rank)) for rank in range(run.record.world_size)]
        run.end = folder.ended() or run._conclude()
        return run

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.record.job_id} generation {self.record.generation}"

    @property
    def is_live(self) -> bool:
        return self.end is None

    @property
    def is_asked(self) -> bool:
        """It was told to leave."""
        return self._asked is not None

    @property
    def is_closing(self) -> bool:
        """Its ranks have ended; what they started in groups of their own is being ended."""
        return self.is_live and bool(self._ranks) and all(view.exit_code is not None for view in self._ranks)

    @property
    def occupied(self) -> Gpus:
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
            self._send(signal.SIGKILL)

    def look(self, now_s: float) -> None:
        """Read what the ranks say and what the agents reported of them, and end the rest of a run that has failed.

        Raises:
            OSError: how it ended cannot be written down. It counts as live until the next look can.
        """
        if self.end is not None:
            return
        codes: list[int | None] | None = None
        while codes != (codes := [process.poll() for process in self._processes]):
            # Exit codes first: what a rank wrote before it ended is then always seen with its end.
            self._statuses.read()
            if self._is_an_agent_ending():
                return
        self._ranks = [
            RankView(process.place.rank, self._statuses.known.get(process.place.rank), code)
            for process, code in zip(self._processes, codes, strict=True)
        ]
        if all(process.is_started for process in self._processes):
            self._all_started_at_s = min(self._all_started_at_s, now_s)
        self._patient = now_s < self._all_started_at_s + self._patience.status_s
        self._judge(now_s)
        if None not in codes and not kill_strays(self._folder.path):
            self.end = self._conclude()

    def ask(self, action: str, *, leave_by_s: float, now_s: float) -> None:
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
        if run_verdict.is_mute(self._ranks) and not self._terminated:
            self._terminated = True
            self._send(signal.SIGTERM)
        self._at("after-notice")

    def ask_to_save(self, wish: SaveWish) -> None:
        """Tell the ranks to save and go on, once for each wish; who leaves saves anyway. Raises OSError as `ask`."""
        asked = wish.steps is not None and wish.asked_at_s != self._save_asked_at_s
        if self.end is None and self._asked is None and asked:
            self._folder.write_notice("checkpoint", step=int(wish.steps or 0))
            self._save_asked_at_s = wish.asked_at_s

    def kill_if_late(self, now_s: float) -> None:
        if self._asked is not None and now_s >= self._asked[1]:
            self.kill("it was killed at its deadline")

    def kill(self, because: str) -> None:
        """End all processes now. The run is then LOST, unless rank 0 has said that it left or succeeded."""
        if self.end is None and not self._killed_because:
            self._at("before-kill")
            self._killed_because = because
            self._send(signal.SIGKILL)
            self._at("after-kill")

    def seen(self) -> Run:
        """The run as the last look found it."""
        if self.end is not None:
            return self.end
        phase = run_verdict.live_phase(self._ranks, asked=self.is_asked, patient=self._patient)
        return self._run(Verdict(phase), gpus=self.occupied)

    def settle(self) -> None:
        self._folder.settle()

    def _is_an_agent_ending(self) -> bool:
        """Whether one is, so that nobody can be judged yet; a run whose ranks died with an agent is ended.

        The agents are looked at after what the ranks say of themselves: that a rank failed because others died with
        their agent is then always seen with that agent's end.
        """
        for process in self._processes:
            agent = process.agent
            agent.look()
            if agent.is_ending:
                return True
            if agent.exit_code is not None and not process.has_code:
                if not agent.is_lost and not self._killed_because:
                    self._fault = self._fault or agent.end_text()
                self.kill(agent.end_text())
        return False

    def _judge(self, now_s: float) -> None:
        """Find out whether the run has failed, and end what outstays its end."""
        faulty = run_verdict.faulty(self._ranks, terminated=self._terminated)
        if faulty and not self._fault and not self._killed_because:
            self._fault = self._fault_text(faulty[0])
        if faulty or run_verdict.last_word(self._ranks):
            self._last_word_at_s = min(self._last_word_at_s, now_s)
        overdue = now_s >= self._last_word_at_s + self._patience.teardown_s
        if overdue or any(view.exit_code is not None for view in faulty):
            self._send(signal.SIGKILL)
        if self._is_doomed:
            self._doomed_at_s = min(self._doomed_at_s, now_s)
        if now_s >= self._doomed_at_s + self._patience.teardown_s:
            for process in self._processes:
                process.agent.kill()

    def _fault_text(self, blamed: RankView) -> str:
        if failure := self._processes[blamed.rank].failure:
            return f"rank {blamed.rank} cannot be started: {failure}"
        return run_verdict.fault_text(blamed, tail(self._folder.log_path(blamed.rank)))

    def _conclude(self) -> Run:
        verdict = run_verdict.outcome(
            self._ranks, fault=self._fault, killed_because=self._killed_because, terminated=self._terminated
        )
        end = self._run(verdict)
        self._folder.write_ended(end)
        logger.info("%s %s %s", self.name, end.phase, end.reason)
        return end

    def _run(self, verdict: Verdict, *, gpus: Gpus = NO_GPUS) -> Run:
        cause = run_verdict.cause(self._ranks, oom_kills=_oom_kills) if verdict.phase is RunPhase.FAILED else None
        record = self.record
        return run_as_told(record.job_id, record.generation, verdict, self._statuses.known, gpus=gpus, cause=cause)

    def _send(self, number: signal.Signals) -> None:
        self._is_doomed = self._is_doomed or number is signal.SIGKILL
        for process in self._processes:
            process.send(number)


def _oom_kills(view: RankView) -> int | None:
    return None if view.status is None else oom_kills(view.status.memory_events)
