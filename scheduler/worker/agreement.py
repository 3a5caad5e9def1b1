"""All ranks follow a notice at the same step, though each may hear of it at another time."""

from __future__ import annotations

from scheduler.worker.notice import Action, Notice

_UNKNOWN_MS = -(2**62)


def agree(notice: Notice | None, *, device: str) -> Notice | None:
    """The most urgent action that any rank knows, with the shortest time left. Collective: every rank calls it.

    Two integers per rank go through one all-reduce (MAX), so the answer is the same on every rank.

    Raises:
        ValueError: there is no process group yet.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError("the ranks cannot agree on a notice before init_process_group()")
    actions = list(Action)
    # A rank without a notice offers 0; the time is negated, so that the maximum is the shortest.
    urgency = 0 if notice is None else 1 + actions.index(notice.action)
    known = torch.tensor([urgency, _negative_ms(notice)], dtype=torch.int64, device=device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    urgency, negative_ms = (int(value) for value in known.tolist())
    if urgency == 0:
        return None
    return Notice(actions[urgency - 1], seconds_left=None if negative_ms == _UNKNOWN_MS else -negative_ms / 1000)


def _negative_ms(notice: Notice | None) -> int:
    if notice is None or notice.seconds_left is None:
        return _UNKNOWN_MS
    return -round(min(notice.seconds_left, 1e9) * 1000)
