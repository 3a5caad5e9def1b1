"""The tick: the only caller of decide(), shared by service, simulator and dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scheduler.domain.commands import Command
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import Loan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, TickReport, TickResult, Violation
from scheduler.executors.executor import Executor
from scheduler.runtime.clock import Clock
from scheduler.scheduling.desired_state import ArchiveResult, apply_decision, archive_ended
from scheduler.scheduling.event_messages import breach_event, decision_event, violation_event, with_job_step
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from scheduler.scheduling.usage import compute_usage_delta
from scheduler.store.protocol import Commit, LoadedState, Store

StageHook = Callable[[str], None]


def ignore_stage(point: str) -> None:
    """Tests put a hook in that kills the process at a named point; everybody else has none."""


def tick(
    store: Store,
    executor: Executor,
    clock: Clock,
    policies: PolicySet,
    *,
    epoch: int,
    planning_inputs: tuple[Command, ...] = (),
    active_breaches: tuple[Breach, ...] = (),
    commands_max: int | None = None,
    stage_hook: StageHook = ignore_stage,
) -> TickReport:
    """One step of the control loop: observe, absorb, decide, check, commit, converge.

    `learned` are solved curve points and forecasts, which do not pass through the inbox; `standing` are the
    breaches of the tick before, which are not told again. Of the inbox the first `commands_max` commands are taken in,
    all of them without it. `now` is read once.

    Raises:
        ConflictError: somebody else committed first; nothing was written and nothing put into effect.
        FencedError: this leader's epoch has ended; likewise.
    """
    watch = StageTimer(clock)
    now_s = clock.now_s()
    stage_hook("before-observe")
    observation = executor.observe()
    watch.record_stage("observe")
    loaded = store.load()
    loaded = replace(loaded, inbox=loaded.inbox[:commands_max])
    watch.record_stage("load")
    stage_hook("after-load")
    away_s = now_s - loaded.snapshot.now_s
    absorbed = update_snapshot(
        _with_time(loaded.snapshot, now_s), observation, (*loaded.inbox, *planning_inputs), outage_s=away_s
    )
    watch.record_stage("absorb")
    result = decide(absorbed.snapshot, policies)
    watch.record_stage("decide")
    applied = _apply_legal_decisions(absorbed.snapshot, result)
    broken = find_breaches(applied.snapshot, observation)
    report = replace(_build_report(absorbed, result, applied, broken, active_breaches), before=loaded.snapshot)
    watch.record_stage("apply")
    if not _has_changes(loaded, report, applied.snapshot):
        executor.converge(loaded.snapshot)
        watch.record_stage("converge")
        return replace(report, stage_s=watch.seconds)
    archived = archive_ended(replace(applied.snapshot, generation=loaded.snapshot.generation + 1))
    stage_hook("before-commit")
    store.commit(_build_commit(loaded, absorbed, applied, report, archived=archived, epoch=epoch))
    watch.record_stage("commit")
    stage_hook("after-commit")
    executor.converge(archived.snapshot)
    watch.record_stage("converge")
    stage_hook("after-converge")
    return replace(report, generation=archived.snapshot.generation, committed=True, stage_s=watch.seconds)


@dataclass(frozen=True, slots=True)
class AppliedDecisions:
    """The legal decisions, the state they make, and what was dropped on the way. `ended_loans` have left that state
    already: their nodes were lent anew at once."""

    snapshot: Snapshot
    decisions: tuple[Decision, ...] = ()
    violations: tuple[Violation, ...] = ()
    events: tuple[Event, ...] = ()
    ended_loans: tuple[Loan, ...] = ()


class StageTimer:
    """Wall time by stage, for metrics alone: nothing is decided on it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.elapsed_s()
        self.seconds: dict[str, float] = {}

    def record_stage(self, stage: str) -> None:
        """What has passed since the last lap was this stage."""
        now_s = self._clock.elapsed_s()
        self.seconds[stage], self._since_s = now_s - self._since_s, now_s


