"""How a run stands by what its ranks say and how they ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.domain.gpus import NO_GPUS, Gpus
from scheduler.domain.observation import FailureCause, Run, RunPhase
from scheduler.domain.rank_status import RankPhase, RankStatus
from scheduler.domain.replan import LoadTraffic
from scheduler.executors.signal_names import signal_name

_ENDED_BY_SIGKILL = (-signal.SIGKILL, 128 + signal.SIGKILL)
_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
_REASON_LENGTH_MAX = 500

ENDS = frozenset({RunPhase.LEFT, RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.LOST})
"""The phases of a run whose processes are gone."""


@dataclass(frozen=True, slots=True)
class RankView:
    """`exit_code` is minus the signal's number where one ended the rank, None while it lives; `status` None where
    it has never written one."""

    rank: int
    status: RankStatus | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    phase: RunPhase
    reason: str = ""


def is_mute(ranks: Sequence[RankView]) -> bool:
    """No rank has said anything: the script is not one of ours, or it has not come that far."""
    return all(view.status is None for view in ranks)


def last_word(ranks: Sequence[RankView]) -> RankPhase | None:
    """LEFT or SUCCEEDED once rank 0 has said so: nothing that happens later changes the outcome."""
    first = ranks[0].status if ranks else None
    return first.phase if first is not None and first.is_good_end else None


def live_phase(ranks: Sequence[RankView], *, asked: bool, patient: bool) -> RunPhase:
    """The phase of a run with processes. A mute script counts as running once nobody is patient any more."""
    if asked:
        return RunPhase.LEAVING
    if is_mute(ranks):
        return RunPhase.STARTING if patient else RunPhase.RUNNING
    first = ranks[0].status
    return RunPhase.RUNNING if first is not None and first.has_begun else RunPhase.STARTING


def faulty(ranks: Sequence[RankView], *, terminated: bool) -> tuple[RankView, ...]:
    """Ranks through which the run has failed, the one to blame first.

    One that says it ran out of memory comes first. A rank that died without a word comes before those that say they
    failed (most often because it died), and of those the one that spoke first. `terminated`: SIGTERM was sent, so that
    dying of it is no fault of a mute script.
    """
    if last_word(ranks):
        return ()
    mute = is_mute(ranks)
    found = [view for view in ranks if _is_faulty(view, mute=mute, terminated=terminated)]
    return tuple(sorted(found, key=_blame))


def cause(ranks: Sequence[RankView], *, oom_kills: Callable[[RankView], int | None]) -> FailureCause | None:
    """What a failed run has died of, where there is proof. `oom_kills` counts those whom the kernel has killed for
    memory by now in a rank's control group.

    A rank says so itself; or it was killed by SIGKILL in a group in which the kernel has killed somebody for memory
    since that rank last wrote. The latter is no proof where a rank died in another way: then it was we who killed the
    others.
    """
    if any(view.status is not None and view.status.cause is FailureCause.OUT_OF_MEMORY for view in ranks):
        return FailureCause.OUT_OF_MEMORY
    wordless = [view for view in ranks if view.exit_code is not None and not (view.status and view.status.is_end)]
    if any(view.exit_code not in _ENDED_BY_SIGKILL for view in wordless):
        return None
    for view in wordless:
        before = None if view.status is None else view.status.oom_kills
        now = None if before is None else oom_kills(view)
        if before is not None and now is not None and now > before:
            return FailureCause.OUT_OF_MEMORY
    return None


def run_as_told(
    job_id: str,
    generation: int,
    verdict: Verdict,
    statuses: Mapping[int, RankStatus],
    *,
    gpus: Gpus = NO_GPUS,
    cause: FailureCause | None = None,
) -> Run:
    """The run of which its ranks told this: progress is rank 0's, memory and times are the worst of all."""
    first = statuses.get(0)
    known = first if first is not None and first.has_begun else None
    return Run(
        job_id=job_id,
        generation=generation,
        phase=verdict.phase,
        gpus=gpus,
        steps=float(known.step) if known else None,
        checkpoint_steps=None if not known or known.checkpoint_step is None else float(known.checkpoint_step),
        loss=known.loss if known else None,
        reason=verdict.reason[:_REASON_LENGTH_MAX],
        cause=cause,
        samples_per_s=known.samples_per_s if known else None,
        peak_bytes=peak_bytes(statuses.values()),
        phases_s=phases_s(statuses.values()),
        frozen_layers=known.frozen_layers if known else None,
        traffic=traffic(statuses.values()),
    )


def peak_bytes(statuses: Iterable[RankStatus]) -> int | None:
    """The most memory that a rank has had at once."""
    return max((status.peak_bytes for status in statuses if status.peak_bytes is not None), default=None)


def phases_s(statuses: Iterable[RankStatus]) -> Mapping[str, float]:
    """Seconds by phase of a re-plan, the longest of the ranks'."""
    longest: dict[str, float] = {}
    for status in statuses:
        for phase, seconds in status.phases_s.items():
            longest[phase] = max(seconds, longest.get(phase, 0.0))
    return longest


def traffic(statuses: Iterable[RankStatus]) -> LoadTraffic | None:
    """What all ranks together have read of a checkpoint; None where none of them says so."""
    told = [status.traffic for status in statuses if status.traffic is not None]
    return sum(told, start=LoadTraffic()) if told else None


def fault_text(view: RankView, log_tail: str) -> str:
    if view.status is not None and view.status.phase is RankPhase.FAILED:
        return f"rank {view.rank}: {view.status.reason or 'it failed and gave no reason'}"
    code = view.exit_code
    assert code is not None, "a rank without a word is to blame only once it has ended"
    if code < 0:
        end = f"was ended by {signal_name(-code)}"
    else:
        end = f"ended with exit code {code}" if code else "ended without a result"
    return f"rank {view.rank} {end}" + (f": {log_tail}" if log_tail else "")


def outcome(ranks: Sequence[RankView], *, fault: str, killed_because: str, terminated: bool) -> Verdict:
    """How a run ended whose processes are gone."""
    word = last_word(ranks)
    if word is not None:
        return Verdict(RunPhase.SUCCEEDED if word is RankPhase.SUCCEEDED else RunPhase.LEFT)
    if fault:
        return Verdict(RunPhase.FAILED, fault)
    if killed_because:
        return Verdict(RunPhase.LOST, killed_because)
    if not terminated:
        return Verdict(RunPhase.SUCCEEDED)
    if any(view.exit_code for view in ranks):
        return Verdict(RunPhase.LOST, "it was asked to leave by SIGTERM and died of it")
    return Verdict(RunPhase.LEFT, "it was asked to leave by SIGTERM and ended with exit code 0")


def _is_faulty(view: RankView, *, mute: bool, terminated: bool) -> bool:
    if view.status is not None and view.status.is_end:
        return view.status.phase is RankPhase.FAILED
    if view.exit_code is None:
        return False
    if mute:
        return view.exit_code != 0 and not (terminated and view.exit_code in _ENDED_BY_SIGTERM)
    return True


def _blame(view: RankView) -> tuple[bool, bool, int, int]:
    said_so = view.status is not None and view.status.phase is RankPhase.FAILED
    known = view.status is not None and view.status.cause is not None
    return not known, said_so, view.status.written_at_ns if said_so and view.status else 0, view.rank
