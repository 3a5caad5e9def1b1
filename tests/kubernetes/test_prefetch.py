"""Images and weights that are loaded onto nodes before they change hands: the operator and a real API server.

The tests play the kubelet, which pulls images, and the Kubernetes scheduler, which binds pods of templates.
"""

from __future__ import annotations

import pytest

from scheduler.domain.events import EventCode
from scheduler.kubernetes.api_objects import (
    GPU_RESOURCE,
    POD,
    POD_TEMPLATE,
    POOL,
    PREFETCH_LABEL,
    Object,
    annotations_of,
    labels_of,
    name_of,
)
from scheduler.store.protocol import Page
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

IMAGE = "registry.example.com/llm:1"


class PlayedKubelet:
    """Pulls the images of prefetches, or fails to. The container of a pulled image does not start.

    `pods` are the pods of prefetches that nodes have admitted.
    """

    def __init__(self, site: Operated) -> None:
        self.pods: list[Object] = []
        self.pulls = True
        self._site = site
        site.kubelet.on_start = self._start
        site.kubelet.waiting_reason = self._find_waiting_reason

    def list_images(self, purpose: str) -> set[str]:
        pods = [pod for pod in self.pods if labels_of(pod)[PREFETCH_LABEL] == purpose]
        return {container["image"] for pod in pods for container in pod["spec"]["containers"]}

    def _start(self, pod: Object) -> None:
        if PREFETCH_LABEL in labels_of(pod):
            self.pods.append(pod)
            self._site.kubelet.finish(pod, 128)

    def _find_waiting_reason(self, pod: Object) -> str:
        is_pulling = PREFETCH_LABEL in labels_of(pod) and not self.pulls
        return "ErrImagePull" if is_pulling else ""


@pytest.fixture
def site(operated: Operated) -> Operated:
    """A training node and two inference nodes, one of which runs a replica and stays."""
    operated.add_nodes(1)
    operated.add_inference(2, replicas=0)
    lending = {"minKeptNodes": 1, "demandProfile": [0] * 24, "prefetch": {"timeout": "60s"}}
    operated.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    container = {"name": "llm", "image": IMAGE, "resources": {"limits": {GPU_RESOURCE: "8"}}}
    spec = {"nodeName": f"{operated.namespace}-i1", "containers": [container], "imagePullSecrets": [{"name": "pull"}]}
    meta = {"name": "llm-0", "namespace": operated.namespace}
    operated.cluster.create(POD, {"metadata": meta, "spec": spec})
    return operated


@pytest.fixture
def played(site: Operated) -> PlayedKubelet:
    return PlayedKubelet(site)


def list_prefetch_pods(site: Operated) -> list[Object]:
    return list(site.cluster.list(POD, label_selector=PREFETCH_LABEL).items)


def list_ends(site: Operated) -> list[tuple[EventCode, str]]:
    """Return code and purpose of the ended prefetches."""
    events = [stored.event for stored in site.store.list_events(Page(limit=10_000))]
    codes = (EventCode.NODE_PREFETCHED, EventCode.PREFETCH_FAILED)
    return [(event.code, event.cause) for event in events if event.code in codes]


def lend(site: Operated) -> None:
    site.start_operator()
    site.submit("llama", 8, 16)
    eventually(lambda: site.held("llama") == 16, what="it has grown onto the lent node")


def test_images_are_pulled_before_the_loan_and_before_the_return(site: Operated, played: PlayedKubelet) -> None:
    lend(site)
    eventually(lambda: (EventCode.NODE_PREFETCHED, "training") in list_ends(site), what="the images of jobs are there")
    assert len(played.list_images("training")) == 2, "that of the job and that of the agent"
    site.scale_inference(2)
    eventually(lambda: (EventCode.NODE_PREFETCHED, "serving") in list_ends(site), what="the replica's image is there")
    assert played.list_images("serving") == {IMAGE}
    eventually(lambda: not site.lent_nodes(), what="the node is home")
    eventually(lambda: not list_prefetch_pods(site), what="nothing is left of the prefetches")
    assert {annotations_of(pod)["ebbtide.dev/node"] for pod in played.pods} == {f"{site.namespace}-i0"}
    assert all(code is EventCode.NODE_PREFETCHED for code, _ in list_ends(site))


def test_failed_pull_delays_neither_the_loan_nor_the_return(site: Operated, played: PlayedKubelet) -> None:
    played.pulls = False
    lend(site)
    site.scale_inference(2)
    eventually(lambda: len(list_prefetch_pods(site)) == 2, what="a pull began for the return")
    eventually(lambda: not site.lent_nodes(), what="the node is home")
    assert played.pods == []
    assert list_ends(site) == []
    ended = {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active longer than its deadline"}
    for pod in list_prefetch_pods(site):
        site.cluster.patch_status(POD, name_of(pod), site.namespace, change={"status": ended})
    eventually(lambda: not list_prefetch_pods(site), what="the pods are removed")
    assert sorted(list_ends(site), key=str) == [
        (EventCode.PREFETCH_FAILED, "serving"),
        (EventCode.PREFETCH_FAILED, "training"),
    ]


def test_weights_are_loaded_while_training_leaves(site: Operated, played: PlayedKubelet) -> None:
    template = {"spec": {"containers": [{"name": "pull", "image": IMAGE, "command": ["pull-weights"]}]}}
    meta = {"name": "weights", "namespace": site.namespace}
    site.cluster.create(POD_TEMPLATE, {"metadata": meta, "template": template})
    weights = {"namespace": site.namespace, "podTemplate": "weights"}
    lending = {"prefetch": {"images": False, "weights": weights}}
    site.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    lend(site)
    assert list_prefetch_pods(site) == []
    site.scale_inference(2)
    eventually(lambda: list_prefetch_pods(site), what="the pod of the template exists")
    for pod in list_prefetch_pods(site):
        site.cluster.bind(pod, f"{site.namespace}-i0")
    eventually(lambda: played.pods, what="it runs")
    eventually(lambda: not site.lent_nodes(), what="the node is home")
    eventually(lambda: not list_prefetch_pods(site), what="the pod is removed")
    assert list_ends(site) == [(EventCode.PREFETCH_FAILED, "weights")], "it ended with exit code 128"


def test_missing_template_is_reported_and_delays_nothing(site: Operated, played: PlayedKubelet) -> None:
    weights = {"namespace": site.namespace, "podTemplate": "missing"}
    lending = {"prefetch": {"images": False, "weights": weights}}
    site.cluster.patch(POOL, "inference", change={"spec": {"lending": lending}})
    lend(site)
    site.scale_inference(2)
    eventually(lambda: not site.lent_nodes(), what="the node is home")
    eventually(lambda: list_ends(site) == [(EventCode.PREFETCH_FAILED, "weights")], what="the failure is reported")
