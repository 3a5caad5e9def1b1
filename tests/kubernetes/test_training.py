"""Real training on a real API server: operator, API, agents and ranks as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.kubernetes.api_objects import name_of, uid_of
from scheduler.kubernetes.client import KubernetesClient
from tests.e2e.training_harness import losses
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.trained import Trained, trainer
from tests.kubernetes.waiting import eventually

STEPS = 100
NAME = f"gpt{'-2' * 24}x"
"""A name of maximum length."""


@pytest.fixture
def trained(
    control_plane: ControlPlane,
    definitions: None,
    cluster: KubernetesClient,
    kubelet: FakeKubelet,
    namespace: str,
    tmp_path: Path,
) -> Iterator[Trained]:
    created = Trained(control_plane, cluster, kubelet, namespace, tmp_path)
    yield created
    created.close()


def reference(ledger: Path) -> dict[int, float]:
    """Return the losses of the same training without interruption on one GPU."""
    command = [sys.executable, *trainer(ledger, steps=STEPS)[1:]]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=240, capture_output=True)
    return losses(ledger)


def test_training_job_scales_and_leaves_nothing(trained: Trained) -> None:
    trained.add_nodes(2, gpus=1)
    trained.train(NAME, most=1, steps=STEPS, checkpoint_every=50, step_s=0.1)
    (first,) = trained.until_it_runs_on(NAME, 1)
    trained.scale(NAME, 2)
    assert uid_of(first) in {uid_of(pod) for pod in trained.until_it_runs_on(NAME, 2)}
    assert trained.job(NAME)["status"]["progress"]["step"] > 0
    trained.scale(NAME, 1)
    trained.until_it_runs_on(NAME, 1)
    trained.until_phase(NAME, "Succeeded")
    assert trained.job(NAME)["status"]["progress"]["step"] == STEPS
    eventually(lambda: not trained.objects(), what="its objects are gone")
    assert set(trained.containers.exit_codes().values()) == {0}
    assert trained.containers.left() == []
    assert trained.steps_made() == STEPS, "no step was lost"
    found, alone = trained.losses(), reference(trained.folder / "alone")
    assert found.keys() == alone.keys()
    assert max(abs(found[step] - alone[step]) for step in found) <= 1e-5, "it learned as if it had never been moved"
    assert not [event for event in trained.events() if event["reason"] == "Breach"]
    reported = trained.containers.logs()[name_of(first)]
    assert "rank 0 | " in reported, "kubectl logs shows what ranks print"


def test_recall_returns_the_node_and_only_a_killed_pod_loses_recent_work(trained: Trained) -> None:
    trained.add_nodes(1, gpus=1)
    trained.add_inference(2, replicas=0, gpus=1)
    trained.train(NAME, most=2, steps=STEPS, checkpoint_every=10, step_s=0.25, says_length=False)
    trained.until_it_runs_on(NAME, 2)
    assert len(trained.lent_nodes()) == 1
    trained.scale_inference(2)
    eventually(lambda: not trained.lent_nodes(), what="the node is home")
    (pod,) = trained.until_it_runs_on(NAME, 1)
    created = len(trained.losses())
    assert trained.steps_made() == created, "no step was lost"

    agent = trained.containers.find_agent(pod)
    agent.kill()
    trained.until_it_runs_on(NAME, 1)
    assert trained.containers.find_agent(pod).pid != agent.pid
    assert trained.steps_made() == len(trained.losses()), "no rank was restarted"

    trained.containers.kill(pod)
    trained.until_phase(NAME, "Succeeded")
    assert sorted(trained.losses()) == list(range(1, STEPS + 1))
    assert trained.steps_made() <= STEPS + 10, "no more than since the last checkpoint"
    eventually(lambda: not trained.objects(), what="its objects are gone")
    assert trained.containers.left() == []
    assert set(trained.containers.exit_codes().values()) == {0, -signal.SIGKILL}
