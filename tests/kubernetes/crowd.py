"""Submitting many jobs from one seed, waiting for them, and finding leftovers."""

from __future__ import annotations

import signal
import subprocess
from random import Random

from scheduler.kubernetes.api_objects import CONFIG_MAP, ELASTIC_JOB, LOAN_LABEL, NODE, SECRET, SERVICE, name_of
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually

ALL_DONE_S = 420.0


def submit_all(operated: Operated, count: int, seed: int) -> None:
    """Submit jobs of 1 to 48 GPUs."""
    rng = Random(seed)
    for number in range(count):
        least = rng.choice((1, 1, 2, 4, 8, 12))
        operated.submit(f"job-{number:03d}", least, least * rng.choice((1, 2, 4)))


def phases(operated: Operated) -> list[str]:
    items = operated.cluster.list(ELASTIC_JOB, namespace=operated.namespace).items
    return [str(item.get("status", {}).get("phase", "")) for item in items]


def wait_for_all(operated: Operated, count: int) -> None:
    eventually(
        lambda: phases(operated).count("Succeeded") == count, what="all jobs have succeeded", timeout_s=ALL_DONE_S
    )
    eventually(lambda: not leftovers(operated), what="nothing is left but the resources")


def leftovers(operated: Operated) -> list[str]:
    """Return objects of jobs other than their resources."""
    cluster, namespace = operated.cluster, operated.namespace
    found = [item for kind in (SERVICE, CONFIG_MAP, SECRET) for item in cluster.list(kind, namespace=namespace).items]
    names = [name_of(item) for item in (*found, *operated.pods())]
    return [name for name in names if "job-" in name]


def delete_all(operated: Operated) -> None:
    """Delete the resources, and check that they disappear and that no node keeps our labels or taints."""
    for item in operated.cluster.list(ELASTIC_JOB, namespace=operated.namespace).items:
        operated.cluster.delete(ELASTIC_JOB, name_of(item), operated.namespace)
    eventually(lambda: not phases(operated), what="all resources are gone")
    assert [name_of(node) for node in operated.cluster.list(NODE, label_selector=LOAN_LABEL).items] == []
    assert operated.lent_nodes() == []


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
