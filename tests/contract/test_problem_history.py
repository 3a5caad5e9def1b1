"""Contract of all stores for episodes of problems, and the recorder across changes of leader."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.domain.problems import Problem, ProblemCode, ProblemEpisode, Severity, SubjectKind, get_problem_key
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.problem_recorder import GAP_S_MIN, ProblemRecorder
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.problems.episodes import SETTLE_S
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.store.api_protocol import ApiStore, HistoryLog
from scheduler.store.protocol import FencedError, UnavailableError
from scheduler.store.sql_retention import DeletedBatch
from scheduler.store.sql_store import SqlStore
from tests.contract.store_records import OpenStore

NOW_S = 1_800_000_000.0
DOWN = Problem(ProblemCode.NODE_DOWN, Severity.WARNING, SubjectKind.NODE, "n", "Node n is down.", "Repair it.")
EPISODE = ProblemEpisode(
    "a", ProblemCode.NODE_DOWN, Severity.WARNING, SubjectKind.NODE, "n", "Node n is down.", "", "train", NOW_S
)
POLICIES = load_policy_set("ebbtide")


def test_episodes_are_replaced_and_found(open_store: OpenStore) -> None:
    history = open_store().problems
    other = replace(EPISODE, id="b", subject="m", begin_s=NOW_S + 1.0)
    history.put_episodes((other, EPISODE), epoch=0)
    assert open_store().problems.list_open() == (EPISODE, other)
    assert history.find_last_end(get_problem_key(EPISODE)) == float("-inf")
    ended = replace(EPISODE, end_s=NOW_S + 9.0, ending="It is up.", times=3)
    closed = replace(other, end_s=NOW_S + 5.0, ending="It is up.", is_closed=True)
    history.put_episodes((ended, closed), epoch=0)
    history.put_episodes((), epoch=0)
    again = open_store().problems
    assert again.list_open() == (ended,)
    assert again.list_ended(since_s=NOW_S, limit=9) == (ended, closed)
    assert again.list_ended(since_s=NOW_S + 6.0, limit=9) == again.list_ended(since_s=NOW_S, limit=1) == (ended,)
    assert [again.find_last_end(get_problem_key(each)) for each in (ended, closed)] == [NOW_S + 9.0, NOW_S + 5.0]


def test_retention_deletes_closed_episodes(database_url: str) -> None:
    store = SqlStore(database_url)
    closed = replace(EPISODE, end_s=NOW_S, is_closed=True)
    lasting = replace(EPISODE, id="b")
    store.problems.put_episodes((closed, lasting, replace(closed, id="c", end_s=NOW_S + 99.0)), epoch=0)
    delete_old_rows = store.retention.delete_old_rows
    deleted = delete_old_rows(HistoryLog.PROBLEMS, before_s=NOW_S + 50.0, rows_max=9, epoch=0)
    assert deleted == DeletedBatch(1, is_complete=True)
    assert [each.id for each in store.problems.list_ended(since_s=0.0, limit=9)] == ["c"]
    assert store.problems.list_open() == (lasting,)
    store.close()


class Site:
    """A database with a sequence of leaders, and the problems that are true at the moment."""

    def __init__(self, store: ApiStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.clock = store, ManualClock(NOW_S)
        self.present: set[str] = set()
        self.leads, self.leaders = True, 0
        self.recorder = self.take_over()
        monkeypatch.setattr("scheduler.runtime.problem_recorder.find_problems", self._find)

    def take_over(self) -> ProblemRecorder:
        """Let another process lead, after the lease of the one before has expired."""
        recorder = ProblemRecorder(self.store, clock=self.clock, epoch=self._get_epoch, policies=POLICIES)
        self.leaders += 1
        self.renew()
        self.recorder = recorder
        return recorder

    def renew(self) -> None:
        lease = self.store.acquire_lease(f"leader-{self.leaders}", now_s=self.clock.now_s(), ttl_s=15.0)
        assert lease is not None
        self.epoch = lease.epoch

    def move(self, seconds: float) -> None:
        self.clock.move_to(self.clock.now_s() + seconds)

    def _get_epoch(self) -> int:
        return self.epoch if self.leads else 0

    def _find(self, snapshot: Snapshot, evidence: Evidence) -> tuple[Problem, ...]:
        del snapshot, evidence
        return tuple(replace(DOWN, subject=subject) for subject in sorted(self.present))


@pytest.mark.parametrize("seed", range(2))
def test_changes_of_leader_neither_lose_nor_double_an_episode(
    store: ApiStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    site, chance = Site(store, monkeypatch), random.Random(seed)
    put, begins = store.problems.put_episodes, 0

    def put_and_fail(episodes: tuple[ProblemEpisode, ...], *, epoch: int) -> None:
        put(episodes, epoch=epoch)
        if chance.random() < 0.3:
            raise UnavailableError("the response was lost")

    monkeypatch.setattr(store.problems, "put_episodes", put_and_fail)
    for _ in range(80):
        site.move(chance.choice([5.0, 5.0, 20.0, 90.0, 400.0]))
        before = set(site.present)
        site.present = {each for each in "abc" if (each in before) != (chance.random() < 0.25)}
        begins += len(site.present - before)
        if chance.random() < 0.2:
            store.release_lease(f"leader-{site.leaders}")
            site.take_over()
        site.renew()
        for _ in range(50):
            try:
                site.recorder.step()
                break
            except UnavailableError:
                continue
    site.present = set()
    site.move(5.0)
    monkeypatch.setattr(store.problems, "put_episodes", put)
    site.renew()
    site.recorder.step()
    ended = store.problems.list_ended(since_s=0.0, limit=1000)
    mine = [each for each in ended if each.code is ProblemCode.NODE_DOWN]
    assert sum(each.times for each in mine) == begins
    for subject in "abc":
        spans = sorted((each.begin_s, each.end_s or 0.0) for each in mine if each.subject == subject)
        assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in pairwise(spans))
    site.move(SETTLE_S)
    site.renew()
    site.recorder.step()
    assert store.problems.list_open() == ()


def test_next_leader_records_the_time_without_one(store: ApiStore, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(store, monkeypatch)
    site.recorder.step()
    site.move(15.0 + GAP_S_MIN - 1.0)
    site.take_over().step()
    assert store.problems.list_ended(since_s=0.0, limit=9) == ()
    site.move(15.0 + 200.0)
    site.take_over().step()
    [gap] = store.problems.list_ended(since_s=0.0, limit=9)
    assert (gap.code, gap.end_s, gap.end_s and gap.end_s - gap.begin_s) == (
        ProblemCode.CONTROLLER_MISSING, site.clock.now_s(), 200.0
    )  # fmt: skip
    site.recorder.step()
    assert len(store.problems.list_ended(since_s=0.0, limit=9)) == 1


def test_process_that_does_not_lead_records_nothing(store: ApiStore, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(store, monkeypatch)
    site.leads, site.present = False, {"a"}
    site.recorder.step()
    assert store.problems.list_open() == ()
    if isinstance(store, SqlStore):
        with pytest.raises(FencedError):
            store.problems.put_episodes((EPISODE,), epoch=site.epoch - 1)
