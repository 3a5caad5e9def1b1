"""Twenty jobs on eight nodes with injected faults: all complete and no GPU is allocated twice."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from scheduler.kubernetes.api_error import ApiError
from scheduler.kubernetes.api_objects import (
    ELASTIC_JOB,
    GPU_RESOURCE,
    JOB_LABEL,
    LOAN_LABEL,
    LOANED_TAINT_KEY,
    NODE,
    POD,
    Object,
    labels_of,
    name_of,
    uid_of,
)
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.crowd import ALL_DONE_S, delete_all, phases, submit_all, wait_for_all
from tests.kubernetes.fault_proxy import FAULTLESS, Fault, FaultProxy
from tests.kubernetes.objects import build_pod
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

JOBS, NODES = 20, 8
FAULTS = (Fault(409), Fault(429), Fault(500), Fault(503), Fault(swallow=True), Fault(delay_s=1.5))
FOREIGN_FINALIZER = "example.com/keep"
ON_ITS_WAY_S = 1.0
"""Writes that a process had passed to its socket before it was stopped still arrive after it is woken."""

seeds = pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane).running() as started:
        yield started


@pytest.fixture
def other_proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane).running() as started:
        yield started


@pytest.fixture
def stormy(operated: Operated) -> Operated:
    operated.add_nodes(NODES)
    operated.agents.steps = 20
    return operated


def settle(operated: Operated) -> None:
    wait_for_all(operated, JOBS)
    delete_all(operated)
    assert all(process.poll() is None for process in operated.operators), "no operator has crashed"


def running_pods(operated: Operated) -> list[Object]:
    return [pod for pod in operated.pods() if pod["status"].get("phase") == "Running"]


def is_write(method: str, path: str) -> bool:
    return method != "GET" and "/leases" not in path


@seeds
def test_lost_and_late_responses_lose_nothing(stormy: Operated, proxy: FaultProxy, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    met: set[Fault] = set()

    def fault(method: str, path: str) -> Fault:
        chosen = rng.choice(FAULTS) if rng.random() < 0.2 else FAULTLESS
        met.add(chosen)
        return chosen

    proxy.fault = fault
    stormy.start_operator(proxy.kubeconfig(tmp_path))
    submit_all(stormy, JOBS, seed)
    settle(stormy)
    assert met == {FAULTLESS, *FAULTS}


def test_silent_watches_are_replaced(stormy: Operated, proxy: FaultProxy, tmp_path: Path) -> None:
    stormy.start_operator(proxy.kubeconfig(tmp_path))
    submit_all(stormy, JOBS, seed=1)
    eventually(lambda: running_pods(stormy), what="pods run")
    proxy.is_mute = True
    stormy.submit("unheard", 1, 1)
    time.sleep(2.0)
    proxy.is_mute = False
    eventually(lambda: stormy.phase("unheard") == "Succeeded", what="what was not heard is found out")
    stormy.cluster.delete(ELASTIC_JOB, "unheard", stormy.namespace)
    settle(stormy)


@seeds
def test_expired_history_is_listed_again(stormy: Operated, control_plane: ControlPlane, seed: int) -> None:
    rng = Random(seed)
    stormy.start_operator()
    submit_all(stormy, JOBS, seed)
    time.sleep(rng.uniform(1.0, 8.0))
    control_plane.forget_past()
    settle(stormy)


def keep(stormy: Operated, pod: Object) -> bool:
    """Add a foreign finalizer to the pod, unless it is already terminating."""
    change = {"metadata": {"finalizers": [FOREIGN_FINALIZER]}}
    try:
        stormy.cluster.patch(POD, name_of(pod), stormy.namespace, change=change)
    except ApiError as refused:
        if not (refused.is_invalid or refused.is_not_found):
            raise
        return False
    return True


@seeds
def test_foreign_deletions_of_pods_are_repaired(stormy: Operated, seed: int) -> None:
    """By eviction and by deletion with and without grace period; some pods are held by finalizers."""
    rng = Random(seed)
    stormy.start_operator()
    submit_all(stormy, JOBS, seed)
    kept: list[str] = []
    for number in range(12):
        pods = eventually(lambda: running_pods(stormy), what="pods run")
        pod = rng.choice(pods)
        if number % 4 == 3 and keep(stormy, pod):
            kept.append(name_of(pod))
        if number % 2:
            stormy.cluster.delete(
                POD, name_of(pod), stormy.namespace, uid=uid_of(pod), grace_period_s=rng.choice((0, 5))
            )
        else:
            stormy.cluster.evict(pod)
        time.sleep(rng.uniform(0.2, 1.0))
    eventually(lambda: phases(stormy).count("Succeeded") == JOBS, what="all jobs have succeeded", timeout_s=ALL_DONE_S)
    for name in {name_of(pod) for pod in stormy.pods()} & set(kept):
        stormy.cluster.patch(POD, name, stormy.namespace, change={"metadata": {"finalizers": None}})
    settle(stormy)


def test_faster_foreign_pod_keeps_its_gpus(stormy: Operated, proxy: FaultProxy, tmp_path: Path) -> None:
    """Foreign pods land on two nodes after these were decided for jobs and before any pod is bound there."""
    taken: list[str] = []

    def take_nodes(method: str, path: str) -> Fault:
        if method != "POST" or not path.partition("?")[0].endswith("/pods") or taken:
            return FAULTLESS
        for number in range(2):
            taken.append(f"{stormy.namespace}-t{number}")
            other = build_pod(f"other-{number}", stormy.namespace)
            other["spec"]["nodeName"] = taken[-1]
            other["spec"]["containers"][0]["resources"] = {"limits": {GPU_RESOURCE: "8"}}
            stormy.cluster.create(POD, other)
        return Fault(delay_s=0.5)

    proxy.fault = take_nodes
    stormy.start_operator(proxy.kubeconfig(tmp_path))
    submit_all(stormy, JOBS, seed=1)
    wait_for_all(stormy, JOBS)
    assert taken
    others = [stormy.cluster.get(POD, f"other-{number}", stormy.namespace) for number in range(2)]
    assert all(pod["status"]["phase"] == "Running" for pod in others)
    settle(stormy)


def test_removed_taints_and_labels_are_restored(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.add_inference(2, replicas=0)
    operated.start_operator()
    operated.submit("llama", 8, 16)
    eventually(lambda: operated.held("llama") == 16, what="it has grown onto a lent node")
    name = operated.lent_nodes()[0]  # another one may be lent in reserve
    before = operated.cluster.get(NODE, name)
    unlabelled = {LOAN_LABEL: None}
    for change in ({"spec": {"taints": None}}, {"metadata": {"labels": unlabelled}}):
        operated.cluster.patch(NODE, name, change=change)
        eventually(lambda: _has_marks_of(before, operated.cluster.get(NODE, name)), what="taint and label are back")
    operated.scale_inference(2)
    operated.cluster.patch(NODE, name, change={"metadata": {"labels": unlabelled}})
    eventually(lambda: not operated.lent_nodes(), what="the node is home")
    operated.agents.finish(operated.job("llama")["metadata"]["labels"][JOB_LABEL])
    operated.until_phase("llama", "Succeeded")
    delete_all(operated)


def _has_marks_of(before: Object, now: Object) -> bool:
    taint = next(taint for taint in before["spec"]["taints"] if taint["key"] == LOANED_TAINT_KEY)
    return taint in now["spec"].get("taints", ()) and labels_of(now) == labels_of(before)


def test_resource_with_foreign_finalizer_is_not_submitted_again(operated: Operated) -> None:
    operated.add_nodes(1)
    operated.start_operator()
    operated.submit("llama", 8, 8)
    operated.until_phase("llama", "Running")
    finalizers = operated.job("llama")["metadata"]["finalizers"]
    change = {"metadata": {"finalizers": [*finalizers, FOREIGN_FINALIZER]}}
    operated.cluster.patch(ELASTIC_JOB, "llama", operated.namespace, change=change)
    operated.cluster.delete(ELASTIC_JOB, "llama", operated.namespace)
    eventually(lambda: operated.job("llama")["metadata"]["finalizers"] == [FOREIGN_FINALIZER], what="ours is gone")
    operated.submit("next", 8, 8)
    operated.until_phase("next", "Running")
    assert {pod["metadata"]["ownerReferences"][0]["name"] for pod in operated.pods()} == {"next"}
    operated.cluster.patch(ELASTIC_JOB, "llama", operated.namespace, change={"metadata": {"finalizers": None}})
    assert operated.find("llama") is None


@seeds
def test_paused_leader_is_fenced(
    stormy: Operated, proxy: FaultProxy, other_proxy: FaultProxy, tmp_path: Path, seed: int
) -> None:
    """Each of two leaders in turn is stopped during a write, until the other one leads and has written."""
    rng = Random(seed)
    sides: list[tuple[subprocess.Popen[bytes], FaultProxy]] = []
    for number, each in enumerate((proxy, other_proxy)):
        folder = tmp_path / f"proxy-{number}"
        folder.mkdir()
        sides.append((stormy.start_operator(each.kubeconfig(folder)), each))
    leader = stormy.leader()
    sides.sort(key=lambda side: side[0] is not leader)
    submit_all(stormy, JOBS, seed)
    for process, its_proxy in sides:
        stopped = _Stopped(process, its_proxy, after=rng.randrange(1, 12))
        epoch = stormy.epoch()
        eventually(stopped.is_caught, what="the leader writes, and is stopped")
        eventually(partial(stormy.leads_since, epoch), what="the other leads")
        assert stormy.leader() is not process
        stopped.wake()
        time.sleep(3.0)
        assert stopped.written_since() == []
    settle(stormy)


class _Stopped:
    """Stops the process at its n-th change or a later one. The change gets status 503 after the process is woken."""

    def __init__(self, process: subprocess.Popen[bytes], proxy: FaultProxy, *, after: int) -> None:
        self._caught = threading.Event()
        self._process = process
        self._left = after
        self._woken_at_s = float("inf")
        self._held = ""
        self._late: list[tuple[float, str]] = []
        proxy.fault = self._fault

    def is_caught(self) -> bool:
        return self._caught.is_set()

    def wake(self) -> None:
        self._woken_at_s = time.monotonic()
        self._process.send_signal(signal.SIGCONT)

    def written_since(self) -> list[str]:
        """Return writes since the process was woken: the failed one repeated, or any that was not in flight."""
        late = [(at_s - self._woken_at_s, what) for at_s, what in self._late if at_s > self._woken_at_s]
        return [what for after_s, what in late if after_s > ON_ITS_WAY_S or what == self._held]

    def _fault(self, method: str, path: str) -> Fault:
        if not is_write(method, path):
            return FAULTLESS
        self._late.append((time.monotonic(), f"{method} {path}"))
        self._left -= 1
        # Only changes name their object. Creations of one kind share a path and would look like the same write.
        if self._left > 0 or method != "PATCH" or self.is_caught():
            return FAULTLESS
        self._process.send_signal(signal.SIGSTOP)
        self._held = f"{method} {path}"
        self._caught.set()
        while self._woken_at_s == float("inf"):
            time.sleep(0.05)
        return Fault(503)
