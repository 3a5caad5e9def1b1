"""The tick: the only caller of decide(), shared by service, simulator and dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scheduler.core.absorb import Absorbed, absorb
from scheduler.core.apply import Archived, archive, take
from scheduler.core.decide import decide
from scheduler.core.draft import Draft
from scheduler.core.legal import breaches, illegal
from scheduler.core.story import stepped, tell, tell_breach, tell_violation
from scheduler.core.usage import booked
from scheduler.domain.command import Command
from scheduler.domain.decision import Decision
from scheduler.domain.event import Event
from scheduler.domain.loan import Loan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, TickReport, TickResult, Violation
from scheduler.executors.protocol import Executor
from scheduler.policies.policy_set import PolicySet
from scheduler.runtime.clock import Clock
from scheduler.store.protocol import Commit, Loaded, Store

Hook = Callable[[str], None]


def no_hook(point: str) -> None:
    """Tests put a hook in that kills the process at a named point; everybody else has none."""


def tick(
    store: Store,
    executor: Executor,
    clock: Clock,
    policies: PolicySet,
    *,
    epoch: int,
    learned: tuple[Command, ...] = (),
    standing: tuple[Breach, ...] = (),
    commands_max: int | None = None,
    at: Hook = no_hook,
) -> TickReport:
    """One step of the control loop: observe, absorb, decide, check, commit, converge.

    `learned` are solved curve points and forecasts, which do not pass through the inbox; `standing` are the
    breaches of the tick before, which are not told again. Of the inbox the first `commands_max` commands are taken in,
    all of them without it. `now` is read once.

    Raises:
        ConflictError: somebody else committed first; nothing was written and nothing put into effect.
        FencedError: this leader's epoch has ended; likewise.
    """
    watch = Stopwatch(clock)
    now_s = clock.now_s()
    at("before-observe")
    observation = executor.observe()
    watch.lap("observe")
    loaded = store.load()
    loaded = replace(loaded, inbox=loaded.inbox[:commands_max])
    watch.lap("load")
    at("after-load")
    away_s = now_s - loaded.snapshot.now_s
    absorbed = absorb(_at(loaded.snapshot, now_s), observation, (*loaded.inbox, *learned), away_s=away_s)
    watch.lap("absorb")
    result = decide(absorbed.snapshot, policies)
    watch.lap("decide")
    applied = _apply_legal(absorbed.snapshot, result)
    broken = breaches(applied.snapshot, observation)
    report = replace(_report(absorbed, result, applied, broken, standing), before=loaded.snapshot)
    watch.lap("apply")
    if not _changes(loaded, report, applied.snapshot):
        executor.converge(loaded.snapshot)
        watch.lap("converge")
        return replace(report, stage_s=watch.seconds)
    archived = archive(replace(applied.snapshot, generation=loaded.snapshot.generation + 1))
    at("before-commit")
    store.commit(_commit(loaded, absorbed, applied, report, archived=archived, epoch=epoch))
    watch.lap("commit")
    at("after-commit")
    executor.converge(archived.snapshot)
    watch.lap("converge")
    at("after-converge")
    return replace(report, generation=archived.snapshot.generation, committed=True, stage_s=watch.seconds)


@dataclass(frozen=True, slots=True)
class Applied:
    """The legal decisions, the state they make, and what was dropped on the way. `ended_loans` have left that state
    already: their nodes were lent anew at once."""

    snapshot: Snapshot
    decisions: tuple[Decision, ...] = ()
    violations: tuple[Violation, ...] = ()
    events: tuple[Event, ...] = ()
    ended_loans: tuple[Loan, ...] = ()


class Stopwatch:
    """Wall time by stage, for metrics alone: nothing is decided on it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.elapsed_s()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """What has passed since the last lap was this stage."""
        now_s = self._clock.elapsed_s()
        self.seconds[stage], self._since_s = now_s - self._since_s, now_s


def _at(snapshot: Snapshot, now_s: float) -> Snapshot:
    """The snapshot at the tick's time. A clock that was set back does not take the state with it."""
    return replace(snapshot, now_s=max(now_s, snapshot.now_s))


def _apply_legal(snapshot: Snapshot, result: TickResult) -> Applied:
    """Apply decision by decision; an illegal one is dropped and reported, the rest goes on."""
    full_pass_at_s = snapshot.now_s if result.full_pass else snapshot.full_pass_at_s
    if not result.decisions:
        return Applied(replace(snapshot, full_pass_at_s=full_pass_at_s))
    draft = Draft(snapshot)
    kept, violations, events = list[Decision](), list[Violation](), list[Event]()
    for decision in result.decisions:
        if violation := illegal(draft, decision):
            violations.append(violation)
            events.append(tell_violation(snapshot.now_s, violation))
            continue
        told = tell(draft.view(), decision)
        take(draft, decision)
        events.append(stepped(told, decision, draft.view()))
        kept.append(decision)
    settled = replace(draft.view(), full_pass_at_s=full_pass_at_s)
    return Applied(settled, tuple(kept), tuple(violations), tuple(events), tuple(draft.ended_loans))


def _report(
    absorbed: Absorbed, result: TickResult, applied: Applied, broken: tuple[Breach, ...], standing: tuple[Breach, ...]
) -> TickReport:
    snapshot = applied.snapshot
    return TickReport(
        generation=snapshot.generation,
        now_s=snapshot.now_s,
        decisions=applied.decisions,
        violations=applied.violations,
        breaches=broken,
        waiting=result.waiting,
        wanted_shapes=result.wanted_shapes,
        events=(*absorbed.events, *applied.events, *_new_breaches(standing, broken, snapshot.now_s)),
        next_wake_s=result.next_wake_s,
        full_pass=result.full_pass,
        committed=False,
        after=snapshot,
        readings=absorbed.readings,
    )


def _new_breaches(standing: tuple[Breach, ...], broken: tuple[Breach, ...], now_s: float) -> Iterator[Event]:
    """A breach is told once, when it begins, and counted in every tick that it lasts."""
    known = {(breach.kind, breach.subject) for breach in standing}
    for breach in broken:
        if (breach.kind, breach.subject) not in known:
            yield tell_breach(now_s, breach)


def _commit(
    loaded: Loaded, absorbed: Absorbed, applied: Applied, report: TickReport, *, archived: Archived, epoch: int
) -> Commit:
    return Commit(
        previous=loaded.snapshot,
        snapshot=archived.snapshot,
        epoch=epoch,
        consumed=tuple(command.id for command in loaded.inbox),
        events=report.events,
        decisions=applied.decisions,
        ended_jobs=archived.ended_jobs,
        ended_loans=(*applied.ended_loans, *archived.ended_loans),
        readings=absorbed.readings,
        samples=absorbed.samples,
        usage=booked(loaded.snapshot, applied.snapshot),
    )


def _changes(loaded: Loaded, report: TickReport, snapshot: Snapshot) -> bool:
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
