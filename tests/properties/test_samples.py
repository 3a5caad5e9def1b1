"""However reports come, the series of a job's samples stays bounded, in order and evenly spread."""

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
    """When the tick is, when the report was made, of which generation: late ones, ones of a clock that is ahead, many
    at once, pauses of all lengths."""
    pace_s = draw(st.sampled_from((0.7, 5.0, 31.0, 4000.0)))
    count = draw(st.sampled_from((3, 40, 700)))
    noise = draw(st.randoms(use_true_random=False))
    now_s, made = 100.0, list[tuple[float, float, int]]()
    for _ in range(count):
        now_s += pace_s * noise.choice((0.0, 0.5, 1.0, 1.0, 1.0, 20.0))
        at_s = now_s + noise.choice((0.0, 0.0, 0.0, -3.0, -40.0 * pace_s, 9.0))
        made.append((now_s, at_s, noise.choice((1, 1, 1, 1, 0, 2))))
    return made


@settings(max_examples=40, deadline=None)
@given(reports())
def test_a_series_is_bounded_and_ascends_and_keeps_the_first_and_the_newest(
    made: list[tuple[float, float, int]],
) -> None:
    job = a_job("a", state=JobState.RUNNING, on={"t0": (0,)})
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job])
    told, series = list[Sample](), dict[int, Sample]()
    for number, (now_s, at_s, generation) in enumerate(made):
        report = Command(str(number), at_s, ReportProgress("a", generation, float(number), loss=1.0))
        absorbed = update_snapshot(replace(snapshot, now_s=now_s), NOTHING, [report])
        snapshot = absorbed.snapshot
        for placed in absorbed.samples:
            assert (placed.job_id, generation) == ("a", 1)
            told.append(placed.sample)
            series[placed.slot] = placed.sample
    kept = sorted(series.values(), key=lambda sample: sample.at_s)
    assert len(kept) <= SAMPLES_MAX
    assert all(0 <= place < SAMPLES_MAX for place in series)
    assert all(later.at_s - earlier.at_s >= SAMPLE_S_MIN for earlier, later in pairwise(kept))
    own = [min(at_s, now_s) for now_s, at_s, generation in made if generation == 1]
    assert bool(kept) == bool(own)
    if kept:
        assert (kept[0], kept[-1]) == (told[0], told[-1])
        assert kept[0].at_s == own[0]
        assert max(own) - kept[-1].at_s < SAMPLE_S_MIN


@settings(max_examples=30, deadline=None)
@given(st.integers(SAMPLES_MAX, 20_000))
def test_samples_of_a_long_job_lie_evenly_over_its_whole_life(count: int) -> None:
    series = {compute_sample_slot(at * SAMPLE_S_MIN): at for at in range(count)}
    kept = sorted(series.values())
    assert len(kept) == SAMPLES_MAX
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert max(later - earlier for earlier, later in pairwise(kept)) <= 4 * count / SAMPLES_MAX


def test_a_pause_of_any_length_leaves_a_place_within_the_series() -> None:
    assert {0 <= compute_sample_slot(10.0**power) < SAMPLES_MAX for power in range(19)} == {True}
