"""Metrics recorded over whole scenarios, with values computed by hand.

In the simulation a first start takes 30 s, a save 10 s, and a restart 20 s more. Each GPU does one step per second.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.capacity_history import CapacityBin
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.prefetch import PrefetchPurpose
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.scheduling.capacity_use import integrate_capacity
from scheduler.telemetry.tick_metrics import ForecastCoverageTracker, TickRecorder
from tests.golden.stage import Stage
from tests.golden.test_golden import RULE, SCENARIOS
from tests.metric_samples import Samples, list_changed_samples, read_samples

EXCLUDED = (
    "ebbtide_tick_duration_seconds",
    "ebbtide_decisions_total",
    "ebbtide_goodput_ratio",
    "ebbtide_gpu_seconds",
    "ebbtide_capacity_gpu_seconds",
    "ebbtide_idle_while_waiting_gpu_seconds",
)


def play(*lines: str) -> Samples:
    """Return what the scenario adds to the metrics."""
    before, stage = read_samples(), Stage(TickRecorder().record)
    for line in lines:
        stage.play(line)
    return list_changed_samples(before)


def job_metrics(changes: Samples) -> Samples:
    return {name.removeprefix("ebbtide_"): value for name, value in changes.items() if not name.startswith(EXCLUDED)}


def gpu_seconds(changes: Samples) -> tuple[float, float]:
    running, moving = (changes.get(f'ebbtide_gpu_seconds_total{{use="{use}"}}', 0.0) for use in ("running", "moving"))
    return running, moving


def test_queueing_time_ends_when_the_blocking_job_ends() -> None:
    """a: 0 to 30 s starting, 100 s on 4 GPUs. b: starts at 130 s, runs from 160 s to 210 s."""
    a = "submit a 4..4 gpu-seconds=400 priority=1"
    changes = play("fleet training=1x4 inference=0x4", a, "submit b 4..4 gpu-seconds=200", "run 400")
    assert job_metrics(changes) == {
        "queueing_seconds_count": 2.0,
        "queueing_seconds_sum": 0.0 + 130.0,
        "jct_seconds_count": 2.0,
        "jct_seconds_sum": 130.0 + 210.0,
        'jobs_ended_total{outcome="succeeded",queue="",reason="Completed"}': 2.0,
    }
    assert gpu_seconds(changes) == (4 * 100 + 4 * 50, 2 * 4 * 30)
    assert read_samples()["ebbtide_goodput_ratio"] == pytest.approx(600 / 840)


def test_recalled_node_is_returned_after_its_job_has_saved() -> None:
    """Alone from 30 s, lent GPUs from 300 s; recalled at 400 s, left at 410 s, and it runs again at 430 s.

    The last tick is the full pass at 600 s. Demand is above what is left beside the loan from 400 s on.
    """
    changes = play(
        "fleet training=1x4 inference=2x4",
        *("demand inference 1", "forecast inference 4", "submit a 2..8 gpu-seconds=8000", "run 400"),
        *("demand inference 5", "forecast inference 8", "run 199"),
    )
    ended = play("fleet training=1x4 inference=2x4")
    assert job_metrics(ended) == {}
    assert job_metrics(changes) == {
        "queueing_seconds_count": 1.0,
        'resize_total{direction="grow",reason="GainExceedsCost"}': 1.0,
        'resize_total{direction="shrink",reason="NodeRecalled"}': 1.0,
        "resize_duration_seconds_count": 2.0,
        "resize_duration_seconds_sum": 30.0 + 30.0,
        "recall_duration_seconds_count": 1.0,
        "recall_duration_seconds_sum": 10.0,
        'recalls_total{outcome="in_time",pool="inference"}': 1.0,
        'breaches_total{kind="inference-short"}': 1.0,
        'inference_intervals_total{outcome="met",pool="inference"}': 1.0,
    }
    assert gpu_seconds(changes) == (4 * 270 + 8 * 70, 4 * 30 + 8 * 30 + 8 * 10 + 4 * 20)


def test_prefetches_count_by_purpose_and_outcome() -> None:
    recorder, reports = TickRecorder(), list[TickReport]()
    stage = Stage(reports.append)
    stage.play("fleet training=1x4 inference=0x4")
    stage.play("run 10")
    ends = (
        (EventCode.NODE_PREFETCHED, PrefetchPurpose.SERVING, 40.0),
        (EventCode.NODE_PREFETCHED, PrefetchPurpose.SERVING, 2.0),
        (EventCode.PREFETCH_FAILED, PrefetchPurpose.WEIGHTS, 600.0),
    )
    events = tuple(
        Event(reports[-1].now_s, code, "i0", "", {"seconds": seconds}, purpose) for code, purpose, seconds in ends
    )
    before = read_samples()
    recorder.record(replace(reports[-1], events=events, committed=True))
    changes = {name: value for name, value in list_changed_samples(before).items() if "prefetch" in name}
    of_serving, of_weights = '{outcome="loaded",purpose="serving"}', '{outcome="failed",purpose="weights"}'
    name = "ebbtide_prefetch_duration_seconds"
    assert {key: value for key, value in changes.items() if "_bucket" not in key} == {
        f"{name}_count{of_serving}": 2.0,
        f"{name}_sum{of_serving}": 42.0,
        f"{name}_count{of_weights}": 1.0,
        f"{name}_sum{of_weights}": 600.0,
    }


def test_preemption_counts_by_reason_and_a_restart_is_not_queueing() -> None:
    """b comes at 1000 s, starts at 1010 s when a has saved, and has run 100 s at 1140 s; a runs again from 1160 s."""
    changes = play(
        *("fleet training=1x4 inference=0x4", "queue lab guaranteed=4", "queue web guaranteed=0"),
        *("submit a 4..4 gpu-seconds=80000 queue=web", "run 1000"),
        *("submit b 4..4 gpu-seconds=400 queue=lab", "run 160"),
    )
    assert job_metrics(changes) == {
        'preemptions_total{reason="QuotaReclaimed"}': 1.0,
        "queueing_seconds_count": 2.0,
        "queueing_seconds_sum": 0.0 + 10.0,
        "jct_seconds_count": 1.0,
        "jct_seconds_sum": 140.0,
        'jobs_ended_total{outcome="succeeded",queue="lab",reason="Completed"}': 1.0,
    }
    assert gpu_seconds(changes) == (4 * 970 + 4 * 100, 4 * 30 + 4 * 10 + 4 * 30 + 4 * 20)


def test_lost_work_reduces_goodput_by_the_time_held_for_it() -> None:
    """It saves every 50 s of its run: the crash at 120 s loses 40 of 90 s of work, of which each second cost
    120 * 4 / 360 GPU-seconds a step with the start in it."""
    changes = play(
        "fleet training=1x4 inference=0x4",
        *("submit a 4..4 gpu-seconds=80000 checkpoint-every=50", "run 120", "crash a", "run 20"),
    )
    lost = 4 * 120 * 40 / 90
    assert job_metrics(changes) == {
        "queueing_seconds_count": 1.0,
        'lost_gpu_seconds_total{cause="failed",gpus="own"}': pytest.approx(lost),
        'restarts_total{cause="workers"}': 1.0,
    }
    assert gpu_seconds(changes) == (4 * 90, 4 * 30 + 4 * 20)
    assert read_samples()["ebbtide_goodput_ratio"] == pytest.approx(360 / 560 * (1 - lost / 560))


def list_ends(*lines: str) -> dict[tuple[str, ...], float]:
    """Return the ended jobs by outcome, queue and reason."""
    pattern = r'ebbtide_jobs_ended_total{outcome="(.*)",queue="(.*)",reason="(.*)"}'
    found = {re.fullmatch(pattern, key): value for key, value in play(*lines).items()}
    return {match.groups(): value for match, value in found.items() if match is not None}


def test_ended_jobs_are_counted_by_outcome_queue_and_reason() -> None:
    fleet = ("fleet training=1x4 inference=0x4", "queue lab guaranteed=4")
    submit = "submit a 4..4 gpu-seconds=80000 queue=lab"
    crash = ("run 100", "crash a") * (JobSpec("a", 1, 1).retries + 1)
    assert list_ends(*fleet, "submit a 4..4 gpu-seconds=80 queue=lab", "run 100") == {
        ("succeeded", "lab", "Completed"): 1.0
    }
    assert list_ends(*fleet, submit, "run 100", "cancel a", "run 100") == {("cancelled", "lab", "OwnerAsked"): 1.0}
    assert list_ends(*fleet, submit, *crash, "run 100") == {("failed", "lab", "WorkersFailed"): 1.0}
    unknown = submit.replace("queue=lab", "queue=unknown")
    assert list_ends(*fleet, unknown, *crash, "run 100") == {("failed", "", "WorkersFailed"): 1.0}


def test_counted_use_of_gpus_equals_the_stored_bins() -> None:
    """Jobs with 8 GPUs wait while 4 GPUs of training and a lent node are idle, and both kinds are used."""
    before, recorder = read_samples(), TickRecorder()
    bins: list[CapacityBin] = []

    def record(report: TickReport) -> None:
        recorder.record(report)
        bins.extend(integrate_capacity(report.before, report.after.now_s) if report.committed else ())

    stage = Stage(record)
    for line in (
        *("fleet training=1x4 inference=2x4", "demand inference 1", "forecast inference 4"),
        *("submit a 2..8 gpu-seconds=2000", "submit b 12..12", "run 1200"),
    ):
        stage.play(line)
    changes = list_changed_samples(before)
    stored: Samples = defaultdict(float)
    for each in bins:
        for use, gpu_s in each.uses_gpu_s.items():
            stored[f'ebbtide_capacity_gpu_seconds_total{{pool="{each.pool}",use="{use}"}}'] += gpu_s
        waited = each.lent_idle_waited_gpu_s if each.pool == "inference" else each.free_waited_gpu_s
        owner = "lent" if each.pool == "inference" else "own"
        stored[f'ebbtide_idle_while_waiting_gpu_seconds_total{{gpus="{owner}",pool="{each.pool}"}}'] += waited
    counted = {key: value for key, value in changes.items() if key.startswith(tuple(key for key in stored))}
    assert counted == {key: value for key, value in stored.items() if value}
    assert len(counted) >= 6


def test_closed_intervals_equal_the_pools_record_of_shortages() -> None:
    """Demand of 6 GPUs meets 4 that are not lent, from 400 s until the node is home."""
    recorder, before, reports = TickRecorder(), read_samples(), []

    def record(report: TickReport) -> None:
        recorder.record(report)
        reports.append(report)

    stage = Stage(record)
    for line in (
        *("fleet training=1x4 inference=2x4", "demand inference 1", "forecast inference 4"),
        *("submit a 2..8 gpu-seconds=8000000", "run 400", "demand inference 6", "forecast inference 8", "run 100"),
        *("demand inference 6", "run 300", "demand inference 1", "run 600", "demand inference 1", "run 1"),
    ):
        stage.play(line)
    shortages = reports[-1].after.demand["inference"].shortages
    changes = list_changed_samples(before)
    counted = {
        outcome: changes.get(f'ebbtide_inference_intervals_total{{outcome="{outcome}",pool="inference"}}', 0.0)
        for outcome in ("met", "short")
    }
    assert shortages.short_intervals > 0
    assert counted == {"short": shortages.short_intervals, "met": shortages.intervals - shortages.short_intervals}


def test_job_counts_as_restarting_from_its_third_restart_within_an_hour() -> None:
    lines = ["fleet training=1x4 inference=0x4", "submit a 4..4 gpu-seconds=8000000"]
    twice = [*lines, *("run 100", "crash a") * 2, "run 100"]
    assert "ebbtide_restarting_jobs" not in play(*twice)
    thrice = play(*twice, "die-of-memory a 60", "run 1")
    assert thrice["ebbtide_restarting_jobs"] == 1.0
    assert thrice['ebbtide_restarts_total{cause="workers"}'] == 2.0
    assert thrice['ebbtide_restarts_total{cause="out-of-memory"}'] == 1.0
    slowly = play(*lines, *("run 2000", "crash a") * 3, "run 100")
    assert slowly["ebbtide_restarting_jobs"] == -1.0, "the one before, and none of its own"


def test_pending_job_is_exported_by_queue_and_reason_until_it_starts() -> None:
    lines = (
        *("fleet training=1x4 inference=0x4", "queue lab guaranteed=2"),
        *("submit a 4..4 gpu-seconds=400 queue=lab priority=1", "submit b 4..4 gpu-seconds=400 queue=lab"),
        *("submit c 4..4 gpu-seconds=400 queue=mine", "submit d 4..4 gpu-seconds=400 queue=yours", "run 10"),
    )
    lab, others = (f'ebbtide_pending_jobs{{queue="{queue}",reason="InsufficientGpus"}}' for queue in ("lab", ""))
    play(*lines)
    assert (read_samples()[lab], read_samples()[others]) == (1.0, 2.0)
    play(*lines, "run 1000")
    assert (read_samples()[lab], read_samples()[others]) == (0.0, 0.0)


def test_forecast_is_evaluated_once_after_its_horizon() -> None:
    """Horizon 600 s. Demand stays within the forecasts of 0 s (0 of 1) and 1201 s (3 of 3), exceeds those of 301 s
    (4 of 1) and 601 s (5 of 4, above the capacity of 4), and the one of 1801 s is still open."""
    changes = play(
        *("fleet training=1x4 inference=1x4", "demand inference 0", "forecast inference 1", "run 301"),
        *("forecast inference 1", "run 300", "demand inference 4", "forecast inference 4", "run 300"),
        *("demand inference 5", "run 10", "demand inference 3", "run 290", "forecast inference 3", "run 600"),
        *("forecast inference 1", "run 599"),
    )
    assert changes['ebbtide_forecasts_judged_total{pool="inference"}'] == 4.0
    assert read_samples()['ebbtide_forecast_coverage_ratio{pool="inference",quantile="0.999"}'] == 0.5


@pytest.mark.parametrize(("event", "evaluated"), [("", 1.0), ("launch", None)])
def test_forecast_that_a_known_event_raises_is_not_evaluated(event: str, evaluated: float | None) -> None:
    before, tracker = read_samples(), ForecastCoverageTracker()
    forecast = Forecast(0.0, 600.0, (0.999,), (1.0,), "scripted", event=event)
    pool = f"raised by {event!r}"
    for now_s in (0.0, 600.0):
        after = Snapshot(now_s=now_s, demand={pool: DemandReading(0.0, 0.0, 0.0)}, forecasts={pool: forecast})
        tracker.record(TickReport(1, now_s, (), (), (), {}, (), (), now_s, True, True, after=after))
    assert list_changed_samples(before).get(f'ebbtide_forecasts_judged_total{{pool="{pool}"}}') == evaluated


def test_goodput_is_unknown_without_allocated_gpus() -> None:
    play("fleet training=1x4 inference=0x4", "run 100")
    assert math.isnan(read_samples()["ebbtide_goodput_ratio"])


def test_lost_leadership_clears_the_current_state_and_pauses_counting() -> None:
    recorder, before = TickRecorder(), read_samples()
    stage = Stage(recorder.record)
    for line in ("fleet training=1x4 inference=0x4", *(f"submit {name} 4..4 gpu-seconds=4000" for name in "ab")):
        stage.play(line)
    stage.play("run 101")
    waits = 'ebbtide_pending_jobs{queue="",reason="InsufficientGpus"}'
    assert read_samples()[waits] == 1.0
    recorder.reset()
    assert math.isnan(read_samples()["ebbtide_goodput_ratio"])
    assert read_samples()[waits] == 0.0
    held = sum(gpu_seconds(list_changed_samples(before)))
    stage.play("run 500")
    seconds = sum(gpu_seconds(list_changed_samples(before))) - held
    assert 0 < seconds < 4 * 500


LABELLED_BY_NAME = (
    "ebbtide_capacity_gpu_seconds_total{",
    "ebbtide_idle_while_waiting_gpu_seconds_total{",
    "ebbtide_forecasts_judged_total{",
    "ebbtide_inference_intervals_total{",
    "ebbtide_jobs_ended_total{",
)
"""Counters by pool or declared queue."""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_create_no_label_values_that_were_not_declared(path: Path) -> None:
    recorder, before = TickRecorder(), read_samples()
    stage = Stage(recorder.record)
    for line in path.read_text().partition(RULE)[0].splitlines():
        if line.strip() and not line.startswith("#"):
            stage.play(line)
    new = {key for key in read_samples().keys() - before.keys() if key.partition("{")[0].endswith("_total")}
    assert {key for key in new if not key.startswith(LABELLED_BY_NAME)} == set()
