"""How long a process took for its parts of a re-plan."""

from __future__ import annotations

import time

from scheduler.domain.job_records import ReplanPhase
from scheduler.worker.status import PhaseTimer, read_process_start_s


def test_a_phase_lasts_from_the_end_of_the_one_before_and_counts_once() -> None:
    watch = PhaseTimer(started_at_s=time.monotonic() - 7.0)
    watch.end_phase(ReplanPhase.START)
    first = watch.seconds_by_phase["start"]
    watch.end_phase(ReplanPhase.START)
    watch.end_phase(ReplanPhase.LOAD)
    assert watch.seconds_by_phase["start"] == first >= 7.0
    assert 0.0 <= watch.seconds_by_phase["load"] < 7.0


def test_a_notice_brings_the_time_that_it_waited_and_only_the_first_one_does() -> None:
    watch = PhaseTimer(started_at_s=time.monotonic())
    watch.begin_leaving(0.5)
    watch.begin_leaving(9.0)
    watch.end_phase(ReplanPhase.SAVE)
    assert watch.seconds_by_phase["notice"] == 0.5
    assert watch.has_ended(ReplanPhase.SAVE)
    assert not watch.has_ended(ReplanPhase.TEARDOWN)


def test_what_lies_between_two_phases_can_be_left_out() -> None:
    watch = PhaseTimer(started_at_s=time.monotonic() - 7.0)
    watch.restart()
    watch.end_phase(ReplanPhase.TEARDOWN)
    assert watch.seconds_by_phase["teardown"] < 7.0


def test_a_process_knows_when_it_began() -> None:
    assert read_process_start_s() < time.monotonic()
    assert PhaseTimer().seconds_by_phase == {}
