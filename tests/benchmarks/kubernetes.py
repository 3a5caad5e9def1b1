"""Jobs on a real Kubernetes API server: time to bind a gang, cost of a tick at 1,000 nodes, load of an idle operator.

etcd and kube-apiserver (KUBEBUILDER_ASSETS) run on the same cores as the operator and the fake kubelet, so the
measurements include their work.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from scheduler.domain.commands import ReportDemand, SubmitJob
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.kubernetes.api_objects import ELASTIC_JOB, JOB_LABEL, POD, is_terminating
from scheduler.kubernetes.client import DELETED, KubernetesClient, connect
from scheduler.kubernetes.flow_control import ClientLimits
from scheduler.runtime.reconciler import tick
from scheduler.settings import Settings
from tests.kubernetes import custom_resources
from tests.kubernetes.control_plane import ASSETS, ControlPlane, missing_binaries
from tests.kubernetes.fake_agents import FakeAgents
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.objects import NAMESPACE
from tests.kubernetes.operated import Operated
from tests.kubernetes.site import Site
from tests.kubernetes.sweeping import sweep
from tests.kubernetes.waiting import eventually

GANG_PODS, GANGS_APPLIED = 8, 7
NODES, SMALL_JOBS, GANGS = 1000, 950, 50
TENANT, OTHER_GPU, RECALL_AFTER_TICKS = "tenant", "a100-80g", 2
REST_S = 30.0
KUBELET_START_S = 5.0
HANDOVERS = 3
UNHURRIED = ClientLimits(qps=2000.0, burst=2000)

Row = tuple[str, str, str]


def rows() -> Iterator[Row]:
    if missing := missing_binaries():
        yield "Kubernetes", "", f"not measured: no {' and no '.join(missing)} in {ASSETS}"
        return
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder))
        plane.start()
        cluster = connect(plane.admin_kubeconfig, limits=UNHURRIED)
        try:
            custom_resources.install(cluster)
            yield from _gang_rows(plane, cluster, Path(folder))
            yield from _failover_rows(plane, cluster, Path(folder))
            yield from _large_cluster_rows(plane, cluster, Path(folder))
        finally:
            cluster.close()
            plane.close()


def _gang_rows(plane: ControlPlane, cluster: KubernetesClient, folder: Path) -> Iterator[Row]:
    kubelet = FakeKubelet(cluster)
    kubelet.start()
    operated = Operated(plane, cluster, kubelet, _namespace(cluster), _folder(folder, "gang"))
    try:
        operated.add_nodes(GANG_PODS)
        operated.start_operator()
        eventually(lambda: len(operated.store.load().snapshot.nodes) == GANG_PODS, what="the nodes are known")
        times_s = [_measure_binding_s(operated, f"gang-{number}") for number in range(GANGS_APPLIED)]
    finally:
        operated.close()
        kubelet.close()
        sweep(cluster)
    each = ", ".join(f"{seconds:.2f}" for seconds in times_s)
    told = f"median {statistics.median(times_s):.2f}, worst {max(times_s):.2f} s ({each})"
    yield f"apply to all {GANG_PODS} pods bound, quiet cluster", "under 3 s", told


def _measure_binding_s(operated: Operated, name: str) -> float:
    """Return the seconds from the response to `apply`. Deletes the job."""
    operated.submit(name, 8 * GANG_PODS, 8 * GANG_PODS)
    began_s = time.monotonic()
    eventually(lambda: sum("nodeName" in pod["spec"] for pod in operated.pods()) == GANG_PODS, what="all are bound")
    seconds = time.monotonic() - began_s
    operated.cluster.delete(ELASTIC_JOB, name, operated.namespace)
    eventually(lambda: operated.cluster.get_or_none(ELASTIC_JOB, name, operated.namespace) is None, what="it is gone")
    eventually(lambda: not operated.pods(), what="its pods are gone")
    return seconds


def _failover_rows(plane: ControlPlane, cluster: KubernetesClient, folder: Path) -> Iterator[Row]:
    """Fail over to a standby operator after SIGKILL and after SIGTERM, then recall a lent node."""
    kubelet = FakeKubelet(cluster)
    kubelet.start()
    operated = Operated(plane, cluster, kubelet, _namespace(cluster), _folder(folder, "handover"))
    try:
        operated.add_nodes(1)
        operated.add_inference(2, replicas=0)
        killed = [_measure_takeover_s(operated, signal.SIGKILL) for _ in range(HANDOVERS)]
        asked = [_measure_takeover_s(operated, signal.SIGTERM) for _ in range(HANDOVERS)]
        recalled = [_measure_return_s(operated, f"tenant-{number}") for number in range(HANDOVERS)]
    finally:
        operated.close()
        kubelet.close()
        sweep(cluster)
    yield "second operator leads after SIGKILL of the first", "15 s", _format_times(killed)
    yield "the same after SIGTERM", "at once", _format_times(asked)
    what = "demand rises to lent node free of pods and taint, ranks that save at once"
    yield what, "save + 5 s", _format_times(recalled)


def _format_times(times_s: list[float]) -> str:
    each = ", ".join(f"{seconds:.1f}" for seconds in times_s)
    return f"median {statistics.median(times_s):.1f}, worst {max(times_s):.1f} s ({each})"


def _measure_takeover_s(operated: Operated, number: signal.Signals) -> float:
    """Return the seconds from the signal until another leader's epoch is in the store."""
    while len(operated.operators) < 2:
        operated.start_operator()
    first = operated.leader()
    eventually(lambda: len(operated.waiting_operators()) >= 1, what="another one waits")
    time.sleep(5.0)
    epoch = operated.epoch()
    began_s = time.monotonic()
    first.send_signal(number)
    eventually(lambda: operated.leads_since(epoch), what="another one leads")
    seconds = time.monotonic() - began_s
    first.wait()
    operated.operators.remove(first)
    return seconds


