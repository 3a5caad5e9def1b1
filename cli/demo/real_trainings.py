"""The real part of the demo: nodes on this machine, two elastic trainings, and the same trainings uninterrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cli.demo.checks import TrainingRun
from cli.demo.service_process import DemoError, DemoService
from ebbtide.client import Client

GLOBAL_BATCH = 12
POOL = "inference"
LENDING = {"quantile": 0.95, "headroom": 0.0, "return_deadline_s": 15.0, "cold_start_s": 3.0}
NODES = {"t0": ("training", 2), "t1": ("training", 1), "i0": (POOL, 1), "i1": (POOL, 1)}
"""Pool and number of processor slots by node. The demo calls the slots GPUs."""


@dataclass(frozen=True, slots=True)
class Training:
    """A real training. It runs `steps_per_s` steps for each second of the replayed day, each of `step_delay_s` more."""

    gpus_max: int
    steps_per_s: float
    step_delay_s: float
    seed: int


TRAININGS: Mapping[str, Training] = {
    "elastic-wide": Training(gpus_max=4, steps_per_s=0.8, step_delay_s=0.8, seed=0),
    "elastic-narrow": Training(gpus_max=2, steps_per_s=0.5, step_delay_s=1.2, seed=1),
}


def create_real_fleet(client: Client) -> None:
    client.create_pool({"name": "training", "kind": "training"})
    client.create_pool({"name": POOL, "kind": "inference", "lending": LENDING})
    for name, (pool, gpus) in NODES.items():
        client.add_node({"name": name, "pool": pool, "gpu": "cpu", "gpus": gpus})


def submit_training(client: Client, service: DemoService, name: str, day_s: float) -> str:
    """Submit a training and return the id of its job."""
    document = {
        "name": name,
        "gpu": "cpu",
        "gpus": {"min": 1, "max": TRAININGS[name].gpus_max},
        "model": "tiny-gpt",
        "globalBatch": GLOBAL_BATCH,
        "steps": _count_steps(name, day_s),
        "onResize": "checkpoint",
        "command": ["python", *_build_arguments(name, day_s, service.ledgers / name, has_delay=True)],
    }
    return str(client.submit(document)["id"])


class ReferenceRuns:
    """The same trainings, uninterrupted on one rank and without delays, while the day passes.

    They have a lower priority than the day, and end with the block at the latest.
    """

    def __init__(self, service: DemoService, day_s: float) -> None:
        self._service = service
        self._day_s = day_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ReferenceRuns:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EBBTIDE_")}
        for name in TRAININGS:
            folder = self._get_folder(name)
            folder.mkdir(parents=True)
            command = [sys.executable, *_build_arguments(name, self._day_s, folder, has_delay=False)]
            with (folder / "train.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    ["nice", "-n", "10", *command], env=environment, stdout=log, stderr=subprocess.STDOUT
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def collect(self) -> list[TrainingRun]:
        """Wait for the runs and return the ledgers to compare.

        Raises:
            DemoError: a run failed.
        """
        for name, process in self._processes.items():
            if process.wait() != 0:
                raise DemoError(f"the uninterrupted run of {name} failed; see {self._get_folder(name) / 'train.log'}")
        return [
            TrainingRun(
                name,
                _count_steps(name, self._day_s),
                GLOBAL_BATCH,
                self._service.ledgers / name,
                self._get_folder(name),
            )
            for name in self._processes
        ]

    def _get_folder(self, name: str) -> Path:
        return self._service.folder / "reference" / name


def _count_steps(name: str, day_s: float) -> int:
    return round(TRAININGS[name].steps_per_s * day_s)


def _build_arguments(name: str, day_s: float, ledger: object, *, has_delay: bool) -> list[str]:
    training = TRAININGS[name]
    delay = ["--step-delay-s", str(training.step_delay_s)] if has_delay else []
    options = ["--model", "tiny-gpt", "--steps", str(_count_steps(name, day_s)), "--global-batch", str(GLOBAL_BATCH)]
    return ["-m", "scheduler.trainer.train", *options, "--seed", str(training.seed), "--ledger", str(ledger), *delay]
