"""How long it takes to carry off a job's state that lies on one node alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.resharding.giving_back import cost_of_giving_back, held_bytes
from scheduler.resharding.placement import Placement, Seat
from scheduler.resharding.tensors import equal_layers

GPU_BYTES_PER_S = 10e9
"""What one GPU's network port is taken to carry. The shipped GPU profiles have a port a GPU, of 3.5 (V100, L40S) to 40
GB/s (H100); policies do not see them, and a choice between nodes of one GPU model needs the magnitude alone."""

NOTHING: Mapping[str, float] = {}


def carrying_by_node_s(snapshot: Snapshot, job: Job) -> Mapping[str, float]:
    """Of each node, how long its GPUs of the job need to send what no GPU on another node holds: 0 for a replica.

    That has to leave whether the job then shrinks, moves, or saves because it is preempted. Added up over several nodes
    it is a lower bound: what two nodes hold only together is in neither figure. The fullest GPU's state counts as all
    that its plan predicts it to take, activations too, because a plan tells no more. Empty where nothing is known: the
    job does not run, or its plan has one layer (as those without a model have) or no figure of memory.
    """
    allocation, plan = job.allocation, job.allocation.plan
    if job.state is not JobState.RUNNING or plan is None:
        return NOTHING
    if not plan.peak_bytes_per_gpu or plan.stages[-1].last_layer == 0:
        return NOTHING
    numbers = dict[str, int]()
    nodes = tuple(numbers.setdefault(node, len(numbers)) for node, _ in snapshot.seats_of(allocation))
    alone = _alone(plan, nodes)
    per_gpu_s = plan.peak_bytes_per_gpu / GPU_BYTES_PER_S
    return {node: alone[number] * per_gpu_s / len(allocation.target[node]) for node, number in numbers.items()}


@lru_cache(maxsize=1024)
def _alone(plan: ParallelPlan, nodes: tuple[int, ...]) -> tuple[float, ...]:
    """Of each node, given the node of each rank, what it holds alone, in units of what the fullest GPU holds; nothing
    for a plan that contradicts itself, because a recall must not fail over it."""
    seats = tuple(Seat(f"{node}", rank) for rank, node in enumerate(nodes))
    tensors, count = equal_layers(plan.layers), max(nodes) + 1
    by_node = [[seat for seat, on in zip(seats, nodes, strict=True) if on == node] for node in range(count)]
    try:
        fullest = max(held_bytes(plan, tensors))
        return tuple(alone / fullest for alone in cost_of_giving_back(Placement(plan, seats), tensors, by_node))
    except ValueError:
        return (0.0,) * count
