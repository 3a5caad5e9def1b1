"""Contract of all stores for the use of pools: tiers agree, checkpoints and fans are found again."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from scheduler.domain.capacity_history import (
    CAPACITY_TIERS,
    MAX_FIELDS,
    SUMMED_FIELDS,
    CapacityBin,
    PoolUse,
    build_bins,
    roll_up,
)
from scheduler.domain.fleet import ForecastFan
from scheduler.store.api_protocol import ApiStore, HistoryLog
from scheduler.store.clock_reset import reset_clock
from scheduler.store.protocol import Commit, FencedError
from scheduler.store.sql_retention import DeletedBatch
from scheduler.store.sql_store import SqlStore
from tests.contract.store_records import OpenStore, make_next_snapshot

NOW_S = 1_800_000_000.0
USE = PoolUse(inference=3, used=0, lent_used=4, lent_idle=1, demand_gpus=5.5, lent_nodes=2, pending_jobs=7)


def commit_use(store: ApiStore, use: PoolUse, from_s: float, to_s: float, *, pool: str = "serve") -> None:
    bins = tuple(build_bins(pool, use, from_s=from_s, to_s=to_s))
    previous = store.load().snapshot
    store.commit(Commit(previous, make_next_snapshot(previous, now_s=to_s), epoch=0, capacity=bins))


def make_change(store: ApiStore, at_s: float, body: bytes = b"changed") -> Commit:
    previous = store.load().snapshot
    return Commit(previous, make_next_snapshot(previous, now_s=at_s), epoch=0, fleet_change=body)


def test_tiers_hold_the_same_sums_as_the_commits(open_store: OpenStore) -> None:
    store, chance, now_s = open_store(), random.Random(1), NOW_S - 17.0
    written = list[CapacityBin]()
    for at in range(25):
        use = USE._replace(lent_used=chance.randrange(9), free=chance.randrange(9), pending_jobs=chance.randrange(99))
        to_s, pool = now_s + chance.uniform(0.1, 400.0), f"p{at % 2}"
        commit_use(store, use, now_s, to_s, pool=pool)
        written += build_bins(pool, use, from_s=now_s, to_s=to_s)
        now_s = to_s
    again = open_store()
    for tier in CAPACITY_TIERS:
        expected = roll_up(written, tier.step_s)
        found = again.capacity.list_bins(tier.step_s, from_s=0.0, to_s=now_s)
        assert [(each.pool, each.step_s, each.at_s) for each in found] == [
            (each.pool, each.step_s, each.at_s) for each in expected
        ]
        for one, other in zip(found, expected, strict=True):
            for name in (*SUMMED_FIELDS, *MAX_FIELDS):
                assert getattr(one, name) == pytest.approx(getattr(other, name)), name
        assert again.capacity.list_bins(tier.step_s, from_s=0.0, to_s=now_s, pool="p1") == tuple(
            each for each in found if each.pool == "p1"
        )


def test_bins_that_overlap_the_time_span_are_found(store: ApiStore) -> None:
    commit_use(store, USE, NOW_S, NOW_S + 300.0)
    found = store.capacity.list_bins(60, from_s=NOW_S + 60.5, to_s=NOW_S + 180.0)
    assert [each.at_s - NOW_S for each in found] == [60.0, 120.0]


def test_newest_checkpoint_before_a_time(open_store: OpenStore) -> None:
    history = open_store().capacity
    assert history.find_checkpoint(NOW_S) is None
    for after_s in (0, 300, 3600, 3900):
        history.add_checkpoint(int(NOW_S) + after_s, str(after_s).encode(), epoch=0)
    history.add_checkpoint(int(NOW_S) + 300, b"again", epoch=0)
    again = open_store().capacity
    assert again.find_checkpoint(NOW_S - 0.5) is None
    for at_s, body, is_hourly in ((0.0, b"0", True), (3599.9, b"again", False), (3600.0, b"3600", True)):
        found = again.find_checkpoint(NOW_S + at_s)
        assert found is not None
        assert (found.body, found.is_hourly) == (body, is_hourly)


def test_changes_of_the_fleet_since_a_checkpoint(open_store: OpenStore) -> None:
    store, after_s = open_store(), (0.5, 1.0, 2.0, 9.0)
    for at_s in after_s:
        store.commit(make_change(store, NOW_S + at_s, b"" if at_s == 1.0 else str(at_s).encode()))
    first = store.load().snapshot.generation - len(after_s)
    list_fleet_changes = open_store().capacity.list_fleet_changes
    assert list_fleet_changes(after=first, until_s=NOW_S + 9.0) == (b"0.5", b"2.0", b"9.0")
    assert list_fleet_changes(after=first + 1, until_s=NOW_S + 8.5) == (b"2.0",)


def test_newest_fan_of_each_pool(open_store: OpenStore) -> None:
    fan = ForecastFan("serve", NOW_S, 300.0, (0.5, 0.9), (300.0, 600.0), ((1.0, 2.0), (3.0, 4.0)), "m")
    open_store().capacity.put_fans((fan, replace(fan, pool="chat")), epoch=0)
    newer = replace(fan, made_at_s=NOW_S + 1.0, method="n")
    open_store().capacity.put_fans((newer,), epoch=0)
    assert open_store().capacity.list_fans() == (replace(fan, pool="chat"), newer)


def test_former_leader_writes_nothing(database_url: str) -> None:
    store = SqlStore(database_url)
    assert store.acquire_lease("new", now_s=NOW_S, ttl_s=10.0) is not None
    with pytest.raises(FencedError):
        commit_use(store, USE, NOW_S, NOW_S + 60.0)
    with pytest.raises(FencedError):
        store.capacity.add_checkpoint(int(NOW_S), b"", epoch=0)
    with pytest.raises(FencedError):
        store.capacity.put_fans((), epoch=0)
    assert store.capacity.list_bins(60, from_s=0.0, to_s=2 * NOW_S) == ()
    store.close()


def test_times_of_a_wrong_clock_are_merged_into_the_right_hours(database_url: str) -> None:
    store, lead_s = SqlStore(database_url), 7 * 86_400.0
    commit_use(store, USE, NOW_S - 3600.0, NOW_S)
    commit_use(store, USE, NOW_S + lead_s - 7200.0, NOW_S + lead_s)
    store.capacity.add_checkpoint(int(NOW_S + lead_s), b"late", epoch=0)
    reset_clock(database_url, now_s=NOW_S)
    for tier in CAPACITY_TIERS:
        bins = store.capacity.list_bins(tier.step_s, from_s=0.0, to_s=2 * NOW_S)
        assert sum(each.seconds for each in bins) == 3 * 3600.0
        assert max(each.at_s + each.step_s for each in bins) == NOW_S
        assert sum(each.lent_used_gpu_s for each in bins) == 4 * 3 * 3600.0
    assert store.capacity.find_checkpoint(2 * NOW_S) is None
    store.close()


def test_each_tier_has_its_own_retention(database_url: str) -> None:
    store = SqlStore(database_url)
    commit_use(store, USE, NOW_S - 7200.0, NOW_S)
    for at_s in (NOW_S - 3600.0, NOW_S - 3000.0, NOW_S):
        store.capacity.add_checkpoint(int(at_s), b"", epoch=0)
    delete_old_rows = partial(store.retention.delete_old_rows, before_s=NOW_S - 1800.0, epoch=0)
    assert delete_old_rows(HistoryLog.CAPACITY_MINUTES, rows_max=60) == DeletedBatch(60, is_complete=False)
    assert delete_old_rows(HistoryLog.CAPACITY_MINUTES, rows_max=60) == DeletedBatch(30, is_complete=True)
    assert delete_old_rows(HistoryLog.CHECKPOINTS, rows_max=60) == DeletedBatch(1, is_complete=True)
    assert delete_old_rows(HistoryLog.HOURLY_CHECKPOINTS, rows_max=60) == DeletedBatch(1, is_complete=True)
    store.commit(commit := make_change(store, NOW_S - 3000.0))
    store.commit(make_change(store, NOW_S))
    assert delete_old_rows(HistoryLog.FLEET_CHANGES, rows_max=60) == DeletedBatch(1, is_complete=True)
    assert len(store.capacity.list_fleet_changes(after=commit.previous.generation, until_s=NOW_S)) == 1
    left = [store.capacity.list_bins(tier.step_s, from_s=0.0, to_s=NOW_S) for tier in CAPACITY_TIERS]
    assert list(map(len, left)) == [30, 12, 2]
    assert store.capacity.find_checkpoint(NOW_S - 1.0) is None
    store.close()
