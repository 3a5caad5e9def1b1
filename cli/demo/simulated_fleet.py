"""The simulated part of the demo: 24 nodes with 8 GPUs each, their machines, and the jobs that run on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from ebbtide.client import Client
from scheduler.domain.fleet import Node
from scheduler.executors.paced_simulation import PacedSimulation
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.package_version import get_package_version
from scheduler.solver.profiles.catalog import load_gpu

GPU = "h100-80g"
GPUS_PER_NODE = 8
SIMULATED_PREFIX = "sim-"
"""Beginning of the names of all simulated pools, nodes and jobs."""
TRAINING_POOL, INFERENCE_POOL = "sim-training", "sim-inference"
INFERENCE_NODES, TRAINING_NODES = 16, 8
CONTAINMENT = "simulated: no process runs on this machine"
QUEUE = "simulated"
CONTACT_PERIOD_S = 5.0
DELAYS = Delays(start_s=3.0, reconfiguration_s=3.0, drain_s=2.0)
LENDING = {"quantile": 0.95, "headroom": 0.02, "return_deadline_s": 15.0, "cold_start_s": 3.0}


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Jobs of one kind. `count` are submitted, the first at `first` and each `every` later, as shares of the day."""

    name: str
    model: str
    global_batch: int
    gpus: tuple[int, int]
    steps: int
    first: float
    every: float
    count: int


WORKLOADS = (
    SimulatedWorkload("pretrain", "llama-2-7b", 64, (8, 32), 60, 0.0, 0.1, 8),
    SimulatedWorkload("finetune", "mistral-7b-v0.1", 32, (8, 16), 24, 0.0, 0.1, 9),
    SimulatedWorkload("encoder", "bert-large", 512, (4, 16), 300, 0.0, 0.13, 7),
    SimulatedWorkload("ablation", "gpt2", 256, (4, 8), 250, 0.01, 0.15, 6),
)


def list_nodes() -> tuple[Node, ...]:
    """Return the simulated nodes, whose names begin with `sim-`."""
    sizes = (("sim-t", TRAINING_POOL, TRAINING_NODES), ("sim-i", INFERENCE_POOL, INFERENCE_NODES))
    memory_bytes = load_gpu(GPU).memory_bytes
    return tuple(
        Node(f"{prefix}{at:02}", pool, GPU, GPUS_PER_NODE, memory_bytes)
        for prefix, pool, count in sizes
        for at in range(count)
    )


def build_simulation(
    *, now: Callable[[], float], record_contact: Callable[[Mapping[str, float]], None]
) -> PacedSimulation:
    """Return the executor of the simulated nodes.

    `record_contact` is called every few seconds with the time of the contact by machine, as agents report.
    """
    nodes, last_s = list_nodes(), -CONTACT_PERIOD_S

    def report_contact(now_s: float) -> None:
        nonlocal last_s
        if now_s - last_s >= CONTACT_PERIOD_S:
            last_s = now_s
            record_contact({node.name: now_s for node in nodes})

    executor = SimulatedExecutor(nodes, now_s=now(), delays=DELAYS)
    return PacedSimulation(executor, now=now, on_observe=report_contact)


def create_simulated_fleet(client: Client, url: str) -> None:
    """Create the simulated pools, and let a machine join for each node, as agents do.

    A node that is declared instead would be on the machine of the service.
    """
    client.create_pool({"name": TRAINING_POOL, "kind": "training"})
    client.create_pool({"name": INFERENCE_POOL, "kind": "inference", "lending": LENDING})
    client.create_queue({"name": QUEUE})
    tokens = {pool: client.create_join_token(pool, uses=100)["secret"] for pool in (TRAINING_POOL, INFERENCE_POOL)}
    with httpx.Client(base_url=url, timeout=30.0) as connection:
        for node in list_nodes():
            reply = connection.post(
                "/v1/machines:join",
                json=_describe_machine(node),
                headers={"Authorization": f"Bearer {tokens[node.pool]}"},
            )
            reply.raise_for_status()


def _describe_machine(node: Node) -> dict[str, Any]:
    device = {"name": node.gpu, "memory_bytes": node.gpu_memory_bytes}
    return {
        "name": node.name,
        "address": "127.0.0.1",
        "version": get_package_version(),
        "clock_s": time.time(),
        "containment": CONTAINMENT,
        "inventory": {"hostname": node.name, "gpus": [{"index": at, **device} for at in range(node.gpus)]},
    }


def list_submissions() -> list[tuple[float, dict[str, Any]]]:
    """Return the simulated jobs with the share of the day after which each is submitted, in order."""
    return sorted(_list_submissions(), key=lambda submission: submission[0])


def _list_submissions() -> Iterator[tuple[float, dict[str, Any]]]:
    for workload in WORKLOADS:
        for number in range(workload.count):
            yield workload.first + number * workload.every, _build_job(workload, number)


def _build_job(workload: SimulatedWorkload, number: int) -> dict[str, Any]:
    least, most = workload.gpus
    return {
        "name": f"sim-{workload.name}-{number + 1}",
        "queue": QUEUE,
        "gpu": GPU,
        "gpus": {"min": least, "max": most},
        "model": workload.model,
        "globalBatch": workload.global_batch,
        "steps": workload.steps,
        "onResize": "checkpoint",
        "checkpoint": {"interval": 10},
        "command": ["simulated"],
    }
