"""Wrong manifests: each is refused by `kubectl apply`, or reported by a condition within two ticks."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.composition.kubernetes_operator import build_operator
from scheduler.kubernetes.api_objects import ELASTIC_JOB, GPU_PROFILE, POOL, QUEUE
from scheduler.kubernetes.client import connect
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore
from scheduler.telemetry.metrics import REGISTRY
from tests.kubernetes.conftest import UNHURRIED
from tests.kubernetes.control_plane import ASSETS, ControlPlane
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.objects import NAMESPACE
from tests.kubernetes.operated import Operated
from tests.kubernetes.sweeping import sweep
from tests.kubernetes.waiting import PATIENCE_S, PAUSE_S, eventually
from tests.kubernetes.wrong_manifests import CASES, Case

TICKS_MAX = 2
EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"


class Applied:
    """A cluster with an operator in this process, whose ticks are counted, and `kubectl apply`."""

    def __init__(self, plane: ControlPlane, operated: Operated) -> None:
        self.operated = operated
        self.kubectl = shutil.which("kubectl", path=str(ASSETS)) or shutil.which("kubectl") or ""
        if not self.kubectl:
            pytest.skip(f"no kubectl in {ASSETS} or on the path")
        self.kubeconfig = plane.admin_kubeconfig
        self.store = SqlStore(operated.url)
        settings = Settings(
            database_url=operated.url,
            kubeconfig=plane.admin_kubeconfig,
            job_namespace=operated.namespace,
            lease_namespace=operated.namespace,
            run_dir=operated.folder / "run",
            full_pass_period_s=2.0,
        )
        self._stop = threading.Event()
        operator = build_operator(settings, self.store)
        self._thread = threading.Thread(target=operator.run, args=(self._stop,), name="operator")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.store.close()

    def apply(self, manifest: Mapping[str, Any]) -> str:
        """Apply like a user, and return what the command prints if it fails."""
        command = [self.kubectl, "--kubeconfig", str(self.kubeconfig), "apply", "-f", "-"]
        done = subprocess.run(command, input=json.dumps(manifest), capture_output=True, text=True, timeout=60)
        return done.stderr if done.returncode else ""

    def delete(self, case: Case, name: str) -> None:
        self.operated.cluster.delete(case.kind, name, self.operated.namespace if case.kind.is_namespaced else "")

    def find_conditions(self, case: Case, name: str) -> list[dict[str, Any]]:
        found = self.operated.cluster.get(case.kind, name, self.operated.namespace if case.kind.is_namespaced else "")
        return list(found.get("status", {}).get("conditions", []))


def count_ticks() -> int:
    return int(REGISTRY.get_sample_value("ebbtide_tick_duration_seconds_count", {"stage": "decide"}) or 0)


@pytest.fixture(scope="module")
def applied(
    control_plane: ControlPlane, definitions: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Applied]:
    """Yield a cluster with two nodes of eight GPUs and queue `research`."""
    cluster = connect(control_plane.admin_kubeconfig, limits=UNHURRIED)
    kubelet = FakeKubelet(cluster)
    kubelet.start()
    namespace = f"wrong-{uuid.uuid4().hex[:8]}"  # xdist may create this fixture twice on one control plane
    cluster.create(NAMESPACE, {"metadata": {"name": namespace}})
    operated = Operated(
        control_plane, cluster, kubelet, namespace, tmp_path_factory.mktemp("operator"), has_agents=False
    )
    created = Applied(control_plane, operated)
    operated.add_nodes(2)
    cluster.apply(QUEUE, {"metadata": {"name": "research"}, "spec": {}})
    eventually(lambda: len(created.store.load().snapshot.nodes) == 2, what="the nodes are known")
    eventually(lambda: "research" in created.store.load().snapshot.queues, what="the queue is known")
    yield created
    created.close()
    operated.close()
    kubelet.close()
    sweep(cluster)
    cluster.close()


def build_manifest(case: Case, name: str, namespace: str) -> dict[str, Any]:
    metadata = {"name": name, **({"namespace": namespace} if case.kind.is_namespaced else {})}
    body = {"apiVersion": case.kind.api_version, "kind": case.kind.name, "spec": dict(case.spec), **case.top}
    return {**body, "metadata": {**metadata, **case.top.get("metadata", {})}}


@pytest.mark.parametrize(("number", "name"), list(enumerate(CASES)), ids=list(CASES))
def test_wrong_manifest_is_refused_or_explained(applied: Applied, number: int, name: str) -> None:
    case, resource = CASES[name], f"wrong-{number}"
    before = count_ticks()
    refusal = applied.apply(build_manifest(case, resource, applied.operated.namespace))
    if not case.reason:
        assert all(word in refusal for word in case.words), refusal or "accepted"
        return
    assert not refusal
    try:
        found = await_condition(applied, case, resource, before)
        held = [job.id for job in applied.store.load().snapshot.jobs.values() if job.allocation.held_gpus]
        assert not held
    finally:
        applied.delete(case, resource)
    assert all(word in found["message"] for word in case.words), found
    assert found["status"] != ("False" if case.reason == "SelectorsOverlap" else "True")


def test_examples_are_accepted(applied: Applied) -> None:
    """The files are applied in the order of `kubectl apply -f examples/kubernetes`: the queue comes after its jobs."""
    manifests = [each for path in sorted(EXAMPLES.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    applied.operated.cluster.delete(QUEUE, "research")
    eventually(lambda: not applied.store.load().snapshot.queues, what="the queue is gone")
    kinds = {kind.name: kind for kind in (ELASTIC_JOB, GPU_PROFILE, POOL, QUEUE)}
    for manifest in manifests:
        if manifest["kind"] == "ElasticJob":
            manifest["metadata"]["namespace"] = applied.operated.namespace
        assert not applied.apply(manifest)
    for manifest in manifests:
        case = Case(kinds[manifest["kind"]], {}, (), "Accepted")
        found = await_condition(applied, case, manifest["metadata"]["name"], count_ticks())
        assert found["status"] == "True"
    assert len(manifests) >= 10


def await_condition(applied: Applied, case: Case, name: str, before: int) -> dict[str, Any]:
    """Return the condition with the case's reason. Fail if it is absent after two complete ticks.

    A tick may run while the manifest is applied, and one more begins before the statuses of the last are written. They
    are written in the background: on a busy machine, the first one may take longer than some ticks.
    """
    limit_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit_s:
        ticks = count_ticks() - before
        conditions = applied.find_conditions(case, name)
        if found := [each for each in conditions if each["reason"] == case.reason]:
            return found[0]
        assert ticks <= TICKS_MAX + 2 or not conditions, f"{ticks} ticks later: {conditions}"
        time.sleep(PAUSE_S)
    raise AssertionError(f"only {ticks} ticks in {PATIENCE_S:.0f} s")
