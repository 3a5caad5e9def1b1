"""Draws the hardware of a fault case, and what jobs may demand of it: GPU models, spare nodes, plans of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from scheduler.domain.fleet import Node
from scheduler.domain.job_spec import JobSpec
from scheduler.simulator.campaign.case import CaseJob
from scheduler.solver.profiles.gpu_throughput import list_throughputs

GPU_MODELS = {"a100-80g": 80, "h100-80g": 80, "v100-32g": 32, "l4": 24, "t4": 16}
"""Memory in GiB by GPU model."""
GLOBAL_BATCH = 24
"""Samples per step of jobs with a model. Only GPU counts that divide it have a plan."""
_MODEL = "gpt2"
_SEVERAL_MODELS_SHARE, _SPARES_SHARE, _PLANNED_SHARE = 0.5, 0.5, 0.6
_GIB = 2**30


def draw_nodes(random: Random, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes of a case; in half of the cases, they are of several GPU models."""
    if random.random() >= _SEVERAL_MODELS_SHARE:
        return nodes
    models = random.sample(sorted(GPU_MODELS), random.randint(2, 3))
    return tuple(_with_gpu(node, random.choice(models)) for node in nodes)


def draw_spares(random: Random, nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Yield nodes that join a pool during the case."""
    if random.random() >= _SPARES_SHARE:
        return
    for number in range(random.randint(1, 2)):
        like = random.choice(nodes)
        yield replace(_with_gpu(like, random.choice(nodes).gpu), name=f"x{number}")


def draw_demands(random: Random, jobs: Iterable[CaseJob], nodes: tuple[Node, ...]) -> Iterator[CaseJob]:
    """Yield the jobs with demands on the hardware: a GPU model, or a plan. Each of them can run on the owned nodes.

    On slow GPUs, jobs are shorter, so that a case takes as many ticks as on fast ones.
    """
    has_plans = random.random() < _PLANNED_SHARE
    models = sorted({node.gpu for node in nodes if node.pool == "training"})
    speeds = list_throughputs()
    pace = min(1.0, min(speeds[model] for model in models) / speeds["a100-80g"])
    for job in jobs:
        spec = job.spec
        if len(models) > 1 and random.random() < 0.3:
            spec = replace(spec, gpu=random.choice(models))
        if has_plans and random.random() < 0.4:
            mixes = random.random() < 0.7
            spec = replace(spec, model=_MODEL, global_batch=GLOBAL_BATCH, mixes_gpu_models=mixes)
        low = fit_gpus(spec, nodes, spec.min_gpus)
        steps, true_steps = math.ceil(spec.steps * pace), math.ceil(job.true_steps * pace)
        spec = replace(spec, min_gpus=low, max_gpus=max(low, spec.max_gpus), steps=steps)
        yield replace(job, spec=spec, true_steps=float(true_steps))


def fit_gpus(spec: JobSpec, nodes: Iterable[Node], gpus: int) -> int:
    """Return the most GPUs, up to `gpus`, on which a job of this kind can run on the owned nodes."""
    owned = Counter[str]()
    for node in nodes:
        if node.pool == "training" and spec.gpu in ("", node.gpu):
            owned[node.gpu] += node.gpus
    most = min(gpus, max(owned.values()))
    return next(count for count in range(most, 0, -1) if not spec.has_profile or GLOBAL_BATCH % count == 0)


def _with_gpu(node: Node, gpu: str) -> Node:
    return replace(node, gpu=gpu, gpu_memory_bytes=GPU_MODELS[gpu] * _GIB)
