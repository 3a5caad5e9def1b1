"""When ranks count as stalled or idle. No process is started; time passes in looks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.agent.liveness import PATIENCE, RunActivity, RunLiveness
from scheduler.domain.observation import RankLiveness, RankPhase, RankStatus

TIMEOUT_S = 30.0
STILL = RunActivity()


class Watched:
    """A run of one rank that is looked at once a second."""

    def __init__(self) -> None:
        self.liveness = RunLiveness([0], TIMEOUT_S)
        self.activity = STILL
        self.status: RankStatus | None = None

    def step(self, *, phase: RankPhase = RankPhase.RUNNING) -> None:
        before = self.status
        step, written = (1, 1) if before is None else (before.step + 1, before.written_at_ns + 1)
        self.status = RankStatus(phase, step=step, written_at_ns=written)
        self.look()

    def look(self, times: int = 1, *, elapsed_s: float = 1.0, **used: float) -> RankLiveness:
        for _ in range(times):
            self.activity = replace(
                self.activity, **{name: getattr(self.activity, name) + more for name, more in used.items()}
            )
            self.liveness.observe(elapsed_s, {} if self.status is None else {0: self.status}, self.activity)
        return self.liveness.judge(0)[0]


@pytest.fixture
def stepping() -> Watched:
    watched = Watched()
    for _ in range(5):
        watched.step()
    return watched


def test_rank_that_stops_stepping_is_stalled_in_time_although_it_spins(stepping: Watched) -> None:
    assert stepping.look(25, cpu_s=1.0, gpu_s=1.0) is RankLiveness.STEPPING
    assert stepping.look(3, cpu_s=1.0, gpu_s=1.0) is RankLiveness.STALLED
    stepping.step()
    assert stepping.look() is RankLiveness.STEPPING


def test_heartbeat_is_progress(stepping: Watched) -> None:
    for _ in range(10):
        assert stepping.status is not None
        stepping.status = replace(stepping.status, written_at_ns=stepping.status.written_at_ns + 1)
        assert stepping.look(10) is RankLiveness.STEPPING


@pytest.mark.parametrize("used", [{"log_bytes": 10}, {"io_bytes": 1 << 18}])
def test_rank_that_writes_or_reads_files_has_more_time(stepping: Watched, used: dict[str, float]) -> None:
    assert stepping.look(60, **used) is RankLiveness.WORKING
    assert stepping.look(int(TIMEOUT_S * PATIENCE), **used) is RankLiveness.STALLED


def test_save_has_more_time(stepping: Watched) -> None:
    stepping.step(phase=RankPhase.SAVING)
    assert stepping.look(60) is RankLiveness.WORKING


def test_slow_steps_raise_the_limit() -> None:
    slow = Watched()
    for _ in range(4):
        slow.step()
        slow.look(20)
    assert slow.look(60) is RankLiveness.STEPPING
    assert slow.look(60) is RankLiveness.STALLED


@pytest.mark.parametrize("used", [{"cpu_s": 0.02}, {"gpu_s": 0.1}, {"log_bytes": 1}, {"io_bytes": 1 << 20}])
def test_rank_without_session_is_idle_only_if_nothing_moves(used: dict[str, float]) -> None:
    watched = Watched()
    assert watched.look(100, **used) is RankLiveness.BUSY
    assert watched.look(40) is RankLiveness.IDLE


def test_wakeups_of_idle_threads_are_no_activity() -> None:
    assert Watched().look(60, cpu_s=0.001) is RankLiveness.IDLE


def test_session_without_a_step_is_starting() -> None:
    watched = Watched()
    watched.status = RankStatus(RankPhase.STARTING, written_at_ns=1)
    assert watched.look(100) is RankLiveness.BUSY
    assert watched.look(int(TIMEOUT_S * PATIENCE)) is RankLiveness.IDLE


def test_time_in_which_nobody_looked_does_not_count(stepping: Watched) -> None:
    assert stepping.look(3, elapsed_s=3600.0) is RankLiveness.STEPPING


@given(gaps_s=st.lists(st.floats(0.1, 25.0), min_size=1, max_size=40))
def test_rank_that_steps_within_the_timeout_is_never_stalled(gaps_s: list[float]) -> None:
    watched = Watched()
    for gap_s in gaps_s:
        watched.step()
        watched.look(int(gap_s))
        assert watched.liveness.judge(0)[0] in (RankLiveness.STEPPING, RankLiveness.BUSY)
