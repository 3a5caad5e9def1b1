"""Metrics recorded from single tick reports."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.domain.decisions import Decision, PreemptJob, Reason, ReasonCode
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Loan, LoanState, NodeState
from scheduler.domain.job_records import ReplanPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, Invariant, TickReport, Violation
from scheduler.runtime.retention import JOB_LOGS
from scheduler.store.api_protocol import HistoryLog
from scheduler.telemetry.metrics import REGISTRY, render_metrics
from scheduler.telemetry.tick_metrics import TickRecorder
from tests.builders import a_fleet
from tests.metric_samples import read_samples

QUIET = TickReport(
    generation=1,
    now_s=0.0,
    decisions=(),
    violations=(),
    breaches=(),
    waiting={},
    wanted_shapes=(),
    events=(),
    next_wake_s=0.0,
    full_pass=False,
    committed=True,
)


def value(name: str, **labels: str) -> float:
    """Return the current value of a sample; 0 if there is none with these labels."""
    for family in text_string_to_metric_families(render_metrics().body.decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


def test_replan_is_observed_once_per_phase() -> None:
    def exported(phase: str) -> tuple[float, float]:
        name = "ebbtide_replan_phase_seconds"
        return value(f"{name}_count", phase=phase), value(f"{name}_sum", phase=phase)

    before = {phase: exported(phase) for phase in ReplanPhase}
    numbers = {"notice_s": 0.25, "save_s": 2.0, "start_s": 4.0, "load_s": 1.0, "first_step_s": 0.5}
    TickRecorder().record(replace(QUIET, events=(Event(0.0, EventCode.JOB_REPLANNED, "a", "took 7.8 s", numbers),)))
    assert exported("save") == (before[ReplanPhase.SAVE][0] + 1, before[ReplanPhase.SAVE][1] + 2.0)
    assert exported("first_step") == (before[ReplanPhase.FIRST_STEP][0] + 1, before[ReplanPhase.FIRST_STEP][1] + 0.5)
    assert exported("teardown") == before[ReplanPhase.TEARDOWN]


def test_bytes_read_by_replans_are_counted_by_kind() -> None:
    before = {kind: value("ebbtide_replan_bytes_total", kind=kind) for kind in ("needed", "read", "moved")}
    numbers = {"start_s": 4.0, "needed_bytes": 100.0, "read_bytes": 110.0, "moved_bytes": 60.0}
    TickRecorder().record(replace(QUIET, events=(Event(0.0, EventCode.JOB_REPLANNED, "a", "took 4 s", numbers),)))
    grown = {kind: value("ebbtide_replan_bytes_total", kind=kind) - known for kind, known in before.items()}
    assert grown == {"needed": 100.0, "read": 110.0, "moved": 60.0}


def test_uncommitted_tick_counts_no_decision() -> None:
    before = value("ebbtide_preemptions_total", reason="NodeRecalled")
    preempted = PreemptJob("a", 10.0, Reason(ReasonCode.NODE_RECALLED, "its node goes home"))
    TickRecorder().record(replace(QUIET, decisions=(preempted,), committed=False))
    assert value("ebbtide_preemptions_total", reason="NodeRecalled") == before


def test_lasting_breach_counts_once_and_a_returning_one_again() -> None:
    recorder = TickRecorder()
    late = replace(QUIET, breaches=(Breach(BreachKind.RECALL_LATE, "i0", "3 s late"),))
    before = value("ebbtide_recalls_late_total")
    for report in (late, late, late, QUIET, late):
        recorder.record(report)
    assert value("ebbtide_recalls_late_total") == before + 2
    assert value("ebbtide_breaches_total", kind="recall-late") == before + 2


def test_active_breaches_are_exported_until_they_end_or_leadership_is_lost() -> None:
    def standing() -> tuple[float, float]:
        name = "ebbtide_standing_breaches"
        return value(name, kind="gpu-held-twice"), value(name, kind="recall-late")

    recorder = TickRecorder()
    twice = tuple(Breach(BreachKind.GPU_HELD_TWICE, node, "") for node in ("t0", "t1"))
    recorder.record(replace(QUIET, breaches=twice))
    assert standing() == (2.0, 0.0)
    recorder.record(replace(QUIET, breaches=twice[:1]))
    assert standing() == (1.0, 0.0)
    recorder.reset()
    assert standing() == (0.0, 0.0)


def test_new_leader_does_not_count_breaches_of_the_stored_state_again() -> None:
    """At the old leader's last commit (100 s), t0 was down and i0 late. Since then t1 went down and i1 became late."""
    pools, nodes = a_fleet(training=2, inference=2)
    nodes["t0"] = replace(nodes["t0"], state=NodeState.DOWN)
    loans = {
        name: Loan(f"l-{name}", name, "inference", LoanState.RECALLED, 0.0, 0.0, by_s)
        for name, by_s in (("i0", 50.0), ("i1", 150.0))
    }
    found = Snapshot(1, 100.0, pools, nodes, loans=loans)
    late = tuple(Breach(BreachKind.RECALL_LATE, name, "") for name in ("i0", "i1"))
    down = tuple(Breach(BreachKind.NODE_DOWN, name, "") for name in ("t0", "t1"))
    before = value("ebbtide_recalls_late_total"), value("ebbtide_breaches_total", kind="node-down")
    recorder = TickRecorder()
    for _ in range(2):
        recorder.record(replace(QUIET, now_s=200.0, breaches=(*late, *down), before=found, after=found))
        recorder.reset()
    after = value("ebbtide_recalls_late_total"), value("ebbtide_breaches_total", kind="node-down")
    assert after == (before[0] + 2, before[1] + 2), "i1 and t1 alone, by each of the two that took over"


