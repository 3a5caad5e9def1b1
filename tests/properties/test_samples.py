"""The series of a job's samples stays bounded, ordered and evenly spread for any sequence of reports."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.commands import Command, ReportProgress
from scheduler.domain.job_records import SAMPLE_S_MIN, SAMPLES_MAX, Sample, compute_sample_slot
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot

NOTHING = Observation(at_s=0.0, converged_generation=-1)


@st.composite
def reports(draw: st.DrawFn) -> list[tuple[float, float, int]]:
    """Draw reports as (time of the tick, time of the report, generation).

    Some are late, some come from a clock that is ahead, and pauses have all lengths.
    """
    pace_s = draw(st.sampled_from((0.7, 5.0, 31.0, 4000.0)))
    count = draw(st.sampled_from((3, 40, 700)))
    noise = draw(st.randoms(use_true_random=False))
    now_s, drawn = 100.0, list[tuple[float, float, int]]()
    for _ in range(count):
        now_s += pace_s * noise.choice((0.0, 0.5, 1.0, 1.0, 1.0, 20.0))
        at_s = now_s + noise.choice((0.0, 0.0, 0.0, -3.0, -40.0 * pace_s, 9.0))
        drawn.append((now_s, at_s, noise.choice((1, 1, 1, 1, 0, 2))))
    return drawn


@settings(max_examples=40, deadline=None)
@given(reports())
def test_series_is_bounded_and_ascending_with_the_first_and_the_newest_sample(
    drawn: list[tuple[float, float, int]],
) -> None:
    job = a_job("a", state=JobState.RUNNING, on={"t0": (0,)})
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job])
    written, series = list[Sample](), dict[int, Sample]()
    for number, (now_s, at_s, generation) in enumerate(drawn):
        report = Command(str(number), at_s, ReportProgress("a", generation, float(number), loss=1.0))
        update = update_snapshot(replace(snapshot, now_s=now_s), NOTHING, [report])
        snapshot = update.snapshot
        for slotted in update.samples:
            assert (slotted.job_id, generation) == ("a", 1)
            written.append(slotted.sample)
            series[slotted.slot] = slotted.sample
    kept = sorted(series.values(), key=lambda sample: sample.at_s)
    assert len(kept) <= SAMPLES_MAX
    assert all(0 <= slot < SAMPLES_MAX for slot in series)
    assert all(later.at_s - earlier.at_s >= SAMPLE_S_MIN for earlier, later in pairwise(kept))
    own = [min(at_s, now_s) for now_s, at_s, generation in drawn if generation == 1]
    assert bool(kept) == bool(own)
    if kept:
        assert (kept[0], kept[-1]) == (written[0], written[-1])
        assert kept[0].at_s == own[0]
        assert max(own) - kept[-1].at_s < SAMPLE_S_MIN


@settings(max_examples=30, deadline=None)
@given(st.integers(SAMPLES_MAX, 20_000))
def test_samples_of_a_long_job_are_evenly_spread(count: int) -> None:
    series = {compute_sample_slot(at * SAMPLE_S_MIN): at for at in range(count)}
    kept = sorted(series.values())
    assert len(kept) == SAMPLES_MAX
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert max(later - earlier for earlier, later in pairwise(kept)) <= 4 * count / SAMPLES_MAX


def test_slot_is_valid_after_a_pause_of_any_length() -> None:
    assert {0 <= compute_sample_slot(10.0**power) < SAMPLES_MAX for power in range(19)} == {True}
