"""Replicas of inference that sleep on lent nodes: the operator, a real API server and an engine over a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from scheduler.domain.events import Event, EventCode
from scheduler.domain.standby import StandbyPhase
from scheduler.kubernetes.api_objects import POD, POOL, Object, uid_of
from scheduler.store.protocol import Page
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually
from tests.sleeping_engine import SleepingEngine, serving_engine

LABELS = {"app": "standby"}


@pytest.fixture
def engine() -> Iterator[SleepingEngine]:
    with serving_engine() as found:
        yield found


@pytest.fixture
def site(operated: Operated, engine: SleepingEngine) -> Operated:
    """A training node, and an inference node whose replica requests no GPU and can sleep."""
    operated.add_nodes(1)
    operated.add_inference(1, replicas=0)
    standby = {
        "namespace": operated.namespace,
        "selector": LABELS,
        "port": engine.port,
        "gpuMemory": "2GiB",
        "wake": "5s",
        "timeout": "2s",
    }
    lending = {"standby": standby, "demandProfile": [0] * 24}  # lends before the forecast is calibrated
    operated.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    spec = {
        "nodeName": f"{operated.namespace}-i0",
        "hostNetwork": True,
        "containers": [{"name": "llm", "image": "none"}],
    }
    meta = {"name": "llm-0", "namespace": operated.namespace, "labels": LABELS}
    operated.cluster.create(POD, {"metadata": meta, "spec": spec})
    return operated


def phase(site: Operated) -> StandbyPhase | None:
    node = site.store.load().snapshot.nodes.get(f"{site.namespace}-i0")
    return None if node is None or node.standby is None else node.standby.phase


def standby_events(site: Operated) -> list[Event]:
    found = [stored.event for stored in site.store.list_events(Page(limit=10_000))]
    return [event for event in found if event.code is EventCode.STANDBY_CHANGED]


def find_replica(site: Operated) -> Object | None:
    return site.cluster.get_or_none(POD, "llm-0", site.namespace)


def lend(site: Operated) -> None:
    site.start_operator()
    eventually(lambda: phase(site) is StandbyPhase.AWAKE, what="the replica is known")
    site.submit("llama", 8, 16)
    eventually(lambda: site.held("llama") == 16, what="it has grown onto the lent node")


def test_replica_sleeps_while_its_node_is_lent_and_its_wake_is_measured(site: Operated, engine: SleepingEngine) -> None:
    lend(site)
    assert engine.is_sleeping
    assert engine.orders == ["POST /sleep?level=1"]
    eventually(lambda: site.most_held[f"{site.namespace}-i0"] == 8, what="a pod of the job holds the GPUs")
    replica = find_replica(site)
    site.scale_inference(1)
    eventually(lambda: not site.lent_nodes() and not engine.is_sleeping, what="the node is home and awake")
    eventually(lambda: phase(site) is StandbyPhase.AWAKE, what="it is known to be awake")
    assert engine.orders == ["POST /sleep?level=1", "POST /wake_up"]
    (wake_s,) = site.store.load().snapshot.return_times["inference"].wake_times_s
    assert 0.0 <= wake_s < 30.0
    after = find_replica(site)
    assert replica is not None
    assert after is not None
    assert uid_of(after) == uid_of(replica), "it was neither evicted nor replaced"


def test_node_whose_replica_does_not_sleep_is_not_lent(site: Operated, engine: SleepingEngine) -> None:
    engine.lies = True
    site.start_operator()
    site.submit("llama", 8, 16)
    eventually(lambda: phase(site) in (StandbyPhase.SLEEP_FAILED, StandbyPhase.AWAKE) and engine.orders, what="tried")
    eventually(lambda: any(event.cause == "sleep_failed" for event in standby_events(site)), what="the failure is told")
    eventually(lambda: not site.lent_nodes(), what="the offer is withdrawn")
    eventually(lambda: phase(site) is StandbyPhase.AWAKE, what="the replica serves on")
    assert site.held("llama") == 8
    assert find_replica(site) is not None
    node = site.store.load().snapshot.nodes[f"{site.namespace}-i0"]
    assert node.standby is not None
    assert node.standby.failure


def test_uninstallation_leaves_no_replica_asleep(site: Operated, engine: SleepingEngine) -> None:
    lend(site)
    assert engine.is_sleeping
    environment = {"EBBTIDE_KUBECONFIG": str(site.kubeconfig), "EBBTIDE_LEASE_NAMESPACE": site.lease_namespace}
    command = [sys.executable, "-m", "cli", "prepare-uninstall", "--stop-jobs", "--timeout=120"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert site.lent_nodes() == []
    assert not engine.is_sleeping or find_replica(site) is None


def test_replica_that_does_not_wake_is_replaced(site: Operated, engine: SleepingEngine) -> None:
    lend(site)
    engine.lies = True
    site.scale_inference(1)
    eventually(lambda: find_replica(site) is None, what="the replica is deleted, so that its owner starts another one")
    eventually(lambda: phase(site) is StandbyPhase.ABSENT, what="the node has no replica")
    assert [event.cause for event in standby_events(site)][-2:] == ["wake_failed", "absent"]
