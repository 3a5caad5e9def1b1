"""Agreement between the ranks of a training, which may also be a lone process without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ebbtide.checkpoints.errors import CheckpointError

T = TypeVar("T")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def compute_on_rank_0(compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's result, or raise its error, on all ranks. Ranks might see a shared disk in different states."""
    if not is_distributed():
        return compute()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [compute()]
        except (OSError, CheckpointError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    result: T = outcome[0]
    return result


def compute_on_all_ranks(compute: Callable[[], T]) -> T:
    """Return this rank's result, or raise the error of the first rank that failed, on all ranks."""
    if not is_distributed():
        return compute()
    error: Exception | None = None
    try:
        result = compute()
    except (OSError, CheckpointError) as raised:
        error = raised
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for each in errors:
        if each is not None:
            raise each
    return result
