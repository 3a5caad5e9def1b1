"""Whether a run is hung, and which rank and node are to blame, from the liveness of its ranks."""

from __future__ import annotations

from scheduler.domain.observation import RankLiveness, RankPhase, RankReport, RankStatus
from scheduler.executors.hang_diagnosis import PlacedRank, diagnose_hang

LATER_NS = 60 * 10**9
IN_COLLECTIVE = "site/torch/distributed/distributed_c10d.py:1 in all_reduce < train.py:9 in step"


def a_rank(rank: int, liveness: str, *, stack: str = "", step: int | None = 7, written_at_ns: int = 0) -> PlacedRank:
    kind = RankLiveness(liveness)
    status = None if step is None else RankStatus(RankPhase.RUNNING, step=step, written_at_ns=written_at_ns)
    inactive_s = 30.0 if kind.is_inactive else 0.0
    report = RankReport(rank, None, status, liveness=kind, inactive_s=inactive_s, stack=stack)
    return PlacedRank(rank, f"n{rank}", report)


def test_run_with_a_rank_that_works_is_not_hung() -> None:
    for other in ("working", "stepping"):
        assert diagnose_hang([a_rank(0, other), a_rank(1, "stalled")]) is None
    assert diagnose_hang([a_rank(0, "busy", step=None), a_rank(1, "idle", step=None)]) is None
    assert diagnose_hang([PlacedRank(0, "n0", None), a_rank(1, "stalled")]) is None
    assert diagnose_hang([PlacedRank(0, "n0", None), a_rank(1, "idle")]) is None
    assert diagnose_hang([]) is None


def test_rank_outside_of_the_collective_is_blamed() -> None:
    ranks = [a_rank(0, "stalled", stack=IN_COLLECTIVE), a_rank(1, "stalled", stack="train.py:3 in load")]
    hang = diagnose_hang(ranks)
    assert hang is not None
    assert hang.suspects == ("n1",)
    assert "rank 1" in hang.reason
    assert "train.py:3 in load" in hang.reason


def test_no_node_is_suspected_without_evidence() -> None:
    hang = diagnose_hang([a_rank(0, "stalled"), a_rank(1, "stalled")])
    assert hang is not None
    assert hang.suspects == ()


def test_rank_behind_the_others_is_named() -> None:
    hang = diagnose_hang([a_rank(0, "stalled", step=8), a_rank(1, "stalled", step=7)])
    assert hang is not None
    assert "rank 1" in hang.reason


def test_ranks_that_never_report_do_not_hide_a_hang() -> None:
    hang = diagnose_hang([a_rank(0, "stalled"), a_rank(1, "busy", step=None)])
    assert hang is not None
    assert hang.suspects == ("n0",)


def test_rank_that_others_leave_behind_is_hung() -> None:
    hang = diagnose_hang([a_rank(0, "stalled"), a_rank(1, "stepping", written_at_ns=LATER_NS)])
    assert hang is not None
    assert "rank 0" in hang.reason
