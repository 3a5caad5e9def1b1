"""Names of signals, for people.

How many processes of a control group the kernel has killed for memory, by the group's own file.

How a run stands by what its ranks say and how they ended. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.domain.gpu_sets import NO_GPUS, Gpus
from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.observation import FailureCause, RankPhase, RankStatus, Run, RunPhase


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35`: Python names only the first and the last of the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_CGROUP_ROOT = Path("/sys/fs/cgroup")


def read_oom_kills(path: str, *, root: Path = _CGROUP_ROOT) -> int | None:
    """The `oom_kill` count in memory.events (cgroup v2) or memory.oom_control (v1); None where it cannot be read.

    `path` comes from a worker, so nothing outside `below` is opened. The kernel counts before the process is gone.
    """
    if not path or not Path(path).resolve().is_relative_to(root):
        return None
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    counts = dict(line.split()[:2] for line in lines if len(line.split()) > 1)
    text = counts.get("oom_kill", "")
    return int(text) if text.isdigit() else None


_ENDED_BY_SIGKILL = (-signal.SIGKILL, 128 + signal.SIGKILL)
_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
_REASON_LENGTH_MAX = 500

ENDED_PHASES = frozenset({RunPhase.LEFT, RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.LOST})
"""The phases of a run whose processes are gone."""


@dataclass(frozen=True, slots=True)
class RankView:
    """`exit_code` is minus the signal's number where one ended the rank, None while it lives; `status` None where
    it has never written one."""

    rank: int
    status: RankStatus | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    phase: RunPhase
    reason: str = ""


def is_silent(ranks: Sequence[RankView]) -> bool:
    """No rank has said anything: the script is not one of ours, or it has not come that far."""
    return all(view.status is None for view in ranks)


def find_final_phase(ranks: Sequence[RankView]) -> RankPhase | None:
    """LEFT or SUCCEEDED once rank 0 has said so: nothing that happens later changes the outcome."""
    first = ranks[0].status if ranks else None
    return first.phase if first is not None and first.is_clean_exit else None


def find_live_phase(ranks: Sequence[RankView], *, is_leaving: bool, within_first_status_timeout: bool) -> RunPhase:
    """The phase of a run with processes. A mute script counts as running once nobody is patient any more."""
    if is_leaving:
        return RunPhase.LEAVING
    if is_silent(ranks):
        return RunPhase.STARTING if within_first_status_timeout else RunPhase.RUNNING
    first = ranks[0].status
    return RunPhase.RUNNING if first is not None and first.has_loaded_state else RunPhase.STARTING


def find_faulty_ranks(ranks: Sequence[RankView], *, terminated: bool) -> tuple[RankView, ...]:
    """Ranks through which the run has failed, the one to blame first.

    One that says it ran out of memory comes first. A rank that died without a word comes before those that say they
    failed (most often because it died), and of those the one that spoke first. `terminated`: SIGTERM was sent, so that
    dying of it is no fault of a mute script.
    """
    if find_final_phase(ranks):
        return ()
    mute = is_silent(ranks)
    found = [view for view in ranks if _is_faulty(view, is_silent_run=mute, terminated=terminated)]
    return tuple(sorted(found, key=_blame_key))


def find_failure_cause(
    ranks: Sequence[RankView], *, oom_kills: Callable[[RankView], int | None]
) -> FailureCause | None:
    """What a failed run has died of, where there is proof. `oom_kills` counts those whom the kernel has killed for
    memory by now in a rank's control group.

    A rank says so itself; or it was killed by SIGKILL in a group in which the kernel has killed somebody for memory
    since that rank last wrote. The latter is no proof where a rank died in another way: then it was we who killed the
    others.
    """
    if any(view.status is not None and view.status.cause is FailureCause.OUT_OF_MEMORY for view in ranks):
        return FailureCause.OUT_OF_MEMORY
    wordless = [view for view in ranks if view.exit_code is not None and not (view.status and view.status.is_terminal)]
    if any(view.exit_code not in _ENDED_BY_SIGKILL for view in wordless):
        return None
    for view in wordless:
        before = None if view.status is None else view.status.oom_kills
        now = None if before is None else oom_kills(view)
        if before is not None and now is not None and now > before:
            return FailureCause.OUT_OF_MEMORY
    return None


def build_run(
    job_id: str,
    generation: int,
    outcome: RunOutcome,
    statuses: Mapping[int, RankStatus],
    *,
    gpus: Gpus = NO_GPUS,
    cause: FailureCause | None = None,
) -> Run:
    """The run of which its ranks told this: progress is rank 0's, memory and times are the worst of all."""
    first = statuses.get(0)
    known = first if first is not None and first.has_loaded_state else None
    return Run(
        job_id=job_id,
        generation=generation,
        phase=outcome.phase,
        gpus=gpus,
        steps=float(known.step) if known else None,
        checkpoint_steps=None if not known or known.checkpoint_step is None else float(known.checkpoint_step),
        loss=known.loss if known else None,
        reason=outcome.reason[:_REASON_LENGTH_MAX],
        cause=cause,
        samples_per_s=known.samples_per_s if known else None,
        peak_bytes=find_peak_bytes(statuses.values()),
        phases_s=find_longest_phases_s(statuses.values()),
        frozen_layers=known.frozen_layers if known else None,
        traffic=sum_traffic(statuses.values()),
    )


