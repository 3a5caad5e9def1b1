"""A cluster with real training: operator and API as processes, agents in running containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from scheduler.kubernetes.api_objects import CONFIG_MAP, JOB_LABEL, SECRET, SERVICE, Object
from scheduler.kubernetes.client import KubernetesClient
from tests.e2e.training_harness import lines, losses
from tests.kubernetes.containers import ROOT, Containers
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually
from tests.loopback import find_free_port

BATCH = 4


def trainer(ledger: Path, *more: str, steps: int) -> list[str]:
    """Return the command of a job that records what it learns."""
    size = ("--model", "tiny-gpt", "--steps", str(steps), "--global-batch", str(BATCH))
    return ["python", "-m", "scheduler.trainer.train", *size, "--ledger", str(ledger), *more]


class Trained(Operated):
    """Nodes with one GPU each, and a volume `checkpoints` shared by all."""

    def __init__(
        self, plane: ControlPlane, cluster: KubernetesClient, kubelet: FakeKubelet, namespace: str, folder: Path
    ) -> None:
        super().__init__(plane, cluster, kubelet, namespace, folder, has_agents=False)
        self.containers = Containers(cluster, kubelet, folder)
        self.ledger = folder / "ledger"
        self.settings = {
            "EBBTIDE_PORT": str(find_free_port()),
            "EBBTIDE_RECONFIGURATION_S": "1",
            "EBBTIDE_RESIZE_PAUSE_S": "1",
        }
        self._services: list[subprocess.Popen[bytes]] = []
        self._start_service("cli", "api")
        self.start_operator()

    def train(
        self,
        name: str,
        *,
        most: int,
        steps: int,
        checkpoint_every: int,
        step_s: float,
        says_length: bool = True,
    ) -> None:
        """Apply a job that trains the small reference model on 1 to `most` GPUs.

        With `says_length`, the job declares its length; no node is lent for a job with little work left.
        """
        pace = ("--checkpoint-every", str(checkpoint_every), "--step-delay-s", str(step_s))
        (self.folder / "checkpoints").mkdir()
        volume = {"name": "checkpoints", "hostPath": {"path": str(self.folder / "checkpoints")}}
        mounts = [{"name": "checkpoints", "mountPath": "/checkpoints"}]
        container = {"name": "main", "image": "x", "volumeMounts": mounts}
        spec: dict[str, Any] = {
            "gpus": {"min": 1, "max": most},
            **({"steps": steps} if says_length else {}),
            "globalBatch": BATCH,
            "onResize": "checkpoint",
            "command": trainer(self.ledger, *pace, steps=steps),
            "template": {"spec": {"containers": [container], "volumes": [volume]}},
        }
        self.apply_job(name, spec)

    def losses(self) -> dict[int, float]:
        return losses(self.ledger)

    def steps_made(self) -> int:
        """Return the number of steps, repeated ones included."""
        return sum(1 for _ in lines(self.ledger, "losses-g*.jsonl"))

    def has_made(self, steps: int) -> bool:
        return max(self.losses(), default=0) >= steps

    def until_it_runs_on(self, name: str, nodes: int) -> list[Object]:
        """Wait until the job runs on this number of nodes only and makes progress. Return its pods."""

        def runs() -> bool:
            status = self.job(name).get("status", {})
            told = status.get("phase"), status.get("allocation", {}).get("gpus")
            return told == ("Running", nodes) and len(self.pods()) == nodes

        eventually(runs, what=lambda: f"{name} runs on {nodes} nodes\n{self.told()}")
        made = max(self.losses(), default=0)
        eventually(lambda: self.has_made(made + 3), what=f"{name} goes on")
        return self.pods()

    def objects(self) -> list[Object]:
        """Return all objects created for jobs."""
        kinds = (SERVICE, CONFIG_MAP, SECRET)
        each = (self.cluster.list(kind, namespace=self.namespace, label_selector=JOB_LABEL).items for kind in kinds)
        return [*self.pods(), *(item for items in each for item in items)]

    def told(self) -> str:
        return "\n".join(f"{pod}:\n{text[-3000:]}" for pod, text in self.containers.logs().items())

    def close(self) -> None:
        for service in self._services:
            service.send_signal(signal.SIGTERM)
        try:
            super().close()
        finally:
            self.containers.close()
            for service in self._services:
                service.kill()
                service.wait()

    def _start_service(self, *words: str) -> None:
        env = {
            **os.environ,
            "EBBTIDE_DATABASE_URL": self.url,
            "EBBTIDE_RUN_DIR": str(self.folder / "run"),
            **self.settings,
        }
        command = [sys.executable, "-m", *words]
        with (self.folder / f"{words[-1]}.log").open("wb") as log:
            self._services.append(
                subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
