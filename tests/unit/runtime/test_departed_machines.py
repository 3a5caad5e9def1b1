"""Removal of temporary machines that have left or were silent for long, and of their nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.domain.commands import RemoveNode
from scheduler.domain.job_state import JobState
from scheduler.domain.machine import JoinToken, Machine
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.departed_machines import DepartedMachines, find_removable_nodes, find_silent_machines
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_fleet, a_job, a_snapshot

PILOT = Machine("t0", ("t0",), "training", "cpu", "127.0.0.1", "1", 100.0, digest="d" * 64, is_temporary=True)
FLEET = a_fleet(training=2, inference=0)
AUDIT = AuditEntry(0.0, "test", "", "test", "t0", None, None, "")


def test_only_temporary_machines_count_as_silent() -> None:
    machines = [
        PILOT,
        replace(PILOT, name="seen", seen_at_s=950.0),
        replace(PILOT, name="new", joined_at_s=990.0),
        replace(PILOT, name="revoked", revoked_at_s=500.0),
        replace(PILOT, name="permanent", is_temporary=False),
    ]
    assert [machine.name for machine in find_silent_machines(machines, 900.0)] == ["t0"]


@pytest.mark.parametrize(("change", "removable"), [({"revoked_at_s": 1.0}, True), ({}, False)])
def test_nodes_of_revoked_temporary_machines_can_be_removed(change: dict[str, float], *, removable: bool) -> None:
    machine = replace(PILOT, **change)  # type: ignore[arg-type]
    assert bool(find_removable_nodes([machine], a_snapshot(FLEET))) is removable
    assert not find_removable_nodes([replace(machine, is_temporary=False)], a_snapshot(FLEET))


def test_nodes_stay_while_a_job_holds_their_gpus() -> None:
    held = a_snapshot(FLEET, [a_job("train", state=JobState.RUNNING, on={"t0": (0,)})])
    assert find_removable_nodes([replace(PILOT, revoked_at_s=1.0)], held) == []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    opened = SqlStore(url)
    opened.commit(Commit(Snapshot(), replace(a_snapshot(FLEET), generation=1), epoch=0))
    opened.machines.add_token(JoinToken("token", "t", "training", 1, 0.0, "test", 1e9), AUDIT)
    opened.machines.join(PILOT, "token", AUDIT, now_s=100.0)
    yield opened
    opened.close()


def test_leader_removes_a_silent_machine_and_its_node_once(store: SqlStore) -> None:
    epoch, clock = 0, ManualClock(200.0)
    departed = DepartedMachines(store, clock=clock, epoch=lambda: epoch, silence_s=300.0)
    clock.move_to(500.0)
    departed.step()
    assert store.machines.list_machines()[0].is_live, "another process leads"
    epoch = 1
    departed.step()
    departed.step()
    assert not store.machines.list_machines()[0].is_live
    assert [command.body for command in store.load().inbox] == [RemoveNode("t0")]