def _with_time(snapshot: Snapshot, now_s: float) -> Snapshot:
    """The snapshot at the tick's time. A clock that was set back does not take the state with it."""
    return replace(snapshot, now_s=max(now_s, snapshot.now_s))


def _apply_legal_decisions(snapshot: Snapshot, result: TickResult) -> AppliedDecisions:
    """Check and apply each decision. An illegal one is dropped and reported; the others still apply.

    This is the only check of legality: the planner is not trusted and does not check its own decisions.
    """
    full_pass_at_s = snapshot.now_s if result.full_pass else snapshot.full_pass_at_s
    if not result.decisions:
        return AppliedDecisions(replace(snapshot, full_pass_at_s=full_pass_at_s))
    state = MutableSnapshot(snapshot)
    legal, violations, events = list[Decision](), list[Violation](), list[Event]()
    for decision in result.decisions:
        if violation := find_violation(state, decision):
            violations.append(violation)
            events.append(violation_event(snapshot.now_s, violation))
            continue
        event = decision_event(state.view(), decision)
        apply_decision(state, decision)
        events.append(with_job_step(event, decision, state.view()))
        legal.append(decision)
    applied = replace(state.view(), full_pass_at_s=full_pass_at_s)
    return AppliedDecisions(applied, tuple(legal), tuple(violations), tuple(events), tuple(state.ended_loans))


def _build_report(
    absorbed: SnapshotUpdate,
    result: TickResult,
    applied: AppliedDecisions,
    breaches: tuple[Breach, ...],
    active_breaches: tuple[Breach, ...],
) -> TickReport:
    snapshot = applied.snapshot
    return TickReport(
        generation=snapshot.generation,
        now_s=snapshot.now_s,
        decisions=applied.decisions,
        violations=applied.violations,
        breaches=breaches,
        waiting=result.waiting,
        wanted_shapes=result.wanted_shapes,
        events=(*absorbed.events, *applied.events, *_build_breach_events(active_breaches, breaches, snapshot.now_s)),
        next_wake_s=result.next_wake_s,
        full_pass=result.full_pass,
        committed=False,
        after=snapshot,
        readings=absorbed.readings,
    )


def _build_breach_events(
    active_breaches: tuple[Breach, ...], breaches: tuple[Breach, ...], now_s: float
) -> Iterator[Event]:
    """A breach is told once, when it begins, and counted in every tick that it lasts."""
    known = {(breach.kind, breach.subject) for breach in active_breaches}
    for breach in breaches:
        if (breach.kind, breach.subject) not in known:
            yield breach_event(now_s, breach)


def _build_commit(
    loaded: LoadedState,
    absorbed: SnapshotUpdate,
    applied: AppliedDecisions,
    report: TickReport,
    *,
    archived: ArchiveResult,
    epoch: int,
) -> Commit:
    return Commit(
        previous=loaded.snapshot,
        snapshot=archived.snapshot,
        epoch=epoch,
        consumed_command_ids=tuple(command.id for command in loaded.inbox),
        events=report.events,
        decisions=applied.decisions,
        ended_jobs=archived.ended_jobs,
        ended_loans=(*applied.ended_loans, *archived.ended_loans),
        readings=absorbed.readings,
        samples=absorbed.samples,
        usage=compute_usage_delta(loaded.snapshot, applied.snapshot),
    )


def _has_changes(loaded: LoadedState, report: TickReport, snapshot: Snapshot) -> bool:
    """Whether there is anything to write: most ticks of a quiet cluster have nothing."""
    before = loaded.snapshot
    if loaded.inbox or report.decisions or report.events or report.full_pass:
        return True
    mappings = ("pools", "nodes", "jobs", "loans", "curves", "demand", "forecasts")
    return any(_differ(getattr(before, name), getattr(snapshot, name)) for name in mappings)


def _differ(before: dict[str, object], after: dict[str, object]) -> bool:
    if before is after:
        return False
    return len(before) != len(after) or any(after.get(key) is not value for key, value in before.items())
