"""The place of each rank."""

from __future__ import annotations

from scheduler.executors.rank_slots import RankSlot, assign_rank_slots


def test_rank_slots() -> None:
    assert assign_rank_slots((("t1", 3), ("t0", 2), ("t1", 1))) == (
        RankSlot(0, 0, "t1", 3),
        RankSlot(1, 0, "t0", 2),
        RankSlot(2, 1, "t1", 1),
    )
