"""Quarantine: which incidents count, the limits, and the release."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.commands import Command, UncordonNode
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import IncidentKind, Node, NodeIncident
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import FailureCause, Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.quarantine import INCIDENT_WINDOW_S, SHARED_LOSS_S
from scheduler.scheduling.snapshot_update import SnapshotUpdate, update_snapshot
from tests.builders import a_fleet, a_job, a_snapshot

NOW_S = 1_000_000.0
PAST_S = NOW_S - 2 * SHARED_LOSS_S


def an_incident(
    job_id: str, *, kind: IncidentKind = IncidentKind.HANG, owner: str = "", at_s: float = PAST_S
) -> NodeIncident:
    return NodeIncident(kind, job_id, owner or f"owner of {job_id}", at_s, generation=1)


def a_fleet_with(*nodes: tuple[str, list[NodeIncident]], size: int = 8) -> Snapshot:
    pools, fleet = a_fleet(training=size, inference=0)
    for name, incidents in nodes:
        fleet[name] = replace(fleet[name], incidents=tuple(incidents))
    return a_snapshot((pools, fleet), now_s=NOW_S)


def updated(snapshot: Snapshot, *runs: Run, commands: tuple[Command, ...] = ()) -> SnapshotUpdate:
    return update_snapshot(snapshot, Observation(snapshot.now_s, snapshot.generation, runs), commands)


def quarantined(snapshot: Snapshot) -> list[str]:
    return [name for name, node in updated(snapshot).snapshot.nodes.items() if node.quarantine]


THREE = [an_incident(job_id) for job_id in ("a", "b", "c")]


def test_node_that_failed_three_jobs_is_drained_and_named_until_released() -> None:
    after = updated(a_fleet_with(("t0", THREE)))
    node = after.snapshot.nodes["t0"]
    assert (node.cordoned, node.draining, node.quarantine != "") == (True, True, True)
    assert [event.code for event in after.events] == [EventCode.NODE_QUARANTINED]
    assert not after.snapshot.serves_training(node)
    released = updated(after.snapshot, commands=(Command("c", NOW_S, UncordonNode("t0")),)).snapshot.nodes["t0"]
    assert (released.cordoned, released.draining, released.quarantine, released.incidents) == (False, False, "", ())


def test_incidents_that_do_not_count() -> None:
    two_jobs = [an_incident("a"), an_incident("b"), an_incident("b", kind=IncidentKind.LOSS)]
    unconfirmed = [replace(incident, is_confirmed=False) for incident in THREE]
    old = [an_incident(job_id, at_s=NOW_S - INCIDENT_WINDOW_S) for job_id in ("a", "b", "c")]
    recent_losses = [an_incident(job_id, kind=IncidentKind.LOSS, at_s=NOW_S) for job_id in ("a", "b", "c")]
    for incidents in (two_jobs, unconfirmed, old, recent_losses):
        assert quarantined(a_fleet_with(("t0", incidents))) == []
    assert updated(a_fleet_with(("t0", old))).snapshot.nodes["t0"].incidents == ()


def test_jobs_that_hang_wherever_they_run_count_for_no_node() -> None:
    assert quarantined(a_fleet_with(("t0", THREE), ("t1", THREE))) == []


def test_outage_of_several_nodes_counts_for_none() -> None:
    lost = [an_incident(job_id, kind=IncidentKind.LOSS) for job_id in ("a", "b", "c")]
    assert quarantined(a_fleet_with(("t0", lost))) == ["t0"]
    elsewhere = [an_incident("d", kind=IncidentKind.LOSS, at_s=PAST_S + SHARED_LOSS_S / 2)]
    assert quarantined(a_fleet_with(("t0", lost), ("t1", elsewhere))) == []


def test_one_owner_quarantines_one_node_at_a_time() -> None:
    first, second = ([an_incident(f"{name}{at}", owner="eve") for at in range(3)] for name in ("a", "b"))
    assert quarantined(a_fleet_with(("t0", first), ("t1", second))) == ["t0"]


def test_pool_keeps_three_quarters_of_its_nodes() -> None:
    accused = [(f"t{node}", [an_incident(f"j{node}{at}") for at in range(3)]) for node in range(8)]
    assert quarantined(a_fleet_with(*accused)) == ["t0", "t1"]


def test_only_node_of_a_pool_is_not_quarantined() -> None:
    assert quarantined(a_fleet_with(("t0", THREE), size=1)) == []


def test_only_faults_of_the_machine_are_recorded() -> None:
    def incidents(**fields: object) -> tuple[NodeIncident, ...]:
        snapshot = a_snapshot(
            a_fleet(training=2, inference=0),
            [a_job("a", 1, state=JobState.RUNNING, on={"t0": (0,)}, now_s=NOW_S - 10)],
            now_s=NOW_S,
        )
        run = Run("a", 1, **fields)  # type: ignore[arg-type]  # each field by its name
        return updated(snapshot, run).snapshot.nodes["t0"].incidents

    (hang,) = incidents(phase=RunPhase.FAILED, cause=FailureCause.HANG, suspects=("t0",), steps=5.0)
    assert (hang.kind, hang.is_confirmed, hang.steps) == (IncidentKind.HANG, False, 5.0)
    (loss,) = incidents(phase=RunPhase.LOST, suspects=("t0",))
    assert (loss.kind, loss.is_confirmed) == (IncidentKind.LOSS, True)
    assert incidents(phase=RunPhase.FAILED, cause=FailureCause.OUT_OF_MEMORY, suspects=("t0",)) == ()
    assert incidents(phase=RunPhase.FAILED) == incidents(phase=RunPhase.LOST) == ()


def test_hang_is_confirmed_once_the_job_goes_on_elsewhere() -> None:
    suspected = replace(an_incident("a"), is_confirmed=False, steps=5.0)

    def confirmed(node: str, steps: float) -> bool:
        fleet = a_fleet(training=2, inference=0)
        fleet[1]["t0"] = replace(fleet[1]["t0"], incidents=(suspected,))
        job = a_job("a", 1, state=JobState.RUNNING, on={node: (0,)}, now_s=NOW_S)
        job = replace(
            job,
            progress=replace(job.progress, steps=steps, is_reported=True),
            allocation=replace(job.allocation, generation=2),
        )
        run = Run("a", 2, RunPhase.RUNNING, {node: (0,)})
        after: Node = updated(a_snapshot(fleet, [job], now_s=NOW_S), run).snapshot.nodes["t0"]
        return after.incidents[0].is_confirmed

    assert confirmed("t1", 6.0)
    assert not confirmed("t1", 5.0)
    assert not confirmed("t0", 6.0)
