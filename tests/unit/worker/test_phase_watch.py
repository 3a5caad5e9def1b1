"""How long a process took for its parts of a re-plan."""

from __future__ import annotations

import time

from scheduler.domain.replan import ReplanPhase
from scheduler.worker.phase_watch import PhaseWatch, process_began_s


def test_a_phase_lasts_from_the_end_of_the_one_before_and_counts_once() -> None:
    watch = PhaseWatch(began_s=time.monotonic() - 7.0)
    watch.end(ReplanPhase.START)
    first = watch.seconds["start"]
    watch.end(ReplanPhase.START)
    watch.end(ReplanPhase.LOAD)
    assert watch.seconds["start"] == first >= 7.0
    assert 0.0 <= watch.seconds["load"] < 7.0


def test_a_notice_brings_the_time_that_it_waited_and_only_the_first_one_does() -> None:
    watch = PhaseWatch(began_s=time.monotonic())
    watch.hear(0.5)
    watch.hear(9.0)
    watch.end(ReplanPhase.SAVE)
    assert watch.seconds["notice"] == 0.5
    assert watch.has(ReplanPhase.SAVE)
    assert not watch.has(ReplanPhase.TEARDOWN)


def test_what_lies_between_two_phases_can_be_left_out() -> None:
    watch = PhaseWatch(began_s=time.monotonic() - 7.0)
    watch.begin()
    watch.end(ReplanPhase.TEARDOWN)
    assert watch.seconds["teardown"] < 7.0


def test_a_process_knows_when_it_began() -> None:
    assert process_began_s() < time.monotonic()
    assert PhaseWatch().seconds == {}
