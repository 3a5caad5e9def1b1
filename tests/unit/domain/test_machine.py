"""Which machine hosts which node."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.machine import Machine, host_declared_nodes

JOINED = Machine("m1", ("m1",), "training", "l4", "10.0.0.1", "0.1.0", 1.0)
SERVICE = Machine("vm", (), "", "", "127.0.0.1", "0.1.0", 5.0, is_service=True)


def test_machine_of_the_service_hosts_the_nodes_of_no_other_machine() -> None:
    assert host_declared_nodes([JOINED, SERVICE], ["n1", "m1", "n0"]) == (JOINED, replace(SERVICE, nodes=("n0", "n1")))


def test_revoked_machine_keeps_its_node() -> None:
    """Its ranks may still run."""
    revoked = replace(JOINED, revoked_at_s=9.0)
    assert host_declared_nodes([revoked, SERVICE], ["m1"])[1].nodes == ()


def test_without_a_service_machine_declared_nodes_are_hosted_nowhere() -> None:
    assert host_declared_nodes([JOINED], ["n0", "m1"]) == (JOINED,)


def test_first_of_several_services_hosts_the_declared_nodes() -> None:
    later = replace(SERVICE, name="other", joined_at_s=6.0)
    assert [each.nodes for each in host_declared_nodes([later, SERVICE], ["n0"])] == [(), ("n0",)]