def _measure_return_s(operated: Operated, name: str) -> float:
    if not operated.operators:
        operated.start_operator()
    operated.scale_inference(0)
    operated.submit(name, 8, 16)
    eventually(lambda: operated.held(name) == 16, what="it has grown onto a lent node", timeout_s=180.0)
    began_s = time.monotonic()
    operated.scale_inference(2)
    eventually(lambda: not operated.lent_nodes(), what="the node is home", timeout_s=180.0)
    seconds = time.monotonic() - began_s
    operated.cluster.delete(ELASTIC_JOB, name, operated.namespace)
    eventually(lambda: operated.find(name) is None, what="it is gone", timeout_s=120.0)
    return seconds


def _large_cluster_rows(plane: ControlPlane, cluster: KubernetesClient, folder: Path) -> Iterator[Row]:
    """Start gangs on a busy cluster with the shipped limits of requests, and recall a lent node meanwhile."""
    settings = Settings()
    limits = ClientLimits(qps=settings.kubernetes_qps, burst=settings.kubernetes_burst)
    shipped = connect(plane.admin_kubeconfig, limits=limits)
    kubelet = FakeKubelet(cluster, lease_period_s=600.0)
    kubelet.start()
    site = Site(shipped, kubelet, _namespace(cluster), _folder(folder, "big"))
    _fill(site)
    kubelet.close_quietly()
    with _kubelet_process(plane.admin_kubeconfig, site):
        ticks_s, bulk_s, recall_s = _start_gangs(site)
    kubelet = FakeKubelet(cluster, lease_period_s=600.0)
    kubelet.adopt_nodes(site.snapshot.nodes)
    site.agents = FakeAgents(kubelet, site.store.run_log)
    kubelet.start()
    what = f"{GANGS} gangs of {GANG_PODS} pods bound beside {SMALL_JOBS} jobs on {NODES:,} nodes"
    yield f"{what}, {limits.qps:.0f} requests/s", "under 10 s", f"{bulk_s:.1f} s in {len(ticks_s)} ticks"
    told = f"median {statistics.median(ticks_s):.2f}, worst {max(ticks_s):.2f} s"
    yield "tick meanwhile", "under 2 s", told
    yield "recall meanwhile, command to deletion of the first pod on the lent node", "0.5 s", f"{recall_s:.2f} s"
    site.until(lambda: _running(site) == SMALL_JOBS + GANGS, what="all jobs run", timeout_s=300.0)
    site.store.release_lease("site")
    site.close()
    shipped.close()
    kubelet.close_quietly()
    yield from _idle_rows(plane, cluster, kubelet, folder / "big", site.namespace)


def _fill(site: Site) -> None:
    """Start the small jobs, and one job that can only run on a lent node."""
    site.add_pools(training=NODES, inference=0, lending=LendingPolicy(headroom=0.0, cold_start_s=0.0))
    for number in range(2):
        site.add_node(f"{site.namespace}-lent-{number}", "inference", gpu=OTHER_GPU)
    site.send(ReportDemand("inference", 0.0))
    _submit(site, TENANT, 8, gpu=OTHER_GPU)
    for number in range(SMALL_JOBS):
        _submit(site, f"small-{number}", 4)
    site.until(lambda: _running(site) == SMALL_JOBS + 1, what="all small jobs run", timeout_s=900.0)


