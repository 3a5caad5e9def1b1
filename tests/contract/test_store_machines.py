"""Contract of all stores for machines, join tokens and estimated GPU profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.machine import (
    CheckpointPath,
    EstimatedGpu,
    GpuDevice,
    GpuLink,
    JoinToken,
    LinkKind,
    Machine,
    MachineInventory,
    NetworkInterface,
)
from scheduler.store.api_protocol import (
    ApiStore,
    AuditEntry,
    AuditFilter,
    JoinTokenSpentError,
    MachineNameTakenError,
)
from scheduler.store.protocol import Page
from tests.contract.store_records import OpenStore

NOW_S = 100.0
ENTRY = AuditEntry(NOW_S, "root", "", "JoinMachine", "m0", None, None, "r")
TOKEN = JoinToken("jtk-a", "d-token", "training", 2, NOW_S, "root", NOW_S + 60.0)
DEVICES = tuple(GpuDevice(at, "NVIDIA L4", f"GPU-{at}", 24 * 10**9, "8.9", 7424, 2_040_000_000) for at in range(2))
INVENTORY = MachineInventory(
    "host", ("10.0.0.1",), 8, 2**36, DEVICES, (GpuLink(0, 1, LinkKind.PCIE_HOST),), (NetworkInterface("eth0", 10**10),),
    (CheckpointPath("/checkpoints", True, True, 10**12),), ("gpu",),
)  # fmt: skip
MACHINE = Machine("m0", ("m0",), "training", "l4", "10.0.0.1", "0.1.0", NOW_S, "full", INVENTORY, "d0")


def count_entries(store: ApiStore) -> int:
    return len(store.audit_log.list_entries(Page(), AuditFilter()))


def test_a_machine_joins_and_is_found(store: ApiStore) -> None:
    store.machines.add_token(TOKEN, ENTRY)
    store.machines.join(MACHINE, TOKEN.id, ENTRY, now_s=NOW_S)
    assert store.machines.get_machine("m0") == store.machines.find_machine("d0") == MACHINE
    assert (store.machines.get_machine("m1"), store.machines.find_machine("d1")) == (None, None)
    assert store.machines.find_token("d-token") == store.machines.get_token("jtk-a") == replace(TOKEN, uses_left=1)
    assert count_entries(store) == 2


def test_a_token_is_used_as_often_as_it_allows(store: ApiStore) -> None:
    store.machines.add_token(TOKEN, ENTRY)
    for name in ("m0", "m1"):
        store.machines.join(replace(MACHINE, name=name, digest=name), TOKEN.id, ENTRY, now_s=NOW_S)
    with pytest.raises(JoinTokenSpentError):
        store.machines.join(replace(MACHINE, name="m2", digest="m2"), TOKEN.id, ENTRY, now_s=NOW_S)
    assert [machine.name for machine in store.machines.list_machines()] == ["m0", "m1"]
    assert count_entries(store) == 3


@pytest.mark.parametrize(("token_id", "now_s"), [("jtk-a", TOKEN.expires_at_s), ("jtk-b", NOW_S)])
def test_an_expired_or_unknown_token_changes_nothing(store: ApiStore, token_id: str, now_s: float) -> None:
    store.machines.add_token(TOKEN, ENTRY)
    with pytest.raises(JoinTokenSpentError):
        store.machines.join(MACHINE, token_id, ENTRY, now_s=now_s)
    assert (store.machines.list_machines(), store.machines.get_token("jtk-a")) == ((), TOKEN)


def test_a_taken_name_does_not_use_the_token(store: ApiStore) -> None:
    store.machines.add_token(TOKEN, ENTRY)
    store.machines.join(MACHINE, TOKEN.id, ENTRY, now_s=NOW_S)
    with pytest.raises(MachineNameTakenError):
        store.machines.join(replace(MACHINE, digest="d1"), TOKEN.id, ENTRY, now_s=NOW_S)
    assert store.machines.get_token("jtk-a") == replace(TOKEN, uses_left=1)


def test_a_revoked_machine_can_be_replaced(store: ApiStore) -> None:
    store.machines.add_token(TOKEN, ENTRY)
    store.machines.join(MACHINE, TOKEN.id, ENTRY, now_s=NOW_S)
    revoked = replace(MACHINE, revoked_at_s=NOW_S + 1.0)
    assert store.machines.revoke_machine("m0", NOW_S + 1.0, ENTRY) == revoked
    assert store.machines.revoke_machine("m0", NOW_S + 2.0, ENTRY) == revoked
    assert store.machines.revoke_machine("m1", NOW_S, ENTRY) is None
    assert count_entries(store) == 3
    again = replace(MACHINE, digest="d1", joined_at_s=NOW_S + 3.0)
    store.machines.join(again, TOKEN.id, ENTRY, now_s=NOW_S + 3.0)
    assert store.machines.list_machines() == (again,)
    assert store.machines.find_machine("d0") is None


def test_the_newest_report_time_stays(store: ApiStore) -> None:
    store.machines.add_token(TOKEN, ENTRY)
    store.machines.join(MACHINE, TOKEN.id, ENTRY, now_s=NOW_S)
    for seen in ({"m0": NOW_S + 5.0, "absent": 1.0}, {"m0": NOW_S + 4.0}, {}):
        store.machines.record_seen(seen)
    assert [machine.seen_at_s for machine in store.machines.list_machines()] == [NOW_S + 5.0]


def test_another_process_sees_a_changed_machine(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    store.machines.add_token(TOKEN, ENTRY)
    store.machines.join(MACHINE, TOKEN.id, ENTRY, now_s=NOW_S)
    store.machines.record_seen({"m0": NOW_S + 5.0})
    assert [machine.agent_version for machine in other.machines.list_machines()] == ["0.1.0"]
    store.machines.update_machine(replace(MACHINE, agent_version="0.1.7", inventory=MachineInventory("renamed")))
    store.machines.update_machine(replace(MACHINE, agent_version="9.9.9", digest="foreign"))
    [machine] = other.machines.list_machines()
    assert (machine.agent_version, machine.inventory.hostname, machine.seen_at_s) == ("0.1.7", "renamed", NOW_S + 5.0)


def test_tokens_are_listed_by_id_and_deleted(store: ApiStore) -> None:
    for number in (2, 0, 1):
        store.machines.add_token(replace(TOKEN, id=f"jtk-{number}", digest=f"d{number}"), ENTRY)
    assert [token.id for token in store.machines.list_tokens(after="", limit=2)] == ["jtk-0", "jtk-1"]
    assert [token.id for token in store.machines.list_tokens(after="jtk-1", limit=2)] == ["jtk-2"]
    for _ in range(2):
        store.machines.delete_token("jtk-1", ENTRY)
    assert store.machines.get_token("jtk-1") is None
    assert count_entries(store) == 4


def test_the_first_estimate_of_a_name_stays(store: ApiStore) -> None:
    first = EstimatedGpu("b9-99g", "{}", "m0", NOW_S)
    for estimate in (first, replace(first, profile_json="[]", machine="m1")):
        store.machines.add_estimated_gpu(estimate)
    assert store.machines.list_estimated_gpus() == (first,)


def test_machine_of_the_service_is_registered_again_but_never_replaces_another(store: ApiStore) -> None:
    service = Machine("vm", (), "", "", "127.0.0.1", "0.1.0", NOW_S, digest="d-first", is_service=True)
    store.machines.register_service(service)
    store.machines.register_service(replace(service, digest="d-second"))
    assert (store.machines.find_machine("d-first"), store.machines.list_machines()[0].digest) == (None, "d-second")
    store.machines.add_token(TOKEN, ENTRY)
    store.machines.join(MACHINE, TOKEN.id, ENTRY, now_s=NOW_S)
    with pytest.raises(MachineNameTakenError):
        store.machines.register_service(replace(service, name="m0"))
