"""The tick: one step of the control loop, shared by the service, the simulator and dry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from scheduler.domain.commands import Command
from scheduler.domain.decisions import Decision
from scheduler.domain.events import Event
from scheduler.domain.fleet import Loan
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, TickReport, TickResult, Violation
from scheduler.executors.executor import Executor
from scheduler.runtime.clock import Clock
from scheduler.scheduling.allocation_spans import compute_span_changes
from scheduler.scheduling.capacity_use import count_loan_changes, integrate_capacity
from scheduler.scheduling.desired_state import ArchiveResult, apply_decision, archive_ended
from scheduler.scheduling.event_messages import (
    breach_event,
    decision_event,
    receipt_event,
    shadow_events,
    unmet_demand_events,
    violation_event,
    with_job_step,
)
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.past_changes import compute_fleet_change, encode_fleet_change
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.recall_tracking import RecallUpdate, update_receipts
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from scheduler.scheduling.usage import compute_usage_delta
from scheduler.store.protocol import Commit, LoadedState, Store

StageHook = Callable[[str], None]


def ignore_stage(point: str) -> None:
    """Do nothing. Tests pass a hook that kills the process at a named point."""


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
    records_history: bool = True,
    stage_hook: StageHook = ignore_stage,
) -> TickReport:
    """Observe, update the snapshot, decide, check, commit and converge. The clock is read once.

    Args:
        epoch: the epoch of this leader's lease.
        planning_inputs: solved curve points and forecasts, which do not pass through the inbox.
        active_breaches: the breaches of the previous tick, for which no events are written again.
        commands_max: how many commands of the inbox to consume; None consumes all.
        records_history: record the use of the pools' GPUs since the previous commit, and how the fleet changed.
        stage_hook: called with the name of each point at which tests kill the process.

    Raises:
        ConflictError: another tick committed first. Nothing was written or put into effect.
        FencedError: the epoch of this leader has ended. Nothing was written or put into effect.
    """
    timer, now_s = StageTimer(clock), clock.now_s()
    stage_hook("before-observe")
    observation = executor.observe()
    timer.record_stage("observe")
    loaded = _limit_inbox(store.load(), commands_max)
    timer.record_stage("load")
    stage_hook("after-load")
    outage_s = now_s - loaded.snapshot.now_s
    commands = (*loaded.inbox, *planning_inputs)
    updated = update_snapshot(_with_time(loaded.snapshot, now_s), observation, commands, outage_s=outage_s)
    timer.record_stage("absorb")
    result = decide(updated.snapshot, policies)
    timer.record_stage("decide")
    applied = _apply_legal_decisions(updated.snapshot, result)
    recalls = update_receipts(loaded.snapshot, observation, updated.snapshot, updated.events, applied.decisions)
    applied = replace(applied, snapshot=replace(applied.snapshot, recalls=recalls.open), recalls=recalls)
    breaches = find_breaches(applied.snapshot, observation)
    report = replace(_build_report(updated, result, applied, breaches, active_breaches), before=loaded.snapshot)
    timer.record_stage("apply")
    if not _has_changes(loaded, report, applied.snapshot):
        executor.converge(loaded.snapshot)
        timer.record_stage("converge")
        return replace(report, stage_s=timer.seconds)
    archived = archive_ended(replace(applied.snapshot, generation=loaded.snapshot.generation + 1))
    stage_hook("before-commit")
    commit = _build_commit(loaded, updated, applied, report, archived=archived, epoch=epoch)
    store.commit(_with_history(commit) if records_history else commit)
    timer.record_stage("commit")
    stage_hook("after-commit")
    executor.converge(archived.snapshot)
    timer.record_stage("converge")
    stage_hook("after-converge")
    return replace(report, generation=archived.snapshot.generation, committed=True, stage_s=timer.seconds)


def _limit_inbox(loaded: LoadedState, commands_max: int | None) -> LoadedState:
    return replace(loaded, inbox=loaded.inbox[:commands_max])


@dataclass(frozen=True, slots=True)
class AppliedDecisions:
    """The legal decisions, the resulting snapshot, and the violations that were dropped.

    `ended_loans` are missing in the snapshot: their nodes were lent again by a later decision. `recalls` are the
    receipts of recalls after these decisions.
    """

    snapshot: Snapshot
    decisions: tuple[Decision, ...] = ()
    violations: tuple[Violation, ...] = ()
    events: tuple[Event, ...] = ()
    ended_loans: tuple[Loan, ...] = ()
    recalls: RecallUpdate = field(default_factory=lambda: RecallUpdate({}))


class StageTimer:
    """Timer of the wall time of each stage, for metrics only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.elapsed_s()
        self.seconds: dict[str, float] = {}

    def record_stage(self, stage: str) -> None:
        """Record the time since the previous stage as the duration of this one."""
        now_s = self._clock.elapsed_s()
        self.seconds[stage], self._since_s = now_s - self._since_s, now_s


