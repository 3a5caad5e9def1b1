"""The outcome of a run, derived from rank statuses, exit codes and OOM kill counts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.domain.gpu_sets import NO_GPUS, Gpus
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.observation import FailureCause, RankPhase, RankStatus, Run, RunPhase, Straggler


def signal_name(number: int) -> str:
    """Return the signal's name, such as SIGKILL, or `signal 35` for real-time signals without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_CGROUP_ROOT = Path("/sys/fs/cgroup")


def read_oom_kills(path: str, *, root: Path = _CGROUP_ROOT) -> int | None:
    """Return the `oom_kill` count from memory.events (cgroup v2) or memory.oom_control (v1), None if it cannot be read.

    `path` comes from a worker, so only files below `root` are opened. The kernel counts before the process is gone.
    """
    if not path or not Path(os.path.realpath(path)).is_relative_to(root):  # Path.resolve raises in a loop of links
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
_FIRST_SIGNAL_CODE = 129  # of a shell whose command a signal has ended
_REASON_LENGTH_MAX = 500
_TAIL_LENGTH_MAX = 420
_LINE_BREAK = re.compile(r"\n| \| ")
_EXCEPTION_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::|$)")
_FAULT_BY_EXCEPTION = {
    "ImportError": PermanentFault.IMPORT_ERROR,
    "ModuleNotFoundError": PermanentFault.IMPORT_ERROR,
    "SyntaxError": PermanentFault.SYNTAX_ERROR,
    "IndentationError": PermanentFault.SYNTAX_ERROR,
    "TabError": PermanentFault.SYNTAX_ERROR,
}
COMMAND_NOT_FOUND_CODES = (126, 127)
"""Exit codes of a shell whose command cannot be executed, or does not exist."""
_PYTHON_CANNOT_OPEN = 2
"""Exit code of the Python interpreter."""

ENDED_PHASES = frozenset({RunPhase.LEFT, RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.LOST})
"""Phases of runs without processes."""


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank. `exit_code` is minus the signal number if a signal ended it, None while it is alive."""

    rank: int
    status: RankStatus | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    phase: RunPhase
    reason: str = ""


def is_silent(ranks: Sequence[RankView]) -> bool:
    """Return whether no rank has written a status: a script without Ebbtide's library, or one that just started."""
    return all(view.status is None for view in ranks)


def find_final_phase(ranks: Sequence[RankView]) -> RankPhase | None:
    """Return LEFT or SUCCEEDED once rank 0 has reported it.

    Later events do not change the outcome, except for an exit code that rank 0 has announced.
    """
    first = ranks[0].status if ranks else None
    if first is None or not first.is_clean_exit or _contradicts_success(ranks[0]):
        return None
    return first.phase


def find_live_phase(ranks: Sequence[RankView], *, is_leaving: bool, within_first_status_timeout: bool) -> RunPhase:
    """Return the phase of a live run. Without any status, it counts as running after the first-status timeout."""
    if is_leaving:
        return RunPhase.LEAVING
    if is_silent(ranks):
        return RunPhase.STARTING if within_first_status_timeout else RunPhase.RUNNING
    first = ranks[0].status
    return RunPhase.RUNNING if first is not None and first.has_loaded_state else RunPhase.STARTING


def find_faulty_ranks(ranks: Sequence[RankView], *, terminated: bool, saved: bool = False) -> tuple[RankView, ...]:
    """Return the ranks that made the run fail, the most likely culprit first.

    Ranks out of memory come first, then ranks that died without a status, then those that report a failure, earliest
    first: most report one because another rank died. `terminated`: SIGTERM was sent, so a silent script may die of it.
    `saved`: a silent script has saved since it was asked to leave, so it may end in any way.
    """
    if find_final_phase(ranks):
        return ()
    is_silent_run = is_silent(ranks)
    if saved and is_silent_run:
        return ()
    faulty_ranks = [view for view in ranks if _is_faulty(view, is_silent_run=is_silent_run, terminated=terminated)]
    return tuple(sorted(faulty_ranks, key=_blame_key))


def find_failure_cause(
    ranks: Sequence[RankView], *, oom_kills: Callable[[RankView], int | None], has_exceeded_memory: bool = False
) -> FailureCause | None:
    """Return the cause of a failed run, if it is proven.

    Either a rank reports it, or the kernel counted an OOM kill in the cgroup of a SIGKILLed rank since its last status.
    The latter proves nothing if another rank died differently, because then Ebbtide killed the others.

    Args:
        oom_kills: returns the current count of a rank's cgroup.
        has_exceeded_memory: whether the count is of the run alone and not 0, so that a rank needs no status.
    """
    if any(view.status is not None and view.status.cause is FailureCause.OUT_OF_MEMORY for view in ranks):
        return FailureCause.OUT_OF_MEMORY
    ended_without_outcome = [
        view for view in ranks if view.exit_code is not None and not (view.status and view.status.is_terminal)
    ]
    if any(view.exit_code not in _ENDED_BY_SIGKILL for view in ended_without_outcome):
        return None
    if has_exceeded_memory and ended_without_outcome:
        return FailureCause.OUT_OF_MEMORY
    for view in ended_without_outcome:
        count_at_status = None if view.status is None else view.status.oom_kills
        count_now = None if count_at_status is None else oom_kills(view)
        if count_at_status is not None and count_now is not None and count_now > count_at_status:
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
    permanent_fault: PermanentFault | None = None,
    ran_s: float | None = None,
    suspects: tuple[str, ...] = (),
    checkpoint_at_s: float | None = None,
    reported_at_s: float | None = None,
    straggler: Straggler | None = None,
    lacks_session: bool = False,
) -> Run:
    """Return the run. Progress is rank 0's; memory and durations are the maximum over ranks.

    Args:
        reported_at_s: when the node of rank 0 reported last. None if it has not, or if the run has ended.
    """
    first = statuses.get(0)
    progress = first if first is not None and first.has_loaded_state else None
    return Run(
        job_id=job_id,
        generation=generation,
        phase=outcome.phase,
        gpus=gpus,
        steps=float(progress.step) if progress else None,
        checkpoint_steps=None if not progress or progress.checkpoint_step is None else float(progress.checkpoint_step),
        loss=progress.loss if progress else None,
        reason=outcome.reason[:_REASON_LENGTH_MAX],
        cause=cause,
        samples_per_s=progress.samples_per_s if progress else None,
        peak_bytes=find_peak_bytes(statuses.values()),
        phases_s=find_longest_phases_s(statuses.values()),
        frozen_layers=progress.frozen_layers if progress else None,
        traffic=sum_traffic(statuses.values()),
        permanent_fault=permanent_fault,
        ran_s=ran_s,
        suspects=suspects,
        checkpoint_at_s=checkpoint_at_s,
        steps_at_s=reported_at_s if progress else None,
        straggler=straggler,
        lacks_session=lacks_session,
    )


