"""What tick reports leave in the metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from scheduler.domain.decision import PreemptJob
from scheduler.domain.event import Event, EventCode
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.replan import ReplanPhase
from scheduler.domain.tick_report import Breach, BreachKind, Law, TickReport, Violation
from scheduler.telemetry.metrics import exposition
from scheduler.telemetry.tick_recorder import TickRecorder

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
    """The sample's present value; 0 while nothing was ever counted under these labels."""
    for family in text_string_to_metric_families(exposition().decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


def test_a_replan_counts_once_in_each_phase_that_it_had() -> None:
    def told(phase: str) -> tuple[float, float]:
        name = "ebbtide_replan_phase_seconds"
        return value(f"{name}_count", phase=phase), value(f"{name}_sum", phase=phase)

    before = {phase: told(phase) for phase in ReplanPhase}
    numbers = {"notice_s": 0.25, "save_s": 2.0, "start_s": 4.0, "load_s": 1.0, "first_step_s": 0.5}
    TickRecorder().record(replace(QUIET, events=(Event(0.0, EventCode.JOB_REPLANNED, "a", "took 7.8 s", numbers),)))
    assert told("save") == (before[ReplanPhase.SAVE][0] + 1, before[ReplanPhase.SAVE][1] + 2.0)
    assert told("first_step") == (before[ReplanPhase.FIRST_STEP][0] + 1, before[ReplanPhase.FIRST_STEP][1] + 0.5)
    assert told("teardown") == before[ReplanPhase.TEARDOWN]


def test_what_replans_read_is_counted_by_kind() -> None:
    before = {kind: value("ebbtide_replan_bytes_total", kind=kind) for kind in ("needed", "read", "moved")}
    numbers = {"start_s": 4.0, "needed_bytes": 100.0, "read_bytes": 110.0, "moved_bytes": 60.0}
    TickRecorder().record(replace(QUIET, events=(Event(0.0, EventCode.JOB_REPLANNED, "a", "took 4 s", numbers),)))
    grown = {kind: value("ebbtide_replan_bytes_total", kind=kind) - known for kind, known in before.items()}
    assert grown == {"needed": 100.0, "read": 110.0, "moved": 60.0}


def test_a_tick_that_was_not_committed_counts_no_decision() -> None:
    before = value("ebbtide_preemptions_total", reason="NodeRecalled")
    preempted = PreemptJob("a", 10.0, Reason(ReasonCode.NODE_RECALLED, "its node goes home"))
    TickRecorder().record(replace(QUIET, decisions=(preempted,), committed=False))
    assert value("ebbtide_preemptions_total", reason="NodeRecalled") == before


def test_a_breach_that_lasts_counts_once_and_one_that_comes_back_again() -> None:
    recorder = TickRecorder()
    late = replace(QUIET, breaches=(Breach(BreachKind.RECALL_LATE, "i0", "3 s late"),))
    before = value("ebbtide_recalls_late_total")
    for report in (late, late, late, QUIET, late):
        recorder.record(report)
    assert value("ebbtide_recalls_late_total") == before + 2
    assert value("ebbtide_breaches_total", kind="recall-late") == before + 2


def test_violations_are_counted_by_law() -> None:
    before = value("ebbtide_violations_total", law="no-reason")
    TickRecorder().record(replace(QUIET, violations=(Violation(Law.NO_REASON, "a", ""),)))
    assert value("ebbtide_violations_total", law="no-reason") == before + 1


def test_stages_are_timed() -> None:
    before = value("ebbtide_tick_duration_seconds_count", stage="decide")
    TickRecorder().record(replace(QUIET, stage_s={"decide": 0.004}))
    assert value("ebbtide_tick_duration_seconds_count", stage="decide") == before + 1


COUNTS_ONE = "from scheduler.telemetry.metrics import *; RECALLS_LATE.inc(); GOODPUT.set(0.5)"
SHOWS = "from scheduler.telemetry.metrics import *; RECALLS_LATE.inc(); print(exposition().decode())"


def test_a_scrape_shows_the_counts_of_both_processes(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    shown = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for code in (COUNTS_ONE, SHOWS)
    ][-1]
    assert "ebbtide_recalls_late_total 2.0" in shown
