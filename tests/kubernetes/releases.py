"""Chart releases on a test control plane."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import yaml

from scheduler.kubernetes.api_objects import SECRET, ResourceKind, name_of
from scheduler.kubernetes.client import KubernetesClient

JOB = ResourceKind("batch", "v1", "Job", "jobs")
PERIOD_S = 0.1


@contextmanager
def finished_jobs(cluster: KubernetesClient, namespace: str, *, succeed: bool = True) -> Iterator[None]:
    """Mark each Job of the namespace as succeeded or failed, because nothing runs pods here."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(PERIOD_S):
            for job in cluster.list(JOB, namespace=namespace).items:
                if not job.get("status", {}).get("conditions"):
                    cluster.patch_status(JOB, name_of(job), namespace, change={"status": _outcome(succeed=succeed)})

    thread = threading.Thread(target=work, name="jobs")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def rendered(cluster: KubernetesClient, release: str, namespace: str) -> list[dict[str, Any]]:
    """Return all manifests of the newest revision, hooks included, as stored by Helm."""
    kept = cluster.list(SECRET, namespace=namespace, label_selector=f"owner=helm,name={release}").items
    newest = max(kept, key=lambda secret: int(secret["metadata"]["labels"]["version"]))
    record = json.loads(gzip.decompress(base64.b64decode(base64.b64decode(newest["data"]["release"]))))
    texts = [record["manifest"], *(hook["manifest"] for hook in record["hooks"])]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def _outcome(*, succeed: bool) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kinds = ("SuccessCriteriaMet", "Complete") if succeed else ("FailureTarget", "Failed")
    held = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
    counts = {"succeeded": 1, "completionTime": now} if succeed else {"failed": 1}
    return {"startTime": now, "conditions": held, **counts}
