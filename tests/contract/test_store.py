"""Contract of all stores: MemoryStore, and SqlStore with SQLite and PostgreSQL."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest

from scheduler.domain.commands import CancelJob, Command, CurveSolved, ReportDemand
from scheduler.domain.decisions import LendNode, Reason, ReasonCode, StartJob
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import (
    DemandReading,
    Forecast,
    Loan,
    LoanState,
    Node,
    NodeState,
    Pool,
    PoolKind,
    PoolNetwork,
)
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.domain.lending_policy import Blackout, LendingPolicy
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Commit, ConflictError, FencedError, Page, UsageSnapshot
from tests.contract.store_records import OpenStore, commit_next, make_next_snapshot, make_stored_job

ONE, EIGHT = (GpuShape.packed("a100-80g", gpus, 8) for gpus in (1, 8))
REASON = Reason(ReasonCode.GAIN_EXCEEDS_COST, "it gains 3 h", {"gain_s": 10_800.0})


def _filled() -> Snapshot:
    """Return a snapshot with every kind of record, job state and live loan state."""
    live = [state for state in JobState if state not in ENDED_STATES]
    lending = LendingPolicy(blackouts=(Blackout(0.0, 3600.0),), lent_nodes_max=None, return_deadline_s=math.inf)
    nodes = [Node(f"i{at}", "serve", "a100-80g", 8, 80 * 2**30, inference_gpus=at) for at in range(4)]
    down = Node("t0", "train", "h100-80g", 4, 80 * 2**30, NodeState.DOWN, cordoned=True, draining=True)
    loans = [Loan(f"l{at}", f"i{at}", "serve", s, 1.0, 2.0, 3.0 + at) for at, s in enumerate(list(LoanState)[:4])]
    curve = ScalingCurve({ONE: build_data_parallel_plan("a100-80g", 1)}, {EIGHT: "needs 94.1 GB of 80 GB"})
    return Snapshot(
        generation=1,
        now_s=12.5,
        gpu_profiles={"l4": GpuProfile("l4", '{"gpu": "l4"}', 3, 11.5, "ada")},
        pools={
            "train": Pool("train", PoolKind.TRAINING, network=PoolNetwork(2e10, 1e-5, 4)),
            "serve": Pool("serve", PoolKind.INFERENCE, lending),
        },
        nodes={node.name: node for node in (*nodes, down)},
        jobs={f"job-{at}": make_stored_job(at, state) for at, state in enumerate(live)},
        loans={loan.node: loan for loan in loans},
        curves={"gpt2/batch-8/seq-1024": curve, "nothing-solved-yet": ScalingCurve()},
        demand={"serve": DemandReading(12.0, 16.0, 20.0)},
        forecasts={"serve": Forecast(12.0, 600.0, (0.5, 0.999), (8.0, 15.5), "seasonal")},
        queues={"vision": JobQueue("vision", 8, 16, 2.0), "rest": JobQueue("rest")},
        switches=Switches(lending_paused=True, resizes_frozen=True),
        full_pass_at_s=10.0,
        solver="5f0e",
        curve_hardware={"l4": "0a1b"},
        shadows={"serve": ShadowLending(2.0, ("i3",), 6.0, 3.0, 48.0, loans=2, recalls=1)},
        lending_set_by="ada",
        lending_set_at_s=11.0,
    )


def _command(number: int) -> Command:
    return Command(f"c{number}", float(number), CancelJob(f"job-{number}"), actor="alice")


def _event(at_s: float, subject: str) -> Event:
    return Event(at_s, EventCode.NODE_LENT, subject, "lent", {"gpus": 8.0})


def test_new_store_is_empty(store: ApiStore) -> None:
    loaded = store.load()
    assert (loaded.snapshot, loaded.inbox, store.count_pending_commands()) == (Snapshot(), (), 0)
    assert (store.list_events(Page()), store.list_decisions(Page())) == ((), ())
    assert (store.get_ended_job("job-0"), store.list_ended_jobs(limit=9), store.list_ended_loans(limit=9)) == (
        None,
        (),
        (),
    )
    assert store.list_readings("serve", since_s=-math.inf) == ()
    assert store.load_usage(from_s=0.0, to_s=math.inf) == UsageSnapshot((), Snapshot())


def test_snapshot_is_loaded_as_committed(open_store: OpenStore) -> None:
    store, filled = open_store(), _filled()
    store.commit(Commit(Snapshot(), filled, epoch=0))
    assert store.load().snapshot == filled
    assert open_store().load().snapshot == filled


def test_pending_and_consumed_commands_are_found(open_store: OpenStore) -> None:
    store, first = open_store(), _command(1)
    assert store.get_command("c1") is None
    store.send(first)
    assert store.get_command("c1") == first
    assert not store.send(replace(first, actor="mallory"))
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, consumed_command_ids=("c1",)))
    assert open_store().get_command("c1") == first


def test_reader_sees_changes_and_removals(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    writer.commit(Commit(Snapshot(), filled := _filled(), epoch=0))
    before = reader.load().snapshot
    jobs = {
        **filled.jobs,
        "job-1": replace(filled.jobs["job-1"], message="new"),
        "job-new": make_stored_job(9, JobState.QUEUED),
    }
    del jobs["job-2"]
    curve = ScalingCurve({EIGHT: build_data_parallel_plan("a100-80g", 8)})
    curves, queues = {"gpt2/batch-8/seq-1024": curve}, {"vision": JobQueue("vision", 8)}
    commit_next(writer, now_s=20.0, jobs=jobs, loans={}, forecasts={}, queues=queues, curves=curves)
    after = reader.load().snapshot
    assert after == writer.load().snapshot
    assert (after.jobs["job-1"].message, "job-2" in after.jobs, after.loans) == ("new", False, {})
    assert after.queues == queues
    assert after.curves == {"gpt2/batch-8/seq-1024": curve}
    assert after.jobs["job-0"] is before.jobs["job-0"], "what did not change stays the same object"


def test_removed_record_can_be_added_again(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    job = make_stored_job(0, JobState.QUEUED)
    for jobs in ({"job-0": job}, {}, {"job-0": replace(job, message="again")}):
        commit_next(writer, jobs=jobs)
        assert reader.load().snapshot.jobs == jobs
    assert open_store().load().snapshot.jobs["job-0"].message == "again"


def test_points_are_added_to_an_empty_curve_and_may_become_infeasible(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    plan = build_data_parallel_plan("a100-80g", 1)
    for curve in (ScalingCurve(), ScalingCurve({ONE: plan}), ScalingCurve({}, {ONE: "no"}), ScalingCurve()):
        commit_next(writer, curves={"c": curve})
        assert reader.load().snapshot.curves == {"c": curve}
    commit_next(writer, curves={})
    assert reader.load().snapshot.curves == {}


def test_second_commit_on_a_generation_conflicts(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    previous = second.load().snapshot
    winner = commit_next(first, now_s=1.0)
    second.send(_command(1))
    loser = make_next_snapshot(previous, now_s=2.0, pools={"train": Pool("train", PoolKind.TRAINING)})
    with pytest.raises(ConflictError):
        second.commit(Commit(previous, loser, epoch=0, consumed_command_ids=("c1",), events=(_event(2.0, "i0"),)))
    assert second.load().snapshot == winner
    assert (second.count_pending_commands(), second.list_events(Page())) == (1, ())


def test_former_leader_is_fenced_before_it_conflicts(open_store: OpenStore) -> None:
    old, new = open_store(), open_store()
    lease = old.acquire_lease("old", now_s=0.0, ttl_s=10.0)
    assert lease is not None
    previous = old.load().snapshot
    taken = new.acquire_lease("new", now_s=11.0, ttl_s=10.0)
    assert taken is not None
    new.commit(Commit(previous, make_next_snapshot(previous, now_s=11.0), epoch=taken.epoch))
    with pytest.raises(FencedError):
        old.commit(Commit(previous, make_next_snapshot(previous, now_s=12.0), epoch=lease.epoch))
    assert old.load().snapshot.now_s == 11.0


def test_lease_is_acquired_renewed_expired_and_released(open_store: OpenStore) -> None:
    a, b = open_store(), open_store()
    first = a.acquire_lease("a", now_s=0.0, ttl_s=10.0)
    assert first is not None
    assert (first.holder, first.expires_at_s) == ("a", 10.0)
    assert b.acquire_lease("b", now_s=9.9, ttl_s=10.0) is None
    renewed = a.acquire_lease("a", now_s=5.0, ttl_s=10.0)
    assert renewed == replace(first, expires_at_s=15.0), "a renewal keeps the epoch"
    assert b.acquire_lease("b", now_s=14.9, ttl_s=10.0) is None
    second = b.acquire_lease("b", now_s=15.0, ttl_s=10.0)
    assert second is not None
    assert second.epoch > first.epoch
    assert a.get_lease() == b.get_lease(), "anybody can see who leads"
    a.release_lease("a")
    assert a.acquire_lease("a", now_s=16.0, ttl_s=10.0) is None, "only the holder can release"
    b.release_lease("b")
    assert a.get_lease() is None
    third = a.acquire_lease("a", now_s=16.0, ttl_s=10.0)
    assert third is not None
    assert third.epoch > second.epoch


def test_leader_cannot_commit_after_releasing_its_lease(store: ApiStore) -> None:
    lease = store.acquire_lease("a", now_s=0.0, ttl_s=10.0)
    assert lease is not None
    store.release_lease("a")
    with pytest.raises(FencedError):
        store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=lease.epoch))


def test_commands_are_pending_in_order_until_consumed(open_store: OpenStore) -> None:
    writer, sender = open_store(), open_store()
    bodies = (ReportDemand("serve", 12.0), CurveSolved("c", EIGHT, build_data_parallel_plan("a100-80g", 8)))
    commands = (_command(3), Command("c2", 2.0, bodies[0]), Command("c1", 1.0, bodies[1]))
    assert [sender.send(command) for command in commands] == [True, True, True]
    assert (writer.load().inbox, writer.count_pending_commands()) == (commands, 3)
    previous = writer.load().snapshot
    writer.commit(
        Commit(previous, make_next_snapshot(previous), epoch=0, consumed_command_ids=("c3", "c1", "never-sent"))
    )
    assert (sender.load().inbox, sender.count_pending_commands()) == ((commands[1],), 1)


def test_command_id_is_accepted_once(store: ApiStore) -> None:
    assert store.send(_command(1))
    assert not store.send(replace(_command(1), actor="bob"))
    assert store.load().inbox == (_command(1),)
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot()), epoch=0, consumed_command_ids=("c1",)))
    assert not store.send(_command(1))
    assert store.load().inbox == ()


def test_one_of_many_concurrent_senders_of_an_id_succeeds(open_store: OpenStore) -> None:
    stores, results = [open_store(), open_store()], list[tuple[str, bool]]()

    def send(number: int) -> None:
        for at in range(10):
            command = _command(at)
            results.append((command.id, stores[number % 2].send(command)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(command_id for command_id, is_new in results if is_new) == sorted(_command(at).id for at in range(10))
    assert len(results) == 80
    assert len(stores[0].load().inbox) == 10


def test_events_are_numbered_paged_and_filtered_by_subject(store: ApiStore) -> None:
    previous = Snapshot()
    assert store.get_last_event_number() == 0
    for tick in range(3):
        snapshot = make_next_snapshot(previous, now_s=float(tick))
        store.commit(Commit(previous, snapshot, epoch=0, events=(_event(tick, "i0"), _event(tick, "i1"))))
        previous = snapshot
    first = store.list_events(Page(limit=4))
    rest = store.list_events(Page(after=first[-1].number, limit=4))
    numbers = [stored.number for stored in (*first, *rest)]
    assert numbers == sorted(set(numbers))
    assert store.get_last_event_number() == numbers[-1]
    assert [(each.generation, each.event.subject) for each in first] == [(1, "i0"), (1, "i1"), (2, "i0"), (2, "i1")]
    assert [each.event for each in rest] == [_event(2.0, "i0"), _event(2.0, "i1")]
    of_one = store.list_events(Page(after=first[1].number, limit=1), subject="i1")
    assert [(each.generation, each.event) for each in of_one] == [(2, _event(1.0, "i1"))]


def test_decisions_have_generation_and_time(store: ApiStore) -> None:
    decisions = (
        LendNode("i0", REASON),
        StartJob("job-0", {"t0": (0, 2)}, build_data_parallel_plan("a100-80g", 2), REASON),
    )
    store.commit(Commit(Snapshot(), make_next_snapshot(Snapshot(), now_s=7.5), epoch=0, decisions=decisions))
    stored = store.list_decisions(Page())
    assert [(each.generation, each.at_s, each.decision) for each in stored] == [(1, 7.5, each) for each in decisions]
    assert store.list_decisions(Page(after=stored[0].number)) == stored[1:]
    assert store.list_decisions(Page(limit=1)) == stored[:1]


def test_threads_send_and_load_during_commits(store: ApiStore) -> None:
    def send(sender: int) -> None:
        for number in range(10):
            assert store.send(_command(sender * 100 + number))
            loaded = store.load()
            assert loaded.snapshot.now_s == loaded.snapshot.generation
            accepted.append(loaded.snapshot.generation)

    accepted: list[int] = []
    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    consumed: list[str] = []
    while any(thread.is_alive() for thread in threads) or store.count_pending_commands():
        loaded = store.load()
        ids = tuple(command.id for command in loaded.inbox)
        moved = make_next_snapshot(loaded.snapshot, now_s=loaded.snapshot.generation + 1.0)
        store.commit(Commit(loaded.snapshot, moved, epoch=0, consumed_command_ids=ids))
        consumed += ids
    assert len(accepted) == 40
    assert sorted(consumed) == sorted(f"c{sender * 100 + number}" for sender in range(4) for number in range(10))
