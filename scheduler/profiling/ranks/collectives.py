"""Times of collectives, alone and during computation."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.profiling.ranks.device import Device
from scheduler.profiling.tasks import CollectiveTask

_REPETITIONS = 7
_FLOAT_BYTES = 4
_PRODUCT_SIZE = 512
"""Rows and columns of the products that run during a collective."""

Start = Callable[[], "dist.Work | None"]


def measure_collective(task: CollectiveTask, device: Device) -> dict[str, float]:
    """Return the time of the collective alone, of computation that takes about as long alone, and of both at once.

    Collective over all ranks. The slowest rank counts.
    """
    group = _make_groups(task.ranks)
    start = _build_collective(task, device, group)
    alone_s = _time_together(lambda: _finish(start()), device)
    factor = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device.torch_name, dtype=device.compute_dtype)
    product_s = device.time_calls(lambda: factor @ factor, batches=3)["time_s"]
    agreed = torch.tensor([product_s], device=device.torch_name)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    count = max(1, round(alone_s / agreed.item()))

    def compute() -> None:
        for _ in range(count):
            factor @ factor

    def run_both() -> None:
        work = start()
        compute()
        _finish(work)

    figures = {"alone_s": alone_s, "compute_s": _time_together(compute, device)}
    figures["both_s"] = _time_together(run_both, device)
    dist.destroy_process_group(group)
    return figures


def _make_groups(ranks: int) -> dist.ProcessGroup:
    """Return this rank's group of `ranks` neighbors. All ranks make all groups."""
    world = dist.get_world_size()
    own: dist.ProcessGroup | None = None
    for first in range(0, world - ranks + 1, ranks):
        members = list(range(first, first + ranks))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            own = group
    assert own is not None, "the number of ranks is a multiple of the group's"
    return own


def _build_collective(task: CollectiveTask, device: Device, group: dist.ProcessGroup) -> Start:
    ranks = task.ranks
    count = max(ranks, task.size_bytes // _FLOAT_BYTES // ranks * ranks)
    whole, other = (torch.ones(count, device=device.torch_name) for _ in range(2))
    part = torch.ones(count // ranks, device=device.torch_name)
    starts: dict[str, Start] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group, async_op=True),
        "send": lambda: _exchange(whole, other, group),
    }
    return starts[task.collective]


def _exchange(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Send to the next rank of the group and receive from the previous one."""
    place, size = dist.get_rank(group), dist.get_world_size(group)
    following, previous = (dist.get_global_rank(group, (place + step) % size) for step in (1, -1))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, following, group), dist.P2POp(dist.irecv, incoming, previous, group)]
    )
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _time_together(call: Callable[[], object], device: Device) -> float:
    """Return the median over repetitions of the slowest rank's time, all ranks starting at the same time."""
    call()
    times_s = []
    for _ in range(_REPETITIONS):
        device.synchronize()
        dist.barrier()
        started_s = time.perf_counter()
        call()
        device.synchronize()
        slowest = torch.tensor([time.perf_counter() - started_s], dtype=torch.float32, device=device.torch_name)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times_s.append(slowest.item())
    return median(times_s)