def find_peak_bytes(statuses: Iterable[RankStatus]) -> int | None:
    """Return the peak memory over ranks."""
    return max((status.peak_bytes for status in statuses if status.peak_bytes is not None), default=None)


def find_longest_phases_s(statuses: Iterable[RankStatus]) -> Mapping[str, float]:
    """Return seconds by re-plan phase, the maximum over ranks."""
    maximum: dict[str, float] = {}
    for status in statuses:
        for phase, seconds in status.phases_s.items():
            maximum[phase] = max(seconds, maximum.get(phase, 0.0))
    return maximum


def sum_traffic(statuses: Iterable[RankStatus]) -> LoadTraffic | None:
    """Return the checkpoint bytes read by all ranks, None if no rank reports them."""
    traffic = [status.traffic for status in statuses if status.traffic is not None]
    return sum(traffic, start=LoadTraffic()) if traffic else None


def find_permanent_fault(view: RankView, log_tail: str) -> PermanentFault | None:
    """Return why a retry of the faulty rank cannot succeed, or None if it may.

    Args:
        log_tail: The last lines of the rank's log, separated by newlines or ` | `.
    """
    if view.exit_code in COMMAND_NOT_FOUND_CODES:
        return PermanentFault.COMMAND_NOT_FOUND
    if view.exit_code == _PYTHON_CANNOT_OPEN and "can't open file" in log_tail:
        return PermanentFault.FILE_NOT_FOUND
    reported = view.status.reason if view.status is not None and view.status.phase is RankPhase.FAILED else ""
    for line in reversed(_LINE_BREAK.split(reported or log_tail)):
        if (match := _EXCEPTION_LINE.match(line.strip())) is not None:
            return _FAULT_BY_EXCEPTION.get(match.group(1))
    return None


def describe_fault(view: RankView, log_tail: str) -> str:
    """Return what ended the faulty rank, with the end of its log, where a traceback names the error."""
    if view.status is not None and view.status.phase is RankPhase.FAILED:
        return f"rank {view.rank}: {view.status.reason or 'it failed without a reason'}"
    code = view.exit_code
    assert code is not None, "a rank without a final status is at fault only after its exit"
    if code < 0:
        end = f"was killed by {signal_name(-code)}"
    else:
        end = f"exited with code {code}" if code else "exited without a final status"
    return f"rank {view.rank} {end}" + (f": {log_tail[-_TAIL_LENGTH_MAX:]}" if log_tail else "")


def classify_outcome(
    ranks: Sequence[RankView], *, fault: str, killed_because: str, terminated: bool, saved: bool = False
) -> RunOutcome:
    """Return the outcome of a run without processes."""
    final_phase = find_final_phase(ranks)
    if final_phase is not None:
        return RunOutcome(RunPhase.SUCCEEDED if final_phase is RankPhase.SUCCEEDED else RunPhase.LEFT)
    has_finished = not terminated and not any(view.exit_code for view in ranks)
    if saved and is_silent(ranks) and not fault and not has_finished:
        return RunOutcome(RunPhase.LEFT, "it saved a checkpoint and ended")
    if fault:
        return RunOutcome(RunPhase.FAILED, fault)
    if killed_because:
        return RunOutcome(RunPhase.LOST, killed_because)
    if not terminated:
        return RunOutcome(RunPhase.SUCCEEDED)
    if any(view.exit_code for view in ranks):
        return RunOutcome(RunPhase.LOST, "it was killed by the SIGTERM that asked it to leave")
    return RunOutcome(RunPhase.LEFT, "it exited with code 0 after SIGTERM")


def _is_faulty(view: RankView, *, is_silent_run: bool, terminated: bool) -> bool:
    if view.status is not None and view.status.is_terminal:
        return view.status.phase is RankPhase.FAILED or _contradicts_success(view)
    if view.exit_code is None:
        return False
    if is_silent_run:
        return view.exit_code != 0 and not (terminated and view.exit_code in _ENDED_BY_SIGTERM)
    return True


def _contradicts_success(view: RankView) -> bool:
    """Return whether the script failed although its steps were done. A signal only disturbed the teardown."""
    code = view.exit_code or 0
    return view.status is not None and view.status.awaits_exit_code and 0 < code < _FIRST_SIGNAL_CODE


def _blame_key(view: RankView) -> tuple[bool, bool, int, int]:
    reported_failure = view.status is not None and view.status.phase is RankPhase.FAILED
    progress = view.status is not None and view.status.cause is not None
    return (
        not progress,
        reported_failure,
        view.status.written_at_ns if reported_failure and view.status else 0,
        view.rank,
    )