def test_violations_are_counted_by_law() -> None:
    before = value("ebbtide_violations_total", law="no-reason")
    TickRecorder().record(replace(QUIET, violations=(Violation(Invariant.NO_REASON, "a", ""),)))
    assert value("ebbtide_violations_total", law="no-reason") == before + 1


def test_stage_durations_are_observed() -> None:
    before = value("ebbtide_tick_duration_seconds_count", stage="decide")
    TickRecorder().record(replace(QUIET, stage_s={"decide": 0.004}))
    assert value("ebbtide_tick_duration_seconds_count", stage="decide") == before + 1


PRINT_NEW = "from scheduler.telemetry.metrics import *; print(render_metrics().body.decode())"
UNBOUNDED = {
    *("ebbtide_api_requests_total", "ebbtide_kubernetes_requests_total", "ebbtide_forecasts_judged_total"),
    *("ebbtide_capacity_gpu_seconds_total", "ebbtide_idle_while_waiting_gpu_seconds_total"),
    *("ebbtide_recalls_total", "ebbtide_inference_intervals_total", "ebbtide_jobs_ended_total"),
}
"""Counters with labels that no enumeration bounds: routes, statuses, resources, pools and queues."""


def run(code: str, folder: Path | None) -> str:
    """Return the output of a process that writes its metrics to this folder, or to none."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    if folder is not None:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("has_folder", [False, True], ids=["one process", "several"])
def test_counters_with_bounded_labels_are_exported_as_zero_from_the_start(tmp_path: Path, has_folder: bool) -> None:
    counted = {
        key: value
        for key, value in read_samples(run(PRINT_NEW, tmp_path if has_folder else None)).items()
        if key.partition("{")[0].endswith("_total")
    }
    families = [family for family in REGISTRY.collect() if family.type == "counter"]
    assert {key.partition("{")[0] for key in counted} == {f"{family.name}_total" for family in families} - UNBOUNDED
    assert set(counted.values()) == {0.0}
    assert {f'ebbtide_violations_total{{law="{law}"}}' for law in Invariant} <= counted.keys()
    assert {f'ebbtide_breaches_total{{kind="{kind}"}}' for kind in BreachKind} <= counted.keys()
    assert {f'ebbtide_decisions_total{{kind="{kind.__name__}"}}' for kind in get_args(Decision)} <= counted.keys()
    assert {f'ebbtide_swept_total{{kind="{kind}"}}' for kind in (*HistoryLog, JOB_LOGS)} <= counted.keys()
    assert {f'ebbtide_webhook_deliveries_total{{outcome="{each}"}}' for each in ("delivered", "failed", "dead")} <= (
        counted.keys()
    )


COUNT_ONE = "from scheduler.telemetry.metrics import *; RECALLS_LATE.inc(); GOODPUT.set(0.5)"
COUNT_AND_PRINT = "from scheduler.telemetry.metrics import *; RECALLS_LATE.inc(); print(render_metrics().body.decode())"


def test_scrape_sums_the_counters_of_both_processes(tmp_path: Path) -> None:
    run(COUNT_ONE, tmp_path)
    assert "ebbtide_recalls_late_total 2.0" in run(COUNT_AND_PRINT, tmp_path)
