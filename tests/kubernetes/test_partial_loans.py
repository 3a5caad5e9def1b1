"""Loans of a part of a node: the operator on a real API server, with serving pods that stay on the node."""

from __future__ import annotations

import pytest

from scheduler.domain.fleet import Loan, LoanState
from scheduler.kubernetes.api_objects import DEPLOYMENT, GPU_RESOURCE, LOAN, NODE, POD, POOL, Object, uid_of
from tests.kubernetes.operated import SERVING, Operated
from tests.kubernetes.waiting import eventually

INFERENCE = {"ebbtide.dev/test-pool": "inference"}
LENDABLE_GPUS = "ebbtide.dev/lendable-gpus"


@pytest.fixture
def site(operated: Operated) -> Operated:
    """A training node, and an inference node of 8 GPUs that lends 4. Each replica requests 4 GPUs."""
    operated.add_nodes(1)
    operated.add_inference(1, replicas=1)
    container = {"name": "llm", "image": "x", "resources": {"limits": {GPU_RESOURCE: "4"}}}
    template = {"metadata": {"labels": SERVING}, "spec": {"containers": [container]}}
    body = {"replicas": 1, "selector": {"matchLabels": SERVING}, "template": template}
    meta = {"name": "llm", "namespace": operated.namespace, "labels": SERVING}
    operated.cluster.apply(DEPLOYMENT, {"metadata": meta, "spec": body})
    lending = {"demandProfile": [0] * 24}  # lends before the forecast is calibrated
    operated.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    operated.cluster.patch(NODE, node_name(operated), change={"metadata": {"labels": {LENDABLE_GPUS: "4"}}})
    return operated


def node_name(site: Operated) -> str:
    return f"{site.namespace}-i0"


def add_replica(site: Operated, name: str, gpus: int, *, bound: bool) -> Object:
    """Create a serving pod: bound to the node, or one for which the Kubernetes scheduler found no GPUs."""
    container = {"name": "llm", "image": "none", "resources": {"limits": {GPU_RESOURCE: str(gpus)}}}
    spec = {"nodeSelector": INFERENCE, "containers": [container]}
    if bound:
        spec["nodeName"] = node_name(site)
    meta = {"name": name, "namespace": site.namespace, "labels": SERVING}
    created = site.cluster.create(POD, {"metadata": meta, "spec": spec})
    if not bound:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        change = {"status": {"conditions": [condition]}}
        site.cluster.patch(POD, name, site.namespace, change=change, subresource="status")
    return created


def find_loan(site: Operated) -> Loan | None:
    return site.store.load().snapshot.loans.get(node_name(site))


def lend_part(site: Operated) -> Loan:
    site.start_operator()
    site.submit("llama", 8, 16)
    eventually(lambda: site.held("llama") == 12, what="it has grown onto the lent GPUs")
    loan = find_loan(site)
    assert loan is not None
    return loan


def test_part_of_a_node_is_lent_while_a_pod_serves_on_it(site: Operated) -> None:
    serving = add_replica(site, "llm-0", 4, bound=True)
    loan = lend_part(site)
    assert (loan.state, loan.gpus, loan.indices) == (LoanState.ACTIVE, 4, (4, 5, 6, 7))
    assert site.lent_nodes() == [], "no taint keeps pods of inference off"
    assert site.cluster.get(LOAN, loan.id)["status"]["gpus"] == 4
    staying = site.cluster.get(POD, "llm-0", site.namespace)
    assert uid_of(staying) == uid_of(serving)
    assert "deletionTimestamp" not in staying["metadata"], "it was not evicted"
    eventually(lambda: site.most_held[node_name(site)] == 8, what="a pod of the job holds the other GPUs")


def test_pod_of_inference_that_finds_no_gpus_gets_those_of_the_loan(site: Operated) -> None:
    add_replica(site, "llm-0", 4, bound=True)
    first = lend_part(site)
    add_replica(site, "llm-1", 4, bound=False)
    eventually(lambda: site.held("llama") == 8 and find_loan(site) is None, what="the loan is returned")
    eventually(lambda: len({pod["spec"]["nodeName"] for pod in site.pods()}) == 1, what="the job's pod has left")
    passes = {site.store.load().snapshot.full_pass_at_s}
    eventually(lambda: len(passes | {site.store.load().snapshot.full_pass_at_s}) > 1, what="one more full pass")
    assert find_loan(site) is None, "the pod still waits for these GPUs"
    assert any(loan.id == first.id for loan in site.store.list_ended_loans(limit=10))
    assert site.most_held[node_name(site)] <= 8


def test_node_is_not_lent_while_serving_pods_use_its_lendable_gpus(site: Operated) -> None:
    add_replica(site, "llm-0", 6, bound=True)
    site.start_operator()
    site.submit("llama", 8, 16)
    site.until_phase("llama", "Running")

    def is_known() -> bool:
        node = site.store.load().snapshot.nodes.get(node_name(site))
        return node is not None and node.inference_gpus == 6

    eventually(is_known, what="the serving pod is known")
    before_s = site.store.load().snapshot.full_pass_at_s
    eventually(lambda: site.store.load().snapshot.full_pass_at_s >= before_s + 4.0, what="two more full passes")
    assert find_loan(site) is None
    assert site.held("llama") == 8


def test_label_that_is_not_valid_keeps_the_node_from_being_lent(site: Operated) -> None:
    site.cluster.patch(NODE, node_name(site), change={"metadata": {"labels": {LENDABLE_GPUS: "8"}}})
    site.start_operator()

    def usable() -> dict[str, str]:
        conditions = site.cluster.get(POOL, "inference").get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == "NodesUsable"), {})

    eventually(lambda: usable().get("reason") == "LendableGpusInvalid", what="the pool names the label")
    assert node_name(site) in usable()["message"]
    assert not site.store.load().snapshot.nodes[node_name(site)].lendable
