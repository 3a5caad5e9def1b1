"""The real part of the demo: nodes on this machine, two elastic trainings, and the same trainings uninterrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

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
    "elastic-wide": Training(gpus_max=4, steps_per_s=1.6, step_delay_s=0.25, seed=0),
    "elastic-narrow": Training(gpus_max=2, steps_per_s=1.0, step_delay_s=0.5, seed=1),
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


def run_references(service: DemoService, day_s: float) -> list[TrainingRun]:
    """Run all trainings uninterrupted on one rank and without delays, at the same time."""
    with ThreadPoolExecutor(len(TRAININGS)) as executor:
        return list(executor.map(partial(_run_reference, service, day_s), TRAININGS))


def _run_reference(service: DemoService, day_s: float, name: str) -> TrainingRun:
    folder = service.folder / "reference" / name
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EBBTIDE_")}
    folder.mkdir(parents=True)
    with (folder / "train.log").open("wb") as log:
        command = [sys.executable, *_build_arguments(name, day_s, folder, has_delay=False)]
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise DemoError(f"the uninterrupted run of {name} failed; see {log.name}")
    return TrainingRun(name, _count_steps(name, day_s), GLOBAL_BATCH, service.ledgers / name, folder)


def _count_steps(name: str, day_s: float) -> int:
    return round(TRAININGS[name].steps_per_s * day_s)


def _build_arguments(name: str, day_s: float, ledger: object, *, has_delay: bool) -> list[str]:
    training = TRAININGS[name]
    delay = ["--step-delay-s", str(training.step_delay_s)] if has_delay else []
    options = ["--model", "tiny-gpt", "--steps", str(_count_steps(name, day_s)), "--global-batch", str(GLOBAL_BATCH)]
    return ["-m", "scheduler.trainer.train", *options, "--seed", str(training.seed), "--ledger", str(ledger), *delay]
