"""Warm replicas of inference: they get no requests while their node is lent, and get them again after the return."""

from __future__ import annotations

import pytest

from scheduler.domain.events import Event, EventCode
from scheduler.domain.standby import StandbyPhase
from scheduler.kubernetes.api_objects import POD, POOL, SERVICE, SERVING_LABEL, labels_of, uid_of
from scheduler.store.protocol import Page
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

LABELS = {"app": "warm"}
DRAIN_S = 1.0


@pytest.fixture
def site(operated: Operated) -> Operated:
    """A training node, and an inference node with a warm replica that a Service selects."""
    operated.add_nodes(1)
    operated.add_inference(1, replicas=0)
    standby = {
        "mode": "warm",
        "namespace": operated.namespace,
        "selector": LABELS,
        "gpuMemory": "20GiB",
        "drain": f"{DRAIN_S:g}s",
        "timeout": "5s",
    }
    lending = {"standby": standby, "demandProfile": [0] * 24}  # lends before the forecast is calibrated
    operated.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    return operated


def add_replica(site: Operated, **labels: str) -> None:
    spec = {"nodeName": f"{site.namespace}-i0", "containers": [{"name": "llm", "image": "none"}]}
    meta = {"name": "llm-0", "namespace": site.namespace, "labels": {**LABELS, **labels}}
    site.cluster.create(POD, {"metadata": meta, "spec": spec})


def add_service(site: Operated, selector: dict[str, str]) -> None:
    meta = {"name": "llm", "namespace": site.namespace}
    site.cluster.create(SERVICE, {"metadata": meta, "spec": {"selector": selector, "ports": [{"port": 80}]}})


def serving_label(site: Operated) -> str:
    return labels_of(site.cluster.get(POD, "llm-0", site.namespace)).get(SERVING_LABEL, "")


def phase(site: Operated) -> StandbyPhase | None:
    node = site.store.load().snapshot.nodes.get(f"{site.namespace}-i0")
    return None if node is None or node.standby is None else node.standby.phase


def standby_changes(site: Operated) -> list[Event]:
    found = [stored.event for stored in site.store.list_events(Page(limit=10_000))]
    return [event for event in found if event.code is EventCode.STANDBY_CHANGED]


def test_replica_gets_no_requests_while_its_node_is_lent(site: Operated) -> None:
    add_replica(site, **{SERVING_LABEL: "true"})
    add_service(site, {**LABELS, SERVING_LABEL: "true"})
    before = site.cluster.get(POD, "llm-0", site.namespace)
    site.start_operator()
    eventually(lambda: phase(site) is StandbyPhase.AWAKE, what="the replica is known")
    site.submit("llama", 8, 16)
    eventually(lambda: site.held("llama") == 16, what="the job has grown onto the lent node")
    assert serving_label(site) == "false"
    (asleep,) = standby_changes(site)
    offered = site.store.load().snapshot.loans[f"{site.namespace}-i0"].offered_at_s
    assert asleep.cause == "asleep"
    assert asleep.at_s - offered >= DRAIN_S
    site.scale_inference(1)
    eventually(lambda: not site.lent_nodes() and serving_label(site) == "true", what="the replica gets requests again")
    eventually(lambda: phase(site) is StandbyPhase.AWAKE, what="it is known to serve")
    (wake_s,) = site.store.load().snapshot.return_times["inference"].wake_times_s
    assert 0.0 <= wake_s < 30.0
    assert uid_of(site.cluster.get(POD, "llm-0", site.namespace)) == uid_of(before), "it was neither moved nor replaced"


def test_node_whose_service_ignores_the_label_is_not_lent(site: Operated) -> None:
    add_replica(site, **{SERVING_LABEL: "true"})
    add_service(site, LABELS)
    site.start_operator()
    eventually(lambda: phase(site) is StandbyPhase.AWAKE, what="the replica is known")
    site.submit("llama", 8, 16)
    eventually(
        lambda: any(event.cause == "sleep_failed" for event in standby_changes(site)), what="the failure is told"
    )
    eventually(lambda: not site.lent_nodes(), what="the offer is withdrawn")
    assert serving_label(site) == "true"
    assert site.held("llama") == 8
    node = site.store.load().snapshot.nodes[f"{site.namespace}-i0"]
    assert node.standby is not None
    assert f"{site.namespace}/llm" in node.standby.failure


def test_replica_without_the_label_cannot_be_idle(site: Operated) -> None:
    add_replica(site)
    site.start_operator()
    eventually(lambda: phase(site) is StandbyPhase.ABSENT, what="it is known that the label is missing")
