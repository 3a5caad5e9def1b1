"""Seeded synthetic traces for simulations in tests."""

from __future__ import annotations

import math
from random import Random

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import DemandRow, JobRow

DAY_S = 86_400.0


def synthetic_jobs(
    seed: int, count: int, *, gap_s: float, mean_s: float, sizes: tuple[int, ...] = (1, 1, 1, 2, 4, 8)
) -> tuple[JobRow, ...]:
    """Return jobs with Poisson arrivals, log-normal durations and evenly drawn sizes."""
    random = Random(f"jobs/{seed}")
    rows, at_s = [], 0.0
    for number in range(count):
        at_s += random.expovariate(1.0 / gap_s)
        duration_s = max(1.0, round(mean_s * random.lognormvariate(-0.5, 1.0)))
        rows.append(JobRow(number + 2, f"job-{number}", round(at_s), duration_s, random.choice(sizes)))
    return tuple(rows)


def synthetic_demand(seed: int, days: int, *, peak_gpus: float, pool: str = "inference") -> tuple[DemandRow, ...]:
    """Return demand every ten minutes: a daily wave between a fifth of the peak and the peak, with noise."""
    random = Random(f"demand/{seed}")
    rows = []
    for number in range(days * 144):
        at_s = number * 600.0
        wave = 0.6 - 0.4 * math.cos(2.0 * math.pi * at_s / DAY_S)
        gpus = min(peak_gpus, max(0.0, peak_gpus * wave * random.gauss(1.0, 0.03)))
        rows.append(DemandRow(number + 2, at_s, pool, gpus, is_load=False))
    return tuple(rows)


def small_cluster(
    *,
    training: int,
    inference: int,
    gpus_per_node: int = 8,
    peak_gpus: float | None = None,
    checkpoint_interval_s: float = 900.0,
) -> ClusterDocument:
    """Return pools `training` and `inference`. Jobs of 2 GPUs or more scale between half and twice their GPUs."""
    hardware = {"gpus_per_node": gpus_per_node, "gpu": "a100-80g"}
    lending = {"quantile": 0.99, "return_deadline_s": 300, "cold_start_s": 300}
    pools = [
        {"name": "training", "kind": "training", "nodes": training, **hardware},
        {"name": "inference", "kind": "inference", "nodes": inference, **hardware, "lending": lending},
    ]
    pools[1] |= {} if peak_gpus is None else {"peak_gpus": peak_gpus}
    elastic = {"from_gpus": 2}
    return parse_document(
        ClusterDocument, {"pools": pools, "elastic": elastic, "checkpoint_interval_s": checkpoint_interval_s}
    )