def find_peak_bytes(statuses: Iterable[RankStatus]) -> int | None:
    """The most memory that a rank has had at once."""
    return max((status.peak_bytes for status in statuses if status.peak_bytes is not None), default=None)


def find_longest_phases_s(statuses: Iterable[RankStatus]) -> Mapping[str, float]:
    """Seconds by phase of a re-plan, the longest of the ranks'."""
    longest: dict[str, float] = {}
    for status in statuses:
        for phase, seconds in status.phases_s.items():
            longest[phase] = max(seconds, longest.get(phase, 0.0))
    return longest


def sum_traffic(statuses: Iterable[RankStatus]) -> LoadTraffic | None:
    """What all ranks together have read of a checkpoint; None where none of them says so."""
    told = [status.traffic for status in statuses if status.traffic is not None]
    return sum(told, start=LoadTraffic()) if told else None


def describe_fault(view: RankView, log_tail: str) -> str:
    if view.status is not None and view.status.phase is RankPhase.FAILED:
        return f"rank {view.rank}: {view.status.reason or 'it failed and gave no reason'}"
    code = view.exit_code
    assert code is not None, "a rank without a word is to blame only once it has ended"
    if code < 0:
        end = f"was ended by {signal_name(-code)}"
    else:
        end = f"ended with exit code {code}" if code else "ended without a result"
    return f"rank {view.rank} {end}" + (f": {log_tail}" if log_tail else "")


def classify_outcome(ranks: Sequence[RankView], *, fault: str, killed_because: str, terminated: bool) -> RunOutcome:
    """How a run ended whose processes are gone."""
    word = find_final_phase(ranks)
    if word is not None:
        return RunOutcome(RunPhase.SUCCEEDED if word is RankPhase.SUCCEEDED else RunPhase.LEFT)
    if fault:
        return RunOutcome(RunPhase.FAILED, fault)
    if killed_because:
        return RunOutcome(RunPhase.LOST, killed_because)
    if not terminated:
        return RunOutcome(RunPhase.SUCCEEDED)
    if any(view.exit_code for view in ranks):
        return RunOutcome(RunPhase.LOST, "it was asked to leave by SIGTERM and died of it")
    return RunOutcome(RunPhase.LEFT, "it was asked to leave by SIGTERM and ended with exit code 0")


def _is_faulty(view: RankView, *, is_silent_run: bool, terminated: bool) -> bool:
    if view.status is not None and view.status.is_terminal:
        return view.status.phase is RankPhase.FAILED
    if view.exit_code is None:
        return False
    if is_silent_run:
        return view.exit_code != 0 and not (terminated and view.exit_code in _ENDED_BY_SIGTERM)
    return True


def _blame_key(view: RankView) -> tuple[bool, bool, int, int]:
    said_so = view.status is not None and view.status.phase is RankPhase.FAILED
    known = view.status is not None and view.status.cause is not None
    return not known, said_so, view.status.written_at_ns if said_so and view.status else 0, view.rank
