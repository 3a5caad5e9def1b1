"""What keeps a persistent volume claim from being mounted by all pods of a job. Pure.

Ebbtide binds pods itself, past the scheduler of Kubernetes, which would have waited: a pod whose claim cannot be
mounted would hold its GPUs without an end, and its job would never start.
"""

from __future__ import annotations

from scheduler.k8s.objects import Object, is_terminating

_ON_ALL_NODES = "ReadWriteMany"
_ON_ONE_NODE = ("ReadWriteOnce", "ReadWriteOncePod")


def claim_fault(claim: Object | None, place: str, *, max_gpus: int) -> str:
    """Empty where a job of up to so many GPUs can mount the claim at `place`, its namespace and name: now, and wherever
    it is moved and grows to."""
    got = f"checkpoint.volume: claim {place}"
    if claim is None:
        return f"{got} does not exist"
    if is_terminating(claim):
        return f"{got} is being deleted"
    phase = (claim.get("status") or {}).get("phase", "Pending")
    if phase != "Bound":
        return f"{got} is {phase}; allowed: Bound (a storage class that waits for a first consumer never binds it)"
    modes = tuple(claim["spec"].get("accessModes") or ())
    if _ON_ALL_NODES in modes or (max_gpus == 1 and any(mode in modes for mode in _ON_ONE_NODE)):
        return ""
    return f"{got} has {', '.join(modes)}; allowed for up to {max_gpus} GPUs, on several nodes: {_ON_ALL_NODES}"
