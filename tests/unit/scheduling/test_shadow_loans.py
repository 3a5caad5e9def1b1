"""Shadow mode: what a pool would lend, and that it lends nothing."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.commands import Command, CommandBody, ReportDemand, SetLendingPolicy
from scheduler.domain.decisions import RecallNode
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.observation import Observation
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.shortages import ShortageDay, ShortageRecord
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.event_messages import shadow_events
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

NOW_S = 6000.0
RULES = LendingPolicy(headroom=0.0, mode=LendingMode.SHADOW)
WANTS_NINE = (a_job("waits", 9),)


def world(needs: float, shadow: ShadowLending | None = None, jobs: tuple[Job, ...] = WANTS_NINE) -> Snapshot:
    """Four nodes of 8 GPUs, none of them training's."""
    return a_snapshot(
        a_fleet(training=0, inference=4, lending=RULES),
        jobs,
        now_s=NOW_S,
        demand={"inference": DemandReading(NOW_S, needs, needs)},
        forecasts={"inference": Forecast(NOW_S, 600.0, (0.999,), (needs,), "scripted")},
        shadows={"inference": shadow} if shadow else {},
    )


def after(snapshot: Snapshot) -> ShadowLending:
    result = decide(snapshot, load_policy_set("ebbtide"))
    assert result.decisions == ()
    return result.shadows["inference"]


def told(snapshot: Snapshot, *bodies: CommandBody) -> Snapshot:
    commands = [Command(f"c{at}", snapshot.now_s, body) for at, body in enumerate(bodies)]
    return update_snapshot(snapshot, Observation(snapshot.now_s, -1), commands).snapshot


def test_nodes_that_jobs_want_would_be_lent_and_none_is() -> None:
    shadow = after(world(0.0))
    assert (shadow.nodes, shadow.gpus, shadow.loans) == (("i0", "i1"), 9.0, 2)
    assert after(world(24.0)).nodes == ("i0",)
    assert after(world(0.0, jobs=())).nodes == ()


def test_nodes_that_inference_needs_would_be_recalled_in_any_tick() -> None:
    lent = ShadowLending(0.0, ("i0", "i1"), 9.0, NOW_S - 100.0)
    between = replace(world(24.0, lent), full_pass_at_s=NOW_S - 1.0)
    shadow = after(between)
    assert (shadow.nodes, shadow.gpus, shadow.recalls) == (("i0",), 8.0, 1)
    assert shadow.settled_gpu_s == 900.0
    assert after(replace(world(0.0, lent), full_pass_at_s=NOW_S - 1.0)) is lent


def test_nodes_that_no_job_wants_leave_without_a_recall() -> None:
    shadow = after(world(0.0, ShadowLending(0.0, ("i0", "i1"), 9.0, NOW_S), jobs=()))
    assert (shadow.nodes, shadow.gpus, shadow.recalls) == ((), 0.0, 0)


def test_event_is_recorded_when_the_number_of_nodes_changes() -> None:
    before = world(0.0, ShadowLending(0.0, ("i0",), 8.0))
    changed = ShadowLending(0.0, ("i0", "i1"), 9.0)
    [event] = shadow_events(NOW_S, before, {"inference": changed})
    assert (event.code, event.numbers["nodes"]) == (EventCode.SHADOW_CHANGED, 2.0)
    assert list(shadow_events(NOW_S, before, {"inference": ShadowLending(0.0, ("i1",), 3.0)})) == []


def test_shadow_loans_leave_intervals_short_until_deadline_and_cold_start_have_passed() -> None:
    """A loan of all nodes is short at once; 300 s of deadline and 300 s of cold start keep later intervals short."""
    lent = told(world(0.0, ShadowLending(0.0, ("i0", "i1", "i2", "i3"), 9.0)), ReportDemand("inference", 8.0))
    idle = replace(lent, shadows={"inference": ShadowLending(0.0)})
    for at in range(1, 6):
        idle = told(replace(idle, now_s=NOW_S + 300.0 * at), ReportDemand("inference", 8.0))
    record = idle.demand["inference"].shortages
    assert (record.intervals, record.short_intervals) == (5, 3)


def test_lending_starts_with_the_shadows_record_of_shortages() -> None:
    spent = ShortageRecord((ShortageDay(0, 288, 9),), 20)
    shadow = world(0.0, ShadowLending(0.0, ("i0",), 8.0))
    shadow = replace(shadow, demand={"inference": replace(shadow.demand["inference"], shortages=spent)})
    lending = told(shadow, SetLendingPolicy("inference", replace(RULES, mode=LendingMode.LEND)))
    assert (lending.demand["inference"].shortages, lending.shadows) == (spent, {})


def test_shadow_of_a_pool_that_was_off_starts_a_new_record() -> None:
    long = ShortageRecord((ShortageDay(0, 288, 0),), 20)
    for enabled, kept in ((True, long), (False, ShortageRecord())):
        before = world(0.0)
        pool = replace(before.pools["inference"], lending=replace(RULES, mode=LendingMode.LEND, enabled=enabled))
        reading = replace(before.demand["inference"], shortages=long)
        before = replace(before, pools={**before.pools, "inference": pool}, demand={"inference": reading})
        assert told(before, SetLendingPolicy("inference", RULES)).demand["inference"].shortages == kept


def test_real_loans_go_back_when_a_pool_enters_shadow_mode() -> None:
    job = a_job("runs", 8, state=JobState.RUNNING, on={"i0": tuple(range(8))})
    snapshot = replace(world(0.0, jobs=(job,)), loans={"i0": a_loan("i0")})
    recalls = [d for d in decide(snapshot, load_policy_set("ebbtide")).decisions if isinstance(d, RecallNode)]
    assert [d.node for d in recalls] == ["i0"]