def _with_time(snapshot: Snapshot, now_s: float) -> Snapshot:
    """Return the snapshot at the time of the tick. Time never goes back, even if the clock was set back."""
    return replace(snapshot, now_s=max(now_s, snapshot.now_s))


def _apply_legal_decisions(snapshot: Snapshot, result: TickResult) -> AppliedDecisions:
    """Check and apply each decision. An illegal one is dropped and reported; the others still apply.

    This is the only check of legality: the planner is not trusted and does not check its own decisions.
    """
    full_pass_at_s = snapshot.now_s if result.full_pass else snapshot.full_pass_at_s
    shadows = tuple(shadow_events(snapshot.now_s, snapshot, result.shadows))
    snapshot = replace(snapshot, shadows=_merge_changed(snapshot.shadows, result.shadows))
    if not result.decisions:
        return AppliedDecisions(replace(snapshot, full_pass_at_s=full_pass_at_s), events=shadows)
    state = MutableSnapshot(snapshot)
    legal, violations, events = list[Decision](), list[Violation](), list(shadows)
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
    events += unmet_demand_events(snapshot, legal)
    return AppliedDecisions(applied, tuple(legal), tuple(violations), tuple(events), tuple(state.ended_loans))


def _merge_changed(
    before: Mapping[str, ShadowLending], changed: Mapping[str, ShadowLending]
) -> Mapping[str, ShadowLending]:
    """Return `before` with the changed records, the same object if there are none."""
    if all(before.get(pool) is shadow for pool, shadow in changed.items()):
        return before
    return {**before, **changed}


def _build_report(
    updated: SnapshotUpdate,
    result: TickResult,
    applied: AppliedDecisions,
    breaches: tuple[Breach, ...],
    active_breaches: tuple[Breach, ...],
) -> TickReport:
    snapshot = applied.snapshot
    receipts = map(receipt_event, applied.recalls.closed)
    begun = _build_breach_events(active_breaches, breaches, snapshot.now_s)
    return TickReport(
        generation=snapshot.generation,
        now_s=snapshot.now_s,
        decisions=applied.decisions,
        violations=applied.violations,
        breaches=breaches,
        waiting=result.waiting,
        wanted_shapes=result.wanted_shapes,
        events=(*updated.events, *applied.events, *receipts, *begun),
        next_wake_s=result.next_wake_s,
        full_pass=result.full_pass,
        committed=False,
        after=snapshot,
        readings=updated.readings,
        settled_recalls=applied.recalls.settled,
    )


def _build_breach_events(
    active_breaches: tuple[Breach, ...], breaches: tuple[Breach, ...], now_s: float
) -> Iterator[Event]:
    """Yield an event for each breach that has begun with this tick."""
    known = {(breach.kind, breach.subject) for breach in active_breaches}
    for breach in breaches:
        if (breach.kind, breach.subject) not in known:
            yield breach_event(now_s, breach)


def _build_commit(
    loaded: LoadedState,
    updated: SnapshotUpdate,
    applied: AppliedDecisions,
    report: TickReport,
    *,
    archived: ArchiveResult,
    epoch: int,
) -> Commit:
    spans = compute_span_changes(loaded.snapshot, applied.snapshot)
    return Commit(
        previous=loaded.snapshot,
        snapshot=archived.snapshot,
        epoch=epoch,
        consumed_command_ids=tuple(command.id for command in loaded.inbox),
        events=report.events,
        decisions=applied.decisions,
        ended_jobs=archived.ended_jobs,
        ended_loans=(*applied.ended_loans, *archived.ended_loans),
        readings=updated.readings,
        samples=updated.samples,
        backfill=updated.backfill,
        usage=compute_usage_delta(loaded.snapshot, applied.snapshot),
        receipts=applied.recalls.closed,
        ended_spans=spans.ended,
        begun_spans=spans.begun,
    )


def _with_history(commit: Commit) -> Commit:
    loans = count_loan_changes(commit.previous, commit.snapshot, commit.ended_loans)
    capacity = (*integrate_capacity(commit.previous, commit.snapshot.now_s), *loans)
    change = compute_fleet_change(commit.previous, commit.snapshot)
    return replace(commit, capacity=capacity, fleet_change=b"" if change.is_empty else encode_fleet_change(change))


def _has_changes(loaded: LoadedState, report: TickReport, snapshot: Snapshot) -> bool:
    """Tell whether there is anything to commit. Most ticks of an idle cluster change nothing."""
    before = loaded.snapshot
    if loaded.inbox or report.decisions or report.events or report.full_pass:
        return True
    mappings = (
        "pools",
        "nodes",
        "jobs",
        "loans",
        "curves",
        "demand",
        "forecasts",
        "return_times",
        "shadows",
        "recalls",
    )
    return any(_differ(getattr(before, name), getattr(snapshot, name)) for name in mappings)


def _differ(before: dict[str, object], after: dict[str, object]) -> bool:
    if before is after:
        return False
    return len(before) != len(after) or any(after.get(key) is not value for key, value in before.items())
