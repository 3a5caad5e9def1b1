"""Host ports: which pods can share a node."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from scheduler.domain.host_ports import compute_port_requests, find_amount, format_host_port
from scheduler.domain.pod_requirements import compute_pod_requests
from tests.kubernetes.pod_admission import find_rejection

NODE: dict[str, Any] = {"metadata": {"name": "t0"}, "spec": {}, "status": {"allocatable": {"pods": "9"}}}
PORTS: list[dict[str, Any]] = [
    {"hostPort": 8080},
    {"hostPort": 8080, "protocol": "UDP"},
    {"hostPort": 8081},
    {"hostPort": 8080, "hostIP": "10.0.0.1"},
    {"hostPort": 8080, "hostIP": "10.0.0.2"},
    {"hostPort": 8080, "hostIP": "0.0.0.0"},
    {"hostPort": 8080, "hostIP": "::1"},
]


def a_spec(*ports: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", "ports": [{"containerPort": 80, **each} for each in ports]}], **fields}


@pytest.mark.parametrize(("ports", "others"), list(product([[each] for each in PORTS] + [PORTS[3:5]], repeat=2)))
def test_pods_conflict_exactly_if_kubelet_says_so(ports: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    used = dict(compute_pod_requests(a_spec(*others)))
    free = {name: find_amount({"pods": 9}, name) - amount for name, amount in used.items()}
    fits = all(amount <= find_amount(free, name) for name, amount in compute_port_requests(a_spec(*ports)).items())
    rejection = find_rejection({"spec": a_spec(*ports)}, NODE, [{"spec": a_spec(*others)}])
    assert fits is (rejection is None)
    assert fits or (rejection and rejection[0] == "NodePorts")


def test_ports_of_sidecars_and_of_pods_on_the_hosts_network_count() -> None:
    sidecar = {**a_spec(PORTS[0])["containers"][0], "restartPolicy": "Always"}
    assert compute_port_requests({"containers": [{}], "initContainers": [sidecar]})
    assert not compute_port_requests({"containers": [{}], "initContainers": a_spec(PORTS[0])["containers"]})
    assert list(compute_port_requests(a_spec({}, hostNetwork=True))) == ["hostPort/TCP/80"]
    assert not compute_port_requests(a_spec({}))


def test_ports_are_named_for_people() -> None:
    names = sorted(compute_port_requests(a_spec(PORTS[3])))
    assert [format_host_port(name) for name in names] == [
        "host port 8080/TCP",
        "host port 8080/TCP of address 10.0.0.1",
    ]
    assert format_host_port("cpu") == ""