@contextmanager
def _kubelet_process(kubeconfig: Path, site: Site) -> Iterator[None]:
    """Run the kubelets of all nodes in a process of their own, so that their work does not slow the ticks down."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve_nodes, args=(kubeconfig, sorted(site.snapshot.nodes)), daemon=True)
    process.start()
    time.sleep(KUBELET_START_S)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _serve_nodes(kubeconfig: Path, nodes: list[str]) -> None:
    kubelet = FakeKubelet(connect(kubeconfig, limits=UNHURRIED), lease_period_s=600.0)
    kubelet.adopt_nodes(nodes)
    kubelet.start()
    threading.Event().wait()


def _count_bound(site: Site) -> int:
    return sum(pod.is_ours and bool(pod.node) for pod in site.mirrors.get_view().pods)


def _start_gangs(site: Site) -> tuple[list[float], float, float]:
    """Return the seconds of each tick, until all pods of the gangs are bound, and until the recall deletes a pod."""
    ticks_s, recalled_at_s, deletion = list[float](), 0.0, _FirstDeletion(site)
    for number in range(GANGS):
        _submit(site, f"gang-{number}", 8 * GANG_PODS)
    began_s = time.monotonic()
    while _count_bound(site) < SMALL_JOBS + GANGS * GANG_PODS:
        if len(ticks_s) == RECALL_AFTER_TICKS:
            site.send(ReportDemand("inference", 16.0))
            recalled_at_s = time.monotonic()
        tick_began_s = time.monotonic()
        tick(site.store, site.executor, site.clock, site.policies, epoch=site.epoch)
        ticks_s.append(time.monotonic() - tick_began_s)
    return ticks_s, time.monotonic() - began_s, deletion.wait_for_s() - recalled_at_s


class _FirstDeletion:
    """Watch for the first deletion of a pod of the tenant."""

    def __init__(self, site: Site) -> None:
        version = site.cluster.list(POD, namespace=site.namespace).resource_version
        self._stream = site.cluster.watch(
            POD, resource_version=version, namespace=site.namespace, label_selector=f"{JOB_LABEL}={TENANT}"
        )
        self._seen_at_s = math.inf
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wait_for_s(self) -> float:
        """Return when the deletion was seen, on the monotonic clock."""
        self._thread.join(timeout=60.0)
        self._stream.close()
        return self._seen_at_s

    def _watch(self) -> None:
        for event in self._stream:
            if event.type == DELETED or is_terminating(event.object):
                self._seen_at_s = time.monotonic()
                return


def _idle_rows(
    plane: ControlPlane, cluster: KubernetesClient, kubelet: FakeKubelet, folder: Path, namespace: str
) -> Iterator[Row]:
    """Measure an operator that takes over running jobs and is then idle."""
    operated = Operated(
        plane, cluster, kubelet, namespace, folder, url=f"sqlite:///{folder}/site.sqlite", has_agents=False
    )
    operator = operated.start_operator()
    eventually(
        lambda: len(cluster.list(ELASTIC_JOB).items) == SMALL_JOBS + GANGS + 1, what="all are told of", timeout_s=300.0
    )
    time.sleep(60.0)
    before = _requests(plane)
    time.sleep(REST_S)
    per_s = (_requests(plane) - before) / REST_S
    memory_mib = psutil.Process(operator.pid).memory_info().rss / 2**20
    operated.close()
    yield (
        f"requests to the API server at rest, {NODES:,} nodes, {SMALL_JOBS + GANGS:,} jobs",
        "50 a second",
        f"{per_s:.1f}",
    )
    yield "memory of the operator there", "400 MiB", f"{memory_mib:.0f} MiB"


def _requests(plane: ControlPlane) -> float:
    """Return the number of requests that the API server has answered, including its own."""
    asked = ["kubectl", f"--kubeconfig={plane.admin_kubeconfig}", "get", "--raw", "/metrics"]
    text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return sum(float(count) for count in re.findall(r"^apiserver_request_total\{.*\} (\S+)$", text, re.MULTILINE))


def _submit(site: Site, job_id: str, gpus: int, *, gpu: str = "") -> None:
    spec = JobSpec(
        job_id, gpus, gpus, gpu=gpu, steps=10**9, command=("python", "train.py"), on_resize=OnResize.CHECKPOINT
    )
    site.send(SubmitJob(job_id, spec))


def _running(site: Site) -> int:
    return sum(job.state is JobState.RUNNING for job in site.snapshot.jobs.values())


def _namespace(cluster: KubernetesClient) -> str:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    cluster.create(NAMESPACE, {"metadata": {"name": name}})
    return name


def _folder(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made
